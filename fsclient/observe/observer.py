"""All that a mount shows of itself, as one part of the client.

It binds its addresses when it is made, before there is a mount, and shows something once the mount
serves. Threading: made, started and closed by the thread that mounts.
"""

from __future__ import annotations

from collections.abc import Callable

from fsclient.observe import endpoints
from fsclient.observe.options import ObserveOptions
from fsclient.observe.registry import Metrics
from fsmeta.runtime import Runtime


class Observer:
    """The registry, and who may look at it."""

    def __init__(self, options: ObserveOptions, runtime: Runtime) -> None:
        """Raises: ConfigError where an address can't be listened on."""
        self.options = options
        self._runtime = runtime
        self.metrics = Metrics()
        self._listeners = endpoints.open_listeners(options)

    def start(self, trouble: Callable[[], str]) -> None:
        """The mount serves: answer; `trouble` says what is wrong with it, or nothing."""
        routes = endpoints.metrics_routes(self.metrics, trouble)
        endpoints.start(self._listeners, self.options, routes, {}, self._runtime)

    def close(self) -> None:
        """Listen no more."""
        for listener in self._listeners.values():
            listener.close()
