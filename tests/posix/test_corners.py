"""Each corner of the model's tables on `Meta`, on the VFS and on mounts."""

from __future__ import annotations

import pytest

from tests.model.corners import fits
from tests.model.corners_files import STRANGERS_SETGID
from tests.model.drivers import Driver
from tests.model.test_corners import CORNERS, skip_by_sysctls
from tests.posix.conftest import MOUNTS, PYFUSE3
from tests.posix.expressible import is_expressible


@pytest.mark.parametrize("corner", CORNERS)
def test_corner(driver: Driver, corner: str) -> None:
    skip_by_sysctls(corner)
    if driver.name in PYFUSE3 and not is_expressible(corner, CORNERS[corner]):
        pytest.skip("pyfuse3 can't express it")
    if corner == STRANGERS_SETGID and driver.name in MOUNTS:
        pytest.skip("decided: FUSE does not tell us the caller's groups")
    for number, (user, op, expected) in enumerate(CORNERS[corner]):
        result = driver.run(user, op)
        assert fits(result, expected), f"step {number}: uid {user.uid} {op} → {result}"
