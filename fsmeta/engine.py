"""`Meta`, the facade of the metadata: one short public method per POSIX verb.

Called by the VFS, the background worker, fsck and the tests. It knows who we are (the session), the
time, the volume's limits and the supply of fresh ids; the verbs themselves are in `ops`.

Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from fsmeta import quota, schema, volume
from fsmeta.cache import RowCache
from fsmeta.errors import Fenced
from fsmeta.ops import attr, create, directory, extent, link, lookup, reclaim, remove, rename
from fsmeta.ops import session as sessions
from fsmeta.ops import xattr as xattrs
from fsmeta.ops.create import NewNode
from fsmeta.ops.inode import Changed, Env
from fsmeta.ops.rename import Place, Renamed
from fsmeta.runtime import Runtime
from fsmeta.schema import SessionRecord
from fsmeta.store import Page, Store
from fsmeta.transact import DEADLINE_S, Transactor, Txn
from fsmeta.types import (
    CHUNK_BYTES,
    FILE_SIZE_MAX,
    ROOT_CALLER,
    Attr,
    Caller,
    Dentry,
    Ino,
    SessionId,
    SetAttr,
    Slice,
    SliceId,
    StatFs,
)

T = TypeVar("T")

INO_BATCH: Final = 1024  # ids a client takes at once; what a crash wastes of 2^64
SLICE_BATCH: Final = 1024
_PURGE_BATCH: Final = 100  # inodes a commit; their rows are read in one request
_FORGET_BATCH: Final = 1000
_FIELDS_MAX: Final = 2 * FILE_SIZE_MAX // CHUNK_BYTES  # of an inode's row: more than it can have


class IdSupply:
    """Hands out ids of one kind; asks the store for the next batch when it runs out."""

    def __init__(self, run: Transactor, runtime: Runtime, field: bytes, batch: int) -> None:
        self._run = run
        self._field = field
        self._batch = batch
        self._lock = runtime.lock()
        self._next = 0  # guarded by _lock
        self._end = 0  # guarded by _lock

    def take(self) -> int:
        """The next id. Raises: StoreError."""
        with self._lock:
            if self._next == self._end:  # the lock stays held: who else wants an id needs the batch
                self._next = self._run.run(self._take_batch)
                self._end = self._next + self._batch
            self._next += 1
            return self._next - 1

    def _take_batch(self, txn: Txn) -> int:
        value = txn.get(schema.COUNTERS, self._field)
        first = schema.unpack_count(schema.COUNTERS, self._field, value)
        txn.put(schema.COUNTERS, self._field, b"%d" % (first + self._batch))
        return first


class Meta:
    """The metadata of one volume, as one client sees it."""

    def __init__(self, store: Store, runtime: Runtime, deadline_s: float = DEADLINE_S) -> None:
        """Raises: ConfigError where there is no volume, or one of a later version."""
        self.store = store
        self.cache = RowCache(runtime)
        self.transactor = Transactor(store, runtime, self.cache, deadline_s)
        self.session: SessionRecord | None = None
        self._runtime = runtime
        self._deadline_s = deadline_s
        self._inos = IdSupply(self.transactor, runtime, schema.NEXT_INO, INO_BATCH)
        self._slices = IdSupply(self.transactor, runtime, schema.NEXT_SLICE, SLICE_BATCH)
        self._listeners: list[Callable[[Sequence[bytes] | None], None]] = []
        store.watch(self._rows_changed)
        self.format = self.transactor.view(volume.load_format)
        self._limits = self.format.limits
        self._now_ns = runtime.now_ns

    def _env(self, caller: Caller) -> Env:
        return Env(caller, self._now_ns(), self._limits)

    def _run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        env = self._env(caller)
        return self.transactor.run(lambda txn: verb(txn, env, *args))

    def _view(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        env = self._env(caller)
        return self.transactor.view(lambda txn: verb(txn, env, *args))

    # --- coherence -------------------------------------------------------------------------------

    def on_change(self, listener: Callable[[Sequence[bytes] | None], None]) -> None:
        """Tell `listener` which rows others changed (None: perhaps all), once we forgot them."""
        self._listeners.append(listener)

    def _rows_changed(self, rows: Sequence[bytes] | None) -> None:
        self.transactor.drop(rows)
        for listener in self._listeners:
            listener(rows)

    def vouches_inode(self, ino: Ino) -> bool:
        """Whether we will hear of any change by others to what `getattr` says of `ino`."""
        return self.cache.is_vouched(schema.inode_row(ino))

    def vouched_inodes(self, inos: Collection[Ino]) -> set[Ino]:
        """Those of `inos` that `vouches_inode` says yes to."""
        rows = dict(zip(schema.inode_rows(inos), inos, strict=True))
        return {rows[row] for row in self.cache.vouched_among(rows)}

    def vouches_names(self, ino: Ino) -> bool:
        """Whether we will hear of any change by others to the names in directory `ino`."""
        return self.cache.is_vouched(schema.dir_row(ino))

    # --- names -----------------------------------------------------------------------------------

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        known = lookup.known_name(self.cache, parent, name) if caller.checked else None
        return known or self._view(lookup.lookup, caller, parent, name)

    def create(self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int = 0) -> Attr:
        """A new file, directory, fifo, socket or device, as the S_IFMT bits of `mode` say."""
        node = NewNode(Ino(self._inos.take()), mode, rdev)
        return self._run(create.create, caller, parent, name, node)

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Attr:
        node = NewNode(Ino(self._inos.take()), 0o120777, 0, target)
        return self._run(create.create, caller, parent, name, node)

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        return self._run(remove.unlink, caller, parent, name)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        return self._run(remove.rmdir, caller, parent, name)

    def rename(self, caller: Caller, old: Place, new: Place, flags: int = 0) -> Renamed:
        return self._run(rename.rename, caller, old, new, flags)

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> Attr:
        return self._run(link.link, caller, ino, parent, name)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        return self._view(lookup.readlink, caller, ino)

    def names(self, ino: Ino, cursor: bytes = b"") -> tuple[list[Dentry], bytes | None]:
        """A page of names in no order, and the next cursor.

        A name there throughout is returned at least once, perhaps on two pages: leave out repeats.
        """
        row = schema.dir_row(ino)
        known = None if cursor else self.cache.complete(row)
        if known is not None:
            return schema.unpack_dentries(row, known), None
        page = self.transactor.view(
            lambda _txn: directory.page(self.store, self.cache, row, cursor)
        )
        return schema.unpack_dentries(row, page.items), page.cursor

    def attrs(self, inos: Sequence[Ino]) -> dict[Ino, Attr]:
        """Attributes of those that exist; one request."""
        return self.transactor.view(lambda _txn: directory.attrs(self.store, self.cache, inos))

    # --- attributes ------------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: Ino) -> Attr:
        return lookup.known_attr(self.cache, ino) or self._view(lookup.getattr_, caller, ino)

    def open(self, caller: Caller, ino: Ino) -> Attr:
        """The attributes of a file that is being opened, asked anew unless the store vouches."""
        return lookup.known_attr(self.cache, ino) or self._view(lookup.open_, caller, ino)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Changed:
        """Change attributes. A very long file is shortened in several commits."""
        first: Attr | None = None
        while True:
            before, after = self._run(attr.setattr_, caller, ino, want)
            first = first or before
            if want.size in (None, after.size):
                return Changed(first, after)
            want = want._replace(opened=True)  # who was let in may go on

    def access(self, caller: Caller, ino: Ino, mask: int) -> None:
        self._view(lookup.access, caller, ino, mask)

    def setxattr(self, caller: Caller, ino: Ino, name: bytes, value: bytes, flags: int = 0) -> None:
        self._run(xattrs.setxattr, caller, ino, name, value, flags)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        xattrs.require_not_known_absent(self.cache, ino, name)
        return self._view(xattrs.getxattr, caller, ino, name)

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        return self._view(xattrs.listxattr, caller, ino)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        self._run(xattrs.removexattr, caller, ino, name)

    def statfs(self) -> StatFs:
        used = self.transactor.view(quota.usage)
        limits = self.format.limits
        return StatFs(used.space, limits.space, used.inodes, limits.inodes)

    def sync(self) -> None:
        """Return when what was answered survives a power loss, as far as the store can tell."""
        self.store.sync()

    # --- file data -------------------------------------------------------------------------------

    def new_slice_id(self) -> SliceId:
        return SliceId(self._slices.take())

    def read_chunk(self, ino: Ino, index: int) -> list[Slice]:
        """The slices of one 64 MiB chunk, oldest first."""
        return self._view(extent.read_chunk, ROOT_CALLER, ino, index)

    def chunks(self, ino: Ino) -> list[int]:
        """Which chunks of a file have slices, in order."""
        fields = (field for field, _ in self._table(schema.inode_row(ino), _FIELDS_MAX))
        return sorted(schema.id_of(field) for field in fields if field[:1] == b"c")

    def write_slices(
        self,
        ino: Ino,
        batch: Sequence[tuple[int, Slice]],
        length: int,
        mtime_ns: int,
        unprivileged: Caller | None = None,
    ) -> Changed:
        """Make stored slices part of a file: (chunk index, slice) in order."""
        return self._run(extent.write, ROOT_CALLER, ino, batch, length, mtime_ns, unprivileged)

    def forget_chunks(self, inos: Iterable[Ino]) -> None:
        """Ask the store again for what is in these files."""
        self.cache.drop([schema.inode_row(ino) for ino in inos])

    def compact_chunk(
        self, ino: Ino, index: int, old: Sequence[Slice], new: Sequence[Slice]
    ) -> bool:
        """Put `new` in place of `old`; False where somebody was first."""
        return self._run(extent.replace_prefix, ROOT_CALLER, ino, index, old, new)

    # --- the session -----------------------------------------------------------------------------

    def open_session(self, info: dict[str, Any], rejoins: bool = False) -> SessionRecord:
        """Join the volume; from here on every commit carries this session."""
        # a transactor of its own, because others may be committing in the name of an ended session:
        # without a fence they would be let through
        joining = Transactor(self.store, self._runtime, self.cache, self._deadline_s)
        record = joining.run(lambda txn: sessions.open_session(txn, info, rejoins))
        self.session = record
        self.transactor.fence = schema.session_row(record.id)
        return record

    def close_session(self) -> None:
        """Leave: nothing can be committed any more."""
        session, self.session = self.session, None
        if session is not None:
            self.end_session(session.id)
            self.transactor.fence = None

    def end_session(self, sid: SessionId) -> None:
        """End a session that is over, ours or one that has stopped beating."""
        try:
            self.transactor.run(lambda txn: sessions.close_session(txn, sid))
        except Fenced:
            pass  # others ended it first

    def beat(self, confirmed: int) -> None:
        """Show that we live, and which deletion round we agree to. Raises: Fenced."""
        assert self.session is not None
        record = self.session._replace(beat=self.session.beat + 1, confirmed=confirmed)
        self.transactor.run(lambda txn: sessions.put_session(txn, record))
        self.session = record

    def sessions(self) -> list[SessionRecord]:
        """Every session that has not been ended."""
        return self.transactor.view(sessions.list_sessions)

    def hold_orphans(self, opened: Iterable[Ino]) -> list[Ino]:
        """Those of `opened` that have lost their last name; others now know that we hold them."""
        assert self.session is not None
        sid, inos = self.session.id, list(opened)
        return self.transactor.run(lambda txn: sessions.hold_orphans(txn, sid, inos))

    def release_orphans(self, inos: Sequence[Ino]) -> None:
        """These orphans are open here no more."""
        assert self.session is not None
        sid = self.session.id
        self.transactor.run(lambda txn: sessions.release_orphans(txn, sid, inos))

    # --- deletion --------------------------------------------------------------------------------

    def take_lead(self, believed_dead: SessionId | None = None) -> bool:
        """Lead the background work, unless somebody alive does."""
        assert self.session is not None
        sid = self.session.id
        return self.transactor.run(lambda txn: reclaim.take_lead(txn, sid, believed_dead))

    def leader(self) -> SessionRecord | None:
        """The session that does the background work, as far as it is alive."""
        return self.transactor.view(reclaim.leader)

    def current_round(self) -> int:
        """The deletion round that sessions are asked to confirm."""
        return self.transactor.view(reclaim.current_round)

    def next_round(self) -> int | None:
        """Ask for a new deletion round; None where we no longer lead."""
        assert self.session is not None
        sid = self.session.id
        return self.transactor.run(lambda txn: reclaim.next_round(txn, sid))

    def orphans(self, at_most: int) -> list[Ino]:
        """Inodes without names that wait to be purged."""
        return [Ino(schema.id_of(field)) for field, _ in self._table(schema.ORPHANS, at_most)]

    def dead_slices(self, at_most: int) -> dict[bytes, list[tuple[SliceId, int]]]:
        """Slices no file refers to, (id, size), under keys for `forget_dead`."""
        entries = self._table(schema.DEAD_SLICES, at_most)
        return {field: schema.unpack_dead(field, value) for field, value in entries}

    def _table(self, row: bytes, at_most: int) -> Iterator[tuple[bytes, bytes]]:
        cursor: bytes | None = b""
        seen: set[bytes] = set()
        while cursor is not None and len(seen) < at_most:
            page = self._scan(row, cursor)
            for field, value in page.items:
                if field not in seen:
                    seen.add(field)
                    yield field, value
            cursor = page.cursor

    def _scan(self, row: bytes, cursor: bytes) -> Page:
        return self.transactor.view(lambda _txn: self.store.scan(row, cursor))

    def held_orphans(self, among: Iterable[SessionId]) -> set[Ino]:
        """Orphans that one of these sessions holds open."""
        return self.transactor.view(partial(_held, sids=list(among)))

    def purge(self, inos: Sequence[Ino]) -> None:
        """Remove orphans for good; the caller has made sure that nobody holds them."""
        for begin in range(0, len(inos), _PURGE_BATCH):
            batch = inos[begin : begin + _PURGE_BATCH]
            while self.transactor.run(partial(reclaim.purge, inos=batch)):
                pass

    def forget_dead(self, keys: Sequence[bytes]) -> None:
        """The objects of these dead slices are gone."""
        for begin in range(0, len(keys), _FORGET_BATCH):
            batch = keys[begin : begin + _FORGET_BATCH]
            self.transactor.run(partial(reclaim.forget_dead, keys=batch))


def _held(txn: Txn, sids: list[SessionId]) -> set[Ino]:
    return sessions.held_orphans(txn, sids)
