"""The `engine` fixture: each test that takes it runs on every engine, and leaves a clean volume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import assert_clean
from tests.meta.engines import ENGINES, Engine, open_engine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A database with an empty volume. `parametrize("engine", […], indirect=True)` picks some."""
    made = open_engine(request.param, tmp_path, request.getfixturevalue)
    try:
        made.format()
        yield made
        assert_clean(made.first)
    finally:
        made.close()
