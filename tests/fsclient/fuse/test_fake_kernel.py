"""A kernel that is not one: garbage and requests that were cut, to the threads that serve a volume.

Each request that wants an answer has exactly one, no thread dies, and nothing is unforeseen. The
volume behind it is a real client's, with its metadata and data in memory.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fsclient.files.handles.open_files import FileHandle
from fsclient.fuse.mount.mount import Mounted
from fsclient.fuse.session.init import KernelWants, negotiate, parse_init
from fsclient.fuse.session.session import Session
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.least import LEAST, UNANSWERED
from fsclient.fuse.wire.protocol import Init, Opcode
from fsmeta.runtime import SystemRuntime
from tests.conftest import LogWatch
from tests.posix import inproc

PATIENCE_S = 60
_INIT = abi.INIT_IN.pack(7, 45, 1 << 20, int(Init.INIT_EXT | Init.MAX_PAGES), 0)
# those that wait for locks are answered when these are free, and nothing says how long a read is
_WAITS = (Opcode.SETLKW,)
_ANSWERED = [each for each in Opcode if each not in (*UNANSWERED, *_WAITS, Opcode.INIT)]
_MOVING = (Opcode.READ, Opcode.READDIR, Opcode.READDIRPLUS)
_SIZE_AT = 16  # in fuse_read_in
_BYTES_MAX = 1 << 20


class FakeKernel:
    """The other end of a session's descriptor."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._ids = count(1)

    def send(self, opcode: int, body: bytes, ino: int = 1, groups: int = 0) -> int:
        """Send a request; its id."""
        unique = next(self._ids)
        size = abi.IN_BYTES + len(body)
        self.end.send(abi.IN_HEADER.pack(size, opcode, unique, ino, 0, 0, 0, groups) + body)
        return unique

    def answer(self) -> tuple[int, int, bytes]:
        """The next answer: id, errno and body."""
        answer = self.end.recv(2 << 20)
        size, error, unique = abi.OUT_HEADER.unpack_from(answer)
        assert size == len(answer)
        return unique, -error, answer[abi.OUT_BYTES :]

    def require_alive(self) -> None:
        """An ordinary request is served."""
        unique = self.send(Opcode.GETATTR, abi.GETATTR_IN.pack(0, 0))
        assert self.answer()[:2] == (unique, 0)


@contextmanager
def served() -> Iterator[FakeKernel]:
    """A session that serves a new volume to a fake kernel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    theirs.settimeout(PATIENCE_S)
    with inproc.client(inproc.memory()) as client, ours:
        session = Session(Mounted(ours.fileno(), "/nowhere"), client.vfs, SystemRuntime())
        client.vfs.locks.start(session)
        with theirs:
            agreed = negotiate(parse_init(memoryview(_INIT)), KernelWants())
            assert agreed is not None
            session.agree(agreed)
            session.begin()
            yield FakeKernel(theirs)
        assert session.wait(PATIENCE_S), "a thread goes on without a kernel"
        for fh, handle in list(client.vfs.files._handles.items()):  # there was no RELEASE
            is_file = isinstance(handle, FileHandle)
            release = client.vfs.release if is_file else client.vfs.directories.releasedir
            release(handle.file.ino, fh)


@pytest.fixture(scope="module")
def kernel() -> Iterator[FakeKernel]:
    with served() as made:
        yield made


@pytest.fixture(autouse=True)
def refusals_are_logged(log_watch: LogWatch) -> None:
    log_watch.expect("fsclient.fuse.session.worker: a request of .* is not whole")


NAMES = st.binary(max_size=300).map(lambda name: name.replace(b"\0", b"") + b"\0")


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, bytes]:
    """Opcode, inode and body: of the right length, cut, or anything."""
    opcode = draw(st.sampled_from(_ANSWERED) | st.integers(0, 1 << 32 - 1))
    known = LEAST[opcode] - abi.IN_BYTES if opcode < len(LEAST) else 0
    words = draw(
        st.lists(
            st.sampled_from((0, 1, 2, 4096, 1 << 31, (1 << 32) - 1)) | st.integers(0, 99),
            min_size=known // 4,
            max_size=known // 4,
        )
    )
    body = b"".join(word.to_bytes(4, "little") for word in words) + draw(NAMES) + draw(NAMES)
    if opcode in _MOVING:  # the kernel asks for no more than was agreed
        size = draw(st.integers(0, _BYTES_MAX))
        body = body[:_SIZE_AT] + size.to_bytes(4, "little") + body[_SIZE_AT + 4 :]
    cut = draw(st.none() | st.integers(0, len(body)))
    ino = draw(st.sampled_from((0, 1, 2, 3, 1 << 62, (1 << 64) - 1)))
    return opcode, ino, body[:cut]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(requests(), min_size=1, max_size=20))
def test_whatever_is_asked_is_answered_once(
    kernel: FakeKernel, asked: list[tuple[int, int, bytes]]
) -> None:
    expected = {
        kernel.send(opcode, body, ino)
        for opcode, ino, body in asked
        if opcode not in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT, Opcode.INIT)
    }
    answered = [kernel.answer()[0] for _ in expected]
    assert sorted(answered) == sorted(expected)
    kernel.require_alive()


@pytest.mark.parametrize("opcode", [each for each in _ANSWERED if LEAST[each] > abi.IN_BYTES])
def test_what_is_cut_is_refused(kernel: FakeKernel, opcode: Opcode) -> None:
    whole = LEAST[opcode] - abi.IN_BYTES
    for size in (0, whole - 1):
        unique = kernel.send(opcode, bytes(size))
        assert kernel.answer() == (unique, 22, b"")
    kernel.require_alive()


def test_lengths_that_are_not_true(kernel: FakeKernel, caplog: pytest.LogCaptureFixture) -> None:
    """More than was sent, less, none, and groups that are not there."""
    with caplog.at_level(logging.CRITICAL):
        for size in (0, 39, 41, 1 << 31):
            header = abi.IN_HEADER.pack(size, Opcode.LOOKUP, 10_000 + size % 97, 1, 0, 0, 0, 0)
            kernel.end.send(header + b"name\0")
            assert kernel.answer()[1] == 22
        kernel.end.send(b"short")  # not even an id: there is nothing to answer
        kernel.send(Opcode.FORGET, b"cut")
        kernel.send(Opcode.INTERRUPT, b"cut")
        kernel.send(Opcode.BATCH_FORGET, abi.BATCH_FORGET_IN.pack((1 << 32) - 1) + bytes(20))
        unique = kernel.send(Opcode.MKDIR, abi.MKDIR_IN.pack(0o755, 0) + b"name\0", groups=9)
        assert kernel.answer()[:2] == (unique, 22)
        extension = abi.EXT_HEADER.pack(15, 32) + b"\xff" * 7  # not in words of 4 bytes
        body = abi.MKDIR_IN.pack(0o755, 0) + b"odd\0" + extension + b"\0"
        unique = kernel.send(Opcode.MKDIR, body, groups=2)
        assert kernel.answer()[0] == unique
    kernel.require_alive()


def test_garbage_before_init() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(PATIENCE_S)
    with inproc.client(inproc.memory()) as client, ours:
        session = Session(Mounted(ours.fileno(), "/nowhere"), client.vfs, SystemRuntime())
        with theirs:
            kernel = FakeKernel(theirs)
            kernel.send(Opcode.LOOKUP, b"early\0")
            kernel.send(Opcode.INIT, b"\7\0")
            kernel.send(Opcode.INIT, _INIT)
            session.start()
            assert [kernel.answer()[1] for _ in range(3)] == [5, 5, 0]
            kernel.require_alive()
        assert session.wait(PATIENCE_S)
        os.fstat(ours.fileno())
