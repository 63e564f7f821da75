"""Fixtures of the tests of histories."""

from tests.meta.conftest import engine, patient

__all__ = ["engine", "patient"]
