"""Generated operations of three users: SliceFS must answer as the model, times included.

A failure prints the shortest steps that still fail; `test_regressions` keeps those that did.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings

from tests.model.compare import demand_equal, run_equal
from tests.model.drivers import Driver, ModelDriver
from tests.model.gen import step_lists, steps_of_seed
from tests.model.ops import Step
from tests.model.tree import Sysctls
from tests.posix.conftest import DRIVERS, MOUNTS, PYFUSE3, QUICK_MOUNTS
from tests.posix.expressible import expressible

SYSCTLS = Sysctls.of_host()
STEPS = 60
SEEDS = {
    "meta-mem": 40,
    "vfs-mem": 40,
    "bare-mem": 20,
    "staged-mem": 40,
    "mount-sqlite": 12,
    "mount-redis": 12,
}
SEEDS_ELSE = 6
CASES = [(name, seed) for name in DRIVERS for seed in range(SEEDS.get(name, SEEDS_ELSE))]
ON_PYFUSE3 = 30  # seeds of each engine, with --soak
WITH_SOAK = [
    pytest.param(name, seed, marks=pytest.mark.soak)
    for name in PYFUSE3
    for seed in range(SEEDS_ELSE if name in DRIVERS else 0, ON_PYFUSE3)
]


@pytest.mark.parametrize(("name", "seed"), [*CASES, *WITH_SOAK])
def test_seed(name: str, seed: int, model: Driver, driver_of: Callable[[str], Driver]) -> None:
    mounted = name in (*MOUNTS, *PYFUSE3)
    steps = steps_of_seed(seed, STEPS, SYSCTLS, fuse=mounted)
    if name in PYFUSE3:
        steps = expressible(steps)
    right = ModelDriver(SYSCTLS, flags_last=True) if mounted else model
    demand_equal(steps, [right, driver_of(name)], times=True)


_QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=50, suppress_health_check=_QUIET)
@given(steps=step_lists(sysctls=SYSCTLS))
def test_hypothesis(
    steps: list[Step], model: Driver, tmpfs: Driver, driver_of: Callable[[str], Driver]
) -> None:
    run_equal(steps, [model, tmpfs, driver_of("meta-mem"), driver_of("vfs-mem")])


@settings(max_examples=15, suppress_health_check=_QUIET)
@given(steps=step_lists(sysctls=SYSCTLS, fuse=True))
def test_hypothesis_mounted(steps: list[Step], driver_of: Callable[[str], Driver]) -> None:
    run_equal(steps, [ModelDriver(SYSCTLS, flags_last=True), *map(driver_of, QUICK_MOUNTS)])
