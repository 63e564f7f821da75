"""The directory on a host's disk for the journal of a mount: one a mount, locked while it runs.

`DIR/UUID/0`, `1`, …: a mount takes the first free one, preferring one with a journal in it, so that
the next mount takes up what was left. A journal that no mount takes up waits. A mount with other
options than before has another DIR: what was left in the usual ones counts.

A client killed a moment ago may still hold its own, and is waited for: its journal is to be taken.

The lock is all that keeps mounts apart, whatever containers and hosts they are on: pids and names
mean nothing there. Where other hosts may not see it nothing is staged.

Threading: called before a mount serves.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fsclient.volume.flock_scope import locks_may_be_unseen
from fsclient.writeback.lock_holder_exiting import is_held_by_exiting
from fsdata.resources.private_paths import (
    make_private,
    open_private,
    require_private,
    require_private_files,
)
from fsdata.staging import journal
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

SLOTS_MAX: Final = 64  # mounts of one volume on one host
DYING_S: Final = 30.0  # for a killed client to be gone; then its journal waits for the next mount
_LOCK: Final = "lock"
_LOOK_S: Final = 0.02


class JournalDir(NamedTuple):
    """A directory that is ours while `lock` is open."""

    path: str
    lock: int


def take_slot(runtime: Runtime, root: str, volume: str, others: Sequence[str] = ()) -> JournalDir:
    """A directory below `root` for the journal of a mount of `volume`.

    Or one below `others`, if a journal is left there. Raises: ConfigError.
    """
    slot = _take_below(runtime, root, volume)
    for other in others:
        if not os.path.isdir(os.path.join(other, volume)):
            continue
        try:
            found = _take_below(runtime, other, volume)
        except ConfigError as error:
            log.warning("%s; what is left there waits", error)
            continue
        if has_log(found.path) and not has_log(slot.path):
            slot, found = found, slot
        elif has_log(found.path):
            _warn_of_left(found.path)
        os.close(found.lock)
    return slot


def _take_below(runtime: Runtime, root: str, volume: str) -> JournalDir:
    """Raises: ConfigError."""
    base = os.path.join(os.path.abspath(root), volume)
    try:
        make_private(base)
        require_private(base, f"staging directory {root}")
        _require_locks(root, base)
        taken = _take(runtime, base)
    except OSError as error:
        raise ConfigError(
            f"staging directory {root}: {error.strerror}: name a directory that you may write to"
        ) from error
    if taken is None:
        raise ConfigError(f"staging directory {root}: {SLOTS_MAX} mounts of this volume use it")
    return taken


def _require_locks(root: str, base: str) -> None:
    """Raises: ConfigError where two hosts could take one slot."""
    if fstype := locks_may_be_unseen(base):
        raise ConfigError(
            f"staging directory {root}: it is on {fstype}, where another host may not see that "
            "this one has a journal there, and would write over it: name a disk of this host"
        )


def _take(runtime: Runtime, base: str) -> JournalDir | None:
    """The best slot that no mount holds."""
    empty: JournalDir | None = None
    left: JournalDir | None = None
    for number in range(SLOTS_MAX):
        path = os.path.join(base, str(number))
        is_new = not os.path.isdir(path)
        if is_new and (left or empty):
            break
        slot = _lock(runtime, path)
        if slot is None:
            continue
        if not has_log(path):
            empty = _better(empty, slot)
        elif left is None:
            left = slot
        else:
            _warn_of_left(path)
            os.close(slot.lock)
    if left is not None and empty is not None:
        os.close(empty.lock)
    return left or empty


def warn_of_journals(roots: Sequence[str], volume: str) -> None:
    """Say in the log what mounts of `volume` have left below `roots`: this one takes up nothing."""
    for path, root in left_journals(roots, volume):
        log.warning(
            "%s has the journal of a mount that has ended, and no mount shows what is "
            "in it: mount with --writeback --staging-dir %s once to have it published",
            path,
            root,
        )


def left_journals(roots: Sequence[str], volume: str) -> Iterator[tuple[str, str]]:
    """Journals of `volume` below `roots` that no mount holds, and below which root each is."""
    for root in roots:
        for number in range(SLOTS_MAX):
            path = os.path.join(root, volume, str(number))
            try:
                if not os.path.isdir(path):
                    break
                if has_log(path) and not _is_held(path):
                    yield path, root
            except OSError as error:
                log.info("%s: %s", path, error.strerror)


def _is_held(path: str) -> bool:
    """Whether a mount has a slot. Meanwhile it looks held to a mount that takes slots."""
    fd = os.open(os.path.join(path, _LOCK), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _warn_of_left(path: str) -> None:
    log.warning(
        "%s has the journal of another mount that has ended: mount the volume once more on this "
        "host to have it published",
        path,
    )


def _better(empty: JournalDir | None, slot: JournalDir) -> JournalDir:
    """The first of two slots; the other is let go."""
    if empty is None:
        return slot
    os.close(slot.lock)
    return empty


def has_log(path: str) -> bool:
    """Whether a slot has a journal in it that was not drained."""
    return os.path.isdir(path) and any(name.startswith(journal.PREFIX) for name in os.listdir(path))


def _lock(runtime: Runtime, path: str) -> JournalDir | None:
    """A slot, unless another process holds it that goes on to live. Raises: OSError."""
    make_private(path)
    require_private_files(path, "staging directory")
    fd = open_private(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT)
    deadline = runtime.monotonic() + DYING_S
    while not (is_ours := _try_lock(fd)) and runtime.monotonic() < deadline:
        if not is_held_by_exiting(fd):
            is_ours = _try_lock(fd)  # the holder may be gone since
            break
        runtime.sleep(_LOOK_S)
    if is_ours:
        return JournalDir(path, fd)
    os.close(fd)
    return None


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
