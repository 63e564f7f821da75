"""The first span of each request that is traced, around what serves it.

Called by the session, which puts these around its dispatcher and its fast lanes. Requests for
virtual files and those that the kernel waits for no answer to are left out, as in the access log
are those of virtual files. Threading: the session's workers.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import Final

from fsclient.fuse.dispatch.dispatch import operation_name
from fsclient.fuse.dispatch.fast_lane import Lane
from fsclient.fuse.dispatch.subdir import Serve, Served
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.least import UNANSWERED
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.protocol import RESENT
from fsclient.kernel.contract import FIRST_VIRTUAL_INO
from fsclient.kernel.later import Later, Outcome
from fsmeta.spans import Spans, TraceSpan
from fsmeta.types import Caller, Ino

_header_at: Final = abi.IN_HEADER.unpack_from
_ATTRIBUTE_MAX: Final = 1 << 63  # an int of OTLP is below


def traced(spans: Spans, serve: Serve) -> Serve:
    """`serve`, with a span for each request."""

    def serve_traced(opcode: int, caller: Caller, ino: int, view: memoryview, end: int) -> Served:
        if ino >= FIRST_VIRTUAL_INO or opcode in UNANSWERED:
            return serve(opcode, caller, ino, view, end)
        span = spans.first(operation_name(opcode))
        if span is None:
            return serve(opcode, caller, ino, view, end)
        _describe(span, view)
        answer: Served = None
        try:
            answer = spans.inside(span, serve, opcode, caller, ino, view, end)
        finally:
            if not isinstance(answer, Later):
                _end(spans, span, answer)
        if isinstance(answer, Later):
            return answer.map(partial(_came, spans, span))
        return answer

    return serve_traced


def traced_lane(spans: Spans, opcode: int, lane: Lane) -> Lane:
    """`lane`, with a span for each request that it answers."""
    name = operation_name(opcode)

    def lane_traced(ino: Ino, view: memoryview, end: int) -> bytes | None:
        if ino >= FIRST_VIRTUAL_INO:
            return lane(ino, view, end)
        span = spans.first(name)
        if span is None:
            return lane(ino, view, end)
        answer = spans.inside(span, lane, ino, view, end)
        if answer is not None:
            _describe(span, view)
            _end(spans, span, answer)
        return answer

    return lane_traced


def _describe(span: TraceSpan, view: memoryview) -> None:
    """Which request it is, in the words of the kernel, as in the access log: `req` there."""
    _, _, unique, ino, uid, gid, pid, _ = _header_at(view)
    attributes = span.attributes
    attributes["slicefs.request"] = unique & ~RESENT
    attributes["slicefs.ino"] = ino if ino < _ATTRIBUTE_MAX else str(ino)
    attributes["slicefs.uid"], attributes["slicefs.gid"] = uid, gid
    attributes["slicefs.pid"] = pid


def _came(spans: Spans, span: TraceSpan, outcome: Outcome[Answer | int]) -> Answer | int:
    """The answer of a request that waited."""
    answer: Answer | int | None = None
    try:
        answer = outcome()
        return answer
    finally:
        _end(spans, span, answer)


def _end(spans: Spans, span: TraceSpan, answer: Served) -> None:
    """A request has this answer."""
    if isinstance(answer, int):
        span.attributes["slicefs.errno"] = errno.errorcode.get(answer, f"E{answer}")
        span.failed = answer == errno.EIO
    spans.end(span)
