"""Capacity and inode limits: exact, ENOSPC before anything is lost, and room comes back."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.types import CHUNK_BYTES, ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice, SpaceUsage
from tests.conftest import assert_clean
from tests.fsmeta.engines import ENGINES, Engine, open_engine

ROOT = ROOT_CALLER
SPACE, INODES = 100 * 4096, 20


@pytest.fixture(params=ENGINES)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A volume of 100 pages and 20 inodes, the root among them."""
    made = open_engine(request.param, tmp_path, request.getfixturevalue)
    try:
        made.format(SpaceUsage(SPACE, INODES))
        yield made
        assert_clean(made.first)
    finally:
        made.close()


def _create(meta: Meta, name: bytes) -> Ino:
    return meta.create(ROOT, ROOT_INO, name, 0o100644).ino


def _write(meta: Meta, ino: Ino, begin: int, length: int) -> None:
    index, pos = divmod(begin, CHUNK_BYTES)
    piece = Slice(pos, meta.new_slice_id(), length, 0, length)
    meta.write_slices(ino, [(index, piece)], begin + length, 1)


def test_the_last_inode(small: Engine) -> None:
    meta = small.meta()
    for n in range(INODES - 1):
        _create(meta, b"f%d" % n)
    before = meta.statfs()
    assert before.inodes_used == before.inodes_limit == INODES
    for make in (
        lambda: _create(meta, b"more"),
        lambda: meta.create(ROOT, ROOT_INO, b"more", 0o40755),
        lambda: meta.symlink(ROOT, ROOT_INO, b"more", b"to"),
    ):
        with pytest.raises(OSError, match="full") as caught:
            make()
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(FileNotFoundError):
            meta.lookup(ROOT, ROOT_INO, b"more")
    assert meta.statfs() == before
    meta.link(ROOT, meta.lookup(ROOT, ROOT_INO, b"f0").ino, ROOT_INO, b"link")  # no new inode
    with pytest.raises(FileExistsError):
        _create(meta, b"link")  # not ENOSPC: nothing would have been made
    meta.unlink(ROOT, ROOT_INO, b"f1")
    _create(meta, b"again")
    assert meta.statfs() == before


def test_the_last_page(small: Engine) -> None:
    meta = small.meta()
    f, g = _create(meta, b"f"), _create(meta, b"g")
    _write(meta, f, 0, SPACE - 4096 - 1)  # 99 pages but for a byte
    _write(meta, g, 0, 1)  # the hundredth
    before = meta.statfs()
    assert before.space_used == before.space_limit == SPACE
    for ino, begin in ((g, 4096), (f, SPACE - 4096), (g, 5 * CHUNK_BYTES)):
        kept = meta.getattr(ROOT, ino), meta.read_chunk(ino, 0)
        with pytest.raises(OSError, match="full") as caught:
            _write(meta, ino, begin, 2 if ino == f else 4096)
        assert caught.value.errno == errno.ENOSPC
        meta.cache.forget()
        assert (meta.getattr(ROOT, ino), meta.read_chunk(ino, 0)) == kept
    _write(meta, f, 0, 4096)  # over what is there
    _write(meta, g, 1, 4095)  # the rest of its page
    meta.setattr(ROOT, g, SetAttr(size=10**9))  # a hole
    assert meta.statfs() == before
    meta.setattr(ROOT, f, SetAttr(size=4096))
    assert meta.statfs().space_used == 2 * 4096
    _write(meta, g, CHUNK_BYTES, SPACE - 2 * 4096)
    assert meta.statfs() == before


def test_what_has_no_name_costs_nothing(small: Engine) -> None:
    meta = small.meta()
    f = _create(meta, b"f")
    _write(meta, f, 0, SPACE)
    meta.unlink(ROOT, ROOT_INO, b"f")
    assert (meta.statfs().space_used, meta.statfs().inodes_used) == (0, 1)
    _write(meta, f, SPACE, 4096)  # still open somewhere
    meta.setattr(ROOT, f, SetAttr(size=0))
    _write(meta, _create(meta, b"g"), 0, SPACE)


def test_clients_at_once_get_exactly_what_there_is(small: Engine) -> None:
    metas = [small.meta() for _ in range(2)]
    made: list[bytes] = []
    errors: list[int | None] = []

    def work(meta: Meta, name: bytes) -> None:
        for n in range(INODES):
            try:
                ino = _create(meta, b"%s%d" % (name, n))
                made.append(b"%s%d" % (name, n))
                for page in range(10):
                    _write(meta, ino, page * 4096, 4096)
            except OSError as error:
                errors.append(error.errno)

    threads = [
        threading.Thread(target=work, args=(meta, b"%d." % n)) for n, meta in enumerate(metas * 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = metas[0].statfs()
    assert (used.space_used, used.inodes_used) == (SPACE, INODES)
    assert len(made) == INODES - 1
    assert set(errors) == {errno.ENOSPC}
    for name in made:
        metas[1].unlink(ROOT, ROOT_INO, name)
    used = metas[0].statfs()
    assert (used.space_used, used.inodes_used) == (0, 1)
