"""The processes of one mount: which they are, what they cost, and how they end; and servers.

A mount is started with a mark in its environment, which daemons inherit however they fork or exec.
So processes are found without knowing anything about the system measured, and nothing else is ever
signalled.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

MARK = "SLICEFS_BENCH_MOUNT"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POLL_S = 0.02
STOP_S = 20.0  # for a server to end


def marked(mark: str) -> list[int]:
    """Pids whose environment says that they serve the mount `mark`."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in _read(entry / "environ").split(b"\0"):
            found.append(int(entry.name))
    return sorted(found)


def cpu_seconds(pids: Collection[int]) -> float:
    """User and system time of `pids` so far."""
    return sum(parse_cpu_ticks(_read(Path(f"/proc/{pid}/stat"))) for pid in pids) / TICKS_PER_S


def parse_cpu_ticks(line: bytes) -> int:
    """utime + stime of a line of /proc/PID/stat; the name in brackets may hold anything."""
    fields = line.rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


class ProcessorTime(NamedTuple):
    """What processes have used so far."""

    user_s: float
    system_s: float
    switches: int  # of context, of threads that still run

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """What was used after `before`."""
        user_s, system_s = self.user_s - before.user_s, self.system_s - before.system_s
        return ProcessorTime(user_s, system_s, max(0, self.switches - before.switches))


def spent(pids: Collection[int]) -> ProcessorTime:
    """What `pids` have used so far."""
    user = system = switches = 0
    for pid in pids:
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
        user += int(fields[11]) if len(fields) > 12 else 0
        system += int(fields[12]) if len(fields) > 12 else 0
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            switches += parse_switches(_read(status))
    return ProcessorTime(user / TICKS_PER_S, system / TICKS_PER_S, switches)


def parse_switches(status: bytes) -> int:
    """Context switches, of either kind, of a thread's /proc/PID/task/TID/status."""
    lines = [line.split() for line in status.splitlines() if b"ctxt_switches:" in line]
    return sum(int(words[1]) for words in lines)


def peak_rss_bytes(pids: Collection[int]) -> int:
    """The sum of the peaks of `pids`; pages that they share count for each."""
    return sum(parse_peak_rss(_read(Path(f"/proc/{pid}/status"))) for pid in pids)


def parse_peak_rss(status: bytes) -> int:
    """VmHWM of /proc/PID/status, in bytes; 0 where there is none."""
    for line in status.splitlines():
        if line.startswith(b"VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def end(mark: str, patience_s: float) -> list[int]:
    """Wait for the processes of `mark` to end; those that don't are killed and returned."""
    if wait_until(lambda: not marked(mark), patience_s):
        return []
    stubborn = marked(mark)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if wait_until(lambda: not marked(mark), 5):
            break
    return stubborn


def listens(port: int) -> bool:
    """Whether a program answers on a loopback port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def serving(command: Sequence[str], port: int, log: Path, start_s: float) -> Iterator[None]:
    """Run a server until it listens on `port`, and end it at the end, whatever happens."""
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        up = wait_until(lambda: listens(port) or server.poll() is not None, start_s)
        if not up or server.poll() is not None:
            raise RuntimeError(f"{command[0]} does not answer on port {port}; see {log}")
        yield
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile, or is not ours to read
        return b""
