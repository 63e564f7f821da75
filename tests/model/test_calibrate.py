"""The model against Linux: generated operations of three users, equal errnos, values and trees.

Decided differences, which `gen` avoids: truncate(2) to the size a file has (ext4 touches mtime,
tmpfs does not; POSIX: only if the size changes); opening devices (depends on `nodev`);
chown(-1, -1) (drops S_ISUID here, never reaches a FUSE server). No seed on the disk writes to what
was open when it became immutable (ext4 refuses, tmpfs does not). Left open by `compare`: whether
setting an xattr to what it is touches ctime (tmpfs: yes, ext4: no). Directory sizes differ and are
not compared. Times are only calibrated on the disk: tmpfs gives a directory the coarse time of what
was removed from it.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings

from tests.model.compare import Difference, demand_equal, minimise, run_equal
from tests.model.drivers import Driver, ModelDriver
from tests.model.gen import step_lists, steps_of_seed
from tests.model.ops import ROOT, Mkdir, Op, Result, Stat, Step, User
from tests.model.tree import Sysctls

SYSCTLS = Sysctls.of_host()
SEEDS = 110
FINE_CLOCK = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 13)  # multigrain ctime
STEPS = 60


@pytest.mark.parametrize("seed", range(SEEDS))
def test_tmpfs(seed: int, model: Driver, tmpfs: Driver) -> None:
    demand_equal(steps_of_seed(seed, STEPS, SYSCTLS), [model, tmpfs])


@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS // 5))
def test_disk_and_times(seed: int, model: Driver, disk: Driver) -> None:
    demand_equal(steps_of_seed(seed, STEPS, SYSCTLS), [model, disk], times=FINE_CLOCK)


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=step_lists(sysctls=SYSCTLS))
def test_hypothesis(steps: list[Step], model: Driver, tmpfs: Driver) -> None:
    run_equal(steps, [model, tmpfs])


def test_generator_is_not_wasteful() -> None:
    """Most operations of generated runs work, and many names exist in the end."""
    worked = total = names = 0
    for seed in range(30):
        driver = ModelDriver(SYSCTLS)
        for step in steps_of_seed(seed, STEPS, SYSCTLS):
            worked += driver.run(*step).errno == 0
            total += 1
        names += len(list(driver.model.tree.paths()))
    assert worked / total > 0.4
    assert names / 30 > 8


class _Wrong:
    """A driver that can't make directories called "b"."""

    name = "wrong"

    def __init__(self) -> None:
        self._inner = ModelDriver()
        self.reset, self.close = self._inner.reset, self._inner.close

    def run(self, user: User, op: Op) -> Result:
        if isinstance(op, Mkdir) and op.path == b"/b":
            return Result(5)
        return self._inner.run(user, op)


def test_judge_finds_and_minimises() -> None:
    steps = [Step(ROOT, Mkdir(b"/" + name)) for name in (b"a", b"c", b"b", b"d")]
    steps.append(Step(ROOT, Stat(b"/a")))
    with pytest.raises(Difference) as caught:
        demand_equal(steps, [ModelDriver(), _Wrong()])
    assert str(caught.value).count("Mkdir") == 1
    assert "wrong says -Input/output error" in str(caught.value)

    def fails(some: object) -> Difference | None:
        return Difference(str(some)) if isinstance(some, list) and steps[2] in some else None

    assert minimise(steps, fails)[0] == [steps[2]]
