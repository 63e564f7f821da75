"""Who is tested: `Meta` alone, the VFS in this process, and mounts, each over several engines.

Each lives for the whole session; a test begins with `reset`. A mount is unmounted at the end, and
then its log holds no warning and fsck finds nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.model.conftest import model, tmpfs  # noqa: F401  (fixtures)
from tests.model.drivers import Driver, OsDriver
from tests.model.fsdriver import FsDriver
from tests.model.tree import Sysctls
from tests.posix import inproc
from tests.posix.expressible import NATIVE_FILES, NATIVE_TESTS
from tests.posix.inproc import Connect
from tests.posix.volumes import Volume, can_mount, new_volume, temporary_folder
from tests.support.binding import require_pyfuse3
from tests.support.redis_server import RedisServer
from tests.support.tikv_server import TikvServer, why_not
from tests.support.waiting import SOON_S

ENGINES = ("mem", "sqlite", "redis", "tikv")
WHOLE = tuple(f"{kind}-{engine}" for engine in ENGINES for kind in ("meta", "vfs"))
QUICK_MOUNTS = ("mount-sqlite", "mount-redis")
MOUNTS = (*QUICK_MOUNTS, "mount-tikv")
STAGED = ("staged-mem", "staged-sqlite", "staged-redis")  # VFS that writes back
PYFUSE3 = ("pyfuse3-sqlite", "pyfuse3-redis")  # the second one with --soak
TRANSPORT_OF = {"mount": "native", "pyfuse3": "pyfuse3"}
DRIVERS = (*WHOLE, *STAGED, "bare-mem", *MOUNTS, PYFUSE3[0])


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    with temporary_folder() as path:
        yield path


ROUNDS_S = 60.0  # by then two deletion rounds are over, of 3 to 5 s on a quiet machine

Servers = Callable[[str], RedisServer | TikvServer]
"""The server of an engine that is one, or skips."""

Databases = Callable[[str], str]
"""Hands out the URL of an empty database of such a server."""


@pytest.fixture(scope="session")
def servers(folder: Path) -> Iterator[Servers]:
    """They end after everything that uses them; each starts when first asked for."""
    with ExitStack() as stack:
        started: dict[str, RedisServer | TikvServer] = {}

        def start(engine: str) -> RedisServer | TikvServer:
            if engine == "tikv":
                reason = why_not()
                if reason:
                    pytest.skip(reason)
                return stack.enter_context(TikvServer())
            if not RedisServer.is_installed():
                pytest.skip("needs redis-server")
            (folder / "redis").mkdir()
            return stack.enter_context(RedisServer(folder / "redis"))

        def find(engine: str) -> RedisServer | TikvServer:
            if engine not in started:
                started[engine] = start(engine)
            return started[engine]

        yield find


@pytest.fixture(scope="session")
def databases(servers: Servers) -> Databases:
    return lambda engine: servers(engine).empty_url()


@pytest.fixture(scope="session")
def engines(folder: Path, databases: Databases) -> Callable[[str], Connect]:
    """Makes a new database of an engine."""
    used = iter(range(100))

    def make(engine: str) -> Connect:
        if engine == "mem":
            return inproc.memory()
        if engine == "sqlite":
            return inproc.sqlite(folder / f"inproc{next(used)}.db")
        return inproc.server(databases(engine))

    return make


@pytest.fixture(scope="session")
def volumes(
    folder: Path, databases: Databases
) -> Callable[[str, str], AbstractContextManager[Volume]]:
    """Makes a new volume of an engine, to be mounted."""
    used = count()

    def make(engine: str, name: str) -> AbstractContextManager[Volume]:
        if not can_mount():
            pytest.skip("needs root and /dev/fuse")
        name = f"{name}-{next(used)}"  # each file of tests may have one of its own
        meta = f"sqlite://{folder / name}.db" if engine == "sqlite" else databases(engine)
        return new_volume(folder / name, meta)

    return make


@pytest.fixture(scope="session")
def driver_of(
    engines: Callable[[str], Connect],
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> Iterator[Callable[[str], Driver]]:
    """Each driver by name, made when first asked for."""
    made: dict[str, Driver] = {}
    with ExitStack() as stack:

        def find(name: str) -> Driver:
            if name not in made:
                made[name] = stack.enter_context(_driver(name, engines, volumes))
            made[name].reset()
            return made[name]

        yield find


@contextmanager
def _driver(
    name: str,
    engines: Callable[[str], Connect],
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> Iterator[Driver]:
    kind, engine = name.split("-")
    driver: Driver
    if kind in TRANSPORT_OF:
        if kind == "pyfuse3":
            require_pyfuse3()
        with volumes(engine, name) as volume:
            words = ("-o", "acl", "--transport", TRANSPORT_OF[kind])
            driver = OsDriver(os.fsencode(volume.mount("mnt", *words)), name=name)
            yield driver
            driver.reset()
            driver.close()
    elif kind == "vfs":
        with inproc.client(engines(engine)) as client:
            driver = FsDriver(client.vfs, Sysctls.of_host(), name=name)
            yield driver
            driver.reset()
            driver.close()
    elif kind == "staged":
        with (
            temporary_folder() as staging,
            inproc.client(engines(engine), staging) as client,
        ):
            driver = FsDriver(client.vfs, Sysctls.of_host(), name=name)
            yield driver
            driver.reset()
            driver.close()
    else:
        with inproc.meta_only(engines(engine)) as fs:
            driver = FsDriver(fs, Sysctls.of_host(), bare=kind == "bare", name=name)
            yield driver
            driver.reset()
            driver.close()


SLOW = pytest.param(PYFUSE3[1], marks=pytest.mark.soak)


@pytest.fixture(params=(*DRIVERS, SLOW))
def driver(request: pytest.FixtureRequest, driver_of: Callable[[str], Driver]) -> Driver:
    """Each driver in turn, empty."""
    return driver_of(request.param)


class Twins:
    """Two mounts of one volume."""

    def __init__(
        self, volume: Volume, engine: str, *options: str, first: Sequence[str] = ()
    ) -> None:
        """`first`: more options of the first one."""
        self.engine = engine
        self.volume = volume
        self.first = volume.mount("first", *options, *first)
        self.second = volume.mount("second", *options)

    def settle(self, name: str) -> None:
        """Wait until both mounts say the same of a file: on Redis news takes a few milliseconds.

        Without tracking there is no news: a kernel that has looked believes it for a second, so
        tests over the others only look at what they have not seen or have written since.
        """
        if self.engine != "redis":
            return

        def equal() -> bool:
            try:
                first, second = os.stat(self.first / name), os.stat(self.second / name)
            except FileNotFoundError:  # one has not heard of it yet
                return False
            return (first.st_size, first.st_mtime_ns) == (second.st_size, second.st_mtime_ns)

        self.wait_until(equal)

    def stat(self, name: str) -> float:
        """A number of `.stats`, summed over both mounts."""
        found = [
            float(line.split()[1])
            for root in (self.first, self.second)
            for line in (root / ".stats").read_text().splitlines()
            if re.match(rf"(slicefs_)?{name}\b", line)
        ]
        assert found, name
        return sum(found)

    def objects(self) -> int:
        """How many objects the store holds."""
        return sum(len(names) for _, _, names in os.walk(self.volume.folder / "data"))

    @staticmethod
    def wait_until(
        true: Callable[[], bool], within_s: float = SOON_S, every_s: float = 0.002
    ) -> float:
        """Poll until it is true; how many seconds that took."""
        begin = time.monotonic()
        while not true():
            assert time.monotonic() - begin < within_s, "still not true"
            time.sleep(every_s)
        return time.monotonic() - begin


@pytest.fixture(scope="session")
def twins_of(
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> Iterator[Callable[[str], Twins]]:
    """The twins of each engine, made when first asked for; idle ones take next to no time."""
    made: dict[str, Twins] = {}
    with ExitStack() as stack:

        def find(engine: str) -> Twins:
            if engine not in made:
                kind, _, name = engine.rpartition("-")
                volume = stack.enter_context(volumes(name, f"twins-{engine}"))
                if kind:
                    require_pyfuse3()
                first = ("--transport", "pyfuse3") if kind else ()
                made[engine] = Twins(volume, name, first=first)
            return made[engine]

        yield find


MIXED = pytest.param("mixed-redis", marks=pytest.mark.soak)  # the first one through pyfuse3


@pytest.fixture(scope="session", params=("sqlite", "redis", "tikv", MIXED))
def twins(request: pytest.FixtureRequest, twins_of: Callable[[str], Twins]) -> Twins:
    """The same volume mounted twice, over each engine; kept for the files that come later."""
    return twins_of(request.param)


@pytest.fixture(autouse=True)
def expressed(request: pytest.FixtureRequest) -> None:
    """Skip what a mount through pyfuse3 can't express."""
    node = request.node
    if "mixed-" in node.name and (
        node.path.name in NATIVE_FILES or node.originalname in NATIVE_TESTS
    ):
        pytest.skip("pyfuse3 can't express it")


@pytest.fixture
def root(twins: Twins, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of a test's own, in which it makes files only."""
    path = twins.first / str(request.node.originalname)
    path.mkdir()
    yield path
    for name in os.listdir(path):
        os.remove(path / name)
    path.rmdir()
