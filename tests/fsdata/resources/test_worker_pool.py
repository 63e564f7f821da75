"""Jobs of a pool: what ends with an error that nothing foresees is not done."""

from __future__ import annotations

import pytest

from fsdata.resources.worker_pool import FEW, WorkerPool
from fsmeta.runtime import SystemRuntime


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unforeseen_error_fails_all() -> None:
    """It ends its thread; those that wait for the jobs took all of them for done."""
    pool = WorkerPool(SystemRuntime(), "job", 2)
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError("a job's own fault")

    jobs = [lambda: done.append(1) for _ in range(FEW)]
    with pytest.raises(OSError, match="a job was not done"):
        pool.run_all([*jobs, fail])
    pool.run_all(jobs)
    assert len(done) >= FEW
    pool.close()
