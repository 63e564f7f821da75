"""What a worker keeps for the next one, record by record: `Kept` over the arena.

    H fh                handle: inode, flags, kind, the request that opened it
    L inode kind owner  file locks of one owner, with the handles through which it has them
    W slice number      a write that is not committed: inode, offset, append, request, data
    D slot              the last append that a thread has taken: request, size
    I slot              the last change of names that a thread was about to commit: request, commit
    C worker            the last commit of slices: session, sequence, slices
    U inode             a write by a caller without CAP_FSETID, which makes commits drop set-id bits
    S                   the session, and its token
    N                   what was agreed with the kernel at INIT

A request is known by the kernel's `unique`. After a takeover the kernel sends again what has no
answer yet; what the last worker had done of it, these records tell.

Called by the VFS, the writers, the session and `kept_store`. Threading: any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from itertools import count
from struct import Struct
from typing import Final, NamedTuple, Protocol

from fsclient.survival.arena import Arena, ArenaFull
from fsmeta.types import Caller, Ino, SliceId

log = logging.getLogger(__name__)

DATA_BYTES_MAX: Final = 160 << 20  # of writes in the arena; more are committed first
_ROOM_BYTES: Final = 72 << 20  # for what all threads write at once, and for other records
_U64: Final = Struct(">Q")
_HANDLE: Final = Struct("=QIBQ")  # ino flags is_dir unique
_LOCK: Final = Struct(">QHQ")  # ino kind owner
_WRITE_KEY: Final = Struct(">QQ")  # slice number
_WRITE: Final = Struct("=QQBQ")  # ino offset append unique
_DONE: Final = Struct("=QI")  # unique size
_INTENT: Final = Struct("=QQ")  # unique sequence; then the worker's field
_COMMIT: Final = Struct("=QH")  # sequence slices; then their ids, then the fence
_IDS: Final = Struct("=Q")

# The slot of the calling thread and the request that it serves.
_request: ContextVar[tuple[int, int]] = ContextVar("kept_request", default=(-1, 0))


class Handle(NamedTuple):
    """A handle that was open."""

    fh: int
    ino: Ino
    flags: int
    is_dir: bool
    unique: int


class Locked(NamedTuple):
    """What one owner had locked of one file."""

    ino: Ino
    kind: int
    owner: int
    handles: tuple[int, ...]


class Unsaved(NamedTuple):
    """A write that may not be committed."""

    slice_id: SliceId
    ino: Ino
    offset: int
    append: bool
    unique: int
    data: bytes
    key: bytes


class Intent(NamedTuple):
    """A commit that may have been applied."""

    unique: int
    worker: bytes
    sequence: int
    fence: bytes
    ids: tuple[int, ...]


class Keeper(Protocol):
    """What the parts of a mount tell of what must outlive the worker."""

    def opened(self, fh: int, ino: Ino, flags: int, is_dir: bool) -> None:
        """A handle is about to be answered."""

    def closed(self, fh: int) -> None:
        """It is closed."""

    def locked(self, ino: Ino, kind: int, owner: int, handles: Collection[int]) -> None:
        """An owner may have locks, through these handles."""

    def unlocked(self, ino: Ino, kind: int, owner: int) -> None:
        """It has none."""

    def has_room(self, size: int) -> bool:
        """Whether a write of that size can be kept; else some must be committed first."""

    def written(
        self, ino: Ino, slice_id: SliceId, offset: int, append: bool, data: memoryview
    ) -> None:
        """A part of a write is taken, and not committed yet."""

    def saved(self, ids: Iterable[SliceId]) -> None:
        """These slices are committed, or given up."""

    def appended(self, size: int) -> None:
        """The append of the calling thread is taken as a whole."""

    def unprivileged(self, ino: Ino, caller: Caller | None) -> None:
        """Commits to a file drop set-id bits in the name of `caller`; None: no more."""


class NotKept:
    """A mount without a supervisor keeps nothing."""

    def opened(self, fh: int, ino: Ino, flags: int, is_dir: bool) -> None:
        pass

    def closed(self, fh: int) -> None:
        pass

    def locked(self, ino: Ino, kind: int, owner: int, handles: Collection[int]) -> None:
        pass

    def unlocked(self, ino: Ino, kind: int, owner: int) -> None:
        pass

    def has_room(self, size: int) -> bool:
        del size
        return True

    def written(
        self, ino: Ino, slice_id: SliceId, offset: int, append: bool, data: memoryview
    ) -> None:
        pass

    def saved(self, ids: Iterable[SliceId]) -> None:
        pass

    def appended(self, size: int) -> None:
        pass

    def unprivileged(self, ino: Ino, caller: Caller | None) -> None:
        pass


NOT_KEPT: Final[Keeper] = NotKept()


def serving(slot: int, unique: int) -> None:
    """The calling thread, of `slot`, serves request `unique` from now on."""
    _request.set((slot, unique))


class Kept:
    """Records in the arena; `Keeper` for the parts of a mount."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._numbers = count(1)  # `next` is atomic
        self._writes: dict[int, list[bytes]] = {}  # keys by slice; item access is atomic
        self._data = 0  # bytes of writes, about

    # --- handles and locks -----------------------------------------------------------------------

    def opened(self, fh: int, ino: Ino, flags: int, is_dir: bool) -> None:
        value = _HANDLE.pack(ino, flags & 0xFFFFFFFF, is_dir, _request.get()[1])
        self._put(b"H" + _U64.pack(fh), value)

    def closed(self, fh: int) -> None:
        self._arena.drop(b"H" + _U64.pack(fh))

    def handles(self) -> list[Handle]:
        """What was open."""
        found = []
        for key, value in self._arena.items(b"H"):
            ino, flags, is_dir, unique = _HANDLE.unpack(value)
            found.append(Handle(_U64.unpack(key[1:])[0], Ino(ino), flags, bool(is_dir), unique))
        return found

    def locked(self, ino: Ino, kind: int, owner: int, handles: Collection[int]) -> None:
        self._put(b"L" + _LOCK.pack(ino, kind, owner), b"".join(map(_U64.pack, handles)))

    def unlocked(self, ino: Ino, kind: int, owner: int) -> None:
        self._arena.drop(b"L" + _LOCK.pack(ino, kind, owner))

    def locks(self) -> list[Locked]:
        """What was locked."""
        found = []
        for key, value in self._arena.items(b"L"):
            ino, kind, owner = _LOCK.unpack(key[1:])
            handles = tuple(fh for (fh,) in _U64.iter_unpack(value))
            found.append(Locked(Ino(ino), kind, owner, handles))
        return found

    # --- writes ----------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        return self._data + size <= DATA_BYTES_MAX and self._arena.room() > _ROOM_BYTES

    def written(
        self, ino: Ino, slice_id: SliceId, offset: int, append: bool, data: memoryview
    ) -> None:
        key = b"W" + _WRITE_KEY.pack(slice_id, next(self._numbers))
        self._put(key, _WRITE.pack(ino, offset, append, _request.get()[1]), data)
        self._writes.setdefault(slice_id, []).append(key)
        self._data += len(data)

    def saved(self, ids: Iterable[SliceId]) -> None:
        for each in ids:
            for key in self._writes.pop(each, ()):
                self._arena.drop(key)
        if not self._writes:
            self._data = 0

    def appended(self, size: int) -> None:
        slot, unique = _request.get()
        if unique:
            self._put(b"D" + _U64.pack(slot), _DONE.pack(unique, size))

    def unprivileged(self, ino: Ino, caller: Caller | None) -> None:
        key = b"U" + _U64.pack(ino)
        if caller is None:
            self._arena.drop(key)
        else:
            numbers = (caller.uid, caller.gid, *caller.groups)
            self._put(key, b"".join(_U64.pack(each & 0xFFFFFFFF) for each in numbers))

    def callers(self) -> dict[Ino, Caller]:
        """Callers in whose names commits drop set-id bits."""
        found = {}
        for key, value in self._arena.items(b"U"):
            uid, gid, *groups = (each for (each,) in _U64.iter_unpack(value))
            found[Ino(_U64.unpack(key[1:])[0])] = Caller(uid, gid, tuple(groups))
        return found

    def appends(self) -> dict[int, int]:
        """Appends that were taken as a whole: how many bytes, by request."""
        return dict(_DONE.unpack(value) for _, value in self._arena.items(b"D"))

    def unsaved(self) -> list[Unsaved]:
        """Writes that were not committed, in order."""
        found = []
        for key, value in self._arena.items(b"W"):
            slice_id, _ = _WRITE_KEY.unpack(key[1:])
            ino, offset, append, unique = _WRITE.unpack_from(value)
            data = value[_WRITE.size :]
            each = Unsaved(SliceId(slice_id), Ino(ino), offset, bool(append), unique, data, key)
            found.append(each)
        return found

    def forget(self, writes: Iterable[Unsaved]) -> None:
        """These are dealt with."""
        for each in writes:
            self._arena.drop(each.key)

    # --- commits ---------------------------------------------------------------------------------

    def commits_names(self, fence: bytes, worker: bytes, sequence: int) -> None:
        """The calling thread is about to commit a change of names."""
        slot, unique = _request.get()
        if unique:
            head = _INTENT.pack(unique, sequence)
            self._put(b"I" + _U64.pack(slot), head + worker + b"/" + fence)

    def commits_slices(
        self, fence: bytes, worker: bytes, sequence: int, ids: Sequence[int]
    ) -> None:
        """Slices are about to become part of a file."""
        body = b"".join(map(_IDS.pack, ids))
        self._put(b"C" + worker, _COMMIT.pack(sequence, len(ids)) + body + fence)

    def commit_ended(self, worker: bytes) -> None:
        """A commit of slices has its answer."""
        self._arena.drop(b"C" + worker)

    def name_intents(self) -> list[Intent]:
        """Changes of names that were about to be committed last, one for each thread."""
        found = []
        for _, value in self._arena.items(b"I"):
            unique, sequence = _INTENT.unpack_from(value)
            worker, _, fence = value[_INTENT.size :].partition(b"/")
            found.append(Intent(unique, worker, sequence, fence, ()))
        return found

    def slice_intents(self) -> list[Intent]:
        """Commits of slices without an answer."""
        found = []
        for key, value in self._arena.items(b"C"):
            sequence, number = _COMMIT.unpack_from(value)
            end = _COMMIT.size + number * _IDS.size
            ids = tuple(each for (each,) in _IDS.iter_unpack(value[_COMMIT.size : end]))
            found.append(Intent(0, key[1:], sequence, value[end:], ids))
        return found

    # --- the mount -------------------------------------------------------------------------------

    def keep(self, name: bytes, value: bytes) -> None:
        """Something there is one of: `S` or `N`."""
        self._put(name, value)

    def kept(self, name: bytes) -> bytes | None:
        """What the last worker kept under that name."""
        return next((value for key, value in self._arena.items(name) if key == name), None)

    def numbers(self) -> dict[str, float]:
        """Gauges for `.stats`."""
        return {"arena_bytes": float(self._arena.live_bytes)}

    def _put(self, key: bytes, head: bytes, data: memoryview | bytes = b"") -> None:
        try:
            self._arena.put(key, head, data)
        except ArenaFull as error:
            log.error("a record for the next worker is lost: %s", error)


_CONFORMS: tuple[type[Keeper], type[Keeper]] = (Kept, NotKept)
