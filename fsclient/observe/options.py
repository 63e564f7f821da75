"""What a mount was told to show of itself, and where."""

from __future__ import annotations

from typing import NamedTuple

from fsclient.observe.routes import Address
from fsclient.tracing.options import TraceOptions


class ObserveOptions(NamedTuple):
    """Options of `slicefs mount`; parsed by `cli/options/observe_options`."""

    metrics: Address | None = None
    web: Address | None = None
    access_log: str = ""  # a file; "": none
    slow_ms: float | None = None  # requests that took as long are logged
    hide: bool = False  # there is no `.stats` and no `.accesslog`
    log_json: bool = False
    syslog: str = ""  # an address that gets the log, too; "": none
    trace: TraceOptions | None = None
    log_max_bytes: int = 0  # then the log begins anew; 0: it grows
