"""Fixtures of the tests of histories."""

from tests.fsmeta.conftest import engine, patient

__all__ = ["engine", "patient"]
