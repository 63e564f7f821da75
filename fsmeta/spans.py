"""The seam to tracing: what a request did in each layer, and for how long.

A mount without `--trace` has no `Spans`: its layers are made of other classes (`Layers` of
`fsclient/tracing/layers`), so it pays nothing. Called by those traced layers, and by
`tracing/request_spans`, which begins the first span of a request.

Which span a thread is in is a context variable; work that one thread leaves to another takes it
along through `carry`. Spans are recorded when they end, as plain objects: what sends them makes of
them what its protocol wants.

Threading: any method from any thread; a span belongs to one thread at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Final, ParamSpec, TypeAlias, TypeVar

from fsmeta.errors import Conflict, NotEmpty, ObjectMissing, Outdated
from fsmeta.runtime import Runtime

P = ParamSpec("P")
T = TypeVar("T")
Attribute: TypeAlias = str | int

TRACE_BITS: Final = 128
_ID_BITS: Final = 62  # an id and those counted up from it fit into 64 bits
# how a verb says no, and how a transaction runs again
_ORDINARY: Final = (OSError, Conflict, NotEmpty, Outdated, ObjectMissing)
_CURRENT: Final[ContextVar[TraceSpan | None]] = ContextVar("slicefs-span", default=None)


class TraceSpan:
    """What one layer did for a request. It never holds a name, a value, a key or a password."""

    __slots__ = (
        "attributes", "begun_ns", "ended_ns", "error", "failed", "name", "number", "parent",
        "trace",
    )  # fmt: skip

    def __init__(self, name: str, trace: int, number: int, parent: int, begun_ns: int) -> None:
        """`parent` is the number of the span around it, 0 for the first of a request."""
        self.name = name
        self.trace = trace
        self.number = number
        self.parent = parent
        self.begun_ns = begun_ns
        self.ended_ns = begun_ns
        self.attributes: dict[str, Attribute] = {}
        self.error = ""  # the type of an exception; "": there was none
        self.failed = False  # it was one that no program expects


class Spans:
    """Records the spans of one mount."""

    def __init__(self, runtime: Runtime, record: Callable[[TraceSpan], None], ratio: float) -> None:
        """`record` gets each span that has ended; of all requests the share `ratio` is traced."""
        self._runtime = runtime
        self._record = record
        self._ratio = ratio
        self._numbers = count(runtime.random_bits(_ID_BITS) + 1)  # `next` is atomic

    def first(self, name: str) -> TraceSpan | None:
        """The span of a request that begins; None where it is not among those that are traced."""
        if self._ratio < 1 and self._runtime.random() >= self._ratio:
            return None
        trace = self._runtime.random_bits(TRACE_BITS) | 1
        return TraceSpan(name, trace, next(self._numbers), 0, self._runtime.now_ns())

    def inside(
        self, span: TraceSpan, body: Callable[P, T], *args: P.args, **options: P.kwargs
    ) -> T:
        """`body(*args)`, whose own spans are below `span`; it does not end."""
        token = _CURRENT.set(span)
        try:
            return body(*args, **options)
        finally:
            _CURRENT.reset(token)

    def end(self, span: TraceSpan) -> None:
        """What `span` stands for is over."""
        span.ended_ns = max(span.begun_ns, self._runtime.now_ns())
        self._record(span)

    def within(self, name: str, body: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """`body(*args)` as a span below the one of the calling thread, if that is in one."""
        span = self.below(name)
        return body(*args, **options) if span is None else self.spent(span, body, *args, **options)

    def name(self) -> str:
        """Of the span that the calling thread is in; "" where it is in none."""
        around = _CURRENT.get()
        return "" if around is None else around.name

    def below(self, name: str) -> TraceSpan | None:
        """A span below the one of the calling thread; None where it is in none."""
        around = _CURRENT.get()
        if around is None:
            return None
        begun_ns = self._runtime.now_ns()
        return TraceSpan(name, around.trace, next(self._numbers), around.number, begun_ns)

    def spent(self, span: TraceSpan, body: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """`body(*args)`, with which `span` ends."""
        try:
            return self.inside(span, body, *args, **options)
        except BaseException as error:
            span.error = type(error).__name__
            span.failed = not isinstance(error, _ORDINARY) or _is_eio(error)
            raise
        finally:
            self.end(span)

    def carry(self, job: Callable[[], None]) -> Callable[[], None]:
        """`job` for another thread, as part of what this one is in."""
        around = _CURRENT.get()
        if around is None:
            return job
        span = around
        return partial(self.inside, span, job)


def _is_eio(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EIO
