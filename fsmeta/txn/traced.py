"""Transactions that are spans of a trace. Called by `TracedMeta`, on mounts with `--trace`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from fsmeta.spans import Spans
from fsmeta.store.contract import Call
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn

T = TypeVar("T")

VERB: Final = "meta."  # with it begins the name of a verb's span


class TracedTransactor(Transactor):
    """Each transaction is a span, below that of its verb."""

    def __init__(self, spans: Spans, *args: Any, **options: Any) -> None:
        """The rest is as `Transactor` has it."""
        super().__init__(*args, **options)
        self._spans = spans

    def run(
        self, verb: Callable[[Txn], T], call: Call | None = None, vouched_only: bool = False
    ) -> T:
        if self._spans.name().startswith(VERB):
            return self._run_traced(verb, call, vouched_only)
        return self._spans.within(_named(verb), self._run_traced, verb, call, vouched_only)

    def _run_traced(self, verb: Callable[[Txn], T], call: Call | None, vouched_only: bool) -> T:
        span = self._spans.below("transaction")
        if span is None:
            return super().run(verb, call, vouched_only)
        attempts = 0

        def attempt(txn: Txn) -> T:
            nonlocal attempts
            attempts += 1
            span.attributes["slicefs.attempts"] = attempts
            return verb(txn)

        return self._spans.spent(span, super().run, attempt, call, vouched_only)


def _named(verb: Callable[..., object]) -> str:
    """After the method of `Meta` or its like that made a lambda of `verb`: `meta.names`."""
    while isinstance(verb, partial):
        verb = verb.func
    place = getattr(verb, "__qualname__", "verb").partition(".<locals>")[0]
    return VERB + place.rpartition(".")[2].strip("_")
