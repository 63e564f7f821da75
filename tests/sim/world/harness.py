"""How a test runs a simulated world, and how its failures can be run again.

    @pytest.mark.sim_seeds(100)
    def test_two_writers(sim_seed: int) -> None:
        simulate(sim_seed, lambda sim: …)

`conftest.py` parametrises `sim_seed`; `--sim-seed N` runs that one alone, `--sim-seeds N` runs so
many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tests.sim.world.core import STEPS_MAX
from tests.sim.world.scheduler import SimRuntime

T = TypeVar("T")


def simulate(seed: int, body: Callable[[SimRuntime], T], steps_max: int = STEPS_MAX) -> T:
    """Run `body` as the main thread of a world that follows from `seed`.

    What a thread raises comes out as it is, with a note that says how to run it again. The order of
    sets is part of that, so `make test` says PYTHONHASHSEED.
    """
    sim = SimRuntime(seed, steps_max)
    try:
        return sim.run(lambda: body(sim))
    except BaseException as error:
        error.add_note(
            f"simulation: seed {seed}, step {sim.scheduler.steps}, {sim.monotonic():.6f} s; "
            f"again with: PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', 'unknown')} "
            f"pytest tests/sim -k {_test_name(body)} --sim-seed {seed}"
        )
        raise


def _test_name(body: Callable[..., object]) -> str:
    """The function that `body` was written in."""
    plain = body.func if isinstance(body, partial) else body
    name: str = getattr(plain, "__qualname__", repr(plain))
    return name.split(".<locals>")[0].split(".")[-1]
