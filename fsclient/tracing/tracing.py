"""All that traces a mount, as one part of what it shows of itself.

Called by `Observer`. Threading: made, started and closed by the thread that mounts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from fsclient.fuse.dispatch.fast_lane import Lane
from fsclient.fuse.dispatch.subdir import Serve
from fsclient.tracing.layers import Layers, traced_layers
from fsclient.tracing.options import TraceOptions
from fsclient.tracing.request_spans import traced, traced_lane
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime
from fsmeta.spans import Spans

if TYPE_CHECKING:
    from fsclient.tracing.sender import Sender

Around: TypeAlias = Callable[[Serve, Callable[[], int | None]], Serve]  # as `SessionConfig` has it
AroundLane: TypeAlias = Callable[[int, Lane], Lane]

log = logging.getLogger(__name__)


class Tracing:
    """The layers of a client, traced if that was asked for."""

    def __init__(self, options: TraceOptions | None, runtime: Runtime) -> None:
        """Raises: ConfigError where packages are missing that the command line needs."""
        self._sender = None if options is None else _sender(options, runtime)
        self.layers = Layers()
        self.around: tuple[Around, ...] = ()
        self.around_lane: tuple[AroundLane, ...] = ()
        if options is not None and self._sender is not None:
            spans = Spans(runtime, self._sender.take, options.ratio)
            self.layers = traced_layers(spans)
            self.around = (lambda serve, _slot: traced(spans, serve),)
            self.around_lane = (partial(traced_lane, spans),)

    def start(self, volume: str, mountpoint: str) -> None:
        """The mount serves: send."""
        if self._sender is not None:
            self._sender.start(volume, mountpoint)

    def close(self) -> None:
        """The mount leaves."""
        if self._sender is not None:
            self._sender.close()

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        return {} if self._sender is None else self._sender.numbers()


def _sender(options: TraceOptions, runtime: Runtime) -> Sender | None:
    """None where only the environment asks for traces, and there can be none."""
    obstacle = options.obstacle
    if not obstacle:
        from fsclient.tracing.sender import Sender  # most mounts send no traces

        try:
            return Sender(options, runtime)
        except ConfigError as error:
            if options.asked:
                raise
            obstacle = str(error)
    log.warning("no traces, though OTEL_EXPORTER_OTLP_* ask for them: %s", obstacle)
    return None
