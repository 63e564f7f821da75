"""Where workers tell of single requests: the access log and the log of slow operations.

A worker compares the time of each request with `floor_s` and calls `take` where it took as long.
So a mount without either pays one comparison.

Threading: `take` from any worker; `floor_s` may be written by any thread.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple, Protocol

from fsclient.fuse.dispatch.subdir import Served
from fsmeta.types import Caller


class ServedRequest(NamedTuple):
    """One request that was served. `view` is valid until `take` returns."""

    unique: int  # the kernel's id of it
    opcode: int
    ino: int
    caller: Caller
    view: memoryview  # the request from its header on
    end: int  # of its body
    answer: Served
    seconds: float


class Tap(Protocol):
    """Takes requests that took at least `floor_s`."""

    floor_s: float

    def take(self, request: ServedRequest) -> None: ...


class NoTap:
    """Takes none."""

    def __init__(self) -> None:
        self.floor_s = inf

    def take(self, request: ServedRequest) -> None:
        pass


NO_TAP: Final = NoTap()
_CONFORMS: type[Tap] = NoTap
