"""Commands in a mount namespace of their own, as root or as an ordinary user.

The user gets what an ordinary system has: `/dev/fuse` that everyone may open, and a Python and a
`slicefs` that he can reach (root's own may lie in /root).
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.faults.program import REPOSITORY, SLICEFS, Done, needs_mounts

NOBODY = 65534
SCRIPT_S = 120
BINDS = {
    "python": sys.base_prefix,
    "site": sysconfig.get_path("purelib"),
    "repo": str(REPOSITORY),
}

needs_namespaces = [
    needs_mounts,
    pytest.mark.skipif(
        None in (shutil.which("unshare"), shutil.which("setpriv"), shutil.which("fusermount3")),
        reason="needs unshare, setpriv and fusermount3",
    ),
]

# Copies of mounts that others have would keep their clients alive.
_PREPARE = "set -e; mount --make-rprivate /; umount -a -l -t fuse.slicefs"
# a process namespace as well, so that nothing outlives the script, daemons included
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")


def as_root(script: str, base: Path) -> Done:
    """Run a shell script where what it mounts is seen by nobody else; $B is `base`."""
    environment = {
        **os.environ,
        "B": str(base),
        "PATH": f"{Path(SLICEFS).parent}:/usr/sbin:/usr/bin:/bin",
    }
    return _run([*_APART, f"{_PREPARE}\n{script}"], environment)


def as_user(script: str, base: Path, prepare: str = "") -> Done:
    """Run a shell script as nobody with a home of his own; `prepare` runs before, as root."""
    home = base / "home"
    if not home.exists():
        _furnish(base, home)
    binds = [f"mount --bind {source} {base}/{name}" for name, source in BINDS.items()]
    become = f"exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups sh -c"
    whole = [_PREPARE, f"mount --bind {base}/fuse /dev/fuse", *binds, prepare, f'{become} "$1"']
    environment = {
        "HOME": str(home),
        "B": str(base),
        "PATH": f"{base}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"{base}/repo:{base}/site",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return _run([*_APART, "\n".join(whole), "sh", script], environment)


def _furnish(base: Path, home: Path) -> None:
    """The user's home, a device for all and a program that he can reach."""
    for name in (*BINDS, "bin"):
        (base / name).mkdir()
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    os.mknod(base / "fuse", stat.S_IFCHR, os.stat("/dev/fuse").st_rdev)
    (base / "fuse").chmod(0o666)
    program = base / "bin/slicefs"
    python = f"{base}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    start = "from fsclient.cli.main import main; main()"
    library = f"export LD_LIBRARY_PATH={base}/python/lib"  # not the system's of another version
    program.write_text(f"#!/bin/sh\n{library}\nexec {python} -c '{start}' \"$@\"\n")
    program.chmod(0o755)


def _run(command: list[str], environment: dict[str, str]) -> Done:
    done = subprocess.run(
        command,
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SCRIPT_S,
    )
    return Done(done.returncode, done.stdout, done.stderr, 0.0)
