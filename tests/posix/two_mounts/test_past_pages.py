"""P4: what is written past the kernel's pages is what readers of pages see, once it is answered."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from fsclient.client.client import MountClient
from fsclient.files.direct_io import DROPS_AFTER_MINOR
from fsclient.kernel.contract import WriteHow
from fsclient.kernel.later import Outcome
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.posix import aio, inproc
from tests.posix.two_mounts.test_notices import Told
from tests.posix.volumes import Volume
from tests.support.waiting import wait_until

BLOCK = 4096
BLOCKS = 128
DEPTH = 16
ROUNDS = 80  # one in five was wrong


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Two threads read the file through its pages, again and again."""
    over = threading.Event()

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            while not over.is_set():
                for begin in range(0, BLOCKS * BLOCK, 8 * BLOCK):
                    os.pread(file.fileno(), 8 * BLOCK, begin)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.skipif(not aio.is_there(), reason="needs to know io_submit(2) of this machine")
def test_p4_readers_see_what_was_written_asynchronously(
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> None:
    """xfstests generic/451: io_submit(2) with O_DIRECT beside read(2)."""
    dice = random.Random(1)
    with volumes("sqlite", "aio") as volume:
        path = volume.mount() / "file"
        path.write_bytes(bytes(BLOCKS * BLOCK))
        direct, pages = os.open(path, os.O_RDWR | os.O_DIRECT), os.open(path, os.O_RDONLY)
        with _reading(path), aio.Queue(direct, DEPTH, BLOCK) as queue:
            for turn in range(ROUNDS):
                begin = dice.randrange(BLOCKS - DEPTH) * BLOCK
                data = bytes((turn % 255 + 1,)) * (DEPTH * BLOCK)
                queue.write(data, begin)
                assert os.pread(pages, len(data), begin) == data, f"old bytes in round {turn}"
        os.close(direct)
        os.close(pages)


@pytest.mark.skipif(not aio.is_there(), reason="needs to know io_submit(2) of this machine")
def test_p4_many_writes_at_once_beside_a_reader_hang_nobody(
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> None:
    """Asynchronous writes held all of the kernel's 64 background requests, and waited for pages
    that read-ahead had locked and could not ask for: ASYNC_DIO is not taken."""
    with volumes("sqlite", "aio-deep") as volume:
        path = volume.mount() / "file"
        path.write_bytes(bytes(BLOCKS * BLOCK))
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        with _reading(path), aio.Queue(direct, BLOCKS, BLOCK) as queue:
            for turn in range(20):
                queue.write(bytes((turn + 1,)) * (BLOCKS * BLOCK), 0)
        os.close(direct)
        assert path.read_bytes() == bytes((20,)) * (BLOCKS * BLOCK)


# --- which writes wait for the notifier ----------------------------------------------------------


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def client(told: Told) -> Iterator[MountClient]:
    with inproc.client(inproc.memory()) as made:
        made.vfs.coherence.start(told)
        yield made


def _open(client: MountClient, flags: int) -> tuple[Ino, int]:
    entry, opened = client.vfs.create(ROOT_CALLER, ROOT_INO, b"file", 0o644, flags)
    assert entry.attr is not None
    return entry.attr.ino, opened.fh


def _write(client: MountClient, ino: Ino, fh: int, o_direct: bool, begin: int = 0) -> bool:
    """Write ten bytes past the pages; whether the answer came with the notifier."""
    data = memoryview(b"0123456789")
    assert client.vfs.write(ROOT_CALLER, ino, fh, begin, data, WriteHow(past_pages=True)) == 10
    later = client.vfs.written_past_pages(ino, fh, begin, 10, o_direct)
    if later is None:
        return False
    outcomes: list[Outcome[None]] = []
    later.begin(outcomes.append)
    wait_until(lambda: outcomes)
    outcomes[0]()
    return True


def test_p4_writes_that_ask_for_it_are_answered_at_once(client: MountClient, told: Told) -> None:
    """The kernel drops the range after a synchronous O_DIRECT write, and all of ours are."""
    client.vfs.io.direct.obey(41, drops_before=True)
    ino, fh = _open(client, os.O_RDWR)
    client.vfs.read(ROOT_CALLER, ino, fh, 0, 10)
    assert not _write(client, ino, fh, o_direct=True, begin=5000)
    assert _write(client, ino, fh, o_direct=False, begin=5000)
    assert told.seen == [("pages", ino, 5000, 5010)], "before the answer, and no more"
    client.vfs.release(ino, fh)


@pytest.mark.parametrize(
    ("minor", "before", "fresh", "paged"),
    [
        (38, False, True, True),  # Linux 6.5 drops nothing: zeros behind an append stayed
        (41, True, False, True),  # 6.13 drops ahead: a read meanwhile brought them back
        (DROPS_AFTER_MINOR, True, False, False),  # 6.18 drops afterwards
    ],
)
def test_p4_handles_that_we_made_direct(
    client: MountClient, minor: int, before: bool, fresh: bool, paged: bool
) -> None:
    """As the kernel does by itself. `fresh`: where it has filled no pages since the open."""
    client.vfs.io.direct.obey(minor, before)
    ino, fh = _open(client, os.O_WRONLY | os.O_APPEND)
    assert _write(client, ino, fh, o_direct=False) == fresh
    reader = client.vfs.open(ROOT_CALLER, ino, os.O_RDONLY).fh
    client.vfs.read(ROOT_CALLER, ino, reader, 0, 4096)
    assert _write(client, ino, fh, o_direct=False) == paged
    client.vfs.release(ino, reader)
    client.vfs.release(ino, fh)
