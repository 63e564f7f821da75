"""Records: JSON files for their owner alone, of which a reader sees all or nothing.

They may hold secrets. A record is written aside first, under a name of its own that begins with
`.tmp-`, so writers of one record do not meet. What a kill leaves of that is removed an hour later
by `remove_leftovers`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from csi.errors import Code, CsiError

_ASIDE: Final = ".tmp-"
_LEFT_BEHIND: Final = timedelta(hours=1)  # no writer takes so long


def read_record(path: str) -> dict[str, Any] | None:
    """What was written there; None where nothing was. Raises: CsiError where it is damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise damaged_record(path) from error
    if not isinstance(found, dict):
        raise damaged_record(path)
    return found


def damaged_record(path: str) -> CsiError:
    """A record that can't be used."""
    return CsiError(Code.INTERNAL, f"the record {path} is damaged: restore or remove it")


def write_record(path: str, content: dict[str, Any]) -> None:
    """Durable when it returns."""
    temporary = _write_aside(path, content)
    os.rename(temporary, path)
    _sync_directory(path)


def create_record(path: str, content: dict[str, Any]) -> bool:
    """Write it unless there is one; whether there was none."""
    temporary = _write_aside(path, content)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    _sync_directory(path)
    return True


def remove_record(path: str) -> None:
    """Durable when it returns; it may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        _sync_directory(path)


def remove_leftovers(directory: str) -> None:
    """Remove what writers that were killed have left in a directory of records."""
    with os.scandir(directory) as entries:
        aside = [entry for entry in entries if entry.name.startswith(_ASIDE)]
    now = datetime.now(UTC)
    for entry in aside:
        with contextlib.suppress(FileNotFoundError):
            if now - datetime.fromtimestamp(entry.stat().st_mtime, UTC) > _LEFT_BEHIND:
                os.unlink(entry.path)


def _write_aside(path: str, content: dict[str, Any]) -> str:
    fd, temporary = tempfile.mkstemp(prefix=_ASIDE, dir=os.path.dirname(path))
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(fd)
    return temporary


def _sync_directory(path: str) -> None:
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
