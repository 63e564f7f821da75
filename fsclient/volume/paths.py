"""Paths and inodes of a volume that is not mounted: for tools that name what they find."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fsmeta.errors import ConfigError, Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.schema import inode, keys, scan
from fsmeta.store.contract import Store
from fsmeta.types import PATH_MAX, ROOT_CALLER, ROOT_INO, FileType, Ino


def find(meta: Meta, path: str) -> Ino:
    """The inode at an absolute path of the volume. Raises: ConfigError."""
    ino = ROOT_INO
    for name in os.fsencode(path).split(b"/"):
        if name not in (b"", b"."):
            try:
                ino = meta.lookup(ROOT_CALLER, ino, name).ino
            except OSError as error:
                raise ConfigError(f"{path} is not in the volume: {error.strerror}") from error
    return ino


def below(store: Store, top: Ino) -> Iterator[Ino]:
    """`top` and everything under it, some perhaps twice where names change meanwhile."""
    todo = [top]
    while todo:
        ino = todo.pop()
        yield ino
        row = keys.dir_row(ino)
        for name, value in scan.fields_of(store, row):
            kind, found = keys.unpack_dentry(row, name, value)
            if kind is FileType.DIR:
                todo.append(found)
            else:
                yield found


def path_of(store: Store, ino: Ino) -> str:
    """A path that leads to an inode, as far as it can be found; of several names any."""
    names: list[bytes] = []
    length = 0
    above = ino
    while above != ROOT_INO:
        try:
            step = _name_of(store, above)
        except Corrupt:
            step = None
        length += 0 if step is None else len(step[1]) + 1
        if step is None or length > PATH_MAX:
            what = f"inode {above}, which has no name"
            return what if above == ino else f"{_joined(names)} under {what}"
        above, name = step
        names.append(name)
    return _joined(names)


def _joined(names: list[bytes]) -> str:
    return "/" + b"/".join(reversed(names)).decode(errors="backslashreplace")


def _name_of(store: Store, ino: Ino) -> tuple[Ino, bytes] | None:
    """A directory that names an inode, and the name. Raises: Corrupt."""
    row = keys.inode_row(ino)
    a = store.read([(row, keys.ATTR_FIELD)])[0]
    if a is None:
        return None
    parent = inode.unpack_stable(ino, a).parent
    parents = [parent]
    if not parent:
        fields = (field for field, _ in scan.fields_of(store, row))
        parents = [Ino(keys.id_of(f)) for f in fields if f[:1] == b"p" and len(f) == 9]
    for each in parents:
        directory = keys.dir_row(each)
        for name, value in scan.fields_of(store, directory):
            if keys.unpack_dentry(directory, name, value)[1] == ino:
                return each, name
    return None
