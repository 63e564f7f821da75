"""One volume of one system: formatted fresh, mounted, remounted cold or warm, and gone at the end.

Whatever happens in between, leaving the `with` block unmounts, ends the processes and removes the
files. A lazy unmount is the last resort and is reported, because it is a bug of what is measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tools.benchlib import procs
from tools.benchlib.systems import System

COMMAND_S_MAX = 120.0  # format, mount, umount: a hang is a failure, not a result
MOUNT_S_MAX = 30.0
EXIT_S_MAX = 60.0  # an unmounted client may still be writing back

OnMount = Callable[[list[int]], Callable[[], None]]
"""Called with the pids of each mount; what it returns is called before the unmount."""


def mounted(mountpoint: Path) -> bool:
    """Whether something is mounted there; asks the kernel's table, so a dead mount can't hang."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(mountpoint) for line in lines)


class Volume:
    """A mounted volume. Not for several threads."""

    def __init__(
        self, system: System, workspace: Path, meta_url: str, on_mount: OnMount | None = None
    ) -> None:
        self.system = system
        self.meta_url = meta_url
        self.root = workspace / system.name
        self.mountpoint = self.root / "mnt"
        self.store = self.root / "store"
        self.cache = self.root / "cache"
        self._log = workspace / f"{system.name}.log"
        self._mark = uuid.uuid4().hex
        self._on_mount = on_mount
        self._before_umount: Callable[[], None] | None = None
        self._peak_rss_bytes = 0

    def __enter__(self) -> Volume:
        try:
            for directory in (self.mountpoint, self.store, self.cache):
                directory.mkdir(parents=True)
            self._run(self.system.format)
            self.mount()
        except BaseException:
            self._destroy()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._destroy()

    def mount(self) -> None:
        """Mount, and return when the kernel shows it."""
        self._run(self.system.mount)
        if not procs.wait_until(lambda: mounted(self.mountpoint), MOUNT_S_MAX):
            raise RuntimeError(f"{self.system.name} did not mount; see {self._log}")
        os.statvfs(self.mountpoint)
        if self._on_mount:
            self._before_umount = self._on_mount(self.pids())

    def umount(self) -> None:
        """Unmount, and return when the client's processes have ended."""
        self._peak_rss_bytes = self.peak_rss_bytes()
        if self._before_umount:
            self._before_umount()
            self._before_umount = None
        self._run(self.system.umount)
        gone = procs.wait_until(lambda: not mounted(self.mountpoint), MOUNT_S_MAX)
        if not gone or procs.end(self._mark, EXIT_S_MAX):
            raise RuntimeError(f"{self.system.name} did not end after umount; see {self._log}")

    def remount(self, keep_cache: bool) -> None:
        """Mount afresh: the kernel's caches and the client's memory are empty.

        Its cache directory too, unless `keep_cache`.
        """
        self.umount()
        if not keep_cache:
            shutil.rmtree(self.cache)
            self.cache.mkdir()
        self.mount()

    def pids(self) -> list[int]:
        """The processes that serve the mount."""
        return procs.marked(self._mark)

    def cpu_seconds(self) -> float:
        """CPU time of the mount's processes since it was mounted."""
        return procs.cpu_seconds(self.pids())

    def peak_rss_bytes(self) -> int:
        """The largest resident size over all mounts so far."""
        return max(self._peak_rss_bytes, procs.peak_rss_bytes(self.pids()))

    def _run(self, template: str) -> None:
        values = {"meta": self.meta_url, "store": str(self.store), "cache": str(self.cache)}
        values |= {"mountpoint": str(self.mountpoint), "log": str(self._log)}
        command = self.system.command(template, **values)
        with self._log.open("ab") as log:
            # A file, not a pipe: the daemon keeps it open.
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {procs.MARK: self._mark},
                timeout=COMMAND_S_MAX,
            ).returncode
        if status != 0:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{' '.join(command)} exited with {status}:\n{tail}")

    def _destroy(self) -> None:
        try:
            if mounted(self.mountpoint):
                self.umount()
        except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
            _warn(f"{self.system.name}: {error}")
        if mounted(self.mountpoint):
            _warn(f"{self.system.name}: unmounting lazily, it did not leave otherwise")
            subprocess.run(["umount", "-l", str(self.mountpoint)], check=False)
        killed = procs.end(self._mark, 0 if mounted(self.mountpoint) else 5)
        if killed:
            _warn(f"{self.system.name}: killed {killed}")
        if mounted(self.mountpoint):
            _warn(f"{self.mountpoint} is still mounted; {self.root} is left as it is")
            return
        shutil.rmtree(self.root, ignore_errors=True)


def _warn(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)
