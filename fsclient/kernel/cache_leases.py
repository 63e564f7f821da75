"""What the kernel may cache and for how long.

While this client has a lease on a row (client tracking), the kernel may cache what came from it for
LONG_S, so that a stat of a warm data set never leaves the kernel. Each such grant is noted here;
when the row is invalidated, `KernelNotices` takes the grants that it ends, and tells the kernel.
Without a lease the kernel gets SHORT_S for what exists and nothing for what does not.

No grant is missed: it is noted *before* the lease is looked at, the lease ends before grants are
taken, and a grant whose directory was taken meanwhile is noted again.

open(2) promises more than SHORT_S: what is cached without a lease is noted with its version,
and where an open finds another one the kernel is told before open returns (`opened`).

Threading: grants take no lock (each step on the leases is atomic); the notifier thread takes
leases. In a directory whose lock stops notifications of names the kernel gets SHORT_S.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from fsclient.kernel.contract import LEASED_S, EntryOut, Notifier, Stat
from fsclient.kernel.ended_leases import EndedLeases, Lease
from fsclient.kernel.kernel_notices import KernelNotices
from fsmeta.dentries import Dentries
from fsmeta.meta.meta import Meta
from fsmeta.ops.names import lookup
from fsmeta.runtime import Runtime
from fsmeta.schema import keys
from fsmeta.txn.contended_dirs import BELIEVED_S
from fsmeta.types import Attr, Ino

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor
LONG_S: Final = LEASED_S
SHORT_S: Final = 1.0
_DOTS: Final = (b".", b"..")
LEASES_MAX: Final = 500_000  # of each kind: 90 MB, without invalidations 160; then all end


class CacheLeases:
    """Grants time to the kernel, and takes it back."""

    def __init__(self, meta: Meta, runtime: Runtime) -> None:
        self._meta = meta
        self._cache = meta.cache
        self._busy = meta.cache.busy
        self._names: dict[Ino, set[bytes]] = {}
        self._name_count = 0  # about: threads may miss each other's additions
        self._inodes: set[Ino] = set()
        self._long: set[Ino] = set()  # those of them that the kernel caches for LONG_S
        self._short: dict[Ino, tuple[int, int]] = {}  # mtime and size, cached for SHORT_S
        self._listed: set[Ino] = set()  # directories whose listing the kernel may have kept
        self._notifier: Notifier | None = None
        self.notices = KernelNotices(runtime, self._take)
        self._is_slow = self.notices.is_slow
        meta.on_change(self.notices.changed)

    def start(
        self, notifier: Notifier, under_way: Callable[[], Collection[int]] = frozenset
    ) -> None:
        """There is a kernel to tell from now on; `under_way` are its requests without an answer."""
        self._notifier = notifier
        self.notices.start(notifier, under_way)

    def numbers(self) -> dict[str, float]:
        """For `.stats`: what the kernel may answer by itself, and what it was told to forget."""
        return {
            "kernel_notifications_total": self.notices.sent,
            'kernel_leases{kind="name"}': self._name_count,
            'kernel_leases{kind="inode"}': len(self._inodes),
        }

    # --- grants ----------------------------------------------------------------------------------

    def entry(self, parent: Ino, name: bytes, attr: Attr) -> EntryOut:
        """What a name leads to, with the time the kernel may cache both."""
        if self._notifier is None:
            return EntryOut(attr, SHORT_S, SHORT_S)
        return _new(EntryOut, (attr, self._name_ttl(parent, name), self._attr_ttl(attr)))

    def grant_absent(self, parent: Ino, name: bytes) -> bool:
        """Whether a name leads nowhere and the kernel may cache that for LONG_S.

        Noted before the cache is asked: an invalidation in between takes it back.
        """
        if self._notifier is None or self._busy.has_dir(parent):
            return False
        if self._name_count >= LEASES_MAX:
            self._make_room()
        names = self._names_of(parent)
        if name not in names:
            self._name_count += 1
            names.add(name)
        if self._cache.get(keys.dir_row(parent), name, need_vouched=True) is not None:
            return False
        return self._names.get(parent) is names and not self._is_slow(parent)

    def grant_attr(self, ino: Ino) -> Attr | None:
        """The leased attributes of an inode, which the kernel may cache for LONG_S; None where
        there are none. Noted before the cache is asked. Raises: Corrupt."""
        if self._notifier is None or self._busy.has_dir(ino):
            return None
        inodes = self._inodes
        if len(inodes) >= LEASES_MAX:
            return None
        inodes.add(ino)
        attr = lookup.leased_attr(self._cache, ino)
        if attr is None or ino not in inodes or inodes is not self._inodes:
            return None
        self._long.add(ino)
        return attr

    def stat(self, attr: Attr) -> Stat:
        """Attributes with the time the kernel may cache them."""
        return Stat(attr, SHORT_S if self._notifier is None else self._attr_ttl(attr))

    def reading(self, ino: Ino) -> None:
        """The kernel is about to keep pages of a file, maybe without asking for its attributes.

        To be called before the store is asked what is in them.
        """
        while True:
            inodes = self._inodes
            inodes.add(ino)
            if inodes is self._inodes:
                return

    def _make_room(self) -> None:
        """Where there are too many leases, begin anew: most are of what is not used any more."""
        if max(len(self._inodes), self._name_count) >= LEASES_MAX:
            self.notices.changed(None)

    def _names_of(self, parent: Ino) -> set[bytes]:
        """The leased names of a directory, to be added to."""
        names = self._names.get(parent)
        return self._names.setdefault(parent, set()) if names is None else names

    def _attr_ttl(self, attr: Attr) -> float:
        ino = attr[0]
        if len(self._inodes) >= LEASES_MAX:
            self._make_room()
        if attr.is_dir and self._busy.has_dir(ino):
            return BELIEVED_S
        while True:
            inodes = self._inodes
            inodes.add(ino)
            long = self._cache.is_leased(keys.inode_row(ino))
            if ino in inodes and inodes is self._inodes:
                if long:
                    self._long.add(ino)
                    return LONG_S
                self._short[ino] = (attr.mtime_ns, attr.size)
                return SHORT_S

    def _name_ttl(self, parent: Ino, name: bytes) -> float:
        if self._name_count >= LEASES_MAX:
            self._make_room()
        if self._busy.has_dir(parent):
            return BELIEVED_S  # no lease: the next invalidation would end it
        while True:
            names = self._names_of(parent)
            if name not in names:
                self._name_count += 1
                names.add(name)
            long = self._cache.is_leased(keys.dir_row(parent))
            ttl = LONG_S if long and not self._is_slow(parent) else SHORT_S
            if self._names.get(parent) is names:
                return ttl

    def entries(
        self, parent: Ino, names: Sequence[bytes], inos: Sequence[Ino], rows: Sequence[bytes]
    ) -> tuple[float, Collection[Ino]]:
        """`entry` for many names: how long the kernel may cache them, and of which inodes it may
        cache the attributes for LONG_S (`inos` itself where that is all). `rows` are theirs."""
        if self._notifier is None:
            return SHORT_S, ()
        self._make_room()
        while True:
            inodes, held = self._inodes, self._names_of(parent)
            before = len(held)
            held.update(names)
            inodes.update(inos)
            self._name_count += len(held) - before
            slow = self._is_slow(parent)
            name_ttl = LONG_S if self._meta.are_names_leased(parent) and not slow else SHORT_S
            if self._busy.has_dir(parent):
                name_ttl = BELIEVED_S
            long = self._meta.leased_inodes(inos, rows)
            taken = inodes is not self._inodes or self._names.get(parent) is not held
            if not taken and inodes.issuperset(inos):
                break
        self._long.update(long)
        return name_ttl, long

    def shortly(self, told: Iterable[tuple[Ino, tuple[int, int]]]) -> None:
        """Inodes with mtime and size, which the kernel is to cache for SHORT_S: see `opened`."""
        if self._notifier is not None:
            self._short.update(told)

    def unknown(self, parent: Ino, names: Dentries) -> Dentries:
        """Those of a listing, without `.` and `..`, that the kernel may not still cache."""
        if any(name in _DOTS for name in names.names[:2]):  # there if anywhere
            names = names.pick([at for at, name in enumerate(names.names) if name not in _DOTS])
        held = self._names.get(parent)
        known = self._long.intersection(names.inos, self._inodes) if held else ()
        if not held or not known or not self._meta.are_names_leased(parent):
            return names
        pairs = enumerate(zip(names.names, names.inos, strict=True))
        lacking = [at for at, (name, ino) in pairs if ino not in known or name not in held]
        return names.pick(lacking) if len(lacking) < len(names) else names

    def listing(self, ino: Ino) -> tuple[bool, bool]:
        """Whether the kernel may keep the listing of a directory that is being opened, and whether
        one that it has kept is still true."""
        if self._notifier is None or not self._meta.are_names_leased(ino):
            return False, False
        keep = ino in self._listed
        self._listed.add(ino)
        return True, keep

    def forget(self, ino: Ino) -> None:
        """The kernel has dropped an inode, and with it what it cached of it."""
        self._inodes.discard(ino)
        self._long.discard(ino)
        self._short.pop(ino, None)
        self._listed.discard(ino)
        self._name_count -= len(self._names.pop(ino, ()))

    # --- taking back -----------------------------------------------------------------------------

    def named(self, parent: Ino) -> None:
        """We gave a directory a name that the kernel has not asked for."""
        self.notices.changed([keys.dir_row(parent), keys.inode_row(parent)])

    def opened(self, attr: Attr) -> None:
        """A file is being opened, and these are its attributes.

        From the thread that serves the request: `inval_attr` waits for no request.
        """
        told = self._short.get(attr.ino)
        if told is not None and told != (attr.mtime_ns, attr.size):
            assert self._notifier is not None
            self._notifier.inval_attr(attr.ino)
            if self._short.get(attr.ino) is told:  # last: another open must not rely on it before
                self._short.pop(attr.ino, None)

    def _take(self, rows: Sequence[bytes] | None) -> EndedLeases:
        """The leases that `rows` end; all of them for None."""
        if rows is None:
            inodes, self._inodes = self._inodes, set()
            self._long = set()
            self._short = {}
            names, self._names = self._names, {}
            self._name_count = 0
            every: list[Lease] = []
            while self._listed:
                every.append((self._listed.pop(), None))
            for parent, held in list(names.items()):
                every += [(parent, name) for name in list(held)]
            return EndedLeases(list(inodes), every)
        ended = EndedLeases([], [])
        for row in rows:
            ino = Ino(keys.id_of(row))
            if row[:1] == keys.INODE_PREFIX and ino in self._inodes:
                self._inodes.discard(ino)
                self._long.discard(ino)
                ended.inodes.append(ino)
            elif row[:1] == keys.DIR_PREFIX:
                held = self._names.pop(ino, set())
                self._listed.discard(ino)
                self._name_count -= len(held)
                ended.twice.append((ino, None))  # the listing the kernel may have kept
                ended.twice.extend((ino, name) for name in list(held))
        return ended
