"""Asynchronous writes as libaio makes them, by its system calls: io_submit(2) with O_DIRECT.

Threading: a `Queue` is one thread's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from types import TracebackType
from typing import Final

_NUMBERS: Final = {  # io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_IOCB: Final = struct.Struct("<QIIHhIQQqQII")  # struct iocb of linux/aio_abi.h
_EVENT: Final = struct.Struct("<QQqq")  # struct io_event
_PWRITE: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def is_there() -> bool:
    """Whether we know the system calls of this machine."""
    return platform.machine() in _NUMBERS


class Queue:
    """Writes of `depth` blocks at once, each of `block` bytes."""

    def __init__(self, fd: int, depth: int, block: int) -> None:
        self._fd, self._depth, self._block = fd, depth, block
        self._setup, self._destroy, self._getevents, self._submit = _NUMBERS[platform.machine()]
        self._memory = mmap.mmap(-1, depth * block)  # as aligned as O_DIRECT wants it
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._context = ctypes.c_ulong(0)
        self._call(self._setup, depth, ctypes.byref(self._context))

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(self._destroy, self._context)

    @staticmethod
    def _call(number: int, *arguments: object) -> int:
        done: int = _LIBC.syscall(ctypes.c_long(number), *arguments)
        if done < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return done

    def write(self, data: bytes, offset: int) -> None:
        """Write `depth` blocks at once, and return when all have been acknowledged."""
        assert len(data) == self._depth * self._block
        self._memory[:] = data
        blocks = []
        for number in range(self._depth):
            at = number * self._block
            where = self._at + at, self._block, offset + at
            packed = _IOCB.pack(number, 0, 0, _PWRITE, 0, self._fd, *where, 0, 0, 0)
            blocks.append(ctypes.create_string_buffer(packed, _IOCB.size))
        pointers = (ctypes.c_void_p * self._depth)(*map(ctypes.addressof, blocks))
        submitted = self._call(self._submit, self._context, ctypes.c_long(self._depth), pointers)
        assert submitted == self._depth
        events = ctypes.create_string_buffer(_EVENT.size * self._depth)
        wanted = ctypes.c_long(self._depth)
        self._call(self._getevents, self._context, wanted, wanted, events, None)
        for number in range(self._depth):
            _, _, result, _ = _EVENT.unpack_from(events, number * _EVENT.size)
            assert result == self._block, os.strerror(-result)
