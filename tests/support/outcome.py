"""What a call came to, as a number."""

from __future__ import annotations

from collections.abc import Callable


def errno_of(call: Callable[[], object]) -> int:
    """0 where it succeeds."""
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0
