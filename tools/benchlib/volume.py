"""One volume of one system: formatted fresh, mounted, remounted cold or warm, and gone at the end.

Whatever happens in between, leaving the `with` block unmounts, ends the processes and removes the
files. A lazy unmount is the last resort and is reported, because it is a bug of what is measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

from tools.benchlib import ceph, procs
from tools.benchlib.s3 import S3
from tools.benchlib.systems import RCLONE, System

COMMAND_S_MAX = 120.0  # format, mount, umount: a hang is a failure, not a result
MOUNT_S_MAX = 30.0
STORED_S_MAX = 300.0
EXIT_S_MAX = 60.0  # an unmounted client may still be writing back

OnMount = Callable[[list[int]], Callable[[], None]]
"""Called with the pids of each mount; what it returns is called before the unmount."""


def mounted(mountpoint: Path) -> bool:
    """Whether something is mounted there; asks the kernel's table, so a dead mount can't hang."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(mountpoint) for line in lines)


def bucket_of(system: System) -> str:
    """Where a system keeps its objects, on stores that have buckets."""
    return f"bench-{system.name}"


def _is_gone(mountpoint: Path) -> bool:
    return not mounted(mountpoint)


class BenchVolume:
    """A mounted volume. Not for several threads."""

    def __init__(
        self,
        system: System,
        workspace: Path,
        meta_url: str,
        s3: S3 | None = None,
        on_mount: OnMount | None = None,
        disk: Path | None = None,
    ) -> None:
        """`s3`: where the data goes; None: into a directory. `disk`: where caches are, if not in
        the workspace.
        """
        self.system = system
        self.meta_url = meta_url
        self.root = workspace / system.name
        self.disk = (disk or workspace) / system.name  # of the caches, and what is beside them
        self.mountpoint = self.root / "mnt"
        self.store = self.root / "store"
        self.cache = self.disk / "cache"
        self._s3 = s3
        self._log = workspace / f"{system.name}.log"
        self._mark = uuid.uuid4().hex
        self._on_mount = on_mount
        self._before_umount: Callable[[], None] | None = None
        self._peak_rss_bytes = 0

    def __enter__(self) -> BenchVolume:
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

    @contextmanager
    def more_mounts(self, count: int, options: str = "") -> Iterator[list[Path]]:
        """The volume mounted `count` times more, with `options`, each with its own cache."""
        mounts = [self.root / f"mnt{number}" for number in range(count)]
        try:
            for mount in mounts:
                mount.mkdir()
                template = f"{self.system.mount} {options}"
                self._run(template, mount, self.disk / f"cache-{mount.name}")
                if not procs.wait_until(partial(mounted, mount), MOUNT_S_MAX):
                    raise RuntimeError(f"{self.system.name} did not mount; see {self._log}")
            yield mounts
        finally:
            for mount in filter(mounted, mounts):
                self._unmount(mount)
            for mount in mounts:
                if not procs.wait_until(partial(_is_gone, mount), MOUNT_S_MAX):
                    raise RuntimeError(f"{mount} is still mounted")
                mount.rmdir()

    def umount(self) -> None:
        """Unmount, and return when the client's processes have ended."""
        self._peak_rss_bytes = self.peak_rss_bytes()
        if self._before_umount:
            self._before_umount()
            self._before_umount = None
        if not procs.wait_until(self.is_stored, STORED_S_MAX):
            raise RuntimeError(f"{self.system.name} does not store what was closed")
        self._unmount(self.mountpoint)
        gone = procs.wait_until(lambda: not mounted(self.mountpoint), MOUNT_S_MAX)
        if not gone or procs.end(self._mark, EXIT_S_MAX):
            raise RuntimeError(f"{self.system.name} did not end after umount; see {self._log}")

    def _unmount(self, mountpoint: Path) -> None:
        if self.system.umount:
            self._run(self.system.umount, mountpoint)
        else:
            subprocess.run(["umount", str(mountpoint)], check=True, timeout=COMMAND_S_MAX)

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

    def spent(self) -> procs.ProcessorTime:
        """What the mount's processes have used since it was mounted."""
        return procs.spent(self.pids())

    def fetched_bytes(self) -> int:
        """Bytes that have come from the store since it was mounted, as the client counts them."""
        lines = (self.mountpoint / ".stats").read_text().splitlines()
        found = [line.split()[1] for line in lines if line.split()[0] == self.system.fetched]
        return int(float(found[0])) if found else 0

    def peak_rss_bytes(self) -> int:
        """The largest resident size over all mounts so far."""
        return max(self._peak_rss_bytes, procs.peak_rss_bytes(self.pids()))

    def _run(
        self, template: str, mountpoint: Path | None = None, cache: Path | None = None
    ) -> None:
        values = {"meta": self.meta_url, "cache": str(cache or self.cache)}
        values |= {"mountpoint": str(mountpoint or self.mountpoint), "log": str(self._log)}
        values["volume"] = f"bench-{self._mark[:8]}"
        command = self.system.command(template.replace("{place}", self.place()), **values)
        with self._log.open("ab") as log:
            # A file, not a pipe: the daemon keeps it open.
            status = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                timeout=COMMAND_S_MAX,
            ).returncode
        if status != 0:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{' '.join(command)} exited with {status}:\n{tail}")

    def requests(self) -> int | None:
        """What the object store was asked by now; None where requests are not counted."""
        return None if self._s3 is None else self._s3.requests()

    def is_stored(self) -> bool:
        """Whether a system that answers close(2) first has stored what it was given."""
        if not self.system.dirty:
            return True
        dirty = "".join(self.system.dirty.split())
        files = [path for path in self.cache.rglob("*") if "vfsMeta" in path.parts]
        return not any(
            dirty in "".join(path.read_text(errors="replace").split())
            for path in files
            if path.is_file()
        )

    def copy_beside(self, folder: Path) -> float | None:
        """How many seconds the S3 server needs for a directory, with nothing but parallel uploads.

        None where the store is a directory.
        """
        if self._s3 is None:
            return None
        place = RCLONE.place("s3", endpoint=self._s3.url("").rstrip("/"))
        place = place.replace("bench-rclone", f"bench-copies/{self._mark}/{folder.name}")
        command = RCLONE.command(f"copy {folder} {place} --transfers 16 -q")
        begin = time.monotonic()
        subprocess.run(command, env=self._environment(), check=True, timeout=COMMAND_S_MAX)
        return time.monotonic() - begin

    def place(self) -> str:
        """The options that name the store."""
        if self._s3 is None:
            return self.system.place("file", store=str(self.store))
        bucket = self._s3.url(bucket_of(self.system))
        if self._s3.ceph is not None and "rados" in self.system.places:
            return self.system.place("rados", pool=ceph.POOL, conf=str(self._s3.ceph))
        return self.system.place("s3", bucket=bucket, endpoint=self._s3.url("").rstrip("/"))

    def _environment(self) -> dict[str, str]:
        keys = {} if self._s3 is None else self._s3.environment()
        return os.environ | keys | {procs.MARK: self._mark}

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
        for directory in {self.root, self.disk}:
            shutil.rmtree(directory, ignore_errors=True)


def _warn(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)
