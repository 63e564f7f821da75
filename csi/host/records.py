"""Records: JSON files for their owner alone, of which a reader sees all or nothing.

They may hold secrets. A file that a kill left behind half written has a name that begins with
`.tmp-`; the next write of a record with the same name takes its place.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from csi.errors import Code, CsiError


def read_record(path: str) -> dict[str, Any] | None:
    """What was written there; None where nothing was. Raises: CsiError where it is damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CsiError(
            Code.INTERNAL, f"the record {path} is damaged: restore or remove it"
        ) from error
    if not isinstance(found, dict):
        raise CsiError(Code.INTERNAL, f"the record {path} is damaged: restore or remove it")
    return found


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


def _write_aside(path: str, content: dict[str, Any]) -> str:
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".tmp-{name}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
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
