"""Mount as an ordinary user, use the mount, unmount; run by `test_user_mount` as root.

    python -m tests.fsclient.fuse.user_mount MOUNTPOINT UID

Everything is imported before the uid changes, because the interpreter may lie where only root can
read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fsclient.fuse.mount.mount import find_mount, mount, umount, user_allow_other
from fsclient.fuse.session.session import Session
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from tests.fsclient.fuse.ramfs import RamFS

SOURCE = "vol,with\\odd"


def main(mountpoint: str, uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if not user_allow_other():
        with pytest.raises(ConfigError, match="user_allow_other"):
            mount(mountpoint, SOURCE, ["allow_other"])
    mounted = mount(mountpoint, SOURCE, ["noatime"])
    session = Session(mounted, fs_of(uid), SystemRuntime())
    session.start()
    info = find_mount(mountpoint)
    assert info is not None
    assert (info.fstype, info.source) == ("fuse.slicefs", SOURCE), info
    file = Path(mountpoint, "file")
    file.write_bytes(b"data")
    assert file.read_bytes() == b"data"
    assert file.stat().st_uid == uid
    umount(mountpoint)
    session.wait()
    with pytest.raises(ConfigError, match="can't unmount"):
        umount(mountpoint)
    print("done")


def fs_of(uid: int) -> RamFS:
    """A file system whose root belongs to `uid`."""
    fs = RamFS()
    for node in fs.nodes.values():
        node.attr = node.attr._replace(uid=uid, gid=uid)
    return fs


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
