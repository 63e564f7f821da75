"""System calls that may wait for the mount itself, in threads that hold nothing but the mount.

A notification waits in the kernel for pages that are being written and for directories that are
locked, and so for answers. Where a client is killed meanwhile only the next one can give those, and
a wait of this kind ends for no signal. The rest of the process ends, but its descriptors would stay
open as long as one thread has them: locks of files and of metadata, without which the next client
can't begin. So such a thread has a table of descriptors of its own, with `/dev/fuse` in it and the
standard ones. The supervisor knows it by that (`survival/last_threads`).

Called by `KernelNotifier`, for mounts with a supervisor. What is called here must use no descriptor
of the process, and so not log either.

Threading: `run` from any thread that may wait for requests.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Final, TypeAlias

from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

Call: TypeAlias = Callable[[], None]

_UNSHARE: Final = 2  # CLOSE_RANGE_UNSHARE of linux/close_range.h; Linux 5.9
_STANDARD: Final = 3  # descriptors: the first ones
_LAST: Final = 0xFFFFFFFF


class DetachedCalls:
    """See the module. There are as many threads as there were calls at a time."""

    def __init__(self, runtime: Runtime, fd: int) -> None:
        """`fd` is what the calls use."""
        self._runtime = runtime
        self._fd = fd
        self._free: list[_CallThread] = []  # append and pop are atomic

    def run(self, call: Call) -> None:
        """`call`, in another thread; returns when it has. Raises: what it raises."""
        try:
            thread = self._free.pop()
        except IndexError:
            thread = _CallThread(self._runtime, self._fd)
        try:
            thread.run(call)
        finally:
            self._free.append(thread)


class _CallThread:
    """One thread, for one caller at a time."""

    def __init__(self, runtime: Runtime, fd: int) -> None:
        self._fd = fd
        self._due, self._done = runtime.event(), runtime.event()
        self._call: Call | None = None
        self._error: Exception | None = None
        runtime.spawn("kernel-call", self._serve)

    def run(self, call: Call) -> None:
        self._call = call
        self._due.set()
        self._done.wait()
        self._done.clear()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self) -> None:
        hold_only(self._fd)
        while True:
            self._due.wait()
            self._due.clear()
            call, self._call = self._call, None
            assert call is not None, "set before `_due`"
            try:
                call()
            except Exception as error:  # noqa: BLE001  (raised where it was called for)
                self._error = error
            self._done.set()


def hold_only(fd: int) -> None:
    """The calling thread keeps `fd` and the standard descriptors, and shares none with others.

    Where the kernel refuses, it keeps all: a client that is killed in a call then ends late.
    """
    close_range = getattr(ctypes.CDLL(None, use_errno=True), "close_range", None)
    if close_range is None:
        log.debug("this C library has no close_range(2)")
    elif close_range(ctypes.c_uint(fd + 1), ctypes.c_uint(_LAST), _UNSHARE) != 0:
        log.debug("close_range(2): %s", os.strerror(ctypes.get_errno()))
    elif fd > _STANDARD:
        close_range(ctypes.c_uint(_STANDARD), ctypes.c_uint(fd - 1), 0)
