"""Words that the tests on TiKV share: commits of a session, and what became of one."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from fsmeta.errors import StoreError
from fsmeta.store.contract import Commit, Store
from fsmeta.store.writes import Append, Put
from tests.fsmeta.engines import add, change

A, B = b"tA", b"tB"
FENCE, WORKER = b"tfence", b"w\0\1"


def put(store: Store, row: bytes, **fields: bytes) -> None:
    """Set fields of a row."""
    store.commit(change(*(Put(row, name.encode(), value) for name, value in fields.items())))


def outcome_of(work: Future[Any]) -> str:
    """What a commit in another thread came to; waits for it."""
    error = work.exception()
    assert error is None or isinstance(error, StoreError)
    return "applied" if error is None else type(error).__name__


def fenced(row: bytes, text: bytes, sequence: int) -> Commit:
    """A commit of the session FENCE, which would show if it were applied twice."""
    grow = Append(row, b"log", text)
    return change(grow, add(row, b"n", 1), fence=FENCE, worker=WORKER, sequence=sequence)
