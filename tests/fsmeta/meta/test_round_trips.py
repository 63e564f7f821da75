"""How often each verb waits for Redis, against a real one.

*Warm* means: the kernel has just looked up the names that the verb is given, as it always does, or
this client made them. The supply of ids is warm too: once in 1024 creates a verb waits twice more.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, DentryLocation
from fsmeta.store.redis.engine import RedisStore
from fsmeta.types import CHUNK_BYTES, ROOT_INO, Attr, Caller, Ino, SetAttr, Slice
from tests.fsmeta.engines import Engine

USER = Caller(1000, 1000)
KERNEL = Caller(1000, 1000, checked=True)  # it has judged permissions: default_permissions
pytestmark = pytest.mark.parametrize("engine", ["redis"], indirect=True)


class Client:
    """A client and what its last verb cost."""

    def __init__(self, meta: Meta, caller: Caller) -> None:
        self.meta = meta
        self.caller = caller
        self.dir = meta.lookup(caller, ROOT_INO, b"d").ino
        # scripts loaded, ids in stock
        spare = self.create(b"spare")
        self.write(spare, 0, 10)
        meta.attrs([spare])
        meta.listxattr(caller, spare)
        meta.lookup(caller, self.dir, b"theirs")

    def cost(self, verb: Callable[..., object], *args: object) -> int:
        """Round trips of a verb that works, or says ENOENT."""
        before = self.meta.store.round_trips
        try:
            verb(*args)
        except FileNotFoundError:
            pass  # a negative lookup
        return self.meta.store.round_trips - before

    def call(self, verb: Callable[..., object], *args: object) -> int:
        """`cost` of a verb that is told the caller."""
        return self.cost(verb, self.caller, *args)

    def create(self, name: bytes, mode: int = 0o100666) -> Ino:
        return self.meta.create(self.caller, self.dir, name, mode).ino

    def lookup(self, *names: bytes, parent: Ino | None = None) -> Attr | None:
        """As the kernel before any verb that takes these names; what the last one is."""
        found = None
        for name in names:
            try:
                found = self.meta.lookup(self.caller, parent or self.dir, name)
            except FileNotFoundError:
                found = None
        return found

    def write(self, ino: Ino, begin: int, length: int) -> int:
        index, pos = divmod(begin, CHUNK_BYTES)
        piece = Slice(pos, self.meta.new_slice_id(), length, 0, length)
        return self.cost(self.meta.write_slices, ino, [(index, piece)], begin + length, 1)


@pytest.fixture
def other(engine: Engine) -> Meta:
    """Somebody else, who has made the directory that all work in."""
    assert isinstance(engine.first, RedisStore)
    meta = engine.meta()
    directory = meta.create(USER._replace(uid=0), ROOT_INO, b"d", 0o40777).ino
    meta.create(USER, directory, b"theirs", 0o100666)
    return meta


@pytest.fixture(params=[USER, KERNEL], ids=["user", "kernel"])
def client(request: pytest.FixtureRequest, engine: Engine, other: Meta) -> Client:
    assert other
    return Client(engine.meta(), request.param)


def test_lookup_is_one(client: Client) -> None:
    """Where the kernel has not judged, the parent's mode must be of the same moment as the name: a
    parent that is remembered costs one more, for the proof.
    """
    proof = 0 if client.caller.checked else 1
    for name in (b"theirs", b"no"):
        client.meta.cache.forget()
        client.meta.getattr(client.caller, client.dir)
        assert client.call(client.meta.lookup, client.dir, name) == 1 + proof


def test_lookup_again_is_at_most_one(client: Client) -> None:
    client.meta.cache.forget()
    client.meta.getattr(client.caller, client.dir)
    client.lookup(b"theirs")
    costs = [client.call(client.meta.lookup, client.dir, b"theirs") for _ in range(2)]
    assert costs[0] <= 1
    assert costs[1] == 0


def test_lookup_of_nothing_is_not_repeated(client: Client) -> None:
    client.lookup(b"no")
    assert client.call(client.meta.lookup, client.dir, b"no") == 0
    directory = client.create(b"own", 0o40777)
    assert client.call(client.meta.lookup, directory, b"no") == 0


def test_a_listing_leaves_nothing_to_ask_for(client: Client) -> None:
    """Who has listed a directory with its attributes knows all names, and that others are free.

    Who looks for such a name is told so by the store, though, the first time.
    """
    client.create(b"old")
    client.meta.cache.forget()
    names, cursor = client.meta.names(client.dir)
    assert cursor is None
    client.meta.attrs([client.dir, *(dentry.ino for dentry in names)])
    assert client.call(client.meta.lookup, client.dir, b"theirs") == 0
    judged = not client.caller.checked  # the directory's mode is known, and has to be confirmed
    assert client.call(client.meta.lookup, client.dir, b"no") == 1 + judged
    assert client.call(client.meta.lookup, client.dir, b"no") == 0
    assert client.call(client.meta.create, client.dir, b"new", 0o100666) == 1
    old, new = DentryLocation(client.dir, b"old"), DentryLocation(client.dir, b"elsewhere")
    assert client.call(client.meta.rename, old, new) == 1
    assert client.call(client.meta.unlink, client.dir, b"theirs") == 1
    assert client.cost(client.meta.names, client.dir) == 0


def test_getattr_is_at_most_one(client: Client) -> None:
    ino = client.lookup(b"theirs").ino  # type: ignore[union-attr]
    client.meta.cache.forget()
    assert [client.call(client.meta.getattr, ino) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("mode", [0o100644, 0o40755, 0o10644], ids=["create", "mkdir", "mknod"])
def test_create_is_one(client: Client, mode: int) -> None:
    for n in range(3):
        client.lookup(b"new%d" % n)
        assert client.call(client.meta.create, client.dir, b"new%d" % n, mode) == 1
    own = client.create(b"own", 0o40755)
    assert client.call(client.meta.create, own, b"new", mode) == 1


def test_symlink_and_readlink(client: Client) -> None:
    client.lookup(b"new")
    assert client.call(client.meta.symlink, client.dir, b"new", b"target") == 1
    ino = client.lookup(b"new").ino  # type: ignore[union-attr]
    assert client.call(client.meta.readlink, ino) == 0
    client.meta.cache.forget()
    assert [client.call(client.meta.readlink, ino) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("name", [b"mine", b"theirs"])
def test_unlink_is_one(client: Client, name: bytes) -> None:
    client.create(b"mine")
    client.meta.cache.forget()
    client.meta.getattr(client.caller, client.dir)
    client.lookup(name)
    assert client.call(client.meta.unlink, client.dir, name) == 1


def test_rmdir_is_one(client: Client) -> None:
    client.create(b"sub", 0o40755)
    assert client.call(client.meta.rmdir, client.dir, b"sub") == 1


@pytest.mark.parametrize("flags", [0, EXCHANGE])
def test_rename_is_one(client: Client, flags: int) -> None:
    sub = client.create(b"sub", 0o40777)
    for old_dir, new_dir in ((client.dir, client.dir), (client.dir, sub), (sub, client.dir)):
        old, new = DentryLocation(old_dir, b"old"), DentryLocation(new_dir, b"new")
        client.meta.create(client.caller, *old, 0o100644)
        client.lookup(b"new", parent=new_dir)
        if flags:
            client.meta.create(client.caller, *new, 0o40755)
        assert client.call(client.meta.rename, old, new, flags) == 1
        client.meta.rename(client.caller, new, DentryLocation(client.dir, b"moved"))
        if flags:
            client.meta.rmdir(client.caller, *old)


def test_rename_over_another_is_one(client: Client) -> None:
    client.create(b"mine")
    client.lookup(b"mine", b"theirs")
    places = DentryLocation(client.dir, b"mine"), DentryLocation(client.dir, b"theirs")
    assert client.call(client.meta.rename, *places) == 1


def test_rename_of_a_directory_is_one(client: Client) -> None:
    deep = client.dir
    for name in (b"1", b"2", b"3"):
        deep = client.meta.create(client.caller, deep, name, 0o40777).ino
    client.create(b"moved", 0o40777)
    assert (
        client.call(
            client.meta.rename, DentryLocation(client.dir, b"moved"), DentryLocation(deep, b"new")
        )
        == 1
    )


def test_link_is_one(client: Client) -> None:
    ino = client.lookup(b"theirs").ino  # type: ignore[union-attr]
    for name in (b"l1", b"l2"):
        client.lookup(name)
        assert client.call(client.meta.link, ino, client.dir, name) == 1
    for name in (b"l2", b"l1", b"theirs"):
        assert client.call(client.meta.unlink, client.dir, name) == 1


@pytest.mark.parametrize(
    "want", [SetAttr(mode=0o640), SetAttr(atime_now=True, mtime_now=True), SetAttr(size=10**6)]
)
def test_setattr_is_one(client: Client, want: SetAttr) -> None:
    client.create(b"mine")
    ino = client.lookup(b"mine").ino  # type: ignore[union-attr]
    assert [client.call(client.meta.setattr, ino, want) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("size", [0, 10])
def test_truncate_is_one(client: Client, size: int) -> None:
    ino = client.create(b"mine")
    client.write(ino, 0, 1000)
    assert client.call(client.meta.setattr, ino, SetAttr(size=size)) == 1


def test_xattrs_are_one(client: Client) -> None:
    ino = client.create(b"mine")
    for value in (b"1", b"2"):
        assert client.call(client.meta.setxattr, ino, b"user.a", value) == 1
    assert client.call(client.meta.getxattr, ino, b"user.a") == 0
    assert client.call(client.meta.removexattr, ino, b"user.a") == 1
    assert client.call(client.meta.listxattr, ino) == 1


def test_setxattr_of_an_unknown_name_is_one(client: Client) -> None:
    ino = client.lookup(b"theirs").ino  # type: ignore[union-attr]
    client.meta.getattr(client.caller, ino)
    assert client.call(client.meta.setxattr, ino, b"user.a", b"1") == 1


def test_views_of_known_and_unknown_are_one(client: Client) -> None:
    """What is remembered is asked for again with the rest, so that nothing has to be proved."""
    ino = client.lookup(b"theirs").ino  # type: ignore[union-attr]
    client.meta.getattr(client.caller, ino)
    with pytest.raises(OSError, match="no such attribute"):
        client.meta.getxattr(client.caller, ino, b"user.a")
    costs = []
    for name in (b"user.b", b"user.b"):
        before = client.meta.store.round_trips
        with pytest.raises(OSError, match="no such attribute"):
            client.meta.getxattr(client.caller, ino, name)
        costs.append(client.meta.store.round_trips - before)
    assert costs == [1, 0]


def test_a_write_is_one(client: Client) -> None:
    """Appending, into a hole beyond the end, and over what this client has written or read."""
    for name in (b"mine", b"theirs"):
        if name == b"mine":
            client.create(name)
        ino = client.lookup(name).ino  # type: ignore[union-attr]
        assert client.write(ino, 0, 1000) == 1
        assert client.write(ino, 1000, 1000) == 1
        client.meta.read_chunk(ino, 0)
        assert client.write(ino, 500, 1000) == 1
        assert client.write(ino, 3 * CHUNK_BYTES + 7, 1000) == 1


def test_opening_is_at_most_one(client: Client) -> None:
    """Open revalidates what the kernel knows; reading asks once for each chunk."""
    ino = client.lookup(b"theirs").ino  # type: ignore[union-attr]
    assert client.call(client.meta.getattr, ino) <= 1
    assert client.call(client.meta.getattr, ino) == 0
    brought = client.caller.checked  # the kernel's second look-up has brought it along
    assert [client.cost(client.meta.read_chunk, ino, 0) for _ in range(2)] == [not brought, 0]


def _readdirplus(meta: Meta, directory: Ino) -> None:
    names, cursor = meta.names(directory)
    assert cursor is None
    assert len(meta.attrs([each.ino for each in names])) == len(names) > 50


def test_readdirplus_is_two_a_page_and_then_none(client: Client, other: Meta) -> None:
    for n in range(100):
        other.create(USER, client.dir, b"more%d" % n, 0o100644)
    assert client.cost(_readdirplus, client.meta, client.dir) == 2
    assert client.cost(_readdirplus, client.meta, client.dir) == 0
    other.create(USER, client.dir, b"another", 0o100644)
    assert client.cost(_readdirplus, client.meta, client.dir) <= 2


def test_statfs_is_one(client: Client) -> None:
    assert client.cost(client.meta.statfs) == 1


def test_a_cold_create_needs_one_read_more(client: Client) -> None:
    """Nothing is known but the parent: one request brings everything, then the commit.

    Where the kernel has looked the name up, the commit alone says that it is free.
    """
    client.meta.cache.forget()
    client.meta.getattr(client.caller, client.dir)
    looked_up = client.caller.checked
    assert client.call(client.meta.create, client.dir, b"new", 0o100644) == 2 - looked_up


def test_a_cold_unlink_needs_one_read_more(client: Client) -> None:
    client.meta.cache.forget()
    client.meta.getattr(client.caller, client.dir)
    assert client.call(client.meta.unlink, client.dir, b"theirs") == 2
