"""P1, P5: how long a file is, while it is written, cut and opened at the same time.

One client in the test's own process, or two of one volume that are told nothing of each other. What
happens at the same time is done between a question to the metadata and the use of its answer.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.files.file_ranges import LOOK_AT_ONCE
from fsclient.files.handles.open_files import OpenFile
from fsclient.kernel.later import Later
from fsdata.objects.mem import MemObjects
from fsmeta.meta.meta import Meta
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import CHUNK_BYTES, ROOT_CALLER, Ino, SetAttr, Slice
from tests.posix import inproc
from tests.posix.inproc import RUNTIME, meanwhile
from tests.sim.world.posix import Posix
from tests.support.waiting import wait_until

LONG = 394_127
AT = 307_200


class Pair:
    """Two clients of one volume."""

    def __init__(self) -> None:
        connect = inproc.memory()
        inproc.format_volume(connect)
        objects = MemObjects(RUNTIME)
        options = ClientOptions(heartbeat_s=0.5)
        self.clients = [
            MountClient(connect(), RUNTIME, options, GivenParts(objects)) for _ in range(2)
        ]
        for each in self.clients:
            each.start()
        self.first, self.second = (Posix(each.vfs) for each in self.clients)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for each in made.clients:
        assert each.stop()


@pytest.fixture
def one() -> Iterator[MountClient]:
    with inproc.client(inproc.memory()) as made:
        yield made


def test_what_another_mount_appends_is_read_while_we_write(pair: Pair) -> None:
    """A file with unstored bytes was as long as this mount had made it, whoever opened it."""
    mine = pair.first.open(b"/f", os.O_RDWR | os.O_CREAT)
    mine.write(0, b"a" * 1000)
    mine.fsync()
    mine.write(0, b"b")
    theirs = pair.second.open(b"/f", os.O_RDWR)
    theirs.write(AT, b"c" * 100)
    theirs.close()
    again = pair.first.open(b"/f")
    assert again.size() == AT + 100
    assert again.read(AT, 4096) == b"c" * 100
    assert again.read(0, 2) == b"ba"
    again.close()
    mine.close()


def test_a_file_that_is_cut_elsewhere_is_short_while_we_write(pair: Pair) -> None:
    mine = pair.first.open(b"/f", os.O_RDWR | os.O_CREAT)
    mine.write(0, b"a" * LONG)
    mine.fsync()
    theirs = pair.second.open(b"/f", os.O_RDWR)
    theirs.truncate(10)
    theirs.close()
    mine.write(0, b"b")
    again = pair.first.open(b"/f")
    assert again.size() == 10
    assert again.read(0, 4096) == b"b" + b"a" * 9
    again.close()
    mine.close()


def test_an_open_learns_nothing_older_than_a_truncation(one: MountClient) -> None:
    """Its answer was from before: sparse writes then made a file that ended where it had."""
    posix = Posix(one.vfs)
    posix.open(b"/f", os.O_RDWR | os.O_CREAT).close()
    ino = posix.stat(b"/f").ino
    with meanwhile(one.meta, "open", lambda: _set_size(one, ino, LONG)):
        file = posix.open(b"/f", os.O_RDWR)
    file.write(0, b"x")
    assert file.read(AT, LONG) == bytes(LONG - AT)
    file.close()
    with meanwhile(one.meta, "open", lambda: _set_size(one, ino, 5)):
        file = posix.open(b"/f", os.O_RDWR)
    assert file.read(0, LONG) == b"x" + bytes(4)
    file.write(0, b"y")
    assert file.size() == 5
    assert file.read(0, LONG) == b"y" + bytes(4)
    file.close()


def _set_size(client: MountClient, ino: Ino, size: int) -> None:
    client.vfs.setattr(ROOT_CALLER, ino, SetAttr(size=size), None)


def test_a_read_at_the_end_learns_nothing_older_than_a_truncation(one: MountClient) -> None:
    posix = Posix(one.vfs)
    file = posix.open(b"/f", os.O_RDWR | os.O_CREAT)
    with meanwhile(one.meta, "getattr", lambda: file.truncate(LONG)):
        file.read(0, 4096)
    file.write(0, b"x")
    assert file.read(AT, LONG) == bytes(LONG - AT)
    file.close()


def test_a_write_beside_a_truncating_open(one: MountClient) -> None:
    """What was written last decides the length, now and whenever more is written."""
    posix = Posix(one.vfs)
    file = posix.open(b"/f", os.O_RDWR | os.O_CREAT)
    file.write(0, b"a" * LONG)
    file.fsync()
    with meanwhile(one.meta, "setattr", lambda: file.write(100, b"b"), before=True):
        posix.open(b"/f", os.O_RDWR | os.O_TRUNC).close()
    for _ in range(2):
        assert file.size() == 101
        assert file.read(0, LONG) == bytes(100) + b"b"
        file.fsync()
        file.write(100, b"b")
    file.close()


def test_lseek_sees_what_is_stored_meanwhile(one: MountClient) -> None:
    posix = Posix(one.vfs)
    file = posix.open(b"/f", os.O_RDWR | os.O_CREAT)
    file.write(AT, b"x")
    with meanwhile(one.meta, "getattr", file.fsync):
        found = one.vfs.ranges.lseek(ROOT_CALLER, file.ino, file.fh, 0, os.SEEK_DATA)
    assert found == AT
    file.close()


def test_p4_looking_for_a_hole_in_a_long_file_holds_no_serving_thread(
    one: MountClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is read from the metadata, and there may be millions of them."""
    file = Posix(one.vfs).open(b"/f", os.O_RDWR | os.O_CREAT)
    far = 40 * CHUNK_BYTES + 5
    file.write(far, b"x" * 10)
    file.fsync()
    looked: list[int] = []
    slices = OpenFile.slices

    def noted(self: OpenFile, index: int) -> list[Slice]:
        looked.append(index)
        return slices(self, index)

    monkeypatch.setattr(OpenFile, "slices", noted)

    def seek(offset: int, whence: int) -> int | Later[int]:
        return one.vfs.ranges.lseek(ROOT_CALLER, file.ino, file.fh, offset, whence)

    assert seek(1, os.SEEK_HOLE) == 1
    assert seek(far - CHUNK_BYTES, os.SEEK_DATA) == far
    looked.clear()
    later = seek(0, os.SEEK_DATA)
    assert isinstance(later, Later)
    assert len(looked) == LOOK_AT_ONCE
    answers: queue.Queue[Callable[[], int]] = queue.Queue()
    later.begin(answers.put)
    assert answers.get(timeout=60)() == far
    assert looked[LOOK_AT_ONCE:] == [40], "others have nothing"
    monkeypatch.setattr("fsclient.files.file_ranges.LOOK_AT_ONCE", 0)
    for at, whence, expected in (
        (far, os.SEEK_HOLE, far + 10),
        (far - 9, os.SEEK_HOLE, far - 9),
        (far + 3, os.SEEK_DATA, far + 3),
    ):
        later = seek(at, whence)
        assert isinstance(later, Later)
        later.begin(answers.put)
        assert answers.get(timeout=60)() == expected
    reached, go_on = threading.Event(), threading.Event()

    def held(self: OpenFile, index: int) -> list[Slice]:
        reached.set()
        assert go_on.wait(60)
        return slices(self, index)

    monkeypatch.setattr(OpenFile, "slices", held)
    later = seek(0, os.SEEK_HOLE)
    assert isinstance(later, Later)
    later.begin(answers.put)
    assert reached.wait(60)
    later.cancel()  # it is answered at once, whatever is looked at
    with pytest.raises(InterruptedError):
        answers.get(timeout=60)()
    go_on.set()
    file.close()


@pytest.mark.parametrize("tracked", [False, True])
def test_p5_what_others_have_cut_off_never_reads_as_zeros(tracked: bool) -> None:
    """Through a descriptor that was open before, and that nobody asks for its attributes."""
    backend = MemBackend(RUNTIME)
    with inproc.client(lambda: MemStore(backend, tracked=tracked)) as client:
        mine = Posix(client.vfs).open(b"/f", os.O_RDWR | os.O_CREAT)
        mine.write(0, b"a" * 4096)
        mine.fsync()
        assert mine.read(4000, 96) == b"a" * 96
        other = Meta(MemStore(backend, tracked=tracked), RUNTIME)
        other.sessions.open({"host": "other"})
        other.setattr(ROOT_CALLER, mine.ino, SetAttr(size=100))
        seen: list[bytes] = []

        def is_short() -> bool:
            seen.append(mine.read(0, 4096))
            return seen[-1] == b"a" * 100

        wait_until(is_short)
        assert set(seen) <= {b"a" * 4096, b"a" * 100}
        assert mine.read(4000, 96) == b""
        other.setattr(ROOT_CALLER, mine.ino, SetAttr(size=300))
        wait_until(lambda: mine.read(0, 4096) == b"a" * 100 + bytes(200))
        other.setattr(ROOT_CALLER, mine.ino, SetAttr(size=200))
        wait_until(lambda: mine.read(0, 4096) == b"a" * 100 + bytes(100))
        other.sessions.close()
        mine.close()
