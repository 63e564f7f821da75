"""What a worker keeps for the next one, record by record: `KeptRecords` over the arena.

    H fh                handle: inode, flags, kind, the request that opened it
    L inode kind owner  file locks of one owner, with the handles through which it has them
    T ticket            a wait for a lock that the store has in line: inode, kind
    P page              where a page of a listing begins and ends: directory, cursors
    W slice number      a write that is not committed: inode, offset, append, time, request, data
    D slot              the last append of a thread: request, size; no size while it is being taken
    I slot              the last change of names that a thread was about to commit: request, commit
    I request           such a change, which was applied, as a client has found that took over
    C slice             a commit of slices that may be applied: commit, slices
    U inode             a write by a caller without CAP_FSETID, which makes commits drop set-id bits
    S                   the session, and the volume
    N                   what was agreed with the kernel at INIT, and the inode that is mounted
    Q                   whether idle polling is worth it on this machine

A request is known by the kernel's `unique`. After a takeover the kernel sends again what has no
answer yet; what the last worker had done of it, these records tell.

Called by the VFS, the writers, the session and `kept_store`. Threading: any thread; `Past` belongs
to the thread that takes over.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from itertools import count
from struct import Struct
from typing import Final

from fsclient.survival.arena import Arena, ArenaFull
from fsclient.survival.records import CommitId, Intent, Keeper, Unsaved
from fsmeta.runtime import Runtime
from fsmeta.types import Caller, Ino, SessionId, SliceId

log = logging.getLogger(__name__)

DATA_BYTES_MAX: Final = 160 << 20  # of writes in the arena; more are committed first
BUFFER_SHARE: Final = 2  # nor more than half of --buffer-size: it is memory besides
FLAGS: Final = 0xFFFFFFFF  # of a handle
DIRECT: Final = 1 << 40  # beside them: it goes past the kernel's pages
COUNTED: Final = 1 << 41  # its file may be passed through; then this is followed by
BACKING_SHIFT: Final = 42  # the id of what the kernel reads, or 0
BEGUN: Final = 0xFFFFFFFF  # in place of the size of an append that is being taken
SETTLED: Final = 1 << 63  # in the key of an I record, with the request instead of the slot
SETTLED_CLIENTS: Final = 8  # five in a row that die at once end the mount
PIECES: Final = 1 << 8  # of one write; more share a number
_ROOM_BYTES: Final = 72 << 20  # for what all threads write at once, and for other records
U64: Final = Struct(">Q")
HANDLE: Final = Struct("=QQBQ")  # ino flags is_dir unique
LOCK: Final = Struct(">QHQ")  # ino kind owner
TICKET: Final = Struct("=QH")  # ino kind
PAGE: Final = Struct("=QBHH")  # ino has_end begin_bytes end_bytes; then both
WRITE_KEY: Final = Struct(">QQ")  # slice number
WRITE: Final = Struct("=QQBQQ")  # ino offset append mtime_ns unique
DONE: Final = Struct("=QI")  # unique size
COMMIT: Final = Struct("=QQQQHB")  # unique sequence journal ino slices worker_bytes
IDS: Final = Struct("=Q")

# The slot of the calling thread and the request that it serves.
_request: ContextVar[tuple[int, int]] = ContextVar("kept_request", default=(-1, 0))


def serving(slot: int, unique: int) -> None:
    """The calling thread, of `slot`, serves request `unique` from now on."""
    _request.set((slot, unique))


def request() -> int:
    """The request that the calling thread serves; 0: none."""
    return _request.get()[1]


class KeptRecords:
    """Records in the arena; `Keeper` for the parts of a mount."""

    def __init__(
        self,
        arena: Arena,
        runtime: Runtime,
        first_number: int = 1,
        data_bytes_max: int = DATA_BYTES_MAX,
    ) -> None:
        """`first_number` is above the numbers of all writes that are there.

        Writers commit where more than `data_bytes_max` would be kept.
        """
        self.arena = arena
        self._data_max = data_bytes_max
        self._numbers = count(first_number)  # `next` is atomic
        self._lock = runtime.lock()
        self._writes: dict[int, list[tuple[bytes, int]]] = {}  # keys and sizes by slice; _lock
        self._data = 0  # bytes of those; guarded by _lock
        self._again = 0  # the number of the write that is taken once more; 0: a new one
        self._pieces = 0

    # --- handles, locks and listings -------------------------------------------------------------

    def opened(
        self,
        fh: int,
        ino: Ino,
        flags: int,
        is_dir: bool,
        direct: bool = False,
        backing: int | None = None,
    ) -> None:
        word = flags & FLAGS | (DIRECT if direct else 0)
        if backing is not None:
            word |= COUNTED | backing << BACKING_SHIFT
        self.put(b"H" + U64.pack(fh), HANDLE.pack(ino, word, is_dir, request()))

    def closed(self, fh: int) -> None:
        self.arena.drop(b"H" + U64.pack(fh))

    def locked(self, ino: Ino, kind: int, owner: int, handles: Collection[int]) -> None:
        self.put(b"L" + LOCK.pack(ino, kind, owner), b"".join(map(U64.pack, handles)))

    def unlocked(self, ino: Ino, kind: int, owner: int) -> None:
        self.arena.drop(b"L" + LOCK.pack(ino, kind, owner))

    def waits(self, ticket: int, ino: Ino, kind: int) -> None:
        self.put(b"T" + U64.pack(ticket), TICKET.pack(ino, kind))

    def waited(self, ticket: int) -> None:
        self.arena.drop(b"T" + U64.pack(ticket))

    def listed(self, number: int, ino: Ino, begin: bytes, end: bytes | None) -> None:
        last = end or b""
        head = PAGE.pack(ino, end is not None, len(begin), len(last))
        self.put(b"P" + U64.pack(number), head + begin + last)

    def unlisted(self, number: int) -> None:
        self.arena.drop(b"P" + U64.pack(number))

    # --- writes ----------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        return self._data + size <= self._data_max and self.arena.room() > _ROOM_BYTES

    def written(
        self,
        ino: Ino,
        slice_id: SliceId,
        offset: int,
        append: bool,
        mtime_ns: int,
        data: memoryview,
    ) -> None:
        key = b"W" + WRITE_KEY.pack(slice_id, self._number())
        head = WRITE.pack(ino, offset, append, mtime_ns, 0 if self._again else request())
        self.put(key, head, data)
        with self._lock:
            self._writes.setdefault(slice_id, []).append((key, len(data)))
            self._data += len(data)

    def _number(self) -> int:
        if not self._again:
            return next(self._numbers) * PIECES
        self._pieces = min(self._pieces + 1, PIECES - 1)
        return self._again + self._pieces

    def rewriting(self, number: int) -> None:
        """What is written from now on, by one thread, is write `number` once more; 0: no more."""
        self._again = number - number % PIECES
        self._pieces = number % PIECES - 1

    def saved(self, ids: Iterable[SliceId]) -> None:
        for each in ids:
            with self._lock:
                writes = self._writes.pop(each, ())
                self._data -= sum([size for _, size in writes])
            for key, _ in writes:
                self.arena.drop(key)
            self.arena.drop(b"C" + U64.pack(each))

    def appending(self) -> None:
        self.appended(BEGUN)

    def appended(self, size: int) -> None:
        slot, unique = _request.get()
        if unique:
            self.put(b"D" + U64.pack(slot), DONE.pack(unique, size))

    def unprivileged(self, ino: Ino, caller: Caller | None) -> None:
        key = b"U" + U64.pack(ino)
        if caller is None:
            self.arena.drop(key)
        else:
            numbers = (caller.uid, caller.gid, *caller.groups)
            self.put(key, b"".join([U64.pack(each & 0xFFFFFFFF) for each in numbers]))

    def forget(self, write: Unsaved) -> None:
        """It is dealt with."""
        self.arena.drop(write.key)

    # --- commits ---------------------------------------------------------------------------------

    def commits_names(self, commit: CommitId, ino: int, journal: int = 0) -> bytes:
        """The calling thread is about to commit a change of names, which made `ino` if it made one.

        Returns the key of the record; b"" where no request is served.
        """
        slot, unique = _request.get()
        if not unique:
            return b""
        key = b"I" + U64.pack(slot)
        fence, worker, sequence = commit
        head = COMMIT.pack(unique, sequence, journal, ino, 0, len(worker))
        self.put(key, head + worker + fence)
        return key

    def commits_slices(self, commit: CommitId, ids: Sequence[int], journal: int = 0) -> bytes:
        """Slices are about to become part of a file. Returns the key of the record."""
        key = b"C" + U64.pack(ids[0])
        fence, worker, sequence = commit
        head = COMMIT.pack(0, sequence, journal, 0, len(ids), len(worker))
        self.put(key, head + b"".join([IDS.pack(each) for each in ids]) + worker + fence)
        return key

    def refused(self, key: bytes) -> None:
        """A commit was not applied, and never will be."""
        self.arena.drop(key)

    # --- the mount -------------------------------------------------------------------------------

    def joined(self, session: SessionId, uuid: str) -> None:
        """This client commits in the name of that session of that volume."""
        self.put(b"S", U64.pack(session) + uuid.encode())

    def session(self) -> tuple[SessionId, str] | None:
        """The session of the last worker, and its volume."""
        value = self.kept(b"S")
        return None if value is None else (SessionId(U64.unpack(value[:8])[0]), value[8:].decode())

    def kept(self, name: bytes) -> bytes | None:
        """A record of which there is one."""
        return next((value for key, value in self.arena.items(name) if key == name), None)

    def numbers(self) -> dict[str, float]:
        """Gauges for `.stats`."""
        return {"arena_bytes": float(self.arena.live_bytes)}

    def put(self, key: bytes, head: bytes, data: memoryview | bytes = b"") -> None:
        """Set a record. Where there is no room the next worker will not know of it."""
        try:
            self.arena.put(key, head, data)
        except ArenaFull as error:
            log.error("a record for the next worker is lost: %s", error)


class Past:
    """What the last worker has left: read once, before this one keeps anything."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.begun = {
            unique
            for unique, size in (DONE.unpack(value) for _, value in arena.items(b"D"))
            if size == BEGUN
        }

    def appends(self) -> dict[int, int]:
        """Appends that were taken as a whole: how many bytes, by request."""
        found = (DONE.unpack(value) for _, value in self._arena.items(b"D"))
        return {unique: size for unique, size in found if size != BEGUN}

    def callers(self) -> dict[Ino, Caller]:
        """Callers in whose names commits drop set-id bits."""
        found = {}
        for key, value in self._arena.items(b"U"):
            uid, gid, *groups = (each for (each,) in U64.iter_unpack(value))
            found[Ino(U64.unpack(key[1:])[0])] = Caller(uid, gid, tuple(groups))
        return found

    def unsaved(self) -> list[Unsaved]:
        """Writes that were not committed, in order.

        An append whose request was not answered is left out: the kernel sends it again.
        """
        found: dict[tuple[int, int], Unsaved] = {}
        for key, value in self._arena.items(b"W"):
            slice_id, number = WRITE_KEY.unpack(key[1:])
            ino, offset, append, mtime_ns, unique = WRITE.unpack_from(value)
            write = Unsaved(
                SliceId(slice_id),
                number,
                Ino(ino),
                offset,
                bool(append),
                mtime_ns,
                value[WRITE.size :],
                key,
            )
            before = found.pop((number, offset), None)
            if before is not None:  # a worker died while it wrote this one once more
                self._arena.drop(before.key)
            if append and unique in self.begun:
                self._arena.drop(key)
            else:
                found[number, offset] = write
        return sorted(found.values(), key=lambda write: write.number)

    def intents(self) -> tuple[list[Intent], list[Intent]]:
        """Commits that may have been applied: of names, by request, and of slices."""
        return self._intents(b"I"), self._intents(b"C")

    def _intents(self, prefix: bytes) -> list[Intent]:
        found = []
        for key, value in self._arena.items(prefix):
            unique, sequence, journal, ino, number, worker_bytes = COMMIT.unpack_from(value)
            at = COMMIT.size + number * IDS.size
            ids = tuple(each for (each,) in IDS.iter_unpack(value[COMMIT.size : at]))
            worker, fence = value[at : at + worker_bytes], value[at + worker_bytes :]
            commit = CommitId(fence, worker, sequence)
            settled = prefix == b"I" and U64.unpack(key[1:])[0] >= SETTLED
            found.append(Intent(key, unique, commit, journal, Ino(ino), ids, settled))
        return found

    def settle(self, intents: Iterable[Intent], generation: int) -> None:
        """Changes of names that were applied, and whose requests may not be answered yet.

        They are kept by request now, beside those of the threads of this client, which is of that
        `generation`: until so many others have served that those requests are answered. Where the
        sequence of a commit was, such a record has the generation.
        """
        for each in intents:
            if not each.settled:
                head = COMMIT.pack(each.unique, generation, 0, each.ino, 0, 0)
                self._arena.put(b"I" + U64.pack(SETTLED | each.unique), head)
                self._arena.drop(each.key)
            elif each.commit.sequence + SETTLED_CLIENTS < generation:
                self._arena.drop(each.key)

    def forget(self, intents: Iterable[Intent]) -> None:
        """It is known what became of these."""
        for each in intents:
            self._arena.drop(each.key)


_CONFORMS: type[Keeper] = KeptRecords
