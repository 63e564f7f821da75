"""Taking a mount over: what the last worker has left becomes the state of this one.

Called by `Client.start`, in this order: handles, before this client shows that it lives and agrees
to deletions; the session, and what became of commits; then locks and unsaved writes. Nothing is
served meanwhile. Where this process dies in the midst of it, the next one finds the same again.
"""

from __future__ import annotations

import logging
from typing import Final

from fsclient.background.background import Background
from fsclient.files.handles.unsynced_slices import STORAGE
from fsclient.kernel.contract import FIRST_VIRTUAL_INO
from fsclient.listings.pages import CursorRange
from fsclient.survival import tables
from fsclient.survival.kept import Past
from fsclient.survival.records import Intent
from fsclient.survival.survival import Survival
from fsclient.vfs.surviving import PastRequests, SurvivingVFS
from fsclient.vfs.vfs import VFS
from fsmeta.errors import Doubt, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.schema.keys import session_row
from fsmeta.schema.locks import Kind

log = logging.getLogger(__name__)

ATTRS_AT_ONCE: Final = 1000


class Takeover:
    """See the module."""

    def __init__(self, survival: Survival, vfs: VFS, meta: Meta) -> None:
        assert isinstance(vfs, SurvivingVFS), "the file system of a mount with a supervisor"
        self._kept = survival.kept
        self._generation = survival.generation
        self._arena = survival.kept.arena
        self._past = Past(self._arena)
        self._session = survival.kept.session()
        self._vfs = vfs
        self._meta = meta

    def restore_handles(self) -> None:
        """Open again what was open, under the same numbers. Raises: StoreError."""
        files, openings = self._vfs.files, {}
        handles = [each for each in tables.handles(self._arena) if each.ino < FIRST_VIRTUAL_INO]
        for each in handles:
            if each.is_dir:
                self._vfs.directories.restore(each.fh, each.ino)
            else:
                files.restore(each.fh, each.ino, each.flags, None)
            if each.direct:
                files.restore_direct(each.fh)
            if each.backing is not None:
                self._restore_counted(each.fh, each.backing)
            openings[each.unique] = each.fh
        for page in tables.pages(self._arena):
            extent = CursorRange(page.ino, page.begin, page.end)
            self._vfs.directories.pages.restore(page.number, extent)
        inos = list(dict.fromkeys(each.ino for each in handles))
        for begin in range(0, len(inos), ATTRS_AT_ONCE):
            for attr in self._meta.attrs(inos[begin : begin + ATTRS_AT_ONCE]).values():
                files.nameless.note(attr)
                file = files.get(attr.ino)
                if file is not None:
                    file.learn(attr, 0)
        for ino, caller in self._past.callers().items():
            file = files.get(ino)
            if file is not None:
                file.unprivileged = caller
        self._vfs.lookups.end_counting()
        self._vfs.past = PastRequests({}, self._past.appends(), openings)

    def _restore_counted(self, fh: int, backing: int) -> None:
        """A handle of a file that the kernel may read by itself: see `Passthrough`."""
        handle = self._vfs.files.file_handle(fh)
        handle.counted, handle.kept = True, not backing
        self._vfs.io.passthrough.restore(handle.file.ino, backing)

    def join(self, background: Background, journal: int) -> None:
        """Go on in the same session, and learn what became of commits. `journal` is the last change
        that the journal of the last worker has. Raises: StoreError.
        """
        if self._session is None:
            return  # the last worker has died before it joined
        names, slices = self._past.intents()
        sid, uuid = self._session
        row = session_row(sid)
        open_ones = [each for each in (*names, *slices) if not each.settled]
        asked = {each.commit.worker for each in open_ones if each.commit.fence == row}
        workers = background.take_over(sid, uuid, asked)
        applied, nothing = [], []
        for each in names:
            if self._is_applied(each, workers if each.commit.fence == row else {}, journal):
                self._vfs.past.names[each.unique] = each.ino
                applied.append(each)
            else:
                nothing.append(each)
        saved: list[int] = []
        for each in slices:
            if self._is_applied(each, workers if each.commit.fence == row else {}, journal):
                saved += each.ids
        for write in self._past.unsaved():
            if write.slice_id in saved:
                self._kept.forget(write)
        self._past.settle(applied, self._generation)
        self._past.forget([*nothing, *slices])

    def _is_applied(self, intent: Intent, workers: dict[bytes, int], journal: int) -> bool:
        if intent.settled or (intent.journal and intent.journal <= journal):
            return True
        last = workers.get(intent.commit.worker)
        if last is not None:
            return last >= intent.commit.sequence
        try:
            return self._meta.transactor.fate(Doubt(*intent.commit))
        except StoreError as error:
            log.warning("what became of a commit of the last worker is not known: %s", error)
            return False

    def restore_rest(self) -> None:
        """Locks, and what was written and is not committed. Raises: StoreError."""
        files, locks = self._vfs.files, self._vfs.locks
        for (ino, kind), tickets in tables.tickets(self._arena).items():
            try:
                self._meta.locks.cancel(ino, Kind(kind), tickets)
            except (OSError, StoreError) as error:
                log.info("waits for locks of inode %d stay in line: %s", ino, error)
            for ticket in tickets:
                self._kept.waited(ticket)
        for lock in tables.locks(self._arena):
            known = [fh for fh in lock.handles if files.has_handle(fh)]
            locks.restore(lock.ino, (Kind(lock.kind), lock.owner), known)
        if self._session is not None and self._kept.session() != self._session:
            locks.lost()  # another client has ended the session, and given them away
        if self._meta.format.storage == STORAGE:
            self._vfs.io.unsynced.know_nothing()
        count = size = 0
        for write in self._past.unsaved():
            self._kept.rewriting(write.number)
            try:
                self._vfs.io.write_again(write)
            finally:
                self._kept.rewriting(0)
            self._kept.forget(write)
            count, size = count + 1, size + len(write.data)
        opened = len(self._vfs.past.openings)
        log.info("took over %d handles and %d unsaved writes of %d bytes", opened, count, size)
