"""W3 and C5: what the kernel does with files in passthrough, which docs/design/write-back-speed
relies on.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fsclient.fuse.session.backing import close_backing, open_backing
from fsclient.fuse.session.init import KernelWants
from fsclient.fuse.session.session import Session, SessionConfig
from fsclient.kernel.contract import OpenOut, Stat
from fsmeta.types import ROOT_INO, Caller, Ino, SetAttr
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.fsclient.fuse.ramfs import RamFS
from tests.support.waiting import wait_until

LINUX = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
pytestmark = [
    needs_root_and_fuse,
    pytest.mark.skipif(LINUX < (6, 9), reason="needs passthrough, Linux 6.9"),
]
WANTS = SessionConfig(wants=KernelWants(passthrough=True))


class BackedFS(RamFS):
    """One backing file for whatever is opened; its size is the size of all files."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat:
        stat = super().getattr(caller, ino, fh)
        if ino == ROOT_INO:
            return stat
        return stat._replace(attr=stat.attr._replace(size=os.fstat(self.fd).st_size))

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat:
        if want.size is not None:
            os.ftruncate(self.fd, want.size)
        return super().setattr(caller, ino, want, fh)


class Backed(NamedTuple):
    """A mount, the file behind its files, and its id."""

    fs: BackedFS
    session_fd: int
    root: Path
    behind: Path
    backing: int


def descriptor(session: Session) -> int:
    return session._fd


@pytest.fixture
def backed(tmp_path: Path) -> Iterator[Backed]:
    behind = tmp_path / "behind"
    fs = BackedFS(behind)
    with serving(fs, tmp_path / "mnt", WANTS) as session:
        fd = descriptor(session)
        backing = open_backing(fd, fs.fd)
        assert backing > 0
        fs.opened = OpenOut(0, backing=backing)
        yield Backed(fs, fd, tmp_path / "mnt", behind, backing)
        wait_until(lambda: not fs.handles)
        close_backing(fd, backing)
        with pytest.raises(FileNotFoundError):
            close_backing(fd, backing)
    os.close(fs.fd)


def test_w3_bytes_go_past_us_and_the_rest_does_not(backed: Backed) -> None:
    fs, _, root, behind, _ = backed
    fd = os.open(root / "file", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        data = os.urandom(3 << 20)
        assert os.write(fd, data) == len(data)
        assert behind.read_bytes() == data
        assert os.fstat(fd).st_size == len(data)
        with mmap.mmap(fd, 8192) as mapped:
            mapped[4096:4100] = b"mmap"
            assert os.pread(fd, 4, 4096) == b"mmap"
        os.fsync(fd)
        os.ftruncate(fd, 5)
        assert behind.read_bytes() == data[:5]
        assert os.pread(fd, 10, 0) == data[:5]
    finally:
        os.close(fd)
    assert (fs.calls["read"], fs.calls["write"]) == (0, 0)
    assert fs.calls["getattr"] > 0
    assert (fs.calls["fsync"], fs.calls["setattr"]) == (1, 1)
    assert fs.calls["flush"] == 2  # mmap.mmap closes a descriptor of its own


def test_w3_all_opens_of_a_file_have_one_backing_file(backed: Backed, tmp_path: Path) -> None:
    fs, session_fd, root, _, backing = backed
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT, 0o600)
    another = open_backing(session_fd, other)
    os.close(other)  # the kernel has it
    first = os.open(root / "file", os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(first, b"seen by all")
    assert (root / "file").read_bytes() == b"seen by all"
    for wrong in (
        OpenOut(0),
        OpenOut(0, keep_cache=True, backing=backing),
        OpenOut(0, backing=another),
    ):
        fs.opened = wrong
        with pytest.raises(OSError, match="Input/output") as caught:
            (root / "file").read_bytes()
        assert caught.value.errno == errno.EIO
    os.close(first)
    wait_until(lambda: not fs.handles)
    close_backing(session_fd, another)


def test_w3_an_inode_is_in_one_mode_until_all_have_closed_it(backed: Backed) -> None:
    fs, _, root, _, backing = backed
    fs.opened = OpenOut(0)
    cached = os.open(root / "file", os.O_RDWR | os.O_CREAT, 0o644)
    fs.opened = OpenOut(0, backing=backing)
    with pytest.raises(OSError, match="Input/output"):
        os.open(root / "file", os.O_RDONLY)
    os.close(cached)
    os.close(os.open(root / "file", os.O_RDONLY))
    fs.opened = OpenOut(0)
    os.close(os.open(root / "file", os.O_RDONLY))
    assert fs.calls["open"] == 3


def test_w3_nobody_gets_it_who_did_not_ask(tmp_path: Path) -> None:
    fs = BackedFS(tmp_path / "behind")
    with serving(fs, tmp_path / "mnt") as session, pytest.raises(PermissionError):
        open_backing(descriptor(session), fs.fd)
    os.close(fs.fd)
