"""After a notification the kernel asks again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.fuse.session.session import Session
from fsclient.kernel.contract import OpenOut
from fsmeta.types import ROOT_INO, Ino
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.fsclient.fuse.ramfs import RamFS

pytestmark = needs_root_and_fuse


@pytest.fixture
def fs() -> RamFS:
    return RamFS(ttl=3600, negative_ttl=3600)


@pytest.fixture
def session(fs: RamFS, tmp_path: Path) -> Iterator[Session]:
    with serving(fs, tmp_path / "mnt") as session:
        yield session


@pytest.fixture
def file(session: Session, fs: RamFS, tmp_path: Path) -> Path:
    """A file that the kernel knows everything about."""
    assert session.notifier is not None
    file = tmp_path / "mnt" / "file"
    file.write_bytes(b"old")
    file.read_bytes()
    file.stat()
    fs.calls.clear()
    return file


def ino_of(fs: RamFS) -> Ino:
    return fs.nodes[ROOT_INO].names[b"file"]


def test_inval_inode(session: Session, fs: RamFS, file: Path) -> None:
    fs.opened = OpenOut(0, keep_cache=True)
    assert file.read_bytes() == b"old"
    assert fs.calls["getattr"] == fs.calls["read"] == 0
    fs.nodes[ino_of(fs)].data[:] = b"new"
    session.notifier.inval_inode(ino_of(fs))
    assert file.read_bytes() == b"new"
    assert fs.calls["getattr"] > 0


def test_inval_attr(session: Session, fs: RamFS, file: Path) -> None:
    """Pages stay."""
    fs.opened = OpenOut(0, keep_cache=True)
    assert file.read_bytes() == b"old"
    session.notifier.inval_attr(ino_of(fs))
    assert file.read_bytes() == b"old"
    assert fs.calls["getattr"] > 0
    assert fs.calls["read"] == 0


def test_inval_entry(session: Session, fs: RamFS, file: Path) -> None:
    file.stat()
    assert fs.calls["lookup"] == 0
    session.notifier.inval_entry(ROOT_INO, b"file")
    file.stat()
    assert fs.calls["lookup"] == 1


def test_inval_negative_entry(session: Session, fs: RamFS, file: Path) -> None:
    none = file.with_name("none")
    assert not none.exists()
    fs._make(ROOT_INO, b"none", 0o100644, fs.callers["lookup"])
    assert not none.exists()
    session.notifier.inval_entry(ROOT_INO, b"none")
    assert none.exists()


def test_inval_all(session: Session, fs: RamFS, file: Path) -> None:
    if not session.notifier.inval_all():
        assert not session.notifier.inval_all()
        pytest.skip("needs FUSE_NOTIFY_INC_EPOCH, Linux 6.16")
    file.stat()
    assert fs.calls["lookup"] == 1


def test_what_is_not_cached_is_no_error(session: Session, file: Path) -> None:
    assert file.exists()
    session.notifier.inval_inode(Ino(123456))
    session.notifier.inval_entry(ROOT_INO, b"never seen")
    session.notifier.inval_entry(Ino(123456), b"never seen")
