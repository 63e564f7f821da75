"""What a mount shows as its root: the volume's, a directory below it, or a snapshot of either.

Called while mounting, and by jobs that are told of a directory by its number, which the kernel has
not checked. Threading: functions only.
"""

from __future__ import annotations

import errno
import os

from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.rules import access
from fsmeta.schema.snapshot_inos import snapshot_dir_of
from fsmeta.types import NO_PARENT, ROOT_CALLER, ROOT_INO, Caller, Ino


def find_root(meta: Meta, subdir: str, snapshot: str) -> Ino:
    """The directory `subdir` of a volume, or its snapshot of that name. Raises: ConfigError."""
    ino = ROOT_INO
    for name in filter(None, os.fsencode(subdir).split(b"/")):
        try:
            attr = meta.lookup(ROOT_CALLER, ino, name)
        except OSError as error:
            raise ConfigError(
                f"subdir {subdir}: {error.strerror or error} in the volume"
            ) from error
        if not attr.is_dir:
            raise ConfigError(f"subdir {subdir}: {os.fsdecode(name)} is no directory")
        ino = attr.ino
    if not snapshot:
        return ino
    try:
        return meta.lookup(ROOT_CALLER, snapshot_dir_of(ino), os.fsencode(snapshot)).ino
    except OSError as error:
        where = f"/{subdir.strip('/')}"
        raise ConfigError(
            f"{where} has no snapshot {snapshot}: see `slicefs snapshot list` on a mount"
        ) from error


def require_way(meta: Meta, caller: Caller, root: Ino, directory: Ino) -> None:
    """Let only callers ask for `directory` that could come to it from `root`.

    Raises: EACCES where there is no way for `caller`, ESTALE, ENOTDIR.
    """
    attr = meta.getattr(caller, directory)
    if not attr.is_dir:
        raise OSError(errno.ENOTDIR, "no directory")
    seen: set[Ino] = set()
    while attr.ino not in seen:
        if attr.ino == root:
            return
        if attr.parent == NO_PARENT:
            break
        seen.add(attr.ino)
        attr = meta.getattr(caller, attr.parent)
        meta.require(caller, attr, access.EXECUTE)
    raise OSError(errno.EACCES, f"no way leads from inode {root} to {directory}")
