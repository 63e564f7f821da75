"""Commits that pass a `StagedStore`: which of them are in doubt, and which was the last.

Threading: any method from any thread; a worker sends one commit at a time.
"""

from __future__ import annotations

from fsmeta.errors import Ambiguous, Unavailable
from fsmeta.store.contract import Commit, Store
from fsmeta.writeback.entries.log_entry import After


class Passing:
    """See the module."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._doubtful: set[tuple[bytes, int]] = set()  # sent, and their answer lost
        self.last: After | None = None  # of a session's commits, that the store has answered

    def is_doubtful(self, commit: Commit) -> bool:
        """Whether a commit was sent before, and may have been applied."""
        return (commit.worker, commit.sequence) in self._doubtful

    def send(self, commit: Commit) -> None:
        """Have the store apply a commit. Raises: as `Store.commit`."""
        mine = (commit.worker, commit.sequence)
        try:
            self._inner.commit(commit)
        except Ambiguous:
            self._doubtful.add(mine)
            raise
        except Unavailable:
            raise  # if it was in doubt, it is
        except BaseException:
            self._doubtful.discard(mine)
            raise
        self._doubtful.discard(mine)
        if commit.fence is not None:
            self.last = After(commit.fence, *mine)
