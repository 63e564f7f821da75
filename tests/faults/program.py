"""The `slicefs` program and a volume that is used through it.

Tests call the program that pip installed, as users do, and look at what it prints, what it logs and
what is on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from tests.support.command_server import CommandServer
from tests.support.waiting import STOOD_STILL

REPOSITORY = Path(__file__).parents[2]
SLICEFS = os.path.join(os.path.dirname(sys.executable), "slicefs")
PASSING_S = 2.0
DYING_S = 5.0  # of a killed process, which lets go of its locks at the end
COMMAND_S = 100  # longer than any command waits for anything
_WORTH_A_LOOK = re.compile(r" (WARNING|ERROR|CRITICAL) |^Traceback|^Exception|^Fatal")
_KILLED_LONG_AGO = r"session \d+ sent no heartbeat for \d+ s: it is ended"

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float


@cache
def _server() -> CommandServer:
    """That of this process; it ends with it."""
    return CommandServer(SLICEFS)


def slicefs(*words: str | Path, program: Sequence[str] = (SLICEFS,)) -> Done:
    """Run `slicefs` to its end, away from any terminal.

    The installed program itself is run where `program` is another one, or a fork would differ.
    """
    begin = time.monotonic()
    line = list(map(str, words))
    if program == (SLICEFS,) and _server().takes(line):
        ended = _server().run(line, COMMAND_S)
        return Done(*ended, time.monotonic() - begin)
    done = subprocess.run(
        [*program, *line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )
    return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def without_waits(err: str) -> str:
    """What a busy machine has a mount say is no complaint.

    Nor is that a test beside this one makes a mount namespace, and has not let go of our mount yet.
    """
    return re.sub(r"^slicefs: (unmounted; )?waiting for .*\n", "", err, flags=re.MULTILINE)


def succeed(*words: str | Path, program: Sequence[str] = (SLICEFS,)) -> str:
    """Run `slicefs`, which must end well and complain of nothing; what it printed."""
    done = slicefs(*words, program=program)
    assert (done.code, without_waits(done.err)) == (0, ""), done
    return done.out


class Mount:
    """A volume on a directory, served by a process of its own."""

    def __init__(self, path: Path, pid: int, ends_with_client: bool = False) -> None:
        """`ends_with_client`: it has no supervisor, whatever the default is."""
        self.path = path
        self.pid = pid
        self.ends_with_client = ends_with_client
        self.supervisor = 0  # its process, where it has one
        self.was_killed = False

    def umount(self) -> None:
        """Unmount; the client stores everything and ends.

        A program of a test beside this one that looks at all mounts may be passing through.
        """
        deadline = time.monotonic() + PASSING_S
        done = slicefs("umount", self.path)
        while "it is in use" in done.err and time.monotonic() < deadline:
            time.sleep(0.05)
            done = slicefs("umount", self.path)
        assert (done.code, without_waits(done.err)) == (0, ""), done
        assert not is_mounted(self.path)
        assert self.has_ended()

    def kill(self) -> None:
        """SIGKILL the client and take its mount away; what hangs below it may outlive this."""
        assert self.ends_with_client, "a mount that is to die is made with --no-supervisor"
        self.was_killed = True
        os.kill(self.pid, signal.SIGKILL)
        subprocess.run(["umount", "-l", self.path], check=True, capture_output=True)
        deadline = time.monotonic() + DYING_S
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)

    def has_ended(self) -> bool:
        """Whether all threads of the client are gone; init may take a moment to bury it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return "State:\tZ" in status and "Threads:\t1\n" in status

    def numbers(self) -> dict[str, float]:
        """What `.stats` says, without the prefix."""
        text = (self.path / ".stats").read_text()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines())
        return {name.removeprefix("slicefs_"): float(value) for name, value in pairs}

    def memory(self, name: str = "VmRSS") -> int:
        """Bytes of memory of the client; `VmHWM` is the most it ever had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None, status
        return int(found[1]) << 10


class Volume:
    """A volume with everything it needs below one directory."""

    # Of mounts that say nothing of it: with a supervisor each starts a second client after 2 s,
    # which costs 0.6 s of processor time. `--soak` has the program's default.
    supervisor: ClassVar[tuple[str, ...]] = ("--no-supervisor",)

    def __init__(self, base: Path, meta: str = "", place: Sequence[str] = ()) -> None:
        """`place`: what `format` is told of the object store; else it is a directory."""
        self.base = base
        self.place = place
        self.meta = meta or f"sqlite://{base}/meta.db"
        self.bucket = base / "bucket"
        self.log = base / "log"
        self.mounts: list[Mount] = []

    def format(self, *options: str) -> None:
        place = self.place or ("--bucket", str(self.bucket))
        succeed("format", self.meta, "testvol", *place, "--trash-days", "0", *options)

    def mount(self, *options: str, name: str = "mnt", program: Sequence[str] = (SLICEFS,)) -> Mount:
        """Mount in the background."""
        path = self.base / name
        path.mkdir(exist_ok=True)
        if not {"--supervisor", "--no-supervisor", "--hang-after"} & set(options):
            options += self.supervisor
        cache = () if "--cache-dir" in options else ("--cache-dir", "none")
        words = ("mount", "-d", "--log", self.log, self.meta, path, *cache, *options)
        succeed(*words, program=program)
        config = json.loads((path / ".config").read_text())["mount"]
        mount = Mount(path, config["pid"], "--no-supervisor" in options)
        mount.supervisor = config.get("supervisor", 0)
        self.mounts.append(mount)
        return mount

    def objects(self) -> list[Path]:
        """The files that hold blocks."""
        return [path for path in (self.bucket / "testvol/chunks").rglob("*") if path.is_file()]

    def value(self, row: bytes, field: bytes) -> bytes:
        """A value as it is in the SQLite file."""
        sql = "SELECT value FROM kv WHERE row = ? AND field = ?"
        with closing(sqlite3.connect(self.base / "meta.db")) as database:
            found = database.execute(sql, (row, field)).fetchone()
        assert isinstance(found[0], bytes)
        return found[0]

    def set_value(self, row: bytes, field: bytes, value: bytes) -> None:
        """Put a value into the SQLite file."""
        with closing(sqlite3.connect(self.base / "meta.db")) as database, database:
            database.execute("REPLACE INTO kv VALUES (?, ?, ?)", (row, field, value))

    def status(self) -> Any:
        return json.loads(succeed("status", self.meta, "--json"))

    def fsck(self, *options: str) -> Any:
        """The report of `slicefs fsck`, which must find nothing wrong."""
        done = slicefs("fsck", self.meta, "--json", *options)
        assert done.code == 0, done
        return json.loads(done.out)

    def log_lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def complaints(self, expected: str = "") -> list[str]:
        """Lines of the log worth a look that don't match the pattern `expected`."""
        found = [line for line in self.log_lines() if _WORTH_A_LOOK.search(line)]
        expected = "|".join(filter(None, (STOOD_STILL, expected)))
        return [line for line in found if not re.search(expected, line)]

    def end(self, expected: str = "") -> None:
        """What every test ends with: all unmounted, fsck clean, nothing odd in the log."""
        for mount in self.mounts:
            if is_mounted(mount.path):
                mount.umount()
        self.fsck("--data")
        if any(mount.was_killed for mount in self.mounts):  # and the test took longer than a lease
            expected = "|".join(filter(None, (expected, _KILLED_LONG_AGO)))
        assert self.complaints(expected) == []

    def clean_up(self) -> None:
        """After a test, whatever became of it: no process, no mount, no files."""
        for mount in self.mounts:
            if is_mounted(mount.path):
                subprocess.run(["umount", "-l", mount.path], check=False, capture_output=True)
            kill_client(mount)
        shutil.rmtree(self.base, ignore_errors=True)


def is_mounted(path: Path) -> bool:
    """Whether something is mounted on `path`, without asking it."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(path) for line in mounts)


def kill_client(mount: Mount) -> None:
    """SIGKILL a client that still runs, even one that was stopped, and its supervisor first.

    Others may have their pids now.
    """
    for pid in filter(None, (mount.supervisor, mount.pid)):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if os.fsencode(mount.path) in words:
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass


def wait_until(what: str, seconds: float, condition: Any) -> None:
    """Poll until `condition()` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)
