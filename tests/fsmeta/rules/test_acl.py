"""P2: how ACLs and flags are stored: shared records, round trips, clients at once, callers.

What they mean is in the model (`tests/model/acls`) and its corners.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Iterator

import pytest

from fsmeta.admin.dump import dump, load
from fsmeta.check.check import check
from fsmeta.check.repair import repair
from fsmeta.errors import Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.schema import acl, inode, keys
from fsmeta.schema.acl import ACCESS_XATTR, DEFAULT_XATTR, Acl, Named
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Put
from fsmeta.types import (
    FLAG_APPEND,
    FLAG_IMMUTABLE,
    ROOT_CALLER,
    ROOT_INO,
    Attr,
    Caller,
    Ino,
    SetAttr,
)
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, Engine, change, make_volume

ROOT = ROOT_CALLER
ALICE, BOB = Caller(60001, 60001), Caller(60002, 60002, (60100,))
ALICES = Acl(7, 5, 7, 0, (Named(False, 60001, 7),))
PAIR = (Named(False, 60001, 6), Named(True, 60100, 4))


def _set(meta: Meta, ino: Ino, wanted: Acl, name: bytes = ACCESS_XATTR) -> None:
    meta.setxattr(ROOT, ino, name, acl.pack_xattr(wanted))


def _dir(meta: Meta, name: bytes = b"d", default: Acl = ALICES) -> Ino:
    ino = meta.create(ROOT, ROOT_INO, name, 0o40755).ino
    _set(meta, ino, default, DEFAULT_XATTR)
    return ino


def test_what_is_made_in_a_directory_shares_one_record(engine: Engine) -> None:
    """Whatever its mode: the mode is not in the record. So chmod makes none, either."""
    meta = engine.meta()
    directory = _dir(meta)
    made = [meta.create(ROOT, directory, b"%o" % mode, 0o100000 | mode) for mode in range(0o700)]
    assert len({attr.acl for attr in made}) == 1
    meta.setattr(ROOT, made[0].ino, SetAttr(mode=0o751))
    found = check(engine.first)
    assert found.problems == []
    assert (found.acls, found.acls_used) == (2, 2)
    shown = meta.acls(meta.getattr(ROOT, made[0].ino))[0]
    assert shown == Acl(7, 5, 5, 1, ALICES.named)


def test_a_file_without_an_acl_is_as_short_as_ever(engine: Engine) -> None:
    meta = engine.meta()
    ino = meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino
    (before,) = engine.first.read_rows([keys.inode_row(ino)])
    _set(meta, ino, ALICES)
    meta.setflags(ROOT, ino, FLAG_APPEND)
    meta.setflags(ROOT, ino, 0)
    _set(meta, ino, Acl(6, 4, None, 4))
    (after,) = engine.first.read_rows([keys.inode_row(ino)])
    assert after[b"a"] == before[b"a"]
    assert len(after[b"a"]) == 27
    assert check(engine.first).acls_used == 0


def test_two_records_of_one_number(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number is another ACL's, the next one is taken, by every client alike."""
    with monkeypatch.context() as patch:
        patch.setattr("fsmeta.ops.names.acl.numbers", lambda *_: iter((7, 9, 8)))
        first, second = engine.meta(), engine.meta()
        inos = [first.create(ROOT, ROOT_INO, b"%d" % n, 0o100644).ino for n in range(4)]
        wanted = [Acl(6, n, 7, 0, PAIR) for n in (0, 1, 2, 1)]
        for meta, ino, each in zip((first, second, first, first), inos, wanted, strict=True):
            _set(meta, ino, each)
        attrs = [second.getattr(ROOT, ino) for ino in inos]
        assert [attr.acl for attr in attrs] == [7, 9, 8, 9]
        assert [second.acls(attr)[0] for attr in attrs] == wanted
        with pytest.raises(OSError, match="no id") as caught:
            _set(first, inos[0], Acl(6, 3, 7, 0, PAIR))
        assert caught.value.errno == errno.ENOSPC
        assert first.getattr(ROOT, inos[0]) == attrs[0]


def test_a_user_makes_so_many_records(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay when nothing has them any more; root, and `repair`, are not bound by that."""
    monkeypatch.setattr("fsmeta.ops.names.acl.MADE_MAX", 2)
    meta = engine.meta()
    mine = meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino
    meta.setattr(ROOT, mine, SetAttr(uid=ALICE.uid, gid=ALICE.gid))

    def put(who: Caller, number: int) -> None:
        wanted = Acl(7, number, 7, 0, (Named(False, 60001, 7),))
        meta.setxattr(who, mine, ACCESS_XATTR, acl.pack_xattr(wanted))

    for number in (0, 1, 0, 1):
        put(ALICE, number)
    with pytest.raises(OSError, match="quota is full") as caught:
        put(ALICE, 2)
    assert caught.value.errno == errno.EDQUOT
    put(ROOT, 3)
    put(ALICE, 0)
    meta.sessions.close()
    repair(Meta(engine.first, RUNTIME), 1)
    assert check(engine.first).acls == 1
    again = engine.meta()
    again.setxattr(ALICE, mine, ACCESS_XATTR, acl.pack_xattr(ALICES))


def test_records_of_others_keep_no_acl_from_being_set(engine: Engine) -> None:
    """A checksum is no secret: who knows an ACL can take all ids that it would have first."""
    meta = engine.meta()
    ino = meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino
    taken = list(acl.numbers(acl.pack_record(acl.without_mode(ALICES))))[: acl.TRIES_MAX]
    other = acl.pack_record(acl.without_mode(Acl(6, 0, 7, 0, PAIR)))
    rows = [Put(keys.acl_row(number), keys.ACL_FIELD, other) for number in taken]
    engine.first.commit(change(*rows))
    _set(meta, ino, ALICES)
    assert meta.acls(meta.getattr(ROOT, ino))[0] == ALICES


def test_clients_at_once_make_one_record_of_each(engine: Engine) -> None:
    metas = [engine.meta() for _ in range(3)]
    directories = [_dir(metas[0], b"d%d" % n, Acl(7, n, 7, 0, PAIR)) for n in range(4)]
    failures: list[BaseException] = []

    def work(meta: Meta, prefix: int) -> None:
        try:
            for n in range(40):
                meta.create(ROOT, directories[n % 4], b"%d.%d" % (prefix, n), 0o100666)
                if n % 10 == 5:
                    _set(meta, directories[n % 4], Acl(7, n % 4, n % 8, 0, PAIR), DEFAULT_XATTR)
        except BaseException as error:  # noqa: BLE001 (shown below)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(meta, n)) for n, meta in enumerate(metas * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert_clean(engine.first)
    assert check(engine.first).acls <= 4 + 4 + 8


def test_a_dump_has_them() -> None:
    planted = Planted()
    planted.meta.setflags(ROOT, planted.file.ino, FLAG_APPEND)
    into = io.BytesIO()
    dump(planted.store, into)
    into.seek(0)
    copy = MemStore(MemBackend(RUNTIME))
    load(copy, into)
    meta = Meta(copy, RUNTIME)
    assert meta.has_acls()
    attr = meta.getattr(ROOT, planted.file.ino)
    assert meta.acls(attr) == planted.meta.acls(attr)
    assert meta.getflags(ROOT, attr.ino) == FLAG_APPEND
    assert_clean(copy)


# --- round trips ---------------------------------------------------------------------------------


def _cost(meta: Meta, call: Callable[[], object]) -> int:
    before = meta.store.round_trips
    call()
    return meta.store.round_trips - before


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_round_trips(engine: Engine) -> None:
    other, meta = engine.meta(), engine.meta()
    directory = _dir(other)
    kernel = ROOT._replace(checked=True)
    meta.lookup(kernel, ROOT_INO, b"d")
    meta.create(kernel, directory, b"first", 0o100666)  # has seen the ACLs, and taken ids
    for name in (b"f", b"s"):
        with pytest.raises(FileNotFoundError):
            meta.lookup(kernel, directory, name)
    assert _cost(meta, lambda: meta.create(kernel, directory, b"f", 0o100666)) == 1
    assert _cost(meta, lambda: meta.create(kernel, directory, b"s", 0o40777)) == 1
    ino = meta.lookup(kernel, directory, b"f").ino
    assert _cost(meta, lambda: meta.setattr(kernel, ino, SetAttr(mode=0o600))) == 1
    assert _cost(meta, lambda: meta.getxattr(kernel, ino, ACCESS_XATTR)) == 0
    assert _cost(meta, lambda: _set(meta, ino, ALICES)) == 1  # a record that is known
    assert _cost(meta, lambda: _set(meta, ino, Acl(7, 0, 7, 0, PAIR))) == 2  # asked for, and made
    assert _cost(meta, lambda: meta.removexattr(kernel, ino, ACCESS_XATTR)) == 1
    assert _cost(meta, lambda: meta.setflags(kernel, ino, FLAG_APPEND)) == 1
    assert _cost(meta, lambda: meta.getflags(kernel, ino)) == 0


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_no_acl_is_no_round_trip(engine: Engine) -> None:
    """The kernel asks for it when somebody comes who does not own the file."""
    meta = engine.meta()
    kernel = ROOT._replace(checked=True)
    ino = meta.create(kernel, ROOT_INO, b"f", 0o100644).ino

    def ask(name: bytes) -> None:
        with pytest.raises(OSError, match="no such attribute") as caught:
            meta.getxattr(kernel, ino, name)
        assert caught.value.errno == errno.ENODATA

    assert _cost(meta, lambda: ask(ACCESS_XATTR)) == 0
    assert _cost(meta, lambda: ask(DEFAULT_XATTR)) == 0


# --- callers that the kernel has judged ----------------------------------------------------------


def test_a_checked_caller_is_told_by_the_kernel(engine: Engine) -> None:
    """Groups that we don't know may say yes; S_ISGID goes when the kernel says so."""
    meta = engine.meta()
    ino = meta.create(ROOT, ROOT_INO, b"f", 0o102755).ino
    meta.setattr(ROOT, ino, SetAttr(mode=0o2755))
    _set(meta, ino, Acl(7, 0, 7, 0, PAIR))
    attr = meta.getattr(ROOT, ino)
    assert attr.mode & 0o7777 == 0o2770
    for caller in (ALICE, BOB, Caller(7, 7)):
        meta.require(caller._replace(checked=True), attr, 7)
    meta.require(ALICE, attr, 6)
    meta.require(BOB, attr, 4)
    for caller, mask in ((ALICE, 1), (BOB, 2), (Caller(7, 7), 4)):
        with pytest.raises(PermissionError):
            meta.require(caller, attr, mask)
    value = acl.pack_xattr(ALICES)
    meta.setxattr(ALICE._replace(checked=True), ino, ACCESS_XATTR, value, kill_sgid=True)
    assert meta.getattr(ROOT, ino).mode & 0o7777 == 0o770


def test_immutable_for_root_and_for_checked_callers(engine: Engine) -> None:
    meta, other = engine.meta(), engine.meta()
    directory = meta.create(ROOT, ROOT_INO, b"d", 0o40777).ino
    other.create(ROOT, directory, b"f", 0o100666)
    meta.setflags(ROOT, directory, FLAG_IMMUTABLE)
    for caller in (ROOT, ROOT._replace(checked=True), ALICE._replace(checked=True)):
        with pytest.raises(PermissionError) as caught:
            other.create(caller, directory, b"g", 0o100666)  # whatever its cache says
        assert caught.value.errno == errno.EPERM
        with pytest.raises(PermissionError):
            other.unlink(caller, directory, b"f")
    with pytest.raises(PermissionError):
        other.setflags(ALICE._replace(checked=True), directory, 0)
    other.setflags(ROOT, directory, 0)
    meta.unlink(ALICE._replace(checked=True), directory, b"f")


# --- damage --------------------------------------------------------------------------------------


class Planted:
    """A volume with an ACL in it, to be damaged."""

    def __init__(self) -> None:
        backend = MemBackend(RUNTIME)
        self.store = MemStore(backend)
        make_volume(self.store, RUNTIME)
        self.meta = Meta(MemStore(backend), RUNTIME)
        self.meta.sessions.open({})
        self.directory = self.meta.getattr(ROOT, _dir(self.meta))
        self.file = self.meta.create(ROOT, self.directory.ino, b"f", 0o100644)
        self.link = self.meta.symlink(ROOT, ROOT_INO, b"l", b"to")

    def put(self, attr: Attr) -> None:
        row = keys.inode_row(attr.ino)
        self.store.commit(change(Put(row, b"a", inode.pack_attr(attr))))

    def put_record(self, number: int, value: bytes, field: bytes = keys.ACL_FIELD) -> None:
        self.store.commit(change(Put(keys.acl_row(number), field, value)))


@pytest.fixture
def planted() -> Iterator[Planted]:
    made = Planted()
    assert_clean(made.store)
    yield made
    assert check(made.store).problems, "the planted fault was not found"


def _demand(planted: Planted, *texts: str) -> None:
    found = [str(problem) for problem in check(planted.store).problems]
    assert len(found) == len(texts), found
    for text in texts:
        assert sum(text in problem for problem in found) == 1, (text, found)


def test_check_finds_acls_that_are_none(planted: Planted) -> None:
    planted.put(planted.file._replace(acl=5))
    planted.put(planted.directory._replace(default_acl=6))
    _demand(planted, "has access ACL 5", "has default ACL 6")


def test_check_finds_acls_where_none_can_be(planted: Planted) -> None:
    default = planted.directory.default_acl
    planted.put(planted.file._replace(default_acl=default))
    planted.put(planted.link._replace(acl=planted.file.acl))
    planted.put(planted.directory._replace(acl=default))  # with a mode of its own
    _demand(planted, "is no directory", "is a symlink with an ACL", "which is none")


def test_check_finds_flags_that_are_none(planted: Planted) -> None:
    planted.put(planted.file._replace(flags=0x100))
    _demand(planted, "has flags 0x100")


def test_check_finds_damaged_records(planted: Planted) -> None:
    planted.put_record(planted.file.acl, b"\1\0\0\0\0\7")
    planted.put_record(planted.directory.default_acl, b"x", b"more")
    _demand(planted, "length 6", "has access ACL", "has fields")


def test_a_damaged_record_is_corrupt(planted: Planted) -> None:
    """Never a default: nobody is let in, and the mount becomes read-only."""
    planted.put_record(planted.file.acl, b"\1\0\0\0\0\7")
    reader = Meta(planted.store, RUNTIME)
    for call in (
        lambda: reader.access(ALICE, planted.file.ino, 4),
        lambda: reader.getxattr(ROOT, planted.file.ino, ACCESS_XATTR),
        lambda: reader.acls(planted.file),
    ):
        with pytest.raises(Corrupt):
            call()
