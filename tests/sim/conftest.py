"""Options and the `sim_seed` fixture of the simulation."""

from __future__ import annotations

import pytest

from fsdata.staging import data_segments
from fsmeta.meta import deletion
from tests.sim.world.cluster import BLOCK

SEEDS_DEFAULT = 20
QUICK_SHARE = 4  # without --soak a simulation runs with one seed in so many of its marker's


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that journals write over some of them, and that clients have open what fills batches."""
    monkeypatch.setattr(data_segments, "SEGMENT_BYTES", 4 * BLOCK)
    monkeypatch.setattr(deletion, "HOLD_BATCH", 2)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, help="run simulations with this seed only")
    parser.addoption("--sim-seeds", type=int, help="run each simulation with this many seeds")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sim_seeds(n): how many seeds a simulation runs with (--soak)"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sim_seed" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("sim_seeds")
    count = metafunc.config.getoption("--sim-seeds", default=None)
    only = metafunc.config.getoption("--sim-seed", default=None)
    if count is None:
        whole = marker.args[0] if marker else SEEDS_DEFAULT
        share = 1 if metafunc.config.getoption("--soak", default=False) else QUICK_SHARE
        count = max(2, whole // share)
    seeds = range(count)
    metafunc.parametrize("sim_seed", seeds if only is None else [only])
