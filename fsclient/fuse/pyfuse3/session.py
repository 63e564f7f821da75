"""The session on pyfuse3: an event loop in a thread, and what the process around it calls.

The mount is made as for the native session, by mount(2) or fusermount3, so that options, errors and
unmounting are the same; libfuse is given the descriptor (as `/dev/fd/N`, which it takes for a mount
that was made for it), so `max_read` is given to the kernel alone, as libfuse wants it where the
file system does not set it at INIT. A process has one such session: pyfuse3 keeps it in its module.

INIT is answered by libfuse as soon as the loop runs. What comes after it waits until `begin`.

Threading: pyfuse3 and trio run in the thread of the loop; other threads ask it through its token.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from fsclient.fuse.dispatch.subdir import NotifierBelow
from fsclient.fuse.mount.mount import Mounted
from fsclient.fuse.pyfuse3.binding import Binding, load
from fsclient.fuse.pyfuse3.notify import Pyfuse3Notifier
from fsclient.fuse.pyfuse3.operations import Operations, parts_of
from fsclient.fuse.pyfuse3.serving import Serving
from fsclient.fuse.session.init import MAX_WRITE_BYTES, Agreement
from fsclient.fuse.session.session import SessionConfig
from fsclient.fuse.session.stats import OpStats, summed
from fsclient.fuse.session.transport import Transport
from fsclient.fuse.session.worker import GONE
from fsclient.fuse.wire.protocol import Init
from fsclient.kernel.contract import FileSystem, Notifier
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_INO, Ino
from fsmeta.user_namespace import own_namespace

log = logging.getLogger(__name__)
_NO_REQUEST: Final = os.strerror(errno.ENOENT)


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether what pyfuse3 logs is worth a line in the log of the mount.

    An answer that the kernel refuses with ENOENT is not: the mount is gone, and with it what waited
    for the answer. It happens to RELEASE, for which no program waits, while a mount ends.
    """
    text = record.getMessage()
    return not ("fuse_reply_* failed" in text and text.endswith(_NO_REQUEST))


T = TypeVar("T")
TASKS_MAX: Final = 256  # requests at once; those that wait for no store need no thread
_SERVED_S: Final = 3.0  # how long requests under way may take once the session is left
_LOOK_S: Final = 0.01
# libfuse does not say what it has agreed on: nothing is relied upon
_AGREED: Final = Agreement(0, Init(0), 0, MAX_WRITE_BYTES, 0)


def require_usable() -> None:
    """Raises: ConfigError where a mount can't be served so, before there is one."""
    load()
    if own_namespace() is not None:
        raise ConfigError(
            "--transport pyfuse3: not in a user namespace: leave it out, or mount outside"
        )


class Pyfuse3Session:
    """Serves one mount from one descriptor."""

    def __init__(
        self,
        mounted: Mounted,
        fs: FileSystem,
        runtime: Runtime,
        config: SessionConfig,
    ) -> None:
        """Raises: ConfigError where pyfuse3 is missing."""
        self._binding: Binding = load()
        logging.getLogger("pyfuse3").addFilter(is_worth_a_line)
        self._mounted = mounted
        self._fs = fs
        self._runtime = runtime
        self._config = config
        self._serving = Serving(self._binding, config, runtime.monotonic)
        self._asked = runtime.event()  # INIT has come
        self._ended = runtime.event()
        self._token: Any = None  # of the loop; written by it before INIT
        self.left = False
        notifier: Notifier = Pyfuse3Notifier(self._binding.fuse, mounted.mountpoint)
        if config.root != ROOT_INO:
            notifier = NotifierBelow(notifier, config.root)
        self.notifier = notifier

    def agree(self, kept: Agreement | None = None) -> Agreement:
        """Have libfuse agree with the kernel. Raises: ConfigError."""
        assert kept is None, "it hands nothing over"
        fuse = self._binding.fuse
        parts = parts_of(self._binding, self._fs, self._config, self._serving)
        operations = Operations(parts, self._config, self._asked.set)
        own = os.dup(self._mounted.fd)  # libfuse closes it
        try:
            fuse.init(operations, f"/dev/fd/{own}", set())
        except RuntimeError as error:
            raise ConfigError(
                f"pyfuse3: {error}; see the message of libfuse on standard error"
            ) from error
        self._runtime.spawn("pyfuse3", self._run)
        self._asked.wait()
        if self._ended.wait(0):
            raise ConfigError("unmounted before serving began: mount it again")
        self._in_loop(_nothing, None)  # the step in which INIT was answered is over
        return _AGREED

    def _run(self) -> None:
        """The thread of the loop."""
        try:
            self._binding.trio.run(self._serve)
        except BaseException as error:  # a group of them; the thread ends here
            if not all(_is_gone(each) for each in _leaves(error)):
                log.error("serving through pyfuse3 has failed", exc_info=error)
        finally:
            self._ended.set()
            self._asked.set()

    async def _serve(self) -> None:
        self._token = self._binding.trio.lowlevel.current_trio_token()
        await self._binding.fuse.main(min_tasks=1, max_tasks=TASKS_MAX)

    def _in_loop(self, ask: Callable[[], T], otherwise: T) -> T:
        """What `ask` returns in the thread of the loop; `otherwise` where that has ended."""
        trio = self._binding.trio
        try:
            found: T = trio.from_thread.run_sync(ask, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            return otherwise
        return found

    def begin(self) -> None:
        self._in_loop(self._serving.begin, None)

    def under_way(self) -> frozenset[int]:
        """Asked in a step of its own: an operation ends and its answer is written in one step."""
        return self._in_loop(self._serving.under_way, frozenset())

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._ended.wait(timeout_s)

    def release_handles(self) -> None:
        """There are none."""

    def stop(self, through: str | None = None) -> None:
        del through
        self._in_loop(self._binding.fuse.terminate, None)

    def leave(self) -> None:
        self.left = True
        self._serving.refuses = errno.ENOTCONN
        give_up = self._runtime.monotonic() + _SERVED_S
        while self.under_way() and self._runtime.monotonic() < give_up:
            self._runtime.sleep(_LOOK_S)
        self._ended.set()

    def can_resend(self) -> bool:
        return False

    def resend(self) -> None:
        """Nothing is taken over."""

    def adopt_handles(self, handles: Iterable[tuple[Ino, int, bool]]) -> None:
        """Nothing is taken over."""

    def current_request(self) -> int | None:
        return None

    def interrupted(self) -> bool:
        """libfuse keeps INTERRUPT to itself."""
        return False

    def answer(self, request: int, code: int) -> None:
        """No request is parked: locks are the kernel's."""

    def snapshot(self) -> dict[str, OpStats]:
        return summed([self._serving.stats])


def _nothing() -> None:
    pass


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _is_gone(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in GONE


_CONFORMS: type[Transport] = Pyfuse3Session
