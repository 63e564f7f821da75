"""Whether a store may go back to an older state, and how that is detected. Most can't: `STEADY`.

A Redis that is restarted from an old file, or a replica that lagged and takes over, answers as if
later commits had never been made. Ids would be handed out twice, and acknowledged changes would not
be there. `redis/engine` notices, and gives its clients a `RollbackDetector` that says so.

Called by the engine facade, the leader and the commands. Threading: any thread.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol


class Review(NamedTuple):
    """What is wrong with how a store is run."""

    refusal: str = ""  # why no volume may live there; "" if it may
    warnings: tuple[str, ...] = ()  # what may be lost, one line each
    notes: tuple[str, ...] = ()  # as `warnings`, of what many choose for its speed


class RollbackDetector(Protocol):
    """What a store can say about its past. Everything raises Unavailable."""

    def store_epoch(self) -> bytes:
        """A name for the past of the data, another one wherever it may have gone back; b"": never.

        One request.
        """

    def is_proven(self, fence: bytes, value: bytes | None) -> bool:
        """Whether what E keeps of a session that was ended, or None, shows all of our commits."""

    def review(self) -> Review:
        """Judge how the server is set up; some requests."""


class _Steady:
    """The history of a store that does not go back."""

    def store_epoch(self) -> bytes:
        return b""

    def is_proven(self, fence: bytes, value: bytes | None) -> bool:
        del fence, value
        return True

    def review(self) -> Review:
        return Review()


STEADY: Final[RollbackDetector] = _Steady()
