"""How signals end a mount: what ends programs unmounts, and SIGUSR1 writes all stacks to the log.

Called by `serve`, in the main thread.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from types import FrameType
from typing import Final

from fsclient.fuse.mount import mount as kernel
from fsclient.fuse.session.transport import Transport
from fsclient.mount.log_lines import dump_stacks
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

LEAVE_S: Final = 3.0  # how long the kernel may take to let a client go that is unmounted
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def fail_on_signal() -> None:
    """Until there is something to unmount, the signals that end programs make mounting fail."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        raise ConfigError(f"{signal.Signals(number).name} before the mount was ready")

    for number in _ENDING:
        signal.signal(number, on_signal)


class Ending:
    """The signals that end programs unmount; a mount in use is detached when no process is served.

    Copies of it in other mount namespaces are left without a client. A second
    signal does not wait for anything but that what was written is stored.

    A signal may come to any thread, and Python calls handlers in the main thread, when that runs
    again: it waits for the session, which does not end. So signals are read from a pipe.
    """

    def __init__(self, session: Transport, mountpoint: str, runtime: Runtime) -> None:
        self._session = session
        self._mountpoint = mountpoint
        self._info = kernel.find_mount(mountpoint)
        self._runtime = runtime
        self._begun = False
        self._done = runtime.event()
        told, tell = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        for number in (*_ENDING, signal.SIGUSR1):
            signal.signal(number, lambda _number, _frame: None)
        runtime.spawn("signals", partial(self._listen, told))

    def finish(self) -> None:
        """The session has ended: return when what a signal has begun is done."""
        if self._begun:
            self._done.wait()

    def _listen(self, told: int) -> None:
        _await_signal(told)
        self._begun = True
        self._runtime.spawn("unmount", self._end)
        _await_signal(told)
        if not self._session.wait(0):
            log.info("a second signal: not waiting for programs that still use the mount")
            self._session.leave()
        while True:  # what hangs now is of interest, too
            _await_signal(told)

    def _end(self) -> None:
        try:
            self._unmount()
        finally:
            self._done.set()

    def _unmount(self) -> None:
        if self._info is None:  # the last client has unmounted it, and died then
            if not self._session.wait(LEAVE_S):
                self._session.leave()
            return
        try:
            if kernel.find_mount(self._mountpoint) == self._info:
                kernel.umount(self._mountpoint)
        except ConfigError as error:
            log.warning("%s; detaching it", error)
            self._session.stop()
            self._session.wait()  # its workers are woken through the mount: detached after that
            _detach(self._mountpoint)
            return
        gone = self._session.wait(LEAVE_S) and not self._session.left
        if not gone:
            _leave_holder(self._session, self._info)


def _leave_holder(session: Transport, info: kernel.MountInfo) -> None:
    """End though the mount, gone from here, is still elsewhere."""
    for holder in kernel.find_holders(info).values():
        log.warning("unmounted, but %s; it is left without a client", holder)
        session.stop(holder.path)
        return
    pins = "; ".join(kernel.find_pins()) or "something that has no name keeps the mount"
    log.warning("unmounted, but %s; what is left of it has no client", pins)
    session.leave()


def _await_signal(told: int) -> None:
    while (number := os.read(told, 1)[0]) not in _ENDING:
        if number == signal.SIGUSR1:
            dump_stacks()
    log.info("%s: unmounting", signal.Signals(number).name)


def _detach(mountpoint: str) -> None:
    try:
        kernel.umount(mountpoint, lazy=True)
    except ConfigError as error:
        log.info("%s", error)  # another process was faster
