"""Clients without a kernel that hand a lock around: `-m tests.faults.lock_clients`.

META STAMP CLIENTS TURNS KIND: so many clients of the volume in this process, each with a session
of its own. Each takes the write lock of `/lock` (KIND is flock or fcntl) so many times, for a
moment; STAMP, a file of 8 bytes that all processes map, has the time of the last release by the
monotonic clock of the host. A line on standard input begins it; standard output gets a JSON list:
the seconds from each release to the next client's having the lock, how often the store was asked,
and how often in vain.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
import time

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.kernel.contract import FileLock
from fsclient.volume.metadata_url import open_store
from fsdata.objects.mem import MemObjects
from fsmeta.runtime import SystemRuntime
from fsmeta.schema.locks import LOCK_END
from tests.sim.world.posix import Posix

WAIT_S = 120.0
_STAMP = struct.Struct("=q")
_RUNTIME = SystemRuntime()


class Waits:
    """Answers of one client's lock requests."""

    def __init__(self) -> None:
        self._had = threading.Event()
        self.code = -1

    def begin(self) -> None:
        self._had.clear()

    def answer(self, request: int, code: int) -> None:
        del request
        self.code = code
        self._had.set()

    def interrupted(self) -> bool:
        return False

    def wait(self) -> None:
        assert self._had.wait(WAIT_S), "the lock never came"
        assert self.code == 0, self.code


def _connect(meta: str) -> MountClient:
    client = MountClient(
        open_store(meta, _RUNTIME),
        _RUNTIME,
        ClientOptions(buffer_bytes=16 << 20, upload_threads=1, prefetch_threads=1),
        GivenParts(MemObjects(_RUNTIME)),
    )
    client.start()
    return client


def _take_turns(
    client: MountClient, waits: Waits, stamp: mmap.mmap, turns: int, flock: bool
) -> list[float]:
    fs = client.vfs
    file = Posix(fs).open(b"/lock", os.O_RDWR)
    lock = FileLock(True, 0, LOCK_END, os.getpid())
    took: list[float] = []
    for turn in range(turns):
        waits.begin()
        if not fs.locks.setlk(file.fh, 1, lock, flock, turn + 1, wait=True):
            waits.wait()
            (left,) = _STAMP.unpack_from(stamp)
            took.append((time.monotonic_ns() - left) / 1e9)
        _STAMP.pack_into(stamp, 0, time.monotonic_ns())
        fs.locks.unlock(file.fh, 1, lock, flock)
    file.close()
    return took


def _spent(clients: list[tuple[MountClient, Waits]]) -> tuple[int, int]:
    """Requests and conflicts of all clients so far."""
    metas = [client.meta for client, _ in clients]
    conflicts = sum(meta.transactor.counters.conflicts for meta in metas)
    return sum(meta.store.round_trips for meta in metas), conflicts


def main() -> None:
    """See the module."""
    meta, path, flock = sys.argv[1], sys.argv[2], sys.argv[5] == "flock"
    count, turns = int(sys.argv[3]), int(sys.argv[4])
    with open(path, "r+b") as file:
        stamp = mmap.mmap(file.fileno(), _STAMP.size)
    clients = [(_connect(meta), Waits()) for _ in range(count)]
    for client, waits in clients:
        client.vfs.locks.start(waits)
    print("ready", flush=True)
    sys.stdin.readline()
    before = _spent(clients)
    took: list[float] = []
    threads = [
        threading.Thread(
            target=lambda c=client, w=waits: took.extend(_take_turns(c, w, stamp, turns, flock))
        )
        for client, waits in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = _spent(clients)
    print(json.dumps([took, after[0] - before[0], after[1] - before[1]]), flush=True)
    sys.stdin.readline()
    for client, _ in clients:
        client.stop()


if __name__ == "__main__":
    main()
