"""What quotas are called: paths, users and groups, for commands, `.stats` and the log.

A directory knows its parent and not its name, so the names of the directories above it are looked
through until it is found; once for all that are asked for together.

Threading: functions only.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterable
from typing import Any

from fsmeta.admin.quota_admin import Quota
from fsmeta.meta.meta import Meta
from fsmeta.rules import quota
from fsmeta.schema import keys
from fsmeta.types import NO_PARENT, ROOT_CALLER, ROOT_INO, Ino

_UNKNOWN = b"?"


def titles(meta: Meta, nodes: Iterable[bytes]) -> dict[bytes, str]:
    """What to call each node: `/a/b`, `user alice`, `group 1000`."""
    nodes = list(nodes)
    dirs = {Ino(keys.id_of(node)) for node in nodes if node[:1] == quota.DIR}
    paths = paths_of(meta, dirs)
    return {node: _title(node, paths) for node in nodes}


def _title(node: bytes, paths: dict[Ino, bytes]) -> str:
    kind, number = node[:1], int.from_bytes(node[1:], "big")
    if kind == quota.DIR:
        return os.fsdecode(paths[Ino(number)])
    return f"{'user' if kind == quota.USER else 'group'} {_name(kind, number) or number}"


def _name(kind: bytes, number: int) -> str | None:
    try:
        if kind == quota.USER:
            return pwd.getpwuid(number).pw_name
        return grp.getgrgid(number).gr_name
    except KeyError:
        return None


def described(node: bytes, title: str) -> dict[str, Any]:
    """Of what a limit is, for `--json`."""
    kind, number = node[:1], int.from_bytes(node[1:], "big")
    what: dict[str, Any] = {"type": "directory", "path": title, "inode": number}
    if kind != quota.DIR:
        word, key = ("user", "uid") if kind == quota.USER else ("group", "gid")
        what = {"type": word, key: number, "name": _name(kind, number)}
    return what


def as_json(each: Quota, title: str) -> dict[str, Any]:
    """One quota, for `--json`."""
    return {
        **described(each.node, title),
        "space_used": each.used.space,
        "space_limit": each.limit.space,
        "inodes_used": each.used.inodes,
        "inodes_limit": each.limit.inodes,
        "percent": round(100 * fullness(each), 1),
    }


def fullness(each: Quota) -> float:
    """Which part of the tighter limit is used."""
    parts = [used / limit for used, limit in zip(each.used, each.limit, strict=True) if limit]
    return max(parts, default=0.0)


def paths_of(meta: Meta, inos: Iterable[Ino]) -> dict[Ino, bytes]:
    """The path of each directory; `?` for what moved away meanwhile."""
    parents: dict[Ino, Ino] = {}
    todo = list(inos)
    wanted = list(todo)
    while todo:
        ino = todo.pop()
        if ino in parents or ino == ROOT_INO:
            continue
        try:
            parents[ino] = meta.getattr(ROOT_CALLER, ino).parent
        except OSError:
            parents[ino] = NO_PARENT
        if parents[ino] != NO_PARENT:
            todo.append(parents[ino])
    names = _names_of(meta, parents)
    return {ino: _path(ino, parents, names) for ino in wanted}


def _names_of(meta: Meta, parents: dict[Ino, Ino]) -> dict[Ino, bytes]:
    """The name of each inode in its parent."""
    by_parent: dict[Ino, set[Ino]] = {}
    for ino, parent in parents.items():
        if parent != NO_PARENT:
            by_parent.setdefault(parent, set()).add(ino)
    names: dict[Ino, bytes] = {}
    for parent, children in by_parent.items():
        cursor: bytes | None = b""
        while cursor is not None and children:
            page, cursor = meta.names(parent, cursor)
            for name, ino, _ in page:
                if ino in children:
                    names[ino] = name
                    children.discard(ino)
    return names


def _path(ino: Ino, parents: dict[Ino, Ino], names: dict[Ino, bytes]) -> bytes:
    parts: list[bytes] = []
    while ino in parents and len(parts) <= len(parents):
        parts.append(names.get(ino, _UNKNOWN))
        ino = parents[ino]
    return b"/" + b"/".join(reversed(parts))
