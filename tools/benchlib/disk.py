"""A disk of its own for what a benchmark writes: ext4 on a loop device, in memory, held to a speed.

`--disk-mib N` puts the caches, the journals and the plain directories beside them there, so that
programs and the raw disk meet the same one, whatever disk the machine has. The kernel holds the
device back (blkio in cgroup v1, io in v2); 0 leaves it as fast as memory. Only root may do that.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20
IMAGE_BYTES: Final = 6 << 30  # sparse: what is written of it is in memory, and trimmed at the end
COMMAND_S_MAX: Final = 60.0
CGROUPS: Final = Path("/sys/fs/cgroup")
SELF: Final = Path("/proc/self/cgroup")
_V1: Final = "blkio/blkio.throttle.write_bps_device"


@contextmanager
def held_to(mib_s: float, image_dir: Path, mountpoint: Path) -> Iterator[Path]:
    """An empty file system at `mountpoint`, written at `mib_s` at most, that goes at the end.

    Raises: RuntimeError where this machine can't.
    """
    if os.geteuid() != 0:
        raise RuntimeError("--disk-mib needs root: it makes a loop device and holds it back")
    with ExitStack() as stack:
        image = image_dir / f"{mountpoint.parent.name}.ext4"
        stack.callback(image.unlink, missing_ok=True)
        with image.open("xb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        device = _run("losetup", "--find", "--show", str(image)).strip()
        stack.callback(_run, "losetup", "--detach", device)
        mountpoint.mkdir()
        _run("mount", "-t", "ext4", device, str(mountpoint))
        stack.callback(_run, "umount", str(mountpoint))
        if mib_s:
            number = os.stat(device).st_rdev
            stack.enter_context(
                throttled(CGROUPS, f"{os.major(number)}:{os.minor(number)}", int(mib_s * MIB))
            )
        yield mountpoint


@contextmanager
def throttled(cgroups: Path, device: str, bytes_s: int) -> Iterator[None]:
    """The block device MAJOR:MINOR takes no more than `bytes_s` from this process and its children.

    Raises: RuntimeError where the kernel has no control of that.
    """
    if (cgroups / _V1).exists():  # of the root: write-back of pages is the root's in v1
        (cgroups / _V1).write_text(f"{device} {bytes_s}\n")
        try:
            yield
        finally:
            (cgroups / _V1).write_text(f"{device} 0\n")
        return
    controllers = cgroups / "cgroup.controllers"
    if not controllers.exists() or "io" not in controllers.read_text().split():
        raise RuntimeError(f"--disk-mib N: no blkio (v1) or io (v2) in {cgroups}; 0 needs neither")
    (cgroups / "cgroup.subtree_control").write_text("+io\n")
    group = cgroups / f"slicefs-bench-{os.getpid()}"
    before = cgroups / SELF.read_text().rpartition("::/")[2].strip()
    group.mkdir()
    try:
        (group / "io.max").write_text(f"{device} wbps={bytes_s}\n")
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n")
        yield
    finally:
        (before / "cgroup.procs").write_text(f"{os.getpid()}\n")
        group.rmdir()


def _run(*command: str) -> str:
    """What a command prints. Raises: RuntimeError with what it said instead."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S_MAX)
    except FileNotFoundError as error:
        raise RuntimeError(f"--disk-mib needs {command[0]}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
