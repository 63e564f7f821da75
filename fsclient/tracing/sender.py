"""Sends spans to a collector, as OTLP over HTTP: the only place that knows OpenTelemetry's library.

No request ever waits for the collector: a span is put into a queue, which drops what it has no room
for, and one thread sends what is there. A collector that is away is one warning.

Threading: `take` from any thread; `_lock` guards the queue and is a leaf.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from fsclient.tracing.options import TraceOptions
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.spans import Attribute, TraceSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 20_000  # spans that wait, of some 1 kB: ten seconds of a busy mount
BATCH_MAX: Final = 512  # in a request, as OpenTelemetry has it
GATHER_S: Final = 1.0  # how long spans wait for others to be sent with
LEAVE_S: Final = 2.0  # how long unmounting waits for the last spans to be sent
_INSTALL: Final = "traces need packages: pip install 'slicefs[trace]'"
_SUCCESS: Final = 0  # SpanExportResult.SUCCESS
_LIBRARY: Final = "opentelemetry"  # its logger


class Sender:
    """The queue, and the thread that empties it."""

    def __init__(self, options: TraceOptions, runtime: Runtime) -> None:
        """Raises: ConfigError where the packages are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            from fsclient.tracing import otlp
        except ImportError as error:
            raise ConfigError(_INSTALL) from error
        self._options = options
        self._runtime = runtime
        self._convert = otlp.readable
        self._resource_of = otlp.resource
        if not log.isEnabledFor(logging.DEBUG):  # it warns of each try; we do once
            logging.getLogger(_LIBRARY).setLevel(logging.CRITICAL + 1)
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=options.endpoint)
        self._lock = runtime.lock()
        self._queue: deque[TraceSpan] = deque()  # guarded by _lock
        self._dropped = 0  # guarded by _lock
        self._sent = 0  # written by the thread
        self._away = False  # the last request failed; written by the thread
        self._wake = runtime.event()
        self._leaving = self._ended = False  # written by `close`
        self._resource: Any = None
        self._thread: Thread | None = None

    def start(self, volume: str, mountpoint: str) -> None:
        """Send from now on, as the mount of `volume` on `mountpoint`."""
        described: dict[str, Attribute] = {
            "service.version": version("slicefs"),
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            "slicefs.volume": volume,
            "slicefs.mountpoint": mountpoint,
        }
        self._resource = self._resource_of(described)
        self._thread = spawn_lasting(self._runtime, "traces", self._run)
        log.info("traces go to %s", self._options.shown())

    def take(self, span: TraceSpan) -> None:
        """A span has ended."""
        with self._lock:
            waiting = len(self._queue)
            if waiting >= QUEUE_MAX:
                self._dropped += 1
            else:
                self._queue.append(span)
        if waiting >= BATCH_MAX:
            self._wake.set()

    def close(self) -> None:
        """Send what there is, unless the collector is away or slow."""
        self._leaving = True
        self._wake.set()
        if self._away:
            self._exporter.shutdown()  # ends the pause before its next try
        if self._thread is not None:
            self._thread.join(LEAVE_S)
        self._ended = True
        if not self._away:
            self._exporter.shutdown()

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        with self._lock:
            return {
                "trace_spans_sent_total": self._sent,
                "trace_spans_dropped_total": self._dropped,
            }

    def _run(self) -> None:
        while True:
            self._wake.wait(GATHER_S)
            self._wake.clear()
            leaving = self._leaving
            while batch := self._next():
                self._send(batch)
            if leaving:
                return

    def _next(self) -> list[TraceSpan]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]

    def _send(self, batch: list[TraceSpan]) -> None:
        """Send spans, or drop them; say once that the collector does not take them."""
        if self._leaving and self._away:
            self._drop(len(batch))
            return
        made = [self._convert(span, self._resource) for span in batch]
        if self._exporter.export(made).value == _SUCCESS:
            self._sent += len(batch)
            if self._away:
                log.info("traces go to %s again", self._options.shown())
            self._away = False
            return
        self._drop(len(batch))
        if not self._away and not self._ended:  # else it was not given the time
            log.warning(
                "%s takes no traces: they are dropped until it does; check the address and the "
                "collector, which has to take OTLP over HTTP (its usual port is 4318)",
                self._options.shown(),
            )
        self._away = True

    def _drop(self, spans: int) -> None:
        with self._lock:
            self._dropped += spans
