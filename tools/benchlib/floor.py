"""`python -m tools.bench floor`: the least that a change, and an entry of a listing, can cost here.

How fast could SliceFS be? Two programs that do only what any such file system has to do take turns
with SliceFS (`--idle-poll never`) and JuiceFS. One in C answers the kernel and writes two hashes of
Redis in one round trip for each name that is made: what is left above it are wake-ups, which no
client is spared. One in Python reads names and attributes of a directory from Redis and packs the
kernel's records, without caches, leases, order or permissions, and without a kernel.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import hiredis

from tools.benchlib import client, nothing, redis
from tools.benchlib.redis import Redis
from tools.benchlib.systems import JUICEFS, SLICEFS, polling
from tools.benchlib.volume import BenchVolume

PHASES: Final = ("mkdir", "create")
LEAST: Final = "least"
NAMES: Final = 5000
PAGE: Final = 1000  # names of a HSCAN, as SliceFS asks for them
RECORD: Final = struct.Struct("<QQQQIIIIIQ8s8s")  # of an inode: 72 bytes, as SliceFS has about
ENTRY: Final = struct.Struct("<5Q2I6Q10IQQII24s")  # fuse_direntplus with a name of 24 bytes


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    made = argparse.ArgumentParser(prog="python -m tools.bench floor", description=__doc__)
    made.add_argument("--count", type=int, default=2000)
    made.add_argument("--repeat", type=int, default=5)
    made.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    arguments = made.parse_args(words)
    workspace = Path(tempfile.mkdtemp(prefix="slicefs-floor-", dir=arguments.dir))
    found: dict[tuple[str, str], list[float]] = {}
    entries: list[_EntryCost] = []
    try:
        with redis.running(workspace / "redis.log") as server:
            for repeat in range(arguments.repeat):
                for name, phase, took_us in _round(workspace, server, arguments.count, repeat):
                    found.setdefault((phase, name), []).append(took_us)
                entries.append(_list_least(server))
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    for (phase, name), values in found.items():
        print(f"{phase:8} {name:8} {_shown(values)} µs")
    print(
        f"listing  {LEAST:8} {_shown([each.client_us for each in entries])} µs an entry in Python"
    )
    print(f"listing  {LEAST:8} {_shown([each.redis_us for each in entries])} µs an entry in Redis")
    return 0


def _shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values):7.2f} ({min(values):.2f} to {max(values):.2f})"


def _round(
    workspace: Path, server: Redis, count: int, repeat: int
) -> Iterator[tuple[str, str, float]]:
    """Each system once, on a fresh volume."""
    server.ask("FLUSHALL")
    place = workspace / f"least-{repeat}"
    with nothing.mounted(place, "pages", server.port) as mountpoint:
        yield from _phases(LEAST, mountpoint, count)
    for system in (polling(SLICEFS, "never", SLICEFS.name, 1), JUICEFS):
        url = system.meta_urls["redis"].format(port=server.port, path="")
        with BenchVolume(system, workspace, url) as volume:
            yield from _phases(system.name, volume.mountpoint, count)


def _phases(name: str, mountpoint: Path, count: int) -> Iterator[tuple[str, str, float]]:
    for phase in PHASES:
        (timing,) = client.run("metaloop", mountpoint / "meta", 1, count, "own", phase)
        yield name, phase, timing.us_per_op


class _EntryCost(NamedTuple):
    """What an entry has cost."""

    client_us: float
    redis_us: float


def _list_least(server: Redis) -> _EntryCost:
    """Read a directory and pack it; the processor time of both sides for each entry."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        link = _Link(connection)
        link.ask([(b"SELECT", b"9"), (b"FLUSHDB",)])
        record = RECORD.pack(*range(10), b"", b"")
        for number in range(NAMES):
            row, name = b"i%016x" % number, b"name-%019d" % number
            link.ask([(b"HSET", b"d", name, b"f%016x" % number)])
            link.ask([(b"HSET", row, b"a", record[:64], b"v", record[64:])])
        before_s, begun = server.cpu_seconds(), time.process_time()
        link.ask([(b"HELLO", b"3"), (b"CLIENT", b"TRACKING", b"ON")])
        packed = sum(map(len, _pages(link)))
        spent, used_s = time.process_time() - begun, server.cpu_seconds() - before_s
        if packed != NAMES * ENTRY.size:
            raise RuntimeError(f"{packed} bytes were packed")
    return _EntryCost(1e6 * spent / NAMES, 1e6 * used_s / NAMES)


def _pages(link: _Link) -> Iterator[bytes]:
    cursor, pack = b"0", ENTRY.pack
    while True:
        [(cursor, flat)] = link.ask([(b"HSCAN", b"d", cursor, b"COUNT", b"%d" % PAGE)])
        names, rows = flat[::2], [b"i" + value[1:] for value in flat[1::2]]
        values = link.ask([(b"HMGET", row, b"a", b"v") for row in rows])
        joined = b"".join([b"".join(value) for value in values])
        yield b"".join(
            [
                pack(
                    *(0, 1, 0, 0, 0, 0, 0, ino, size, size, atime, mtime, mtime),
                    *(0, 0, 0, mode, links, uid, gid, 0, 4096, 0, ino, at, len(name), 8, name),
                )
                for at, (name, (ino, size, atime, mtime, mode, links, uid, gid, *_)) in enumerate(
                    zip(names, RECORD.iter_unpack(joined), strict=True)
                )
            ]
        )
        if cursor == b"0":
            return


class _Link:
    """A connection to Redis with nothing around it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = hiredis.Reader()

    def ask(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """The answers, in order."""
        parts = []
        for words in commands:
            parts.append(b"*%d\r\n" % len(words))
            parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
        self._socket.sendall(b"".join(parts))
        answers: list[Any] = []
        while len(answers) < len(commands):
            answer = self._reader.gets()
            if answer is False:
                self._reader.feed(self._socket.recv(1 << 20))
            else:
                answers.append(answer)
        return answers
