"""The HTTP endpoints of a mount: what each path answers, and at which addresses.

Called by `fsclient/mount/serve`: `open_listeners` before it mounts, `start` once it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from fsclient.observe.options import ObserveOptions
from fsclient.observe.registry import CONTENT_TYPE, Metrics
from fsclient.observe.routes import Address, Reply, Route
from fsmeta.runtime import Runtime

if TYPE_CHECKING:
    from fsclient.observe.http import Listener

_TEXT: Final = "text/plain; charset=utf-8"


def open_listeners(options: ObserveOptions) -> dict[Address, Listener]:
    """Listen where the options say. Raises: ConfigError; then nothing is left open."""
    wanted = {"--metrics": options.metrics, "--web": options.web}
    opened: dict[Address, Listener] = {}
    try:
        for option, address in wanted.items():
            if address is not None and address not in opened:
                from fsclient.observe.http import Listener  # most mounts listen nowhere

                opened[address] = Listener(address, option)
    except BaseException:
        for listener in opened.values():
            listener.close()
        raise
    return opened


def start(
    listeners: Mapping[Address, Listener],
    options: ObserveOptions,
    metrics: Mapping[str, Route],
    web: Mapping[str, Route],
    runtime: Runtime,
) -> None:
    """Serve `metrics` and `web` where the options say; at one address both."""
    for address, listener in listeners.items():
        routes = dict(metrics) if address == options.metrics else {}
        if address == options.web:
            routes.update(web)
        listener.start(routes, runtime, frozenset(metrics))


def metrics_routes(metrics: Metrics, trouble: Callable[[], str]) -> dict[str, Route]:
    """`/metrics` and `/healthz`; `trouble` says what is wrong with the mount, or nothing."""

    def health() -> Reply:
        wrong = trouble()
        return Reply(_TEXT, f"{wrong or 'ok'}\n".encode(), 503 if wrong else 200)

    return {"/metrics": lambda: Reply(CONTENT_TYPE, metrics.prometheus()), "/healthz": health}
