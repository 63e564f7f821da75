# ruff: noqa: ARG002  (a stand-in has the signatures of the Protocol)
"""The dispatcher without a kernel: errors, tables, parsers, pages."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence

import pytest

from fsclient.fuse.dispatch.dispatch import Dispatcher, operations
from fsclient.fuse.dispatch.subdir import Served
from fsclient.fuse.session.init import KernelWants, negotiate, parse_init
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.pack import entry_out, statfs_out, statx_out
from fsclient.fuse.wire.parse import supplementary_groups
from fsclient.fuse.wire.protocol import FATTR_MTIME, FATTR_SIZE, Init, Opcode
from fsclient.kernel.contract import Entries, EntryOut, Fits, SetAttr, Stat
from fsmeta import errors
from fsmeta.types import ROOT_INO, Attr, Caller, Dentry, FileType, Ino, StatFs
from tests.conftest import LogWatch
from tests.fsclient.fuse.ramfs import RamFS

CALLER = Caller(7, 8, (), 9, True)
ATTR = Attr(Ino(5), 0o100644, 1, 2, 0, 0, ROOT_INO, -1, 5000, 1, 5000, -1, 1, 10**9)


@pytest.fixture(autouse=True)
def errors_are_logged(log_watch: LogWatch) -> None:
    """Most tests here provoke what the dispatcher logs at ERROR."""
    log_watch.expect("fsclient.fuse.dispatch.errnos")


def ask(dispatcher: Dispatcher, opcode: int, body: bytes, ino: int = 1) -> Served:
    request = abi.IN_HEADER.pack(abi.IN_BYTES + len(body), opcode, 2, ino, 7, 8, 9, 0) + body
    return dispatcher.serve(opcode, CALLER, ino, memoryview(request), len(request))


def failing(error: BaseException) -> Callable[[], None]:
    def hook() -> None:
        raise error

    return hook


@pytest.mark.parametrize(
    ("error", "number", "level"),
    [
        (OSError(errno.ENOENT, "no"), errno.ENOENT, logging.DEBUG),
        (OSError(errno.EDQUOT, "full"), errno.EDQUOT, logging.DEBUG),
        (OSError(errno.EIO, "bad"), errno.EIO, logging.ERROR),
        (OSError("no number"), errno.EIO, logging.ERROR),
        (OSError(9999, "beyond what the kernel takes"), errno.EIO, logging.ERROR),
        (errors.Unavailable("down"), errno.EIO, logging.ERROR),
        (errors.Ambiguous("lost"), errno.EIO, logging.ERROR),
        (errors.Conflict("again"), errno.EIO, logging.ERROR),
        (errors.Fenced("out"), errno.ESTALE, logging.ERROR),
        (errors.LimitExceeded("space"), errno.EDQUOT, logging.ERROR),
        (errors.StoreFull("full"), errno.ENOSPC, logging.ERROR),
        (errors.ObjectMissing("gone"), errno.EIO, logging.ERROR),
        (errors.ObjectDamaged("crc"), errno.EIO, logging.ERROR),
        (ValueError("unforeseen"), errno.EIO, logging.ERROR),
    ],
)
def test_errors_become_errnos(
    error: Exception, number: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    fs = RamFS()
    fs.hooks["lookup"] = failing(error)
    with caplog.at_level(logging.DEBUG, "fsclient.fuse"):
        assert ask(Dispatcher(fs), Opcode.LOOKUP, b"name\0") == number
    assert [record.levelno for record in caplog.records] == [level]


def test_corrupt_is_told() -> None:
    told: list[errors.Corrupt] = []
    fs = RamFS()
    corrupt = errors.Corrupt(b"i1", b"a", "short")
    fs.hooks["getattr"] = failing(corrupt)
    dispatcher = Dispatcher(fs, on_corrupt=told.append)
    assert ask(dispatcher, Opcode.GETATTR, abi.GETATTR_IN.pack(0, 0)) == errno.EIO
    assert told == [corrupt]


def test_forget_is_never_answered() -> None:
    fs = RamFS()
    fs.hooks["forget"] = failing(OSError(errno.EPERM, "no"))
    assert ask(Dispatcher(fs), Opcode.FORGET, abi.FORGET_IN.pack(1), ino=77) is None


def test_batch_forget() -> None:
    fs = RamFS()
    fs.lookups.update({Ino(70): 2, Ino(71): 3})
    body = abi.BATCH_FORGET_IN.pack(2) + abi.FORGET_ONE.pack(70, 2) + abi.FORGET_ONE.pack(71, 1)
    assert ask(Dispatcher(fs), Opcode.BATCH_FORGET, body) is None
    assert (fs.lookups[Ino(70)], fs.lookups[Ino(71)]) == (0, 2)


@pytest.mark.parametrize("opcode", [0, Opcode.POLL, Opcode.BMAP])
def test_unknown_opcodes(opcode: int) -> None:
    assert ask(Dispatcher(RamFS()), opcode, b"") == errno.ENOSYS


def test_long_names() -> None:
    dispatcher = Dispatcher(RamFS())
    assert ask(dispatcher, Opcode.LOOKUP, b"n" * 255 + b"\0") == errno.ENOENT
    assert ask(dispatcher, Opcode.LOOKUP, b"n" * 256 + b"\0") == errno.ENAMETOOLONG
    long_target = abi.RENAME2_IN.pack(1, 0) + b"a\0" + b"n" * 256 + b"\0"
    assert ask(dispatcher, Opcode.RENAME2, long_target) == errno.ENAMETOOLONG


def test_setxattr_of_old_kernels() -> None:
    fs = RamFS()
    body = abi.SETXATTR_IN_OLD.pack(3, 0) + b"user.k\0" + b"a\0b"
    assert ask(Dispatcher(fs, operations(setxattr_ext=False)), Opcode.SETXATTR, body) == b""
    assert fs.nodes[ROOT_INO].xattrs == {b"user.k": b"a\0b"}


def test_setattr_fields() -> None:
    row = operations(True)[Opcode.SETATTR]
    assert row is not None
    body = abi.SETATTR_IN.pack(FATTR_SIZE | FATTR_MTIME, 0, 9, 0, 5, -2, 0, 6, 7, 0, 0, 0, 0)
    view = memoryview(bytes(abi.IN_BYTES) + body)
    assert row.parse(view, len(view)) == (SetAttr(size=9, mtime_ns=-2 * 10**9 + 7), None)


def test_trace() -> None:
    lines: list[str] = []
    dispatcher = Dispatcher(RamFS(), trace=lines.append)
    ask(dispatcher, Opcode.LOOKUP, b"name\0")
    ask(dispatcher, Opcode.POLL, b"")
    ask(dispatcher, Opcode.WRITE, abi.WRITE_IN.pack(5, 0, 3, 0, 0, 0) + b"abc", ino=4)
    assert lines[0] == "lookup(1, b'name') by uid 7 gid 8 pid 9 -> ENOENT"
    assert lines[1] == "poll(1) by uid 7 gid 8 pid 9 -> ENOSYS"
    assert lines[2].startswith("write(4, 5, 0, 3 bytes, 0, 0)")


class Endless(RamFS):
    """A directory without an end, that notes which names were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bytes] = []

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, at_most: int
    ) -> tuple[Sequence[Dentry], Sequence[int]]:
        numbers = range(cookie, cookie + at_most)
        names = [Dentry(b"n" * (n % 255 + 1), Ino(5), FileType.REG) for n in numbers]
        return names, range(cookie + 1, cookie + at_most + 1)

    def readdirplus(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, fits: Fits
    ) -> tuple[Sequence[Dentry], Sequence[int], Entries]:
        names, cookies = self.readdir(caller, ino, fh, cookie, 8192)
        names = names[: fits(names)]
        self.taken += [name for name, _, _ in names]
        entries = Entries.of([EntryOut(ATTR, 0, 0) for _ in names])
        return names, cookies[: len(names)], entries


def _records(page: bytes, plus: bool) -> list[tuple[int, bytes]]:
    """Cookie and name of each record of a page."""
    found, at = [], 0
    head = abi.DIRENTPLUS if plus else abi.DIRENT
    while at < len(page):
        cookie, length = head.unpack_from(page, at)[-3:-1]
        begin = at + head.size
        found.append((cookie, page[begin : begin + length]))
        at += abi.align8(head.size + length)
    return found


@pytest.mark.parametrize("size", [4096, 32768, 1 << 20])
@pytest.mark.parametrize("opcode", [Opcode.READDIR, Opcode.READDIRPLUS])
def test_pages_are_full_and_join(opcode: Opcode, size: int) -> None:
    fs = Endless()
    plus = opcode == Opcode.READDIRPLUS
    at = 0
    for _ in range(3):
        page = ask(Dispatcher(fs), opcode, abi.READ_IN.pack(1, at, size, 0, 0, 0))
        assert isinstance(page, bytes)
        head = abi.DIRENTPLUS if plus else abi.DIRENT
        assert size - abi.align8(head.size + 255) < len(page) <= size
        records = _records(page, plus)
        assert [cookie for cookie, _ in records] == list(range(at + 1, at + 1 + len(records)))
        assert [name for _, name in records] == [
            b"n" * (n % 255 + 1) for n in range(at, at + len(records))
        ]
        if plus:
            assert fs.taken[-len(records) :] == [name for _, name in records]
        at += len(records)
    assert len(fs.taken) == (at if plus else 0)


def test_times_before_1970() -> None:
    fields = abi.ENTRY_OUT.unpack(entry_out(EntryOut(ATTR, 1.5, 0.25)))
    assert fields[:6] == (5, 1, 1, 0, 500_000_000, 250_000_000)
    atime, mtime, ctime, atime_nsec = fields[9:13]
    assert (atime, mtime, ctime, atime_nsec) == (-1, 0, 1, 999_999_999)
    assert fields[8] == 2 * 4096 // 512
    assert abi.STATX_OUT.unpack(statx_out(Stat(ATTR, 0)))[15:17] == (-1, 999_999_999)


def test_statfs_with_and_without_limits() -> None:
    free = abi.STATFS_OUT.unpack(statfs_out(StatFs(0, 0, 0, 0)))
    assert free[0] * 4096 == 1 << 50
    assert free[3] == 10 << 20
    much = abi.STATFS_OUT.unpack(statfs_out(StatFs(3 << 50, 0, 1, 0)))
    assert much[1] * 4096 == (8 << 50) - (3 << 50)
    over = abi.STATFS_OUT.unpack(statfs_out(StatFs(9 << 20, 8 << 20, 5, 4)))
    assert (over[0], over[1], over[2], over[4]) == ((8 << 20) // 4096, 0, 0, 0)


def test_supplementary_groups() -> None:
    body = abi.EXT_HEADER.pack(16, 32) + (1).to_bytes(4, "little") + (77).to_bytes(4, "little")
    assert supplementary_groups(memoryview(body), 0, len(body)) == (77,)
    assert supplementary_groups(memoryview(b""), 0, 0) == ()


def test_init_of_old_and_new_kernels() -> None:
    old = parse_init(memoryview(abi.INIT_IN_OLD.pack(7, 33, 131072, Init.ASYNC_READ)))
    assert (old.minor, old.flags) == (33, Init.ASYNC_READ)
    low = Init.INIT_EXT | Init.WRITEBACK_CACHE | Init.SETXATTR_EXT
    new = parse_init(memoryview(abi.INIT_IN.pack(7, 99, 131072, low, Init.HAS_EXPIRE_ONLY >> 32)))
    agreed = negotiate(new, KernelWants())
    assert agreed is not None
    assert agreed.flags == Init.INIT_EXT | Init.SETXATTR_EXT | Init.HAS_EXPIRE_ONLY
    assert agreed.minor == 45
    assert negotiate(old._replace(minor=30), KernelWants()) is None
    for offered, asked in ((False, True), (True, False), (True, True)):
        offer = new._replace(flags=new.flags | (Init.PASSTHROUGH if offered else Init(0)))
        agreed = negotiate(offer, KernelWants(passthrough=asked))
        assert agreed is not None
        taken = offered and asked
        assert (bool(agreed.flags & Init.PASSTHROUGH), agreed.max_stack_depth) == (taken, taken)
