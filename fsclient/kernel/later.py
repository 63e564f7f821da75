"""An answer that comes later, so that no thread which serves requests waits for it.

A method of `FileSystem` returns a `Later` where it would wait and needs no thread for that. The
transport begins it, has the thread serve others, and answers the request when the outcome comes; an
INTERRUPT of the request calls `cancel`.

Threading: `begin` is called once, by the thread that serves the request; the outcome may come from
any thread, also within `begin`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")

Outcome = Callable[[], T]
"""Returns the value, or raises why there is none."""

Take = Callable[[Outcome[T]], None]
"""Takes the outcome; to be called once."""


def interrupted() -> NoReturn:
    """The outcome of what is cancelled. Raises: EINTR."""
    raise OSError(errno.EINTR, "interrupted")


def outcome_of(work: Callable[[], T]) -> Outcome[T]:
    """What `work` returns or raises; it has been done when this returns."""
    try:
        value = work()
    except Exception as error:  # noqa: BLE001  (the taker of the outcome meets it)
        return failure(error)
    return lambda: value


def failure(error: Exception) -> Callable[[], NoReturn]:
    """The outcome that raises `error`."""
    return partial(_raise, error)


def _raise(error: Exception) -> NoReturn:
    raise error


def _not_cancelled() -> None:
    """What can't be cancelled comes soon."""


class Later(Generic[T_co]):
    """A value that is not there yet."""

    def __init__(
        self, begin: Callable[[Take[T_co]], None], cancel: Callable[[], None] = _not_cancelled
    ) -> None:
        """`begin` gets the taker of the outcome; `cancel` has it come at once, as EINTR."""
        self.begin = begin
        self.cancel = cancel

    def map(self, then: Callable[[Outcome[T_co]], U]) -> Later[U]:
        """What `then` makes of the outcome."""

        def begin(take: Take[U]) -> None:
            self.begin(lambda outcome: take(lambda: then(outcome)))

        return Later(begin, self.cancel)
