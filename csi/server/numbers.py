"""Numbers of the driver: `/metrics` for Prometheus and `/healthz` for a liveness probe."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

_REQUEST_S: Final = 10.0
_HEAD_BYTES_MAX: Final = 8192


class Numbers:
    """Counts calls. Threading: the event loop's."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()
        self._seconds: Counter[str] = Counter()

    def note(self, call: str, code: str, seconds: float) -> None:
        """A call has ended."""
        self._calls[call, code] += 1
        self._seconds[call] += seconds  # type: ignore[assignment]

    def text(self, gauges: Mapping[str, float]) -> str:
        """Lines that Prometheus reads."""
        lines = ["# TYPE slicefs_csi_calls_total counter"]
        for (call, code), count in sorted(self._calls.items()):
            lines.append(f'slicefs_csi_calls_total{{call="{call}",code="{code}"}} {count}')
        lines.append("# TYPE slicefs_csi_call_seconds_total counter")
        for call, seconds in sorted(self._seconds.items()):
            lines.append(f'slicefs_csi_call_seconds_total{{call="{call}"}} {seconds:.6f}')
        for name, value in sorted(gauges.items()):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE slicefs_csi_{name} {kind}", f"slicefs_csi_{name} {value:g}"]
        return "\n".join(lines) + "\n"


class NumbersServer:
    """Answers GET requests on a TCP port."""

    def __init__(self, pages: Mapping[str, Callable[[], tuple[int, str]]]) -> None:
        self._pages = pages

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Raises: OSError."""
        return await asyncio.start_server(self._serve, host, port, limit=_HEAD_BYTES_MAX)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_S)
            path = head.split(b" ", 2)[1].decode("ascii", "replace")
            page = self._pages.get(path)
            code, text = (404, "see /metrics and /healthz\n") if page is None else page()
            body = text.encode()
            writer.write(
                f"HTTP/1.1 {code} {'OK' if code == 200 else 'Error'}\r\n"
                f"Content-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await asyncio.wait_for(writer.drain(), _REQUEST_S)
        except (TimeoutError, OSError, ValueError, IndexError, EOFError):
            pass  # a visitor that does not speak HTTP
        except asyncio.LimitOverrunError:
            pass
        finally:
            writer.close()
