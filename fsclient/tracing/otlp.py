"""Our spans as those of OpenTelemetry's library. Imported by `Sender` alone: it may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Final

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from fsmeta.spans import Attribute, TraceSpan

_WORDS: Final = ("process.command", "process.executable")
_CLIENT: Final = ("store.", "object.")  # spans of requests to another server begin so
_SCOPE: Final = InstrumentationScope("slicefs", version("slicefs"))
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_FINE: Final = Status(StatusCode.UNSET)
_FAILED: Final = Status(StatusCode.ERROR)
_NO_NAME: Final = "unknown_service"  # what the library calls a service that the environment has not


def resource(described: Mapping[str, Attribute]) -> Resource:
    """What sends the spans; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME add to it.

    The words of the command stay here, whatever detectors are on: they may hold passwords.
    """
    made = Resource.create(dict(described))
    told = {name: of for name, of in made.attributes.items() if not name.startswith(_WORDS)}
    found = Resource(told, made.schema_url)
    if str(found.attributes.get(SERVICE_NAME, _NO_NAME)).startswith(_NO_NAME):
        return found.merge(Resource({SERVICE_NAME: "slicefs"}))
    return found


def readable(span: TraceSpan, sender: Resource) -> ReadableSpan:
    """`span` as the exporter takes it."""
    attributes = dict(span.attributes)
    if span.error:
        attributes["error.type"] = span.error
    kind = SpanKind.INTERNAL
    if not span.parent:
        kind = SpanKind.SERVER
    elif span.name.startswith(_CLIENT):
        kind = SpanKind.CLIENT
    return ReadableSpan(
        span.name,
        context=_context(span.trace, span.number),
        parent=_context(span.trace, span.parent) if span.parent else None,
        resource=sender,
        attributes=attributes,
        kind=kind,
        status=_FAILED if span.failed else _FINE,
        start_time=span.begun_ns,
        end_time=span.ended_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace: int, number: int) -> SpanContext:
    return SpanContext(trace, number, is_remote=False, trace_flags=_SAMPLED)
