"""What the kernel may believe and for how long, and how it learns that it no longer may.

While the store vouches for a row (client tracking), the kernel may keep what came from it for
LONG_S, so that a stat of a warm data set never leaves the kernel. Each such grant is a lease, noted
here; when the store says that others changed the row, a thread of its own sends the notifications
for its leases. Without the promise the kernel gets SHORT_S for what exists and nothing for what
does not.

A grant is noted *before* the promise is looked at, and the promise ends before leases are taken, so
no lease is missed. An answer on its way to the kernel may still arrive after its notification;
leases younger than RECENT_S are therefore told a second time a little later.

Threading: `_lock` guards the leases; the notifier holds nothing while it talks to the kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from fsclient.filesystem import Entry, Notifier, Stat
from fsmeta import schema
from fsmeta.engine import Meta
from fsmeta.runtime import Runtime, Thread
from fsmeta.types import Attr, Ino

LONG_S: Final = 3600.0
SHORT_S: Final = 1.0
RECENT_S: Final = 2.0
AGAIN_AFTER_S: Final = 0.05
LEASES_MAX: Final = 500_000  # of each kind, about 50 MB; beyond it the kernel gets SHORT_S


class _Told:
    """One batch of rows to tell the kernel about; None: everything."""

    def __init__(self, rows: Sequence[bytes] | None) -> None:
        self.rows = rows


class Coherence:
    """Grants time to the kernel, and takes it back."""

    def __init__(self, meta: Meta, runtime: Runtime) -> None:
        self._meta = meta
        self._runtime = runtime
        self._lock = runtime.lock()
        self._names: dict[Ino, dict[bytes, float]] = {}  # guarded by _lock: granted when
        self._name_count = 0  # guarded by _lock
        self._inodes: dict[Ino, float] = {}  # guarded by _lock: granted when
        self._cond = runtime.condition()
        self._queue: deque[_Told] = deque()  # guarded by _cond
        self._stopped = False  # guarded by _cond
        self._notifier: Notifier | None = None
        self._thread: Thread | None = None
        self.notifications = 0  # written by the notifier thread only
        meta.on_change(self._changed)

    def start(self, notifier: Notifier) -> None:
        """There is a kernel to tell from now on."""
        self._notifier = notifier
        self._thread = self._runtime.spawn("notifier", self._run)

    def stop(self) -> None:
        with self._cond:
            self._stopped = True
            self._cond.notify()
        if self._thread is not None:
            self._thread.join()

    # --- grants ----------------------------------------------------------------------------------

    def entry(self, parent: Ino, name: bytes, attr: Attr) -> Entry:
        """What a name leads to, with the time the kernel may believe both."""
        return Entry(attr, self._name_ttl(parent, name, SHORT_S), self.stat(attr).ttl)

    def absent(self, parent: Ino, name: bytes) -> Entry | None:
        """That a name leads nowhere; None where the kernel may not believe it."""
        ttl = self._name_ttl(parent, name, 0.0)
        return Entry(None, ttl, 0.0) if ttl else None

    def stat(self, attr: Attr) -> Stat:
        """Attributes with the time the kernel may believe them."""
        if self._notifier is None or len(self._inodes) >= LEASES_MAX:
            return Stat(attr, SHORT_S)
        with self._lock:
            self._inodes[attr.ino] = self._runtime.monotonic()
        return Stat(attr, LONG_S if self._meta.vouches_inode(attr.ino) else SHORT_S)

    def _name_ttl(self, parent: Ino, name: bytes, otherwise: float) -> float:
        if self._notifier is None or self._name_count >= LEASES_MAX:
            return otherwise
        with self._lock:
            names = self._names.setdefault(parent, {})
            if name not in names:
                self._name_count += 1
            names[name] = self._runtime.monotonic()
        return LONG_S if self._meta.vouches_names(parent) else otherwise

    def forget(self, ino: Ino) -> None:
        """The kernel has dropped an inode, and with it what it believed of it."""
        with self._lock:
            self._inodes.pop(ino, None)
            names = self._names.pop(ino, None)
            if names:
                self._name_count -= len(names)

    # --- taking back -----------------------------------------------------------------------------

    def _changed(self, rows: Sequence[bytes] | None) -> None:
        """Called by the store's thread, after our own caches have dropped the rows."""
        if self._notifier is None:
            return
        with self._cond:
            self._queue.append(_Told(rows))
            self._cond.notify()

    def _run(self) -> None:
        while True:
            with self._cond:
                while not self._queue and not self._stopped:
                    self._cond.wait()
                if self._stopped:
                    return
                told = self._queue.popleft()
            again = self._tell(told)
            if again:
                self._runtime.sleep(AGAIN_AFTER_S)
                for parent, name in again:
                    self._send(parent, name)

    def _tell(self, told: _Told) -> list[tuple[Ino, bytes | None]]:
        """Notify the kernel of one batch; the leases that are so young as to be told again."""
        leases = self._take_all() if told.rows is None else self._take(told.rows)
        young = self._runtime.monotonic() - RECENT_S
        for parent, name, _ in leases:
            self._send(parent, name)
        return [(parent, name) for parent, name, granted in leases if granted > young]

    def _send(self, ino: Ino, name: bytes | None) -> None:
        assert self._notifier is not None
        self.notifications += 1
        if name is None:
            self._notifier.inval_inode(ino)
        else:
            self._notifier.inval_entry(ino, name)

    def _take(self, rows: Sequence[bytes]) -> list[tuple[Ino, bytes | None, float]]:
        """The leases that `rows` end: (directory, name, when) or (inode, None, when)."""
        taken: list[tuple[Ino, bytes | None, float]] = []
        with self._lock:
            for row in rows:
                ino = Ino(schema.id_of(row))
                if row[:1] == schema.INODE_PREFIX:
                    granted = self._inodes.pop(ino, None)
                    if granted is not None:
                        taken.append((ino, None, granted))
                elif row[:1] == schema.DIR_PREFIX:
                    names = self._names.pop(ino, {})
                    self._name_count -= len(names)
                    taken.append((ino, None, 0.0))  # the listing the kernel may have kept
                    taken += [(ino, name, granted) for name, granted in names.items()]
        return taken

    def _take_all(self) -> list[tuple[Ino, bytes | None, float]]:
        with self._lock:
            taken: list[tuple[Ino, bytes | None, float]] = [
                (ino, None, granted) for ino, granted in self._inodes.items()
            ]
            for parent, names in self._names.items():
                taken += [(parent, name, granted) for name, granted in names.items()]
            self._inodes.clear()
            self._names.clear()
            self._name_count = 0
        return taken
