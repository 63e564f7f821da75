"""A mount through fusermount3 by someone who is not root."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fsclient.fuse.mounting import needs_root_and_fuse

NOBODY = 65534
REPOSITORY = Path(__file__).parents[3]
# A mount namespace of its own, where /dev/fuse is open to all as on an ordinary system.
SCRIPT = """
set -e
mount --make-rprivate /
umount -a -l -t fuse.slicefs || :  # copies of what others have mounted, who may be killing it
mount --bind "$1" /dev/fuse
exec "$2" -m tests.fsclient.fuse.user_mount "$3" "$4"
"""


@needs_root_and_fuse
@pytest.mark.skipif(
    shutil.which("fusermount3") is None or shutil.which("unshare") is None,
    reason="needs fusermount3 and unshare",
)
def test_mount_as_nobody() -> None:
    base = Path(tempfile.mkdtemp(prefix="slicefs-user-"))
    try:
        base.chmod(0o755)
        mountpoint = base / "mnt"
        mountpoint.mkdir()
        os.chown(mountpoint, NOBODY, NOBODY)
        device = base / "fuse"
        os.mknod(device, stat.S_IFCHR | 0o666, os.stat("/dev/fuse").st_rdev)
        device.chmod(0o666)
        arguments = [str(device), sys.executable, str(mountpoint), str(NOBODY)]
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", SCRIPT, "sh", *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "done"
    finally:
        shutil.rmtree(base)
