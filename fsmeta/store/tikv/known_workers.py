"""The last sequence that each worker has committed, as far as no answer was lost.

`tikv/group_commit` asks before a transaction: a worker's record that is known need not be read. It
would be the very key that the worker's last commit has left locked for a moment.

Threading: loop thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fsmeta.store.contract import Commit, Key

WORKERS_MAX: Final = 4096  # a mount has as many as threads


class KnownWorkers:
    """Workers of which the last commit is not in doubt, the latest last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, int] = OrderedDict()

    def blind(self, commits: Sequence[Commit]) -> frozenset[Key]:
        """Records that need not be read: they are there, and older than these commits."""
        return frozenset(
            (commit.fence, commit.worker)
            for commit in commits
            if commit.fence is not None
            and 0 <= self._known.get((commit.fence, commit.worker), -1) < commit.sequence
        )

    def remember(self, commit: Commit) -> None:
        """A commit was applied."""
        if commit.fence is None:
            return
        key = (commit.fence, commit.worker)
        self._known[key] = max(commit.sequence, self._known.get(key, 0))
        self._known.move_to_end(key)
        while len(self._known) > WORKERS_MAX:
            self._known.popitem(last=False)

    def doubt(self, commit: Commit) -> None:
        """A commit may have been applied."""
        if commit.fence is not None:
            self._known.pop((commit.fence, commit.worker), None)
