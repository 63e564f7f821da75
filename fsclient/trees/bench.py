"""Measuring a directory of any file system: what `slicefs bench` and `slicefs mdtest` do.

Each phase runs the same steps in several threads, which system calls leave to run at once, and ends
with the last of them. Everything happens in a directory of its own, which is removed at the end.

Threading: the caller's thread waits; each worker has numbers of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from fsclient.trees.remove import remove
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

PIECE_BYTES: Final = 1 << 20
_PERCENTILE: Final = 0.99


class Phase(NamedTuple):
    """One kind of operation: how many, how long they took, how much was moved."""

    what: str
    operations: int
    seconds: float
    bytes: int
    mean_seconds: float
    p99_seconds: float
    max_seconds: float

    @property
    def per_s(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds if self.seconds else 0.0

    @property
    def bytes_s(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        speeds = {"per_second": self.per_s, "bytes_per_second": self.bytes_s}
        return {**self._asdict(), **speeds}


class BenchSizes(NamedTuple):
    """What `bench` writes and reads, for each thread."""

    big_bytes: int = 256 << 20
    small_bytes: int = 128 << 10
    small_count: int = 100
    threads: int = 1


class TreeSizes(NamedTuple):
    """What `mdtest` makes, for each thread: `dirs` to the power of `depth`, and files in each."""

    dirs: int = 3
    depth: int = 2
    files: int = 10
    threads: int = 4


Step = Callable[[], int]
"""One operation; how many bytes it has moved."""


class Measure:
    """Runs phases, and keeps the time of each operation."""

    def __init__(self, runtime: Runtime, threads: int) -> None:
        self._runtime = runtime
        self._threads = threads

    def run(self, what: str, steps: Callable[[int], Sequence[Step]]) -> Phase:
        """`steps` of each thread's number. Raises: OSError, the first one."""
        clock = self._runtime.monotonic
        times: list[list[float]] = [[] for _ in range(self._threads)]
        moved = [0] * self._threads
        errors: list[OSError] = []
        jobs = [steps(number) for number in range(self._threads)]

        def work(number: int) -> None:
            try:
                for step in jobs[number]:
                    begun = clock()
                    moved[number] += step()
                    times[number].append(clock() - begun)
            except OSError as error:
                errors.append(error)

        begun = clock()
        threads = [
            self._runtime.spawn(f"bench-{n}", partial(work, n)) for n in range(self._threads)
        ]
        for thread in threads:
            thread.join()
        seconds = clock() - begun
        if errors:
            raise errors[0]
        spent = sorted(each for part in times for each in part)
        mean = sum(spent) / len(spent) if spent else 0.0
        high = spent[int(len(spent) * _PERCENTILE)] if spent else 0.0
        most = spent[-1] if spent else 0.0
        return Phase(what, len(spent), seconds, sum(moved), mean, high, most)


@contextmanager
def workplace(directory: str, runtime: Runtime) -> Iterator[str]:
    """A directory of its own in `directory`, removed at the end. Raises: ConfigError."""
    if not os.path.isdir(directory):
        raise ConfigError(f"{directory} is no directory: name a mount or a directory in it")
    place = os.path.join(directory, f"slicefs-bench-{runtime.random_bits(48):012x}")
    try:
        os.mkdir(place)
    except OSError as error:
        raise ConfigError(
            f"{directory}: {error.strerror}: name one that you may write to"
        ) from error
    try:
        yield place
    finally:
        remove([place], runtime)


def bench(
    directory: str,
    sizes: BenchSizes,
    runtime: Runtime,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Phase]:
    """Write and read one big file, then many small ones, in each thread. Raises: ConfigError."""
    measure, phases = Measure(runtime, sizes.threads), []
    with workplace(directory, runtime) as place:

        def big(number: int) -> str:
            return os.path.join(place, f"big-{number}")

        def small(number: int) -> list[str]:
            return [os.path.join(place, f"small-{number}-{n}") for n in range(sizes.small_count)]

        plans: list[tuple[str, Callable[[int], Sequence[Step]]]] = [
            ("write big file", lambda n: [partial(_write, big(n), sizes.big_bytes)]),
            ("read big file", lambda n: [partial(_read, big(n))]),
            (
                "write small file",
                lambda n: [partial(_write, path, sizes.small_bytes) for path in small(n)],
            ),
            ("read small file", lambda n: [partial(_read, path) for path in small(n)]),
            ("stat file", lambda n: [partial(_stat, path) for path in small(n)]),
        ]
        for what, steps in plans:
            progress(what)
            phases.append(measure.run(what, steps))
    return phases


def mdtest(
    directory: str,
    sizes: TreeSizes,
    runtime: Runtime,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Phase]:
    """Make a tree of empty files in each thread, look at it, and remove it. Raises: ConfigError."""
    measure, phases = Measure(runtime, sizes.threads), []
    with workplace(directory, runtime) as place:

        def folders(number: int) -> list[str]:
            found = [os.path.join(place, f"t{number}")]
            level = found
            for _ in range(sizes.depth):
                level = [os.path.join(above, f"d{n}") for above in level for n in range(sizes.dirs)]
                found = [*found, *level]
            return found

        def files(number: int, name: str = "f") -> list[str]:
            return [
                os.path.join(folder, f"{name}{n}")
                for folder in folders(number)
                for n in range(sizes.files)
            ]

        def renamed(number: int) -> list[Step]:
            both = zip(files(number), files(number, "g"), strict=True)
            return [partial(_done, os.rename, *pair) for pair in both]

        plans: list[tuple[str, Callable[[int], Sequence[Step]]]] = [
            ("mkdir", lambda n: [partial(_done, os.mkdir, path) for path in folders(n)]),
            ("create", lambda n: [partial(_create, path) for path in files(n)]),
            ("stat", lambda n: [partial(_stat, path) for path in files(n)]),
            ("readdir", lambda n: [partial(_done, os.listdir, path) for path in folders(n)]),
            ("rename", renamed),
            ("unlink", lambda n: [partial(_done, os.unlink, path) for path in files(n, "g")]),
            ("rmdir", lambda n: [partial(_done, os.rmdir, path) for path in folders(n)[::-1]]),
        ]
        for what, steps in plans:
            progress(what)
            phases.append(measure.run(what, steps))
    return phases


@contextmanager
def _open(path: str, flags: int) -> Iterator[int]:
    """A descriptor; errors of what is done with it name the file."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    except OSError as error:
        error.filename = error.filename or path
        raise
    finally:
        os.close(fd)


def _write(path: str, size: int) -> int:
    """A new file of random bytes, synced."""
    piece = os.urandom(min(size, PIECE_BYTES))
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        left = size
        while left:
            left -= os.write(fd, piece[:left])
        os.fsync(fd)
    return size


def _read(path: str) -> int:
    """The whole file; pages that the kernel still has are dropped first."""
    with _open(path, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        total = 0
        while piece := os.read(fd, PIECE_BYTES):
            total += len(piece)
        return total


def _stat(path: str) -> int:
    os.stat(path)
    return 0


def _create(path: str) -> int:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return 0


def _done(call: Callable[..., object], *arguments: str) -> int:
    call(*arguments)
    return 0
