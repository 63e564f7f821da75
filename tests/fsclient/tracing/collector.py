"""A collector of traces: OTLP over HTTP on loopback, decoded as the protocol has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(NamedTuple):
    """A span."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    kind: int
    failed: bool
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    sender: dict[str, Any]


class Collector:
    """What has arrived, and how requests are answered."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Received] = []
        self.bytes = b""  # of all requests, with their headers
        self.code = 200

    def take(self, path: str, headers: str, body: bytes) -> int:
        """The code of the answer."""
        self.bytes += headers.encode() + body
        if path != "/v1/traces":
            return 404
        if self.code == 200:
            self.spans += _spans_of(ExportTraceServiceRequest.FromString(body))
        return self.code

    def trees(self) -> dict[bytes, list[Received]]:
        """Spans by trace."""
        found: dict[bytes, list[Received]] = {}
        for span in list(self.spans):
            found.setdefault(span.trace, []).append(span)
        return found

    def requests(self, name: str) -> list[Received]:
        """The first spans of requests of that name."""
        return [span for span in list(self.spans) if span.name == name and not span.parent]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code = collector.take(self.path, str(self.headers), body)
            self.send_response(code)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        sender = _plain(resource.resource.attributes)
        for scope in resource.scope_spans:
            assert scope.scope.name == "slicefs"
            for span in scope.spans:
                yield Received(
                    span.name,
                    span.trace_id,
                    span.span_id,
                    span.parent_span_id,
                    span.kind,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _plain(span.attributes),
                    sender,
                )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
