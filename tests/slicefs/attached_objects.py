"""Objects of another program's, and what tests of attached files ask of calls and trees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

BIG = os.urandom(9_000_000)  # more than two blocks
OBJECTS = {
    "a/one": b"1" * 1000,
    "a/b/two": b"22",
    "a-b": b"x",
    "big": BIG,
    "empty": b"",
    "é ü": b"3",
}


def found(root: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def code_of(call: Callable[[], object]) -> int | None:
    """The errno that a call fails with."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None
