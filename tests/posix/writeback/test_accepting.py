"""W2: what a change costs until a mount that writes back has accepted it, and what it is judged by.

The judge remembers what the store has (docs/design/write-back): what others
have changed must count all the same, once this client has been told of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from fsmeta.schema import keys as schema
from fsmeta.store.contract import Key
from fsmeta.store.redis.connection import Channel
from fsmeta.types import Caller, Ino, SetAttr
from fsmeta.writeback.staged_store import StagedStore
from tests.conftest import LogWatch
from tests.posix.inproc import memory, server
from tests.posix.writeback.test_writeback import Pair, new_pair, read
from tests.sim.world.posix import Posix
from tests.support.waiting import wait_until

KERNEL = Caller(0, 0, checked=True)  # it has judged permissions
FILES = 20


@pytest.fixture(params=["mem", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    with new_pair(server(url) if url else memory(), tmp_path / "staging") as made:
        yield made


def look_up(pair: Pair, parent: Ino, name: bytes) -> None:
    """As the kernel before it has a name made."""
    try:
        found = pair.mine.vfs.lookup(KERNEL, parent, name).attr
    except FileNotFoundError:
        found = None
    assert found is None


def make(pair: Pair, parent: Ino, name: bytes, flags: int = os.O_EXCL) -> Ino:
    """What a kernel asks for when a program writes a small file, but for the look-up."""
    vfs = pair.mine.vfs
    entry, opened = vfs.create(KERNEL, parent, name, 0o644, flags | os.O_CREAT | os.O_RDWR)
    assert entry.attr is not None
    ino = entry.attr.ino
    vfs.write(KERNEL, ino, opened.fh, 0, memoryview(b"mine"))
    vfs.flush(KERNEL, ino, opened.fh)
    vfs.release(ino, opened.fh)
    return ino


def target(posix: Posix, path: bytes) -> bytes:
    """Where a symlink leads."""
    return posix.fs.readlink(KERNEL, posix.stat(path).ino)


def theirs_changes(pair: Pair, row: bytes, change: Callable[[], object]) -> None:
    """Have the other client change a row that mine remembers, and be told of it.

    Redis may send the news a moment behind the answer to whoever made the change.
    """
    store = pair.mine.meta.store
    assert isinstance(store, StagedStore)
    assert store.beneath.is_leased(row), "nothing is shown where it has to ask"
    change()
    wait_until(lambda: not store.beneath.is_leased(row))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the test's own thread asks Redis; others beat, and delete what is dead."""
    seen: list[bytes] = []
    whole = Channel.request_many
    here = threading.get_ident()

    def request_many(channel: Channel, packed: bytes, count: int) -> list[object]:
        if threading.get_ident() == here:
            seen.append(packed)
        return whole(channel, packed, count)

    monkeypatch.setattr(Channel, "request_many", request_many)
    return seen


def make_many(pair: Pair, parent: Ino, asked: list[bytes]) -> None:
    """Make FILES files; `asked` is what that asks the metadata store."""
    make(pair, parent, b"begun")  # the first one may have to ask
    asked.clear()
    for number in range(FILES):
        look_up(pair, parent, b"%d" % number)
        make(pair, parent, b"%d" % number)


@pytest.mark.parametrize("pair", ["redis"], indirect=True)
def test_w2_files_are_accepted_without_asking(pair: Pair, asked: list[bytes]) -> None:
    pair.hold()
    make_many(pair, pair.me.stat(b"/d").ino, asked)
    assert asked == []
    for number in range(FILES):
        assert read(pair.me, b"/d/%d" % number) == b"mine"


def test_w2_what_is_all_laid_over_is_not_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel asks for security.capability before the first write to a file."""
    pair.hold()
    ino = make(pair, pair.me.stat(b"/d").ino, b"new")
    store = pair.mine.meta.store
    assert isinstance(store, StagedStore)
    asked: list[Key] = []
    whole, here = store._inner.read, threading.get_ident()

    def read(keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        if threading.get_ident() == here:
            asked.extend(keys)
        return whole(keys, busy)

    monkeypatch.setattr(store._inner, "read", read)
    with pytest.raises(OSError, match="attribute"):
        pair.mine.vfs.xattrs.getxattr(KERNEL, ino, b"security.capability")
    assert asked == []


@pytest.mark.parametrize("pair", ["redis"], indirect=True)
def test_w2_only_the_look_up_asks_where_others_made_the_directory(
    pair: Pair, asked: list[bytes]
) -> None:
    pair.them.mkdir(b"/t")
    pair.hold()
    parent = pair.me.stat(b"/t").ino
    pair.mine.vfs.lookup(KERNEL, Ino(1), b"t")
    pair.me.rename(b"/d/first", b"/t/first")  # so that something waits there, too
    make_many(pair, parent, asked)
    assert len(asked) <= FILES + 1  # many look-ups in one directory have it listed once


def test_w2_a_name_that_others_made_since_the_look_up(pair: Pair) -> None:
    pair.hold()
    parent = pair.me.stat(b"/d").ino
    for number in range(FILES):
        name = b"n%d" % number
        look_up(pair, parent, name)
        theirs_changes(
            pair, schema.dir_row(parent), partial(pair.them.symlink, b"theirs", b"/d/" + name)
        )
        with pytest.raises(FileExistsError):
            make(pair, parent, name)
        assert target(pair.me, b"/d/" + name) == b"theirs"
        make(pair, parent, b"m%d" % number)
    pair.release()
    for number in range(FILES):
        assert target(pair.them, b"/d/n%d" % number) == b"theirs"
        assert read(pair.them, b"/d/m%d" % number) == b"mine"


def test_w2_what_others_changed_of_a_file_that_was_published(pair: Pair) -> None:
    """What this mount has published it remembers, too: until others have changed it."""
    parent = pair.me.stat(b"/d").ino
    pair.hold()
    inos = [make(pair, parent, b"%d" % number) for number in range(FILES)]
    pair.release()
    pair.hold()
    for number, ino in enumerate(inos):
        theirs, mine = SetAttr(uid=100 + number), SetAttr(mode=0o600 + number % 8)
        change = partial(pair.theirs.vfs.setattr, KERNEL, ino, theirs, None)
        theirs_changes(pair, schema.inode_row(ino), change)
        after = pair.mine.vfs.setattr(KERNEL, ino, mine, None).attr
        assert (after.uid, after.mode & 0o777) == (100 + number, 0o600 + number % 8)
    pair.release()
    for number in range(FILES):
        after = pair.them.stat(b"/d/%d" % number)
        assert (after.uid, after.mode & 0o777) == (100 + number, 0o600 + number % 8)


def test_w2_both_make_a_name_and_one_is_rescued(pair: Pair, log_watch: LogWatch) -> None:
    """Accepted before others have made it: theirs stands, ours is kept."""
    log_watch.expect(
        "^WARNING fsclient.writeback.publisher: create both: .*; it is in /lost.found/both"
    )
    pair.hold()
    parent = pair.me.stat(b"/d").ino
    look_up(pair, parent, b"both")
    ino = make(pair, parent, b"both")
    pair.them.symlink(b"theirs", b"/d/both")
    assert read(pair.me, b"/d/both") == b"mine"
    pair.release()
    for posix in (pair.me, pair.them):
        assert target(posix, b"/d/both") == b"theirs"
        assert read(posix, b"/lost+found/both.%d" % ino) == b"mine"


def test_w2_what_passed_is_remembered_as_it_is(pair: Pair) -> None:
    """A change that had nothing to wait for, then one of the same file that has."""
    parent = pair.me.stat(b"/d").ino
    ino = make(pair, parent, b"file")
    pair.release()
    for number in range(FILES):
        mode, uid = 0o600 + number % 8, 100 + number
        pair.mine.vfs.setattr(KERNEL, ino, SetAttr(mode=mode), None)  # passes
        pair.hold()
        after = pair.mine.vfs.setattr(KERNEL, ino, SetAttr(uid=uid), None).attr
        assert (after.uid, after.mode & 0o777) == (uid, mode)
        pair.release()
        seen = pair.them.stat(b"/d/file")
        assert (seen.uid, seen.mode & 0o777) == (uid, mode)
