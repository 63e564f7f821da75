"""All that a mount shows of itself, as one part of the client.

It binds its addresses when it is made, before there is a mount, and shows something once the mount
serves. Threading: made, started and closed by the thread that mounts.
"""

from __future__ import annotations

from collections.abc import Callable

from fsclient.kernel.virtual import VirtualStream
from fsclient.observe import endpoints
from fsclient.observe.access_file import AccessFile
from fsclient.observe.access_log import AccessLog
from fsclient.observe.options import ObserveOptions
from fsclient.observe.registry import Metrics
from fsclient.observe.routes import Route
from fsclient.tracing.tracing import Tracing
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime


class Observer:
    """The registry, and the servers that show it."""

    def __init__(
        self, options: ObserveOptions, runtime: Runtime, sees_requests: bool = True
    ) -> None:
        """`sees_requests`: single ones are told to `access`.

        Raises: ConfigError where an address can't be listened on, or packages are missing.
        """
        self.options = options
        self._sees_requests = sees_requests
        self._runtime = runtime
        self.metrics = Metrics()
        self.access = AccessLog(runtime, options.slow_ms)
        self.metrics.add(self.access.numbers)
        self.tracing = Tracing(options.trace, runtime)
        self.metrics.add(self.tracing.numbers)
        self._file: AccessFile | None = None
        if options.access_log:
            self._file = AccessFile(options.access_log, options.log_max_bytes, self.access, runtime)
        self._listeners = endpoints.open_listeners(options)

    def streams(self) -> dict[bytes, Callable[[], VirtualStream]]:
        """What the root of the mount has besides: the access log, where there is one."""
        return {b".accesslog": self.access.open} if self._sees_requests else {}

    def start(self, trouble: Callable[[], str], meta: Meta, mountpoint: str) -> None:
        """The mount serves: answer; `trouble` says what is wrong with it, or nothing."""
        self.tracing.start(meta.format.name, mountpoint)
        web: dict[str, Route] = {}
        if self.options.web is not None:
            from fsclient.observe.web import WebPage  # most mounts have none

            page = WebPage(self.metrics, meta, mountpoint, self._runtime)
            self.metrics.add(page.numbers)
            web = page.routes()
        routes = endpoints.metrics_routes(self.metrics, trouble)
        endpoints.start(self._listeners, self.options, routes, web, self._runtime)

    def close(self) -> None:
        """Listen no more; end the access logs, with every line in its file."""
        self.access.end()
        if self._file is not None:
            self._file.close()
        self.tracing.close()
        for listener in self._listeners.values():
            listener.close()
