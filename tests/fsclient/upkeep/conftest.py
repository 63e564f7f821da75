"""Commands of the upkeep run on every metadata engine."""

from tests.fsmeta.conftest import engine, patient

__all__ = ["engine", "patient"]
