"""File locks of one mount: requests that wait are parked, and the kernel drops what it cached
before.

Called by the VFS for GETLK, SETLK and SETLKW, at close(2), and by `Background` when another client
has ended our session. `fsmeta.ops.sessions.lock` defines what locks mean, `lock_table` knows the
possible holders; the rest is what a mount adds. `lock_requests` asks the store: its thread answers
what has waited, and pages and sizes from before a lock are dropped when it is granted. Here, what
was written is stored before a lock is given up.

A file that no program here locks costs nothing: `OpenFiles.locked` does not have it.

Threading: any method from any thread; nothing here changes after `start`.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from functools import partial

from fsclient.files.file_io import FileIO
from fsclient.files.handles.open_files import OpenFiles
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import FileLock, LockCalls, LockReplies
from fsclient.kernel.later import Later
from fsclient.survival.records import NOT_KEPT, Keeper
from fsclient.vfs.locks.lock_requests import LockRequests
from fsclient.vfs.locks.lock_table import Holder, LockTable, Waiter
from fsclient.vfs.locks.parking import Publishing
from fsmeta.errors import StoreError
from fsmeta.meta.locks import Range
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.schema.locks import Kind
from fsmeta.types import Ino

log = logging.getLogger(__name__)


class FileLocks:
    """See the module."""

    def __init__(
        self,
        meta: Meta,
        io: FileIO,
        files: OpenFiles,
        coherence: CacheLeases,
        runtime: Runtime,
        require_writable: Callable[[], None],
        keeper: Keeper = NOT_KEPT,
    ) -> None:
        """`require_writable` raises EROFS on a mount that is frozen."""
        self._meta = meta
        self._io = io
        self._files = files
        self._coherence = coherence
        self._runtime = runtime
        self._require_writable = require_writable
        self._host = socket.gethostname()
        self._table = LockTable(runtime, files.locked, keeper)
        self._requests = LockRequests(meta, io, runtime, self._table)
        self._releases = self._requests.releases
        self.cancel = self._requests.cancel
        self.stop = self._requests.stop
        self.numbers = self._table.numbers
        self.restore = self._table.restore

    def start(self, replies: LockReplies) -> None:
        """Requests that wait are answered through `replies` from now on."""
        self._requests.replies = replies

    def wait_for(self, publishing: Publishing) -> None:
        """Other clients see what was written under a lock before it is given up."""
        self._releases.wait_for(publishing, self._runtime)
        self._table.mark = publishing.mark

    # --- requests --------------------------------------------------------------------------------

    def getlk(self, ino: Ino, owner: int, lock: FileLock) -> FileLock | None:
        """F_GETLK: what is in the way. A process of another host has no number here."""
        bar = self._meta.locks.getlk(ino, owner, Range(lock.write, lock.begin, lock.end))
        if bar is None:
            return None
        pid = bar.pid
        session = self._meta.session
        if session is None or bar.owner.session != session.id:
            there = self._meta.locks.session_info(bar.owner.session).get("host")
            pid = pid if there == self._host else 0
        return FileLock(bar.write, bar.begin, bar.end, pid)

    def setlk(
        self, fh: int, owner: int, lock: FileLock, flock: bool, request: int, wait: bool
    ) -> bool:
        """Take a lock; False where the answer will come through `LockReplies`.

        Raises: EROFS, EAGAIN, EDEADLK, ENOLCK, EIO where this handle's locks were lost.
        """
        self._require_writable()
        file = self._io.handle(fh).file
        holder = Kind.FLOCK if flock else Kind.POSIX, owner
        held = self._table.holding(file.ino, holder)
        waiter = Waiter(request, file, holder, lock)
        replies = self._requests.replies
        wait = wait and replies is not None
        if not lock.write and held is not None and held.since is not None:
            self._io.flush_file(file)  # readers get in when it turns into a read lock
            parked = self._releases.unseen(file.ino, held, replies is None, request)
            if parked is not None:
                parked.go = partial(self._setlk_parked, waiter, fh, wait)
                parked.cancelled = replies is not None and replies.interrupted()
                self._releases.parking.put(parked)
                return False
        return self._requests.take(waiter, fh, wait)

    def _setlk_parked(self, waiter: Waiter, fh: int, wait: bool, seen: bool) -> None:
        """`setlk` of a request that was parked, and its answer."""
        code = errno.EINTR
        if seen:
            try:
                if not self._requests.take(waiter, fh, wait):
                    return
                code = 0
            except StoreError as error:
                log.error("setlk ino %d: %s", waiter.ino, error)
                code = errno.EIO
            except OSError as error:
                code = error.errno or errno.EIO
        self._requests.answer(waiter, code)

    # --- giving up -------------------------------------------------------------------------------

    def unlock(self, fh: int, owner: int, lock: FileLock, flock: bool) -> Later[None] | None:
        """F_UNLCK, LOCK_UN: what was written is stored first, and other clients see it.

        None where it is done. Raises: EIO where the lock was lost; what storing met, and then the
        lock stays: else what is stored later would hide what the next holder has written.
        """
        file = self._files.file_handle(fh).file
        holder = Kind.FLOCK if flock else Kind.POSIX, owner
        holding = self._table.holding(file.ino, holder)
        if holding is not None and holder not in self._table.lost.get(file.ino, ()):
            self._io.flush_file(file)
            parked = self._releases.unseen(file.ino, holding, self._requests.replies is None)
            if parked is not None:
                then = partial(self._unlock_now, file.ino, holder, lock.begin, lock.end)
                return self._releases.parking.later(parked, then)
        self._unlock_now(file.ino, holder, lock.begin, lock.end)
        return None

    def _unlock_now(
        self, ino: Ino, holder: Holder, begin: int, end: int, seen: bool = True
    ) -> None:
        """Raises: EINTR, and the lock stays; EIO where it was lost."""
        if not seen:
            raise OSError(
                errno.EINTR, "other clients do not see yet what was written under the lock"
            )
        if holder not in self._table.lost.get(ino, ()):
            self._releases.unlock(ino, holder, begin, end)
        if self._forget_lost(ino, holder):  # before, or while we gave it up
            raise OSError(errno.EIO, f"inode {ino}: the lock was lost with the session")

    def closed(self, ino: Ino, owner: int) -> Later[None] | None:
        """close(2) of one descriptor, and all is stored: the process loses its fcntl locks.

        None where it is done, or where no request waits for it.
        """
        holder = Kind.POSIX, owner
        holding = self._table.holding(ino, holder)
        parked = None
        try:
            if holding is not None:
                parked = self._releases.unseen(ino, holding, self._requests.replies is None)
        except StoreError as error:  # then it is owed
            log.debug("giving up locks of inode %d: %s", ino, error)
        if parked is None:
            self._releases.give_up(ino, holder)
            return None

        def then(seen: bool) -> None:
            del seen  # where it is not, they are given up when it is
            try:
                self._releases.give_up(ino, holder, parked.upto)
            finally:
                self.told(ino, owner)

        return self._releases.parking.later(parked, then)

    def told(self, ino: Ino, owner: int) -> None:
        """close(2) has said that locks are lost, or what else was wrong."""
        self._forget_lost(ino, (Kind.POSIX, owner))

    def released(self, ino: Ino, fh: int) -> None:
        """The last close of a handle: what was locked through it alone is free, soon at least."""
        alone, lost = self._table.leave_handle(ino, fh)
        file = self._files.get(ino)
        if alone and file is not None:
            self._io.unstored.store_or_void(file)
        for holder in lost:
            self._forget_lost(ino, holder, fh)
        for holder in alone:
            self._releases.give_up(ino, holder)

    # --- a session that was ended ----------------------------------------------------------------

    def lost(self) -> None:
        """Another client has ended our session, and given our locks away.

        Before there is a new one: nothing that was written under a lock may be committed in it.
        """
        inos, count = self._table.lose(self._releases.released())
        for ino in inos:
            self._mark(ino, void=True)
        if count:
            log.warning("%d owners have lost their locks: using those files is EIO", count)
        self._requests.session_ended()

    def _mark(self, ino: Ino, void: bool = False) -> None:
        """Let a file know which of its handles are not to be used; `void`: as in `set_lost`."""
        file = self._files.get(ino)
        handles = self._table.lost_handles(ino)
        if file is not None:
            self._files.set_lost(file, handles, void)
        if void:
            self._coherence.notices.drop_pages(ino, _nothing, _nothing)

    def _forget_lost(self, ino: Ino, holder: Holder, fh: int = 0) -> bool:
        """The owner knows, or its handle is gone; whether it had lost anything."""
        had = self._table.forget_lost(ino, holder, fh)
        if had:
            self._mark(ino)
        return had


def _nothing() -> None:
    """No request waits for it."""


_CONFORMS: type[LockCalls] = FileLocks
