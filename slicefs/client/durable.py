"""When what was written survives the loss of this host: `wait_durable` and `drain`.

Without write-back a file is in the store when it is closed or synced. With it, changes wait in the
journal, and others see them in order once they are published.

Called by `Client`. Threading: any thread.
"""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from fsmeta.errors import StoreError
from slicefs.client.connection import as_oserror
from slicefs.client.parallel import RUNTIME
from slicefs.client.paths import CallerView, Path

_FOREVER_S: Final = 10.0**9


class DrainReport(NamedTuple):
    """How far `drain` has come."""

    durable: bool  # everything that was written before it
    left_bytes: int  # written and not in the object store yet
    error: OSError | None = None  # what kept something from being stored


def wait_durable(view: CallerView, path: Path | None, timeout: float | None) -> bool:
    """Store and publish. Raises: OSError."""
    if timeout is None:
        return view.run(path, lambda: _store(view, path, _FOREVER_S))
    return _in_time(view, path, timeout).durable


def drain(view: CallerView, deadline: float) -> DrainReport:
    """Store and publish as much as can be in `deadline` seconds."""
    try:
        return _in_time(view, None, deadline)
    except OSError as error:
        return DrainReport(False, view.connection.client.unstored_bytes(), error)


def _store(view: CallerView, path: Path | None, wait_s: float) -> bool:
    """Raises: OSError, StoreError."""
    vfs, meta = view.vfs, view.connection.meta
    writeback = view.connection.client.writeback
    if path is None:
        vfs.io.unstored.syncfs()
        return writeback is None or writeback.settle(None, wait_s)
    attr = view.find(path)
    vfs.io.unstored.flush_open(None if attr.is_dir else attr.ino)
    if attr.is_dir:
        vfs.io.unstored.syncfs()
    else:
        vfs.io.unsynced.sync(attr.ino)
    meta.sync()
    return writeback is None or writeback.settle(attr.ino, wait_s)


def _in_time(view: CallerView, path: Path | None, wait_s: float) -> DrainReport:
    """`_store` on a thread that may be left behind. Raises: OSError."""
    done = RUNTIME.event()
    outcome: list[bool | Exception] = []

    def run() -> None:
        try:
            outcome.append(_store(view, path, min(wait_s, _FOREVER_S)))
        except (OSError, StoreError) as error:
            outcome.append(error)
        done.set()

    RUNTIME.spawn("slicefs-drain", run)
    done.wait(None if wait_s == inf else max(0.0, wait_s))
    left = view.connection.client.unstored_bytes()
    if not outcome:
        return DrainReport(False, left)
    if isinstance(outcome[0], Exception):
        raise as_oserror(outcome[0], path) from outcome[0]
    return DrainReport(outcome[0], left)
