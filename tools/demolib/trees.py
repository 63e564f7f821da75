"""Is one tree the same as another? Contents, modes, times, owners and links."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DIFFERENCES_MAX = 5  # shown


class Seen(NamedTuple):
    """What is compared of a file, directory or link."""

    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    names: int  # hard links of a file; file systems differ in what they say of directories
    content: str  # of a file its SHA-256, of a link its target


class Differs(Exception):
    """Two trees are not the same."""


def _paths(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            yield Path(folder, name)


def _look(path: Path) -> Seen:
    info = path.lstat()
    content, names = "", 1
    if stat.S_ISLNK(info.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(info.st_mode):
        names = info.st_nlink
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    return Seen(info.st_mode, (info.st_uid, info.st_gid), info.st_mtime_ns, names, content)


def compare(left: Path, right: Path) -> int:
    """How many entries both trees have. Raises: Differs."""
    ours = {path.relative_to(left): _look(path) for path in _paths(left)}
    theirs = {path.relative_to(right): _look(path) for path in _paths(right)}
    names = sorted(ours.keys() | theirs.keys())
    different = [name for name in names if ours.get(name) != theirs.get(name)]
    if different:
        shown = "; ".join(
            f"{name}: {ours.get(name)} / {theirs.get(name)}" for name in different[:DIFFERENCES_MAX]
        )
        raise Differs(f"{len(different)} of {len(names)} differ: {shown}")
    return len(names)


def size(root: Path) -> tuple[int, int]:
    """Files, and the bytes in them."""
    sizes = [path.lstat().st_size for path in _paths(root) if not path.is_dir()]
    return len(sizes), sum(sizes)
