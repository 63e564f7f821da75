"""Redis frozen, killed and started again under load: operations wait, and all goes on by itself."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.faults.judge import Worker, await_operations, failing, start
from tests.faults.program import Volume, needs_mounts, wait_until
from tests.faults.redis_server import DurableRedis

pytestmark = needs_mounts

WORKERS = 3
SOME = 4  # operations, which is enough to need Redis
AWAY_S = 3.0
SHORT_S = 2  # a --meta-timeout that ends before Redis comes back
# A silent Redis has 10 s to answer and 4 s for each step of a connection; open(2) is two requests.
# The rest is for a machine that is busy.
FROZEN_S_MAX = 90.0
REFUSED_S_MAX = 90.0
AWAY_LOG = "redis: gave up after|redis: Error 111|no answer to a commit|redis: Timeout"


@pytest.fixture
def workers(served: Volume) -> Iterator[list[Worker]]:
    """Load processes, not started; the volume must be mounted on `mnt`."""
    made = [
        Worker(served.base / "mnt" / f"w{n}", served.base / f"journal{n}", n)
        for n in range(WORKERS)
    ]
    yield made
    for worker in made:
        worker.abandon()


def through(
    served: Volume, workers: list[Worker], away: Callable[[], None], back: Callable[[], None]
) -> None:
    """Under load, have Redis go away for a while: nothing fails, nothing is lost."""
    served.format()
    served.mount()
    start(workers)
    await_operations(workers, SOME)
    away()
    before = [worker.operations() for worker in workers]
    time.sleep(AWAY_S)
    meanwhile = [worker.operations() for worker in workers]
    back()
    await_operations(workers, SOME)
    for worker in workers:
        worker.stop()
    assert failing(workers) == []
    for worker, once, late in zip(workers, before, meanwhile, strict=True):
        assert late <= once + 1, "what needs Redis waits"
        worker.judge()
    served.end(AWAY_LOG)


def test_frozen_under_load(
    served: Volume, workers: list[Worker], durable_redis: DurableRedis
) -> None:
    through(served, workers, durable_redis.freeze, durable_redis.thaw)


def test_killed_under_load(
    served: Volume, workers: list[Worker], durable_redis: DurableRedis
) -> None:
    through(served, workers, durable_redis.kill, durable_redis.start)


def fails_with_eio(act: Callable[[], object]) -> float:
    """How long `act` took to fail."""
    begin = time.monotonic()
    with pytest.raises(OSError, match="Input/output error") as caught:
        act()
    assert caught.value.errno == errno.EIO
    return time.monotonic() - begin


def away_for_long(
    served: Volume, away: Callable[[], None], back: Callable[[], None], most_s: float
) -> None:
    """Operations fail with EIO in time, and work again at once when Redis is back."""
    served.format()
    mount = served.mount("--meta-timeout", str(SHORT_S))
    file = mount.path / "before"
    file.write_text("before")
    away()
    assert SHORT_S / 2 < fails_with_eio((mount.path / "none").stat) < most_s
    assert fails_with_eio((mount.path / "new").touch) < most_s
    back()
    assert file.read_text() == "before"
    (mount.path / "after").write_text("after")
    assert sorted(path.name for path in mount.path.iterdir()) == ["after", "before"]
    served.end(AWAY_LOG)


def test_killed_for_longer_than_the_timeout(served: Volume, durable_redis: DurableRedis) -> None:
    away_for_long(served, durable_redis.kill, durable_redis.start, REFUSED_S_MAX)


def test_frozen_for_longer_than_the_timeout(served: Volume, durable_redis: DurableRedis) -> None:
    away_for_long(served, durable_redis.freeze, durable_redis.thaw, FROZEN_S_MAX)


def test_what_is_pending_is_stored_when_redis_is_back(
    served: Volume, durable_redis: DurableRedis
) -> None:
    served.format()
    mount = served.mount("--meta-timeout", str(SHORT_S))
    with (mount.path / "file").open("wb", buffering=0) as file:
        file.write(b"written")
        durable_redis.kill()
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(file.fileno())
        durable_redis.start()
        os.fsync(file.fileno())
        assert (mount.path / "file").read_bytes() == b"written"
    served.end(AWAY_LOG)


def test_unmounting_while_redis_is_away(served: Volume, durable_redis: DurableRedis) -> None:
    """The client gives up, says what is lost, and ends; a new mount is fine."""
    served.format()
    mount = served.mount("--meta-timeout", str(SHORT_S))
    (mount.path / "kept").write_text("kept")
    durable_redis.kill()
    mount.umount()
    durable_redis.start()
    assert (served.mount().path / "kept").read_text() == "kept"
    served.end(f"{AWAY_LOG}|could not end the session|deletion of unused data")


def test_the_log_says_that_calls_wait(served: Volume, durable_redis: DurableRedis) -> None:
    """Before any of them fails, and again when they go on."""
    served.format()
    mount = served.mount()
    durable_redis.freeze()
    try:
        lines = served.log_lines
        wait_until(
            "it says so", FROZEN_S_MAX, lambda: any(" does not answer, so" in x for x in lines())
        )
        assert not any("gave up" in line or "Timeout" in line for line in lines())
    finally:
        durable_redis.thaw()
    wait_until("it says so", FROZEN_S_MAX, lambda: any("answers again" in x for x in lines()))
    (mount.path / "file").write_text("data")
    served.end()
