"""Settings of CPython itself that suit a server of short requests. Called once, before any thread.

Measured on two cores: with the default switch interval of 5 ms one busy thread delays every request
by that much; automatic garbage collection cost a tenth of all processor time, because it walks the
row cache again and again and finds nothing, as the code makes next to no reference cycles.
"""

from __future__ import annotations

import gc
import sys
from typing import Final

from fsdata.resources.malloc import keep_freed_memory

SWITCH_S: Final = 0.0002
# new containers before the young are looked at, and how seldom the older ones are; a full
# collection happens about once in 10^9 allocations, so cycles are freed while they are young
_GC_THRESHOLDS: Final = (50_000, 50, 400)


def tune(buffer_bytes: int) -> None:
    """Prepare the process to serve; `buffer_bytes` is the memory it may keep for file data."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    keep_freed_memory(buffer_bytes)
