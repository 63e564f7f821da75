"""M2: what each verb asks of TiKV, request by request.

The kernel has looked up the names beforehand, as in `test_round_trips`; parents are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, DentryLocation
from fsmeta.types import ROOT_INO, Caller, Ino, SetAttr, Slice
from tests.fsmeta.engines import Engine
from tests.support.tikv_server import TikvServer, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("engine", ["tikv"], indirect=True)
KERNEL = Caller(1000, 1000, checked=True)

# a timestamp and one request
READ = {"Tso": 1, "KvBatchGet": 1}
# a timestamp, everything it relies on, writing, a timestamp, committing; the last request is the
# one that commits the other keys, which nobody waits for
COMMIT = {"Tso": 2, "KvBatchGet": 1, "KvPrewrite": 1, "KvCommit": 2}
COMMIT_WAITS = 5
QUIET_S = 0.1  # a request takes a hundredth of it


@pytest.fixture(scope="module")
def tikv_cluster() -> Iterator[TikvServer]:
    """A server of this file's own: nobody who was here before still asks it for anything."""
    yield from serving()


class Client:
    """A client, and what its last verb has asked for."""

    def __init__(self, meta: Meta, server: TikvServer) -> None:
        self.meta = meta
        self.waits = 0
        self._server = server
        self.dir = meta.lookup(KERNEL, ROOT_INO, b"d").ino
        self.spare = self.create(b"spare")  # takes ids
        self._write(self.spare)

    def create(self, name: bytes, mode: int = 0o100666) -> Ino:
        return self.meta.create(KERNEL, self.dir, name, mode).ino

    def _write(self, ino: Ino) -> None:
        piece = Slice(0, self.meta.new_slice_id(), 100, 0, 100)
        self.meta.write_slices(ino, [(0, piece)], 100, 1)

    def requests(self, verb: Callable[[], object]) -> dict[str, int]:
        """Requests by kind; those behind the answer have come, too."""
        before, waits = self._settled(), self.meta.store.round_trips
        verb()
        self.waits = self.meta.store.round_trips - waits
        wait_until(lambda: self.has_committed(before))
        after = self._settled()
        return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name)}

    def has_committed(self, before: dict[str, int]) -> bool:
        """Whether all second phases since then have come: one of the first key, one of the rest."""
        now = self._server.counts()
        written, committed = (now[m] - before[m] for m in ("KvPrewrite", "KvCommit"))
        return committed >= 2 * written

    def _settled(self) -> dict[str, int]:
        """The counts, once nothing more comes behind the answers."""
        counts = self._server.counts()
        while True:
            time.sleep(QUIET_S)
            before, counts = counts, self._server.counts()
            if before == counts:
                return counts


@pytest.fixture
def client(engine: Engine, tikv_server: TikvServer) -> Client:
    other = engine.meta()
    directory = other.create(KERNEL._replace(uid=0), ROOT_INO, b"d", 0o40777).ino
    other.create(KERNEL, directory, b"theirs", 0o100666)
    return Client(engine.meta(), tikv_server)


def test_reads(client: Client) -> None:
    meta = client.meta
    ino = meta.lookup(KERNEL, client.dir, b"theirs").ino
    meta.cache.forget()
    assert client.requests(lambda: meta.getattr(KERNEL, ino)) == READ
    assert client.requests(lambda: meta.getattr(KERNEL, ino)) == READ  # nobody would have told us
    look = lambda: meta.lookup(KERNEL, client.dir, b"theirs")  # noqa: E731
    assert client.requests(look) == {"Tso": 1, "KvBatchGet": 2}
    assert client.waits == 3
    assert client.requests(lambda: meta.read_chunk(ino, 0)) == READ
    assert client.requests(lambda: meta.names(client.dir)) == {"Tso": 1, "KvScan": 1}
    assert client.requests(lambda: meta.attrs([ino, client.spare, client.dir])) == READ
    assert client.requests(meta.statfs) == {"Tso": 1, "KvScan": 2, "KvBatchGet": 1}  # settings


def test_changes(client: Client) -> None:
    meta, directory = client.meta, client.dir
    ino = client.create(b"mine")

    def cost(verb: Callable[..., object], *args: object) -> dict[str, int]:
        return client.requests(lambda: verb(KERNEL, *args))

    assert cost(meta.setattr, ino, SetAttr(mode=0o640)) == COMMIT
    assert client.waits == COMMIT_WAITS
    assert client.requests(lambda: client._write(ino)) == COMMIT
    assert cost(meta.setxattr, ino, b"user.a", b"1") == COMMIT
    old, new = DentryLocation(directory, b"mine"), DentryLocation(directory, b"new")
    with pytest.raises(FileNotFoundError):
        meta.lookup(KERNEL, *new)
    assert cost(meta.rename, old, new) == COMMIT
    with pytest.raises(FileNotFoundError):
        meta.lookup(KERNEL, directory, b"more")
    assert cost(meta.link, ino, directory, b"more") == COMMIT
    assert cost(meta.unlink, directory, b"more") == COMMIT
    assert cost(meta.unlink, directory, b"new") == COMMIT
    assert client.waits == COMMIT_WAITS


@pytest.mark.parametrize(("mode", "rows"), [(0o100644, 1), (0o40755, 2)], ids=["create", "mkdir"])
def test_what_is_new_is_looked_at_besides(client: Client, mode: int, rows: int) -> None:
    """That each of its rows is empty takes a scan, at the same time as the rest is read."""
    with pytest.raises(FileNotFoundError):
        client.meta.lookup(KERNEL, client.dir, b"n")
    assert client.requests(lambda: client.create(b"n", mode)) == {**COMMIT, "KvScan": rows}


def test_rmdir(client: Client) -> None:
    """One scan tells that the directory is empty, one what its own row holds."""
    client.create(b"sub", 0o40755)
    asked = client.requests(lambda: client.meta.rmdir(KERNEL, client.dir, b"sub"))
    assert asked.pop("KvScan") <= 3
    assert asked == COMMIT


def _known(client: Client, *names: bytes, parent: Ino | None = None) -> None:
    """As the kernel asks before a verb that takes these names."""
    for name in names:
        with suppress(FileNotFoundError):
            client.meta.lookup(KERNEL, parent or client.dir, name)


def test_m2_no_verb_waits_more_often_than_two_phase_commit(client: Client) -> None:
    """Every verb that changes something is one transaction of five waits; what must be empty, or
    goes with its row, is scanned beside the read, which is one more request, not one more wait.
    """
    meta, directory = client.meta, client.dir
    mine, also = client.create(b"mine"), client.create(b"also")
    sub = client.create(b"sub", 0o40777)
    for _ in range(3):
        client._write(mine)
    places = [DentryLocation(directory, name) for name in (b"mine", b"also", b"free")]
    inside = DentryLocation(sub, b"inside")
    _known(client, b"free", b"link", b"fifo", b"sym")
    _known(client, b"inside", parent=sub)
    verbs: list[tuple[int, Callable[[], object]]] = [
        (1, lambda: meta.symlink(KERNEL, directory, b"sym", b"to")),
        (1, lambda: meta.create(KERNEL, directory, b"fifo", 0o10644)),
        (0, lambda: meta.link(KERNEL, mine, directory, b"link")),
        (0, lambda: meta.rename(KERNEL, places[0], places[2])),
        (0, lambda: meta.rename(KERNEL, places[2], inside)),
        (0, lambda: meta.rename(KERNEL, inside, places[1], EXCHANGE)),
        (0, lambda: meta.rename(KERNEL, inside, places[1])),
        (0, lambda: meta.setattr(KERNEL, also, SetAttr(size=10))),
        (0, lambda: meta.setattr(KERNEL, also, SetAttr(atime_now=True, mtime_now=True))),
        (0, lambda: meta.setxattr(KERNEL, also, b"user.a", b"1")),
        (0, lambda: meta.removexattr(KERNEL, also, b"user.a")),
        (0, lambda: meta.unlink(KERNEL, directory, b"link")),
        (2, lambda: meta.rmdir(KERNEL, directory, b"sub")),
    ]
    for number, (scans, verb) in enumerate(verbs):
        asked = client.requests(verb)
        assert asked.pop("KvScan", 0) <= scans, number
        assert asked == COMMIT, number
        assert client.waits - COMMIT_WAITS <= scans, number


REPLICATION_MS = 20  # what a cluster takes to agree on a write, only more


def test_nothing_waits_for_what_is_still_being_committed(
    client: Client, tikv_server: TikvServer
) -> None:
    """The other keys of a commit are locked for a moment after its answer: reading one takes three
    waits more. The next create in the directory, and the next commit of the worker, read none.
    """
    inos = [client.create(b"warm%d" % n) for n in range(3)]  # their directory is known, and ids
    for ino in inos:
        client._write(ino)  # the parts of counters that it moves in turn are there
    for method in ("KvPrewrite", "KvCommit"):
        tikv_server.fault(method, "delay", millis=REPLICATION_MS)

    def begin() -> None:
        """The last commit is under way still, and none before it, however busy the machine is."""
        wait_until(lambda: client.has_committed(before))

    before = tikv_server.counts()

    def work() -> None:
        for n in range(5):
            begin()
            with pytest.raises(FileNotFoundError):
                client.meta.lookup(KERNEL, client.dir, b"n%d" % n)
            inos.append(client.create(b"n%d" % n))

    creates = client.requests(work)
    assert creates["KvBatchGet"] == 2 * 5  # the look-up, and what the create relies on
    assert creates["KvPrewrite"] == 5

    def write() -> None:
        for ino in inos:
            begin()
            client._write(ino)

    writes = client.requests(write)
    assert (writes["KvBatchGet"], writes["KvPrewrite"]) == (len(inos), len(inos))
