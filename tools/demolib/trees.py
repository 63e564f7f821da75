"""Is a tree what its archives say? Contents, modes, times, owners and links of every member."""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple, TypeAlias

DIFFERENCES_MAX = 5  # shown
_TYPES = {
    tarfile.REGTYPE: stat.S_IFREG,
    tarfile.AREGTYPE: stat.S_IFREG,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
}


class Seen(NamedTuple):
    """What is compared of a file, directory or link."""

    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    names: int  # hard links of a file; file systems differ in what they say of directories
    content: str  # of a file its SHA-256, of a link its target


Tree: TypeAlias = Mapping[Path, Seen]


class Differs(Exception):
    """A tree is not what it should be."""


def members(archives: Iterable[Path]) -> Tree:
    """What unpacking these archives with `tar -x -p --numeric-owner` makes."""
    found: dict[Path, Seen] = {}
    for archive in archives:
        hard: list[tuple[Path, Path]] = []
        with tarfile.open(archive) as tar:
            for member in tar:
                path = Path(member.name)
                if member.islnk():
                    hard.append((path, Path(member.linkname)))
                else:
                    found[path] = _member(tar, member)
        for path, target in hard:
            found[path] = found[target]
        for path, target in hard:
            names = 1 + sum(other == target for _, other in hard)
            found[path] = found[target] = found[target]._replace(names=names)
    return found


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Seen:
    kind = _TYPES[member.type]
    content = member.linkname if member.issym() else ""
    file = tar.extractfile(member) if member.isreg() else None
    if file is not None:
        content = hashlib.sha256(file.read()).hexdigest()
    root = os.geteuid() == 0
    owner = (member.uid, member.gid) if root else (os.geteuid(), os.getegid())
    mtime = Decimal(member.pax_headers.get("mtime", str(int(member.mtime))))
    mode = 0o777 if member.issym() else member.mode & 0o7777
    return Seen(kind | mode, owner, int(mtime * 10**9), 1, content)


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


def compare(wanted: Tree, root: Path) -> int:
    """How many members are below `root`, and nothing else. Raises: Differs."""
    seen = {path.relative_to(root): _look(path) for path in _paths(root)}
    for folder in {above for path in wanted for above in path.parents} - wanted.keys():
        if folder in seen and stat.S_ISDIR(seen[folder].mode):
            del seen[folder]  # made by tar only because a member is in it
    names = sorted(wanted.keys() | seen.keys())
    different = [name for name in names if wanted.get(name) != seen.get(name)]
    if different:
        shown = "; ".join(
            f"{name}: {wanted.get(name)} / {seen.get(name)}" for name in different[:DIFFERENCES_MAX]
        )
        raise Differs(f"{len(different)} of {len(names)} differ: {shown}")
    return len(names)


def size(root: Path) -> tuple[int, int]:
    """Files, and the bytes in them."""
    sizes = [path.lstat().st_size for path in _paths(root) if not path.is_dir()]
    return len(sizes), sum(sizes)
