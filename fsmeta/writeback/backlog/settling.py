"""Waiting until what a mount holds back is published, or can't be.

`StagedStore` owns one, beside the backlog that it looks at. A domain of which something is lost
takes nothing more, and may never be published: no call waits for it without an end.

Threading: any method from any thread; `cond` is the owner's, guards the backlog, and is notified
when something is published or refused.
"""

from __future__ import annotations

from fsmeta.runtime import Condition, Runtime
from fsmeta.writeback.backlog.publish_queue import Goal, PublishQueue
from fsmeta.writeback.entries.log_entry import EVERY, LogEntry


class Settling:
    """See the module."""

    def __init__(self, cond: Condition, backlog: PublishQueue, runtime: Runtime) -> None:
        self._cond = cond
        self._backlog = backlog
        self._runtime = runtime

    def await_entry(self, entry: LogEntry) -> None:
        """Wait until the store has an entry. Raises: EIO where what is before it is lost."""
        with self._cond:
            while self._backlog.has(entry.sequence):
                self._backlog.require_whole(entry.domains)
                self._cond.wait()

    def await_what_moves(self, upto: int) -> None:
        """Wait until all up to a sequence is published, but where something is lost."""
        with self._cond:
            while self._backlog.moves(upto):
                self._cond.wait()

    def await_goal(self, goal: Goal, deadline: float) -> bool:
        """Wait until all of `goal` is published; False if the monotonic `deadline` passes first."""
        with self._cond:
            while self._backlog.waits(*goal):
                left = deadline - self._runtime.monotonic()
                if left <= 0:
                    return False
                self._cond.wait(left)
            return True

    def await_written(self, domain: int, since: int, upto: int, deadline: float) -> bool:
        """Wait for all of a domain up to a sequence, and behind `since` for that of all others.

        Not for what is lost. False when the monotonic `deadline` passes first.
        """
        with self._cond:
            wanted = [
                entry
                for entry in self._backlog
                if entry.sequence <= upto
                and (
                    entry.sequence > since
                    or domain == EVERY
                    or not entry.domains.isdisjoint((domain, EVERY))
                )
            ]
            for entry in wanted:
                while self._backlog.has(entry.sequence) and not self._backlog.is_lost(entry):
                    left = deadline - self._runtime.monotonic()
                    if left <= 0:
                        return False
                    self._cond.wait(left)
            return True
