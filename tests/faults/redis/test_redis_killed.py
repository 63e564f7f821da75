"""M1: Redis killed and started again at random points of every verb: each change counts once.

Redis has each write on disk before it answers (appendfsync always). Threads of two clients run
every verb that changes something; in between Redis is killed with SIGKILL. What was answered is
there, what was refused is not, and no link count, size or counter is off: `check`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, DentryLocation
from fsmeta.runtime import SystemRuntime
from fsmeta.store.redis.engine import RedisStore
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr, Ino, SetAttr, Slice
from tests.conftest import assert_clean
from tests.faults.redis_server import DurableRedis
from tests.fsmeta.engines import make_volume

RUNTIME = SystemRuntime()
BLOCK = 4096
FILES = 6
AWAY_S = 0.05


class Tenant:
    """A thread that works in a directory of its own, and knows what must be in it."""

    def __init__(self, meta: Meta, name: bytes, seed: int) -> None:
        self._meta = meta
        self._dice = random.Random(seed)
        self._home = meta.create(ROOT_CALLER, ROOT_INO, name, 0o40755).ino
        self.files: dict[bytes, tuple[Ino, int, bytes]] = {}  # name → ino, blocks, xattr
        self.verbs = 0
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        verbs = [self.create, self.write, self.shorten, self.rename, self.exchange]
        verbs += [self.link, self.unlink, self.mark, self.subdirectory]
        try:
            while not self._stop.is_set():
                self._dice.choice(verbs)()
                self.verbs += 1
        except (StoreError, OSError) as error:
            self.failure = error

    def _pick(self) -> bytes | None:
        return self._dice.choice(sorted(self.files)) if self.files else None

    def create(self) -> None:
        name = b"f%d" % self._dice.randrange(FILES)
        if name not in self.files:
            attr = self._meta.create(ROOT_CALLER, self._home, name, 0o100644)
            self.files[name] = (attr.ino, 0, b"")

    def write(self) -> None:
        """Append a block: applied twice, the file says that it uses too much."""
        name = self._pick()
        if name is not None:
            ino, blocks, mark = self.files[name]
            sid = self._meta.new_slice_id()
            piece = (0, Slice(blocks * BLOCK, sid, BLOCK, 0, BLOCK))
            self._meta.write_slices(ino, [piece], (blocks + 1) * BLOCK, RUNTIME.now_ns())
            self.files[name] = (ino, blocks + 1, mark)

    def shorten(self) -> None:
        name = self._pick()
        if name is not None:
            ino, blocks, mark = self.files[name]
            left = self._dice.randrange(blocks + 1)
            self._meta.setattr(ROOT_CALLER, ino, SetAttr(size=left * BLOCK))
            self.files[name] = (ino, left, mark)

    def rename(self) -> None:
        name, new = self._pick(), b"f%d" % self._dice.randrange(FILES)
        if name is not None and name != new:
            self._meta.rename(
                ROOT_CALLER, DentryLocation(self._home, name), DentryLocation(self._home, new)
            )
            self.files[new] = self.files.pop(name)

    def exchange(self) -> None:
        one, two = self._pick(), self._pick()
        if one is not None and two is not None and one != two:
            places = DentryLocation(self._home, one), DentryLocation(self._home, two)
            self._meta.rename(ROOT_CALLER, *places, EXCHANGE)
            self.files[one], self.files[two] = self.files[two], self.files[one]

    def link(self) -> None:
        """A second name, and away with it: a link count that moved twice shows in `check`."""
        name = self._pick()
        if name is not None:
            ino = self.files[name][0]
            self._meta.link(ROOT_CALLER, ino, self._home, b"second")
            self._meta.unlink(ROOT_CALLER, self._home, b"second")

    def unlink(self) -> None:
        name = self._pick()
        if name is not None:
            self._meta.unlink(ROOT_CALLER, self._home, name)
            del self.files[name]

    def mark(self) -> None:
        name = self._pick()
        if name is not None:
            ino, blocks, _ = self.files[name]
            value = b"%d" % self._dice.randrange(1000)
            self._meta.setxattr(ROOT_CALLER, ino, b"user.mark", value)
            self.files[name] = (ino, blocks, value)

    def subdirectory(self) -> None:
        self._meta.create(ROOT_CALLER, self._home, b"sub", 0o40755)
        self._meta.symlink(ROOT_CALLER, self._home, b"symlink", b"f0")
        self._meta.rmdir(ROOT_CALLER, self._home, b"sub")
        self._meta.unlink(ROOT_CALLER, self._home, b"symlink")

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def judge(self, meta: Meta) -> None:
        """What another client sees is what this one was answered."""
        found = {
            entry.name: meta.getattr(ROOT_CALLER, entry.ino) for entry in meta.names(self._home)[0]
        }
        assert {name: _shown(attr) for name, attr in found.items()} == {
            name: (ino, blocks * BLOCK, blocks * BLOCK)
            for name, (ino, blocks, _) in self.files.items()
        }
        for ino, _, mark in self.files.values():
            if mark:
                assert meta.getxattr(ROOT_CALLER, ino, b"user.mark") == mark


def _shown(attr: Attr) -> tuple[Ino, int, int]:
    return attr.ino, attr.size, attr.used


def _through(server: DurableRedis, kills: int, seed: int) -> None:
    url = server.url()
    first = RedisStore(url, RUNTIME)
    make_volume(first, RUNTIME)
    metas = [Meta(RedisStore(url, RUNTIME), RUNTIME, 30) for _ in range(2)]
    for meta in metas:
        meta.sessions.open({"host": "test"})
    tenants = [Tenant(metas[n % 2], b"t%d" % n, seed + n) for n in range(4)]
    dice = random.Random(seed)
    try:
        for _ in range(kills):
            before = sum(tenant.verbs for tenant in tenants)
            while sum(tenant.verbs for tenant in tenants) < before + 20:
                assert all(tenant.failure is None for tenant in tenants)
                time.sleep(0.001)
            time.sleep(dice.random() * 0.05)
            server.kill()
            time.sleep(AWAY_S)
            server.start()
    finally:
        _each([tenant.end for tenant in tenants])
    first.close()
    last = Meta(RedisStore(url, RUNTIME), RUNTIME, 10)
    for tenant in tenants:
        tenant.judge(last)
    assert_clean(last.store)
    _each([meta.store.close for meta in (*metas, last)])


def _each(acts: list[Callable[[], None]]) -> None:
    """All of them at once; the first failure."""
    failures: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except (StoreError, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 6), (2, 6), pytest.param(3, 200, marks=pytest.mark.soak)]
)
def test_killed_in_every_verb(durable_redis: DurableRedis, seed: int, kills: int) -> None:
    _through(durable_redis, kills, seed)
