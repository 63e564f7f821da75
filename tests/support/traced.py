"""How much memory Python's objects take, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def tracing() -> Iterator[Callable[[], int]]:
    """Yield what tells the largest number of bytes allocated since; for `traced` only.

    It does not end the tracing: `tracemalloc.stop` crashes beside threads that free memory
    (CPython 3.11), and where it goes on everything later is slow.
    """
    tracemalloc.start()
    begun = tracemalloc.get_traced_memory()[0]
    yield lambda: tracemalloc.get_traced_memory()[1] - begun


def traced(function: Callable[..., int], *arguments: str | int) -> int:
    """What the function of a module of tests returns where a process of its own calls it."""
    name = function.__name__
    call = f"print({name}(*{arguments!r}))"
    program = f"from {function.__module__} import {name}; {call}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
