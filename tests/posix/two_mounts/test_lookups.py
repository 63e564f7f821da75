"""P6: lookups are counted as the kernel counts them; a FORGET ends no lease of a later one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.client.client import MountClient
from fsclient.fuse.session.init import KernelWants
from fsclient.fuse.session.session import SessionConfig
from fsclient.vfs import lookup_counts as lookups
from fsclient.vfs.lookup_counts import LookupCounts
from fsmeta.meta.meta import Meta
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, SetAttr
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.posix import inproc
from tests.posix.inproc import RUNTIME
from tests.posix.two_mounts.test_notices import Told
from tests.support.waiting import wait_until


@pytest.fixture
def backend() -> MemBackend:
    return MemBackend(RUNTIME)


@pytest.fixture
def client(backend: MemBackend) -> Iterator[MountClient]:
    with inproc.client(lambda: MemStore(backend, tracked=True)) as made:
        yield made


def _looked_up(client: MountClient, name: bytes) -> Ino:
    attr = client.vfs.lookup(ROOT_CALLER, ROOT_INO, name).attr
    assert attr is not None
    return attr.ino


def test_p6_a_forget_that_comes_after_a_later_lookup_takes_no_lease(
    client: MountClient, backend: MemBackend
) -> None:
    """Memory reclaim of a cgroup: the kernel went on believing the old mode for an hour."""
    kernel, other = Told(), Meta(MemStore(backend, tracked=True), RUNTIME)
    client.vfs.coherence.start(kernel)
    other.sessions.open({"host": "other"})
    ino = other.create(ROOT_CALLER, ROOT_INO, b"file", 0o100755).ino
    assert _looked_up(client, b"file") == ino
    client.vfs.getattr(ROOT_CALLER, ino, None)
    assert _looked_up(client, b"file") == ino
    client.vfs.forget(ino, 1)
    other.setattr(ROOT_CALLER, ino, SetAttr(mode=0o700))
    wait_until(lambda: ("inode", ino) in kernel.seen)
    client.vfs.getattr(ROOT_CALLER, ino, None)
    client.vfs.forget(ino, 1)
    kernel.seen.clear()
    other.setattr(ROOT_CALLER, ino, SetAttr(mode=0o755))
    other.setattr(ROOT_CALLER, ROOT_INO, SetAttr(mode=0o700))
    client.vfs.getattr(ROOT_CALLER, ROOT_INO, None)
    other.setattr(ROOT_CALLER, ROOT_INO, SetAttr(mode=0o755))
    wait_until(lambda: ("inode", ROOT_INO) in kernel.seen)
    assert ("inode", ino) not in kernel.seen, "the kernel has dropped it"
    other.sessions.close()


@needs_root_and_fuse
def test_p6_lookups_are_counted_as_the_kernel_counts_them(
    client: MountClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever answers with an entry counts one; what is gone has none left."""
    few: list[tuple[int, int, int]] = []
    real = LookupCounts.forget

    def forget(counts: LookupCounts, ino: Ino, lookups: int) -> None:
        known = counts._counts.get(ino, 0)
        if known < lookups:
            few.append((ino, lookups, known))
        real(counts, ino, lookups)

    monkeypatch.setattr(LookupCounts, "forget", forget)
    root = tmp_path / "mnt"
    wants = KernelWants(readdirplus_auto=False)
    with serving(client.vfs, root, SessionConfig(wants=wants)):
        (root / "dir").mkdir()
        (root / "dir" / "file").write_bytes(b"x")
        os.link(root / "dir" / "file", root / "dir" / "link")
        os.symlink("file", root / "dir" / "symlink")
        os.mkfifo(root / "dir" / "fifo")
        fd = os.open(root / "dir", os.O_TMPFILE | os.O_RDWR)
        os.link(f"/proc/self/fd/{fd}", root / "dir" / "tmp", src_dir_fd=fd)  # follows it then
        os.close(fd)
        for _ in range(2):
            subprocess.run(["ls", "-la", root / "dir"], check=True, stdout=subprocess.DEVNULL)
        assert len(client.vfs.lookups) >= 5
        shutil.rmtree(root / "dir")
        wait_until(lambda: len(client.vfs.lookups) == 0)
    assert not few


def test_inodes_that_are_counted_are_bounded(
    client: MountClient, backend: MemBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound nothing is known to be gone, so no lease ends too early."""
    monkeypatch.setattr(lookups, "LOOKUPS_MAX", 10)
    kernel, other = Told(), Meta(MemStore(backend, tracked=True), RUNTIME)
    client.vfs.coherence.start(kernel)
    other.sessions.open({"host": "other"})
    for number in range(20):
        client.vfs.mkdir(ROOT_CALLER, ROOT_INO, b"d%d" % number, 0o755)
    assert len(client.vfs.lookups) <= 10
    ino = _looked_up(client, b"d0")
    client.vfs.getattr(ROOT_CALLER, ino, None)
    client.vfs.forget(ino, 1)
    other.setattr(ROOT_CALLER, ino, SetAttr(mode=0o700))
    wait_until(lambda: ("inode", ino) in kernel.seen)
    other.sessions.close()
