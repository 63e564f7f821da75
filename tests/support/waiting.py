"""Waiting for what is bound to come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

SOON_S: Final = 60.0  # by then any news has come; only a failure takes longer

# what a client says where its Redis, or itself, stood still for a second or two
STOOD_STILL: Final = "Redis does not answer, so calls wait|Redis answers again, after"


def wait_until(true: Callable[[], Any], seconds: float = SOON_S) -> None:
    """Returns when `true()` is; fails when that takes too long."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)
