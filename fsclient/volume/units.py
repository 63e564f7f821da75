"""Sizes as people write and read them. Called by the commands; imports nothing heavy."""

from __future__ import annotations

import re
from typing import Final

from fsmeta.errors import ConfigError

SIZE_MAX: Final = (1 << 63) - 1  # what a signed 64-bit counter of the metadata holds
_SIZE: Final = re.compile(
    r"(\d{1,30}(?:\.\d{1,30})?)\s*([KMGTPE]?)(i?)B?", re.IGNORECASE | re.ASCII
)
_POWERS: Final = {unit: power for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E"))}


def parse_size(text: str) -> int:
    """Bytes in `4MiB`, `1.5G` or `4096`; K, M, … are powers of 1024 with or without the `i`.

    Raises: ConfigError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"size {text!r}: write a number and a unit, as in 4MiB or 100GiB")
    number, unit, _ = match.groups()
    scale = 1024 ** _POWERS[unit.upper()]
    size = int(number) * scale if number.isdigit() else int(float(number) * scale)
    if size > SIZE_MAX:
        raise ConfigError(f"size {text!r}: at most 8EiB less one byte")
    return size


def format_size(size: int) -> str:
    """`size` bytes as people read them: 4.0 MiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")
