"""P1: what fsync(2) has promised survives a loss of power, whatever is done to the file later.

The object store of these tests is one that forgets what was not synced, as a directory does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.files.handles import unsynced_slices
from fsclient.kernel.later import Outcome
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import object_key
from fsdata.objects.file import FileObjects
from fsmeta.rules.settings import new_format
from fsmeta.runtime import SystemRuntime
from fsmeta.types import Ino
from tests.posix.inproc import format_volume, memory
from tests.sim.world.posix import Posix
from tests.support.waiting import wait_until

RUNTIME = SystemRuntime()


class Forgetful(FileObjects):
    """Objects of which those that were synced survive a loss of power."""

    def __init__(self, root: Path) -> None:
        super().__init__(RUNTIME, str(root))
        self.synced: set[str] = set()

    def sync(self, keys: Iterable[str]) -> None:
        kept = list(keys)
        super().sync(kept)
        self.synced.update(kept)


class Host:
    """A client and its store."""

    def __init__(self, root: Path) -> None:
        connect = memory()
        format_volume(connect, new_format("testvol", "file", str(root)))
        self.objects = Forgetful(root)
        self.client = MountClient(connect(), RUNTIME, ClientOptions(), GivenParts(self.objects))
        self.client.start()
        self.posix = Posix(self.client.vfs)

    def at_risk(self, ino: Ino) -> list[str]:
        """The objects of a file that a loss of power would take."""
        size = self.client.meta.format.block_bytes
        keys = [
            object_key(each.id, block, block_length(each.size, block, size))
            for each in self.client.meta.read_chunk(ino, 0)
            for block in range(block_count(each.size, size))
        ]
        assert keys, "the file has data"
        return [key for key in keys if key not in self.objects.synced]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    assert made.client.stop()


def test_p1_compaction_keeps_what_fsync_has_promised(host: Host) -> None:
    """It deletes the objects that fsync(2) has had synced: those in their place must be, too."""
    file = host.posix.open(b"/file", os.O_CREAT | os.O_RDWR)
    ino = host.posix.stat(b"/file").ino
    for at in range(60):
        file.write(at * 1000, bytes([at]) * 1000)
        host.client.vfs.io.flush(file.fh)
    file.fsync()
    assert host.at_risk(ino) == []
    host.client.background.compact(ino, 0)
    assert len(host.client.meta.read_chunk(ino, 0)) < 20
    assert host.at_risk(ino) == []
    file.close()


def test_p1_fsync_of_what_another_descriptor_has_written(host: Host) -> None:
    """`cp a b; sync b`: fsync(2) is of the file, not of what came through the descriptor."""
    file = host.posix.open(b"/file", os.O_CREAT | os.O_RDWR)
    file.write(0, b"some bytes")
    file.close()
    file = host.posix.open(b"/file")
    file.fsync()
    file.close()
    assert host.at_risk(file.ino) == []
    file = host.posix.open(b"/file", os.O_RDWR)
    file.write(4, b"-")
    file.close()
    file = host.posix.open(b"/file", os.O_RDWR)
    file.write(0, b"S")
    file.fsync()
    assert host.at_risk(file.ino) == []
    file.close()


def test_p1_fsync_of_what_shares_the_data_of_another_file(host: Host) -> None:
    """`cp` shares slices, and who syncs the copy has not written them."""
    source = host.posix.open(b"/source", os.O_CREAT | os.O_RDWR)
    source.write(0, b"some bytes")
    source.close()
    source = host.posix.open(b"/source")
    copy = host.posix.open(b"/copy", os.O_CREAT | os.O_RDWR)
    assert source.copy(copy, 0, 0, 10) == 10
    copy.fsync()
    assert host.at_risk(copy.ino) == []
    source.close()
    copy.close()


@pytest.mark.parametrize("many", ["files", "slices"])
def test_p1_fsync_of_what_too_many_were_closed_after(
    host: Host, monkeypatch: pytest.MonkeyPatch, many: str
) -> None:
    """Nobody knows any more what is to be synced, so all of the file is."""
    monkeypatch.setattr(unsynced_slices, "FILES_MAX" if many == "files" else "SLICES_MAX", 3)
    for number in range(8):
        path = b"/%d" % (number if many == "files" else 0)
        file = host.posix.open(path, os.O_CREAT | os.O_RDWR)
        file.write(number * 100, b"some bytes")
        file.close()
    file = host.posix.open(b"/0")
    assert host.at_risk(file.ino)
    file.fsync()
    assert host.at_risk(file.ino) == []
    host.objects.synced.clear()
    file.fsync()
    assert not host.objects.synced, "once is enough"
    file.close()


def test_p1_fsync_of_a_sparse_file_that_shares_data(host: Host) -> None:
    """It looked at each chunk there could be, of which a file of petabytes has very many."""
    source = host.posix.open(b"/source", os.O_CREAT | os.O_RDWR)
    source.write(0, b"some bytes")
    source.close()
    source = host.posix.open(b"/source")
    copy = host.posix.open(b"/copy", os.O_CREAT | os.O_RDWR)
    copy.truncate(1 << 51)
    source.copy(copy, 0, 1 << 50, 10)
    copy.fsync()
    assert copy.read(1 << 50, 10) == b"some bytes"
    (index,) = host.client.meta.ranges.chunks(copy.ino)
    assert index
    copy.close()
    source.close()
    assert host.at_risk(source.ino) == []


def test_p1_syncfs_is_honoured_where_the_kernel_sends_it(host: Host) -> None:
    """It does not to mounts like ours: docs/LIMITS.md. What is open, and what is closed."""
    closed = host.posix.open(b"/closed", os.O_CREAT | os.O_RDWR)
    closed.write(0, b"some bytes")
    closed.close()
    deleted = host.posix.open(b"/deleted", os.O_CREAT | os.O_RDWR)
    deleted.write(0, b"some bytes")
    deleted.close()
    host.posix.unlink(b"/deleted")
    file = host.posix.open(b"/open", os.O_CREAT | os.O_RDWR)
    file.write(0, b"more bytes")
    outcomes: list[Outcome[None]] = []
    host.client.vfs.syncfs().begin(outcomes.append)
    wait_until(lambda: outcomes)
    outcomes[0]()
    assert host.at_risk(closed.ino) == host.at_risk(file.ino) == []
    file.close()
