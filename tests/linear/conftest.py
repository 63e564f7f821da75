"""Fixtures of the tests of histories."""

from tests.meta.conftest import engine

__all__ = ["engine"]
