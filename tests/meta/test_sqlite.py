"""SQLite's own: how often commits wait for the disk. Shows M3."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fsmeta.types import ROOT_CALLER, ROOT_INO
from tests.meta.engines import Engine

FILES = 800


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_m3_many_names_wait_for_few_checkpoints(engine: Engine) -> None:
    """The database itself is written, and synced, by a checkpoint alone."""
    file = Path(urlsplit(engine.url).path)
    meta = engine.meta()
    before, checkpoints = file.stat().st_mtime_ns, 0
    for number in range(FILES):
        meta.create(ROOT_CALLER, ROOT_INO, b"f%d" % number, 0o100644)
        now = file.stat().st_mtime_ns
        checkpoints += now != before
        before = now
    assert checkpoints <= 1
