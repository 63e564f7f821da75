"""Drivers for the tests: the model, tmpfs and the disk under the temporary directory.

SliceFS's own drivers, with and without a kernel, are in `tests/posix/conftest`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model.drivers import Driver, ModelDriver, OsDriver
from tests.model.tree import Sysctls

DRIVERS = ("model", "tmpfs", "disk")


def _os_driver(name: str, parent: Path | None) -> Iterator[Driver]:
    if os.geteuid() != 0:
        pytest.skip("needs root: the helpers change user and root directory")
    if parent is not None and not parent.is_dir():
        pytest.skip(f"there is no {parent}")
    with tempfile.TemporaryDirectory(prefix="slicefs-model-", dir=parent) as root:
        driver = OsDriver(os.fsencode(root), name=name)
        try:
            yield driver
            driver.reset()
        finally:
            driver.close()


@pytest.fixture(scope="session")
def tmpfs() -> Iterator[Driver]:
    """The kernel's own file system in memory: the definition of right."""
    yield from _os_driver("tmpfs", Path("/dev/shm"))


@pytest.fixture(scope="session")
def disk() -> Iterator[Driver]:
    """Whatever the temporary directory is on; ext4 where this was calibrated."""
    yield from _os_driver("disk", None)


@pytest.fixture
def model() -> Driver:
    return ModelDriver(Sysctls.of_host())


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> Driver:
    """Each driver in turn, empty."""
    found: Driver = request.getfixturevalue(request.param)
    found.reset()
    return found
