"""The rate limits of one mount: what counts, what waits, and what divides them among mounts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from fsclient.qos.exchange import LimitExchange
from fsclient.qos.limiter import RateLimiter
from fsclient.qos.throttle import Throttle, not_direct
from fsmeta.admin import rate_limits
from fsmeta.meta.meta import Meta
from fsmeta.rules.rate_limits import RateLimits
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)


class Qos:
    """See the module. Threading: as its parts."""

    def __init__(
        self,
        meta: Meta,
        runtime: Runtime,
        mount: RateLimits,
        is_direct: Callable[[int], bool] = not_direct,
    ) -> None:
        """`mount`: the limits of this mount alone. `is_direct`: see `Throttle`."""
        self._mount = mount
        self.limiter = RateLimiter(runtime, mount, partial(rate_limits.nodes_above, meta))
        self.throttle = Throttle(runtime, self.limiter, is_direct)
        self.exchange = LimitExchange(meta, self.limiter, self.throttle, runtime)

    def start(self) -> None:
        """Learn the volume's limits, now and from now on."""
        if any(self._mount):
            log.info("this mount has rate limits of its own: %s", self._mount)
        self.exchange.start()

    def stop(self) -> None:
        """The session has ended: leave the volume's limits to other mounts."""
        self.throttle.close()
        self.exchange.stop()
