"""`Meta`, the facade of the metadata: one short public method per POSIX verb.

Called by the VFS, the background worker, fsck and the tests. It knows who we are (the session), the
time, the volume's limits and the supply of fresh ids; the verbs themselves are in `ops`.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeVar

from fsmeta.errors import ConfigError
from fsmeta.meta.deletion import DeletionVerbs
from fsmeta.meta.id_allocator import INO_BATCH, SLICE_BATCH, IdAllocator
from fsmeta.meta.locks import LockVerbs
from fsmeta.meta.packing import PackVerbs
from fsmeta.meta.prefetch import MetadataPrefetch
from fsmeta.meta.ranges import RangeVerbs
from fsmeta.meta.sessions import SessionVerbs
from fsmeta.meta.slice_allocator import SliceAllocator
from fsmeta.meta.trash import TrashBucket
from fsmeta.ops.data import extent, fitting
from fsmeta.ops.names import (
    acl as acls,
    attr,
    create,
    directory,
    flags,
    link,
    lookup,
    remove,
    rename,
    xattr as xattrs,
)
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import DentryLocation, Renamed
from fsmeta.rules import access, quota, settings as volume
from fsmeta.rules.context import Changed, Env
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime
from fsmeta.schema import keys, snapshot_inos
from fsmeta.schema.acl import Acl
from fsmeta.schema.sessions import SessionRecord
from fsmeta.store.contract import Store
from fsmeta.txn.retry import DEADLINE_S, Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    ROOT_CALLER,
    ROOT_INO,
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


class Meta:
    """The metadata of one volume, as one client sees it."""

    def __init__(self, store: Store, runtime: Runtime, deadline_s: float = DEADLINE_S) -> None:
        """Raises: ConfigError where there is no volume, or one of a later version."""
        self.store = store
        self.cache = RowCache(runtime)
        self.transactor = Transactor(store, runtime, self.cache, deadline_s)
        self.locks = LockVerbs(self.transactor, lambda: self.sessions.own)
        self.deletion = DeletionVerbs(self.transactor, lambda: self.sessions.own)
        self.ranges = RangeVerbs(self._run, self.transactor)
        self._bin = TrashBucket(runtime.monotonic)
        self._inos = IdAllocator(self.transactor, runtime, keys.NEXT_INO, INO_BATCH)
        slices = IdAllocator(self.transactor, runtime, keys.NEXT_SLICE, SLICE_BATCH)
        self.slices = SliceAllocator(runtime, slices)
        self.sessions = SessionVerbs(
            self.transactor, self.slices, self.locks, runtime.now_ns, self._obey
        )
        self.packing = PackVerbs(self.transactor, self.slices, self.sessions.fence_for)
        self._neighbours = MetadataPrefetch(self.transactor)
        self._listeners: list[Callable[[Sequence[bytes] | None], None]] = []
        store.watch(self._rows_changed)
        self.format = self.transactor.view(volume.load_format)
        self._now_ns = runtime.now_ns
        self._following = runtime.lock()  # held while new settings are read
        self._obey(self.format)
        self.transactor.follow = self._follow
        self.transactor.on_ended = self._tell

    @property
    def session(self) -> SessionRecord | None:
        """Ours, once there is one."""
        return self.sessions.own

    def _run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        now_ns = self._now_ns()
        body = lambda txn: verb(txn, Env(caller, now_ns, *self._rules), *args)  # noqa: E731
        return self.transactor.run(body, (verb, caller, now_ns, args))

    def run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        """Run a verb of `ops` that has no method here: clones."""
        return self._run(verb, caller, *args)

    def _view(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        env = Env(caller, self._now_ns(), *self._rules)
        return self.transactor.view(lambda txn: verb(txn, env, *args))

    def _remove(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        """`_run` of a verb by which something may lose its last name."""
        now_ns = self._now_ns()
        place = self._bin.place(now_ns)

        def removal(txn: Txn) -> T:
            env = Env(caller, now_ns, *self._rules)
            if self.format.trash_days:
                env = env._replace(trash=place.hour, trash_is_new=place.is_new)
            return verb(txn, env, *args)

        result = self.transactor.run(removal, (verb, caller, now_ns, args))
        self._bin.committed(place, result)
        return result

    # --- settings --------------------------------------------------------------------------------

    def _obey(self, settings: VolumeFormat) -> None:
        """Verbs follow `settings` from here on; their commits say so."""
        self.format = settings
        self._rules = settings.limits, settings.charged, settings.born
        self.has_quotas = settings.charged != 0
        self.transactor.edition = settings.edition  # last: a verb reads it first

    def _follow(self) -> None:
        """The settings have changed: obey the new ones. Raises: Fenced."""
        edition = self.transactor.edition
        with self._following:  # the lock stays held: who else commits needs the settings
            if self.session is not None and self.transactor.edition == edition:
                self._obey(self.sessions.follow(self.session.id))

    def refresh_settings(self) -> None:
        """Learn what has changed of the settings, for who only looks at them. Raises: Fenced."""
        try:
            settings = self.transactor.view(volume.load_format)
        except ConfigError:
            return  # the volume is gone, or of a later version: commits will tell
        if settings.changes != self.format.changes:
            self._follow()

    # --- coherence -------------------------------------------------------------------------------

    def on_change(
        self, listener: Callable[[Sequence[bytes] | None], None], first: bool = False
    ) -> None:
        """Tell `listener` which rows others changed (None: perhaps all), once we forgot them.

        `first`: before those that were named earlier.
        """
        self._listeners.insert(0 if first else len(self._listeners), listener)

    def _rows_changed(self, rows: Sequence[bytes] | None) -> None:
        self._tell(self.cache.hear(rows))

    def _tell(self, rows: Sequence[bytes] | None) -> None:
        for listener in self._listeners:
            listener(rows)

    def vouches_inode(self, ino: Ino) -> bool:
        """Whether we will hear of any change by others to what `getattr` says of `ino`."""
        return self.cache.is_vouched(keys.inode_row(ino))

    def vouched_inodes(self, inos: Collection[Ino]) -> Collection[Ino]:
        """Those of `inos` that `vouches_inode` says yes to; `inos` itself where it is all."""
        rows = keys.inode_rows(inos)
        if self.cache.are_vouched(rows):
            return inos
        return {ino for ino, row in zip(inos, rows, strict=True) if self.cache.is_vouched(row)}

    def vouches_names(self, ino: Ino) -> bool:
        """Whether we will hear of any change by others to the names in directory `ino`."""
        return self.cache.is_vouched(keys.dir_row(ino))

    # --- names -----------------------------------------------------------------------------------

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        self.store.hear()
        known = lookup.known_name(self.cache, parent, name) if caller.checked else None
        return known or self._lookup(caller, parent, name)

    def _lookup(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        """`lookup` that has to ask the store."""
        child = lookup.known_child(self.cache, parent, name) if caller.checked else None
        if child is not None:
            self._neighbours.missed_inode(parent, child)
            attr = self._attr_of(caller, child)
            if attr is not None and lookup.known_child(self.cache, parent, name) == child:
                return attr
        remembered = self.vouches_names(parent)
        try:
            return self._view(lookup.lookup, caller, parent, name)
        finally:
            self._neighbours.missed_name(parent, remembered)

    def _attr_of(self, caller: Caller, child: Ino) -> Attr | None:
        """What a name that we know leads to; whoever asks is about to open it. None: it is gone."""
        try:
            return self._view(lookup.open_, caller, child)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return None

    def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int = 0, umask: int = 0
    ) -> Attr:
        """A new file, directory, fifo, socket or device, as the S_IFMT bits of `mode` say."""
        node = NewNode(Ino(self._inos.take()), mode, rdev, umask=umask)
        return self._run(create.create, caller, parent, name, node)

    def new_ino(self) -> Ino:
        """The number of an inode, for a file that is listed as open before it exists."""
        return Ino(self._inos.take())

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Attr:
        node = NewNode(Ino(self._inos.take()), 0o120777, 0, target)
        return self._run(create.create, caller, parent, name, node)

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        return self._remove(remove.unlink, caller, parent, name)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        return self._remove(remove.rmdir, caller, parent, name)

    def rename(
        self, caller: Caller, old: DentryLocation, new: DentryLocation, flags: int = 0
    ) -> Renamed:
        if not flags & rename.WHITEOUT:
            return self._remove(rename.rename, caller, old, new, flags)
        node = NewNode(Ino(self._inos.take()), rename.WHITEOUT_MODE)
        return self._remove(rename.rename, caller, old, new, flags, node)

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> Attr:
        return self._run(link.link, caller, ino, parent, name)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        return self._view(lookup.readlink, caller, ino)

    def names(self, ino: Ino, cursor: bytes | None = None) -> tuple[list[Dentry], bytes | None]:
        """A page of names in no order, and the next cursor.

        Without a cursor it is the first one, or all names where they are known; b"" begins the
        store's first. A name there throughout comes at least once, perhaps twice: leave that out.
        """
        self.store.hear()
        row = keys.dir_row(ino)
        known = self.cache.complete(row) if cursor is None else None
        if known is not None:
            return keys.unpack_dentries(row, known), None
        begin = cursor or b""
        page = self.transactor.view(lambda _txn: directory.page(self.store, self.cache, row, begin))
        return keys.unpack_dentries(row, dict(page.items)), page.cursor

    def attrs(self, inos: Sequence[Ino]) -> dict[Ino, Attr]:
        """Attributes of those that exist; one request."""
        return self.transactor.view(lambda _txn: directory.attrs(self.store, self.cache, inos))

    # --- attributes ------------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: Ino) -> Attr:
        self.store.hear()
        return lookup.known_attr(self.cache, ino) or self._view(lookup.getattr_, caller, ino)

    def open(self, caller: Caller, ino: Ino) -> Attr:
        """The attributes of a file that is being opened, asked anew unless the store vouches."""
        self.store.hear()
        known = lookup.known_attr(self.cache, ino)
        if known is None:
            return self._view(lookup.open_, caller, ino)
        self._neighbours.opened(known.parent)
        return known

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

    def require(self, caller: Caller, attr: Attr, mask: int) -> None:
        """As `access`, by attributes that are known. Raises: EACCES, EPERM, EROFS."""
        if attr.ino >= snapshot_inos.SEALED_INO or access.needs_acl(caller, attr):
            self._view(lookup.require_known, caller, attr, mask)
        else:
            access.require(caller, attr, mask)

    def getflags(self, caller: Caller, ino: Ino) -> int:
        return self._view(flags.getflags, caller, ino)

    def setflags(self, caller: Caller, ino: Ino, wanted: int) -> None:
        self._run(flags.setflags, caller, ino, wanted)

    def has_acls(self) -> bool:
        """Whether an inode of the volume has, or has had, an ACL."""
        return self.transactor.view(acls.has_acls)

    def acls(self, attr: Attr) -> tuple[Acl | None, Acl | None]:
        """The access ACL and the default ACL of an inode."""
        return self.transactor.view(partial(acls.both, attr=attr))

    def setxattr(
        self,
        caller: Caller,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int = 0,
        kill_sgid: bool = False,
    ) -> None:
        """`kill_sgid` is for ACLs: the caller is not in the file's group."""
        self._run(xattrs.setxattr, caller, ino, name, value, flags, kill_sgid)

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        xattrs.require_not_known_absent(self.cache, ino, name)
        return self._view(xattrs.getxattr, caller, ino, name)

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        return self._view(xattrs.listxattr, caller, ino)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        self._run(xattrs.removexattr, caller, ino, name)

    def statfs(self, ino: Ino = ROOT_INO) -> StatFs:
        """Of the volume, or of the quota that leaves least in directory `ino`."""
        return self._view(quota.statfs, ROOT_CALLER, ino)

    def free_space(self, ino: Ino) -> int | None:
        """How much the quotas of a file let it grow; None where it has no limit."""
        return self._view(quota.free_space, ROOT_CALLER, ino)

    def now_ns(self) -> int:
        """What time it is for the store; this host's clock may be wrong."""
        return self.transactor.view(lambda _txn: self.store.now_ns())

    def sync(self) -> None:
        """Return when what was answered survives a power loss, as far as the store can tell."""
        self.store.sync()

    # --- file data -------------------------------------------------------------------------------

    def new_slice_id(self) -> SliceId:
        return self.slices.take()

    def give_up_slices(self, ids: Iterable[SliceId]) -> None:
        """These were taken and will not become part of a file."""
        self.slices.give_up(ids)

    def read_chunk(self, ino: Ino, index: int) -> list[Slice]:
        """The slices of one 64 MiB chunk, oldest first."""
        known = extent.known_chunk(self.cache, ino, index)
        if known is not None:
            return known
        if index == 0:
            self._neighbours.missed_chunk(ino)
        return self._view(extent.read_chunk, ROOT_CALLER, ino, index)

    def write_slices(
        self,
        ino: Ino,
        batch: Sequence[tuple[int, Slice]],
        length: int,
        mtime_ns: int,
        unprivileged: Caller | None = None,
        session: SessionId | None = None,
    ) -> Changed:
        """Make stored slices part of a file: (chunk index, slice) in order.

        In no other name than that of `session`, where it is given. Those that an earlier commit in
        doubt has brought are left out. Raises: Fenced; Voided where gc may have deleted them while
        others took us for dead.
        """
        known = self.slices.settle([piece.id for _, piece in batch], self.transactor.fate)
        if known:
            batch, length = extent.without(batch, known)
            if not batch:
                attr = self.getattr(ROOT_CALLER, ino)
                self.slices.give_up(known)
                return Changed(attr, attr)
        ids, now_ns = [piece.id for _, piece in batch], self._now_ns()

        def verb(txn: Txn) -> Changed:
            txn.fence = self.sessions.fence_for(ids, session)
            env = Env(ROOT_CALLER, now_ns, *self._rules)
            return extent.write(txn, env, ino, batch, length, mtime_ns, unprivileged)

        args = (ino, batch, length, mtime_ns, unprivileged)
        with self.slices.committing(ids):
            changed = self.transactor.run(verb, (extent.write, ROOT_CALLER, now_ns, args))
        self.slices.give_up(known)
        return changed

    def settle_doubts(self) -> None:
        """Find out what became of commits of slices whose answer was lost. Raises: StoreError."""
        self.slices.settle_all(self.transactor.fate)

    def fitting(self, ino: Ino, batch: Sequence[tuple[int, Slice]]) -> int:
        """How many bytes of what `write_slices` was refused with ENOSPC or EDQUOT there is room
        for."""
        known = self.slices.settle([piece.id for _, piece in batch], self.transactor.fate)
        there = sum(piece.length for _, piece in batch if piece.id in known)
        left, _ = extent.without(batch, known)
        return there + self._view(fitting.fitting, ROOT_CALLER, ino, left)

    def forget_chunks(self, inos: Iterable[Ino]) -> None:
        """Ask the store again for what is in these files."""
        self.cache.drop([keys.inode_row(ino) for ino in inos])

    def compact_chunk(
        self, ino: Ino, index: int, old: Sequence[Slice], new: Sequence[Slice]
    ) -> bool:
        """Put `new` in place of `old`; False where somebody was first."""
        ids, now_ns = [piece.id for piece in new], self._now_ns()
        exchange = extent.Exchange(old, new)

        def verb(txn: Txn) -> bool:
            txn.fence = self.sessions.fence_for(ids)
            env = Env(ROOT_CALLER, now_ns, *self._rules)
            return extent.replace_prefix(txn, env, ino, index, exchange)

        with self.slices.committing(ids):
            return self.transactor.run(verb, (extent.replace_prefix,))
