"""A metadata engine whose commits are noted in the arena, as far as they must not be applied twice.

A worker may die between a commit and its answer. The next one finds the note, and the store knows
by session, worker and sequence whether the commit was applied (`ops/sessions/takeover`). Noted are
commits of slices, and changes of names that fail or do harm when they are repeated; the rest is
repeated.

A note goes when the commit is refused, and else with the next change of the same thread, or when
its slices count as saved. As a worker is not used again before its commit has an answer, a record
of the store that is at the sequence of a note, or above it, says that it was applied.

The outermost store of a mount. Threading: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from fsclient.survival.kept import KeptRecords
from fsclient.survival.records import CommitId
from fsmeta.errors import Ambiguous, Unavailable
from fsmeta.ops.data import extent
from fsmeta.ops.names import create, link, remove, rename, xattr
from fsmeta.store.contract import SCAN_PAGE, Applied, Commit, Page, RowPage, Store
from fsmeta.writeback.entries.intents import CreateIntent, LinkIntent, WriteIntent

_ON_NAMES: Final[frozenset[Callable[..., Any]]] = frozenset(
    (
        *(create.create, link.link, remove.unlink, remove.rmdir, rename.rename),
        *(xattr.setxattr, xattr.removexattr),
    )
)


class _Note(NamedTuple):
    """What the calling thread commits."""

    commit: CommitId
    ino: int
    ids: Sequence[int]


_noted: ContextVar[_Note | None] = ContextVar("kept_commit", default=None)


def journalled(kept: KeptRecords, sequence: int) -> None:
    """A journal holds what the calling thread commits, as its entry `sequence`."""
    note = _noted.get()
    if note is None:
        return
    if note.ids:
        kept.commits_slices(note.commit, note.ids, sequence)
    else:
        kept.commits_names(note.commit, note.ino, sequence)


class KeptStore:
    """Notes the commits to `inner`."""

    def __init__(self, inner: Store, kept: KeptRecords) -> None:
        self._inner = inner
        self._kept = kept
        self._doubtful: set[tuple[bytes, int]] = set()  # item access is atomic
        self.name = inner.name
        self.history = inner.history
        self.has_leases, self.poll_invalidations, self.watch = (
            inner.has_leases,
            inner.poll_invalidations,
            inner.watch,
        )
        self.now_ns, self.tidy, self.sync = inner.now_ns, inner.tidy, inner.sync
        self.everything, self.close = inner.everything, inner.close
        self.read, self.read_many, self.read_linked = inner.read, inner.read_many, inner.read_linked
        self.read_rows, self.read_short_rows = inner.read_rows, inner.read_short_rows

    @property
    def round_trips(self) -> int:
        return self._inner.round_trips

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        return self._inner.scan(row, cursor, limit)

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        return self._inner.scan_rows(prefix, cursor, limit)

    def commit(self, commit: Commit) -> Applied | None:
        """See `Store`."""
        note = _note_of(commit)
        if note is None:
            return self._inner.commit(commit)
        kept, doubt = self._kept, (commit.worker, commit.sequence)
        if note.ids:
            key = kept.commits_slices(note.commit, note.ids)
        else:
            key = kept.commits_names(note.commit, note.ino)
        token = _noted.set(note)
        try:
            applied = self._inner.commit(commit)
        except Ambiguous:
            self._doubtful.add(doubt)
            raise
        except BaseException as error:
            if not (isinstance(error, Unavailable) and doubt in self._doubtful):
                self._doubtful.discard(doubt)
                kept.refused(key)
            raise
        finally:
            _noted.reset(token)
        self._doubtful.discard(doubt)
        return applied


def _note_of(commit: Commit) -> _Note | None:
    """What is to be noted of a commit; None where it may be repeated."""
    if not commit.call or not commit.writes or commit.fence is None:
        return None
    verb, args = commit.call.verb, commit.call.args
    ident = CommitId(commit.fence, commit.worker, commit.sequence)
    if verb is extent.write:
        return _Note(ident, 0, [piece.id for _, piece in WriteIntent(*args).batch])
    return _Note(ident, _ino_shown(verb, args), ()) if verb in _ON_NAMES else None


def _ino_shown(verb: Callable[..., object], args: Sequence[Any]) -> int:
    """The inode that the answer of a verb on names shows; 0 where it shows none."""
    if verb is create.create:
        return CreateIntent(*args).node.ino
    return LinkIntent(*args).ino if verb is link.link else 0


def _conforms(store: KeptStore) -> Store:
    return store
