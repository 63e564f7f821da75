"""M3: a SQLite file that is replaced under a mount takes no more writes of that mount."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsmeta.errors import StoreRolledBack
from fsmeta.meta.meta import Meta
from fsmeta.store.sqlite import SqliteStore
from fsmeta.types import ROOT_CALLER, ROOT_INO
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, make_volume


@pytest.mark.parametrize("removed", [False, True])
def test_m3_a_file_that_was_replaced_is_noticed(tmp_path: Path, removed: bool) -> None:
    """Writes went on into the file that was gone, and were lost with the mount."""
    path = tmp_path / "meta.db"
    for each in (path, tmp_path / "other.db"):
        store = SqliteStore(str(each), RUNTIME, create=True)
        make_volume(store, RUNTIME)
        store.close()
    store = SqliteStore(str(path), RUNTIME)
    meta = Meta(store, RUNTIME)
    meta.sessions.open({"host": "test"})
    meta.create(ROOT_CALLER, ROOT_INO, b"before", 0o100644)
    store.sync()
    if removed:
        path.unlink()
    else:
        os.replace(tmp_path / "other.db", path)
    with pytest.raises(StoreRolledBack, match="replaced or removed"):
        meta.create(ROOT_CALLER, ROOT_INO, b"after", 0o100644)
    with pytest.raises(StoreRolledBack, match="replaced or removed"):
        store.sync()
    assert meta.lookup(ROOT_CALLER, ROOT_INO, b"before").size == 0  # reads go on
    store.close()
    if not removed:
        other = SqliteStore(str(path), RUNTIME)
        assert_clean(other)
        other.close()
