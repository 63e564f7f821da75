"""Keeps the processors from halting while requests flow, where waking one costs more than serving.

A request wakes this process, its answer wakes the program that waits for it, and a verb wakes the
metadata server and this process again. Waking a processor that has halted takes a few µs on
hardware, but 40 to 60 in some virtual machines (docs/design/serving-requests). Linux lets root ask
that idle processors poll for work instead: a 0 written to `/dev/cpu_dma_latency` holds until the
number is taken back or the file is closed (Documentation/power/pm_qos_interface.rst).

Made by `serve`, called by the session when the watcher of its thread pool looks, which it does only
while there are requests. It asks while there are many, and takes it back when they become few.
`auto` does so only in a virtual machine, and only where a trial at the mount shows that it helps.

Threading: `probe` comes first, then the watcher alone. The file is closed when the process ends.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from typing import Final

from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

MODES: Final = ("auto", "always", "never")
DEVICE: Final = "/dev/cpu_dma_latency"
BUSY_HZ: Final = 1000  # requests a second; then the wakes of one cost a tenth of a core's time
WORTH_S: Final = 20e-6  # saved of two wakes: more than they take on hardware
_POLL: Final = struct.pack("=i", 0)  # µs that waking may take
_HALT: Final = struct.pack("=i", 2_000_000_000)  # the kernel's default: anything
_SURE: Final = 6  # so many busy looks more than quiet ones, and it is worth asking
_LEVEL_MAX: Final = 10
_BUSY_STEP: Final = 2  # up; a quiet look goes down by one
_ROUNDS: Final = 20  # of a trial
_REST_S: Final = 0.001  # before each round: what halts for less is woken cheaply even there


class IdlePolling:
    """Asks for polling while there are at least BUSY_HZ requests a second."""

    def __init__(self, runtime: Runtime, mode: str, device: str = DEVICE) -> None:
        """Raises: ConfigError where it is always wanted and can't be had."""
        assert mode in MODES
        self._runtime = runtime
        self._descriptor = None if mode == "never" else _open(device, mode == "always")
        self._wanted = mode == "always"
        self._level = 0
        self._count = 0
        self._at = 0.0
        self.asked = False
        self.times = 0  # it was asked for

    def probe(self) -> None:
        """For `auto`: find out whether it is worth it. Takes about 40 ms, asleep for most; nothing
        else should be going on.
        """
        if self._descriptor is None or self._wanted or not _is_virtual():
            return
        try:
            halting = wake_s(self._runtime)
            os.write(self._descriptor, _POLL)
            polling = wake_s(self._runtime)
            os.write(self._descriptor, _HALT)
        except OSError as error:
            log.debug("idle processors will halt: %s", error)
            return
        self._wanted = halting - polling >= WORTH_S
        log.debug(
            "waking a processor takes %.0f µs, one that polls %.0f µs: %s",
            halting * 1e6,
            polling * 1e6,
            "will poll while busy" if self._wanted else "no use in polling",
        )

    @property
    def pays(self) -> bool:
        """Whether it is worth it, as far as that was found out."""
        return self._wanted

    def believe(self, pays: bool) -> None:
        """What an earlier process has found out by `probe`."""
        self._wanted = self._descriptor is not None and (self._wanted or pays)

    def look(self, served: int) -> None:
        """Called every few ms while there are requests, with their number so far."""
        if not self._wanted:
            return
        now = self._runtime.monotonic()
        busy = served - self._count >= BUSY_HZ * (now - self._at)
        self._at, self._count = now, served
        self._level = min(_LEVEL_MAX, self._level + _BUSY_STEP) if busy else max(0, self._level - 1)
        if self._level >= _SURE and not self.asked:
            self._ask(True)
        elif self._level == 0 and self.asked:
            self._ask(False)

    def rest(self) -> None:
        """There are no requests; the watcher will not look for a while."""
        self._level = 0
        if self.asked:
            self._ask(False)

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        return {"idle_polling": float(self.asked), "idle_polling_asked_total": self.times}

    def _ask(self, poll: bool) -> None:
        assert self._descriptor is not None
        os.write(self._descriptor, _POLL if poll else _HALT)
        self.asked = poll
        self.times += poll


def _open(device: str, required: bool) -> int | None:
    """Raises: ConfigError where it is required and not there."""
    try:
        return os.open(device, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        if required:
            raise ConfigError(
                f"--idle-poll always: can't open {device}: {error.strerror}; "
                "mount as root where the kernel has it, or leave the option out"
            ) from error
        log.debug("idle processors will halt: %s", error)
        return None


def _is_virtual() -> bool:
    """Whether this is a virtual machine, as x86 processors say it."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            return any(line.startswith("flags") and " hypervisor" in line for line in lines)
    except OSError:
        return False


def wake_s(runtime: Runtime) -> float:
    """Seconds to wake a processor that has been idle, and be woken by it; 0 where there is one.

    Raises: OSError where we may not choose our processors.
    """
    cpus = sorted(os.sched_getaffinity(0))  # 0 is the calling thread
    if len(cpus) < 2:
        return 0.0
    (ours, to_us), (theirs, to_them) = os.pipe(), os.pipe()

    def echo() -> None:
        try:
            os.sched_setaffinity(0, {cpus[-1]})
            while os.read(theirs, 1):
                os.write(to_us, b".")
        except OSError as error:
            log.debug("no trial of waking: %s", error)
        finally:
            os.close(to_us)

    echoing = runtime.spawn("idle-echo", echo)
    try:
        os.sched_setaffinity(0, {cpus[0]})
        taken = [_round_s(runtime, ours, to_them) for _ in range(_ROUNDS)]
    finally:
        os.sched_setaffinity(0, cpus)
        os.close(to_them)
        echoing.join()
        os.close(ours)
        os.close(theirs)
    return sorted(taken)[_ROUNDS // 4]  # other load only adds to it


def _round_s(runtime: Runtime, source: int, target: int) -> float:
    """Seconds from a byte to `target` to the one that answers it. Raises: OSError."""
    runtime.sleep(_REST_S)
    begun = runtime.monotonic()
    os.write(target, b".")
    if not os.read(source, 1):
        raise OSError(errno.EPIPE, "the other thread has ended")
    return runtime.monotonic() - begun
