"""`Meta` whose verbs are spans of a trace. Called by the client, on mounts with `--trace`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fsmeta.errors import StoreRolledBack
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.spans import Spans
from fsmeta.store.contract import Store
from fsmeta.txn.retry import DEADLINE_S
from fsmeta.txn.traced import VERB, TracedTransactor
from fsmeta.types import Caller

T = TypeVar("T")


class TracedMeta(Meta):
    """Each verb of `ops` is a span; the transactor makes those of other verbs, and of its own."""

    def __init__(
        self,
        spans: Spans,
        store: Store,
        runtime: Runtime,
        deadline_s: float = DEADLINE_S,
        generation: int = 0,
        rolled_back: Callable[[StoreRolledBack], object] = bool,
    ) -> None:
        self._spans = spans
        transactor = partial(TracedTransactor, spans)
        super().__init__(store, runtime, deadline_s, generation, transactor, rolled_back)

    def _run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        return self._spans.within(_named(verb), super()._run, verb, caller, *args)

    def _view(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        return self._spans.within(_named(verb), super()._view, verb, caller, *args)

    def _remove(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        return self._spans.within(_named(verb), super()._remove, verb, caller, *args)


def _named(verb: Callable[..., object]) -> str:
    """`meta.rename`."""
    return VERB + getattr(verb, "__name__", "verb").strip("_")
