"""A trainer that is killed at a chosen call of its save.

`python -m tests.slicefs.checkpoint.killed_saver` runs it.

The process forks one trainer for each kill. A trainer counts what it asks of the system (opens,
writes, fsyncs, renames, removals) and of a volume's client, and sends itself SIGKILL at the call
that the seed chose. ROOT is a directory or the URL of a volume. After each one the newest step is
read back and compared with what the seed says it must hold.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

from slicefs.checkpoint.manager import StepManager
from slicefs.checkpoint.manifest import CHUNK_BYTES
from slicefs.client.paths import CallerView
from slicefs.stores.opening import open_tree

FILES = ("model.bin", "optimizer/part-0.bin", "optimizer/part-1.bin", "config.json")
CALLS_MAX = 160  # of one save and its retention; a greater number lets it end


def content(step: int, name: str) -> bytes:
    """What a file of a step holds."""
    chance = random.Random(f"{step}/{name}")
    size = chance.choice((0, 1, 4096, 300_000, CHUNK_BYTES, CHUNK_BYTES + 5))
    return chance.randbytes(1) * size if size > CHUNK_BYTES else chance.randbytes(size)


def train(root: str, steps: int) -> None:
    """Save `steps` steps behind the newest one."""
    manager = StepManager(root, keep_last=2, ephemeral_every=3)
    newest = manager.latest()
    first = 1 if newest is None else newest.number + 1
    for step in range(first, first + steps):
        with manager.save(step) as saving:
            for name in FILES:
                with saving.open(name) as file:
                    data = content(step, name)
                    for at in range(0, len(data), 200_000):
                        file.write(data[at : at + 200_000])


def die_at(call: int) -> None:
    """Arrange to be killed at that call of the system."""
    left = call

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*words: Any, **named: Any) -> Any:
            count()
            return function(*words, **named)

        return run

    os.fsync = counted(os.fsync)
    CallerView.run = counted(CallerView.run)  # type: ignore[method-assign]
    sys.addaudithook(
        lambda event, _: count() if event.startswith(("os.", "open", "shutil.")) else None
    )


def check(root: str) -> int:
    """The newest step; its bytes are compared. Raises: AssertionError."""
    manager = StepManager(root)
    newest = manager.latest(digest=True)
    if newest is None:
        return 0
    assert newest.names == sorted(FILES)
    for name in FILES:
        assert newest.read(name) == content(newest.number, name), (newest.number, name)
    return newest.number


def main(root: str, seed: int, kills: int) -> None:
    """Print the newest step after each kill."""
    chance = random.Random(seed)
    reached = 0
    for _ in range(kills):
        call = chance.randrange(1, CALLS_MAX)
        child = os.fork()
        if child == 0:
            die_at(call)
            train(root, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), (call, status)
        newest = check(root)
        assert newest >= reached, f"killed at call {call}: {reached} was there, now {newest}"
        reached = newest
        print(call, status, newest, flush=True)
    train(root, 1)
    assert check(root) == reached + 1
    names = [entry.name for entry in open_tree(root).list_dir()]
    left = [name for name in names if name.startswith((".saving", ".removing"))]
    assert not left, left


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
