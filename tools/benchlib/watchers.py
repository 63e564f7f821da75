"""What Redis sends when a thousand mounts look into a directory in which other clients create.

`python -m tools.benchlib.watchers [--watchers 1000] [--seconds 5]` starts its own Redis. The
creating clients are real (`Meta`). A watcher is a model of a mount: it has the two connections that
a mount tracks rows with and the real `ContendedDirs`, and a program that looks up one name at a
pace. For each pace the table shows messages and reads a second, and the processor time that Redis
takes.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import hiredis

from fsclient.volume.metadata_url import open_store
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.schema.keys import dir_row
from fsmeta.store.redis.script import pack
from fsmeta.txn.contended_dirs import BELIEVED_S, ContendedDirs
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tools.benchlib import redis

CREATORS: Final = 10
# creates a second of each creator, looks a second of each watcher
PACES: Final = ((0.5, 1.0), (0.5, 10.0), (2.0, 1.0), (2.0, 10.0), (20.0, 1.0), (20.0, 10.0))
NAME: Final = b"looked-for"


class Link:
    """One connection to Redis, as far as a watcher needs it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def ask(self, *words: bytes) -> object:
        """Send a request and return its answer."""
        self.socket.sendall(pack(words))
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self.socket.recv(1 << 16))
        return answer

    def arrived(self) -> int:
        """Read what has arrived and return the number of messages."""
        self._reader.feed(self.socket.recv(1 << 16))
        count = 0
        while self._reader.gets() is not False:
            count += 1
        return count


class DirectoryWatcher:
    """The model of a mount on which one program looks up `NAME`."""

    def __init__(self, port: int, row: bytes, key: bytes) -> None:
        self.news, self._link = Link(port), Link(port)
        number = self.news.ask(b"CLIENT", b"ID")
        self.news.ask(b"SUBSCRIBE", b"__redis__:invalidate")
        self._link.ask(b"CLIENT", b"TRACKING", b"ON", b"REDIRECT", str(number).encode(), b"NOLOOP")
        self._busy = ContendedDirs(time.monotonic)
        self._row, self._key = row, key
        self._believed_until = 0.0

    def poll_invalidations(self) -> int:
        """Apply the invalidations that have arrived and return their number."""
        count = self.news.arrived()
        self._believed_until = 0.0
        self._busy.heard(self._row)
        return count

    def look(self, unwatched: Link) -> bool:
        """Look up the name as a program would; true if that takes a read from Redis."""
        now = time.monotonic()
        if now < self._believed_until:
            return False
        busy = self._busy.has(self._row)
        (unwatched if busy else self._link).ask(b"HMGET", self._key, NAME)
        self._believed_until = now + BELIEVED_S if busy else float("inf")
        return True


@dataclass
class Counts:
    """Events during one measurement."""

    creates: int = 0
    messages: int = 0
    looks: int = 0
    reads: int = 0
    redis_s: float = 0.0
    took_s: float = 0.0
    errors: list[BaseException] = field(default_factory=list)

    def line(self, looks_each: float) -> str:
        """The numbers as a row of the table."""
        numbers = (self.creates, self.looks, self.messages, self.reads)
        cells = "".join(f"{number / self.took_s:>11,.0f}" for number in numbers)
        return f"{looks_each:>10.0f}{cells}{100 * self.redis_s / self.took_s:>9.1f} %"


def create_on(meta: Meta, parent: Ino, a_second: float, stop: threading.Event, to: Counts) -> None:
    """Create files at a steady pace until `stop` is set."""
    chance = random.Random()
    due = time.monotonic() + chance.random() / a_second
    while not stop.wait(max(0.0, due - time.monotonic())):
        due += 1 / a_second
        try:
            meta.create(ROOT_CALLER, parent, b"%032x" % chance.getrandbits(128), stat.S_IFREG)
        except OSError as error:
            to.errors.append(error)
            return
        to.creates += 1


def measure(
    server: redis.Redis,
    metas: Sequence[Meta],
    parent: Ino,
    watchers: Sequence[DirectoryWatcher],
    pace: tuple[float, float],
    seconds: float,
) -> Counts:
    """Run creators and watchers at one pace and count events."""
    found = Counts()
    stop = threading.Event()
    threads = [
        threading.Thread(target=create_on, args=(meta, parent, pace[0], stop, found))
        for meta in metas
    ]
    unwatched = Link(server.port)
    by_number = {watcher.news.socket.fileno(): watcher for watcher in watchers}
    with select.epoll() as arrived:
        for number in by_number:
            arrived.register(number, select.EPOLLIN)
        for thread in threads:
            thread.start()
        begin, spent = time.monotonic(), server.cpu_seconds()
        gap_s = 1 / (pace[1] * len(watchers))
        due = begin
        turn = 0
        while (now := time.monotonic()) < begin + seconds:
            for number, _ in arrived.poll(max(0.0, min(due - now, 0.01)), 1000):
                found.messages += by_number[number].poll_invalidations()
            while due <= now:
                due += gap_s
                found.looks += 1
                found.reads += watchers[turn % len(watchers)].look(unwatched)
                turn += 1
        found.took_s, found.redis_s = time.monotonic() - begin, server.cpu_seconds() - spent
        stop.set()
        for thread in threads:
            thread.join()
    if found.errors:
        raise found.errors[0]
    return found


def run(count: int, seconds: float) -> None:
    """Measure every pace and print the table."""
    with (
        tempfile.TemporaryDirectory() as folder,
        redis.running(Path(folder) / "redis.log") as server,
    ):
        runtime = SystemRuntime()
        url = f"redis://127.0.0.1:{server.port}/0"
        format_ = [
            sys.executable,
            "-c",
            "from fsclient.cli.main import main; main()",
            "format",
            url,
            "watched",
        ]
        subprocess.run([*format_, "--bucket", f"{folder}/data"], check=True, capture_output=True)
        metas = [Meta(open_store(url, runtime), runtime) for _ in range(CREATORS)]
        for meta in metas:
            meta.sessions.open({"host": "watchers"})
        parent = metas[0].create(ROOT_CALLER, ROOT_INO, b"shared", stat.S_IFDIR | 0o755).ino
        row = dir_row(parent)
        watchers = [DirectoryWatcher(server.port, row, row) for _ in range(count)]
        print(f"{count} watchers; all numbers are per second, `looks each` of one watcher")
        heads = ("creates", "looks", "messages", "reads", "Redis CPU")
        print(f"{'looks each':>10}" + "".join(f"{head:>11}" for head in heads))
        for pace in PACES:
            print(measure(server, metas, parent, watchers, pace, seconds).line(pace[1]), flush=True)
        for meta in metas:
            meta.sessions.close()


def main(words: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchlib.watchers", description=__doc__)
    parser.add_argument("--watchers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args(words)
    run(arguments.watchers, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
