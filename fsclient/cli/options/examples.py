"""Examples at the end of a command's help, in lines that click leaves as they are."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """The epilog of a command."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
