"""`Meta`, the facade of the metadata: one short public method per POSIX verb.

It knows the session and the volume's settings, and has the verbs on attributes; those on names and
on file data come from its bases. What the verbs do is in `ops`. Threading: any method from any
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from fsmeta.errors import ConfigError, StoreRolledBack
from fsmeta.meta.deletion import DeletionVerbs
from fsmeta.meta.file_data import FileDataVerbs
from fsmeta.meta.locks import LockVerbs
from fsmeta.meta.names import NameVerbs
from fsmeta.meta.packing import PackVerbs
from fsmeta.meta.ranges import RangeVerbs
from fsmeta.meta.sessions import SessionVerbs
from fsmeta.ops.data import extent
from fsmeta.ops.names import acl as acls, attr, flags, lookup, xattr as xattrs
from fsmeta.rules import access, quota, settings as volume
from fsmeta.rules.context import Changed
from fsmeta.runtime import Runtime
from fsmeta.schema import keys, snapshot_inos
from fsmeta.schema.acl import Acl
from fsmeta.schema.sessions import SessionRecord
from fsmeta.store.contract import Store
from fsmeta.txn.retry import DEADLINE_S, CommitNumbers, Notices, Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr, Caller, Ino, SetAttr, StatFs


class Meta(NameVerbs, FileDataVerbs):
    """The metadata of one volume, as one client sees it."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        deadline_s: float = DEADLINE_S,
        generation: int = 0,
        transactor: Callable[..., Transactor] = Transactor,
        rolled_back: Callable[[StoreRolledBack], object] = bool,
    ) -> None:
        """`generation` is higher than that of all processes that had the same session before.
        `rolled_back` is called once, when the store is found to have gone back.

        Raises: ConfigError where there is no volume, or one of a later version.
        """
        cache, numbers = RowCache(runtime), CommitNumbers.of_generation(generation)
        notices = Notices(rolled_back, self._tell)
        run = transactor(store, runtime, cache, deadline_s, numbers=numbers, notices=notices)
        super().__init__(store, runtime, cache, run)
        self._listeners: list[Callable[[Sequence[bytes] | None], None]] = []
        self.locks = LockVerbs(run, lambda: self.sessions.own, self._tell)
        self.deletion = DeletionVerbs(run, lambda: self.sessions.own)
        self.ranges = RangeVerbs(self._run, run, lambda: self.format.version, self._turns)
        self.sessions = SessionVerbs(run, self.slices, self.locks, self._now_ns, self._obey)
        poll = store.poll_invalidations
        self.packing = PackVerbs(run, self.slices, self.sessions.fence_for, poll)
        store.watch(self._rows_changed)
        self._following = runtime.lock()  # held while new settings are read
        self._obey(run.view(volume.load_format))
        run.follow = self._follow

    @property
    def session(self) -> SessionRecord | None:
        """Ours, once there is one."""
        return self.sessions.own

    # --- settings --------------------------------------------------------------------------------

    def _follow(self) -> None:
        """The settings have changed: obey the new ones. Raises: Fenced."""
        edition = self.transactor.edition
        with self._following:  # the lock stays held: other commits need the settings
            if self.session is not None and self.transactor.edition == edition:
                self._obey(self.sessions.follow(self.session.id))

    def refresh_settings(self) -> None:
        """Read changed settings, for a caller that only looks at them. Raises: Fenced."""
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
        """Call `listener` with rows other clients changed (None: perhaps all), once forgotten.

        `first`: before those that were named earlier.
        """
        self._listeners.insert(0 if first else len(self._listeners), listener)

    def _rows_changed(self, rows: Sequence[bytes] | None) -> None:
        self._tell(self.cache.apply_invalidations(rows))

    def _tell(self, rows: Sequence[bytes] | None) -> None:
        for listener in self._listeners:
            listener(rows)

    def is_inode_leased(self, ino: Ino) -> bool:
        """Whether the store reports each change of what `getattr` says of `ino`."""
        return self.cache.is_leased(keys.inode_row(ino))

    def leased_inodes(self, inos: Collection[Ino], rows: Collection[bytes]) -> Collection[Ino]:
        """Those of `inos` that `is_inode_leased` says yes to; `inos` itself where it is all.

        `rows` are theirs.
        """
        if self.cache.are_leased(rows):
            return inos
        return {ino for ino, row in zip(inos, rows, strict=True) if self.cache.is_leased(row)}

    # --- attributes ------------------------------------------------------------------------------

    def getattr(self, caller: Caller, ino: Ino) -> Attr:
        self.store.poll_invalidations()
        return lookup.known_attr(self.cache, ino) or self._view(lookup.getattr_, caller, ino)

    def open(self, caller: Caller, ino: Ino) -> Attr:
        """The attributes of a file that is being opened, read again unless they are leased."""
        return self.open_known(ino) or self._view(lookup.open_, caller, ino)

    def open_known(self, ino: Ino) -> Attr | None:
        """`open` without asking the store; None where it has to be asked."""
        self.store.poll_invalidations()
        known = lookup.known_attr(self.cache, ino)
        if known is not None:
            self._neighbours.opened(known.parent)
        return known

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr) -> Changed:
        """Change attributes. A very long file is shortened in several commits."""
        first: Attr | None = None
        while True:
            if want.size is not None:
                self._turns.wait(ino)
            before, after = self._run(attr.setattr_, caller, ino, want)
            first = first or before
            if want.size is None or extent.is_cut(before, after, want.size):
                return Changed(first, after)
            want = want._replace(opened=True)  # an open that was allowed stays so

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
