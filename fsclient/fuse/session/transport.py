"""What serves a mount, as the process around it sees it: `Session`, or `Pyfuse3Session`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, Protocol

from fsclient.fuse.session.init import Agreement
from fsclient.fuse.session.session import Session
from fsclient.fuse.session.stats import OpStats
from fsclient.kernel.contract import LockReplies, Notifier
from fsmeta.types import Ino

NATIVE: Final = "native"
PYFUSE3: Final = "pyfuse3"
TRANSPORTS: Final = (NATIVE, PYFUSE3)


class Transport(LockReplies, Protocol):
    """Serves one mount. Any thread may call."""

    notifier: Notifier
    left: bool

    def under_way(self) -> Collection[int]:
        """Requests that have no answer yet."""

    def agree(self, kept: Agreement | None = None) -> Agreement:
        """Agree with the kernel; nothing is served before `begin`. Raises: ConfigError."""

    def begin(self) -> None:
        """Serve what comes, and has come."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when it has ended; False where that takes longer."""

    def release_handles(self) -> None:
        """End what was opened for readers without a handle. It has ended."""

    def stop(self, through: str | None = None) -> None:
        """Have it end behind the requests that it serves, which the mount outlives."""

    def leave(self) -> None:
        """End at once; requests then fail."""

    def can_resend(self) -> bool:
        """Whether the kernel can let another process go on with this mount."""

    def resend(self) -> None:
        """Have the kernel send again what it has no answer to."""

    def adopt_handles(self, handles: Iterable[tuple[Ino, int, bool]]) -> None:
        """Inodes and handles that an earlier process has opened for readers without one, and
        whether they are directories'."""

    def current_request(self) -> int | None:
        """The number of the request that the calling thread serves; None where it is not known."""

    def snapshot(self) -> dict[str, OpStats]:
        """Counts and latency of every operation so far, by name."""


_CONFORMS: type[Transport] = Session
