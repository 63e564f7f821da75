"""What the parts of a mount record to outlive their process, and what the next one reads.

`Keeper` is the interface; `Kept` in `survival/kept` implements it, and `NOT_KEPT` stands for a
mount without a supervisor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, Protocol

from fsmeta.types import Caller, Ino, SliceId


class KeptHandle(NamedTuple):
    """A handle that was open."""

    fh: int
    ino: Ino
    flags: int
    direct: bool
    is_dir: bool
    unique: int
    backing: int | None  # of a file that may be passed through: what the kernel reads; 0: us


class KeptLock(NamedTuple):
    """What one owner had locked of one file."""

    ino: Ino
    kind: int
    owner: int
    handles: tuple[int, ...]


class KeptPage(NamedTuple):
    """A page of a listing."""

    number: int
    ino: Ino
    begin: bytes
    end: bytes | None


class Unsaved(NamedTuple):
    """A write that may not be committed."""

    slice_id: SliceId
    number: int
    ino: Ino
    offset: int
    append: bool
    mtime_ns: int
    data: bytes
    key: bytes


class CommitId(NamedTuple):
    """By what the store knows a commit."""

    fence: bytes
    worker: bytes
    sequence: int


class Intent(NamedTuple):
    """A commit that may have been applied."""

    key: bytes
    unique: int
    commit: CommitId
    journal: int  # the number that the journal gave it; 0: none
    ino: Ino
    ids: tuple[int, ...]
    settled: bool = False  # it was, as a client has found that took over before


class Keeper(Protocol):
    """What the parts of a mount tell of what must outlive the worker."""

    def opened(
        self,
        fh: int,
        ino: Ino,
        flags: int,
        is_dir: bool,
        direct: bool = False,
        backing: int | None = None,
    ) -> None:
        """A handle is about to be answered."""

    def closed(self, fh: int) -> None:
        """It is closed."""

    def locked(self, ino: Ino, kind: int, owner: int, handles: Collection[int]) -> None:
        """An owner may have locks, through these handles."""

    def unlocked(self, ino: Ino, kind: int, owner: int) -> None:
        """It has none."""

    def waits(self, ticket: int, ino: Ino, kind: int) -> None:
        """The store is about to be asked to have a wait in line."""

    def waited(self, ticket: int) -> None:
        """The wait is over."""

    def listed(self, number: int, ino: Ino, begin: bytes, end: bytes | None) -> None:
        """A page of a listing has got a number, which the kernel may come back with."""

    def unlisted(self, number: int) -> None:
        """The number is forgotten."""

    def has_room(self, size: int) -> bool:
        """Whether a write of that size can be kept; else some must be committed first."""

    def written(
        self,
        ino: Ino,
        slice_id: SliceId,
        offset: int,
        append: bool,
        mtime_ns: int,
        data: memoryview,
    ) -> None:
        """A part of a write is taken, and not committed yet."""

    def saved(self, ids: Iterable[SliceId]) -> None:
        """These slices are committed, or given up."""

    def appending(self) -> None:
        """The calling thread begins to take an append."""

    def appended(self, size: int) -> None:
        """The append of the calling thread is taken as a whole."""

    def unprivileged(self, ino: Ino, caller: Caller | None) -> None:
        """Commits to a file drop set-id bits in the name of `caller`; None: no more."""


class NotKept:
    """A mount without a supervisor keeps nothing."""

    def opened(
        self,
        fh: int,
        ino: Ino,
        flags: int,
        is_dir: bool,
        direct: bool = False,
        backing: int | None = None,
    ) -> None:
        pass

    def closed(self, fh: int) -> None:
        pass

    def locked(self, ino: Ino, kind: int, owner: int, handles: Collection[int]) -> None:
        pass

    def unlocked(self, ino: Ino, kind: int, owner: int) -> None:
        pass

    def waits(self, ticket: int, ino: Ino, kind: int) -> None:
        pass

    def waited(self, ticket: int) -> None:
        pass

    def listed(self, number: int, ino: Ino, begin: bytes, end: bytes | None) -> None:
        pass

    def unlisted(self, number: int) -> None:
        pass

    def has_room(self, size: int) -> bool:
        del size
        return True

    def written(
        self,
        ino: Ino,
        slice_id: SliceId,
        offset: int,
        append: bool,
        mtime_ns: int,
        data: memoryview,
    ) -> None:
        pass

    def saved(self, ids: Iterable[SliceId]) -> None:
        pass

    def appending(self) -> None:
        pass

    def appended(self, size: int) -> None:
        pass

    def unprivileged(self, ino: Ino, caller: Caller | None) -> None:
        pass


NOT_KEPT: Final[Keeper] = NotKept()
