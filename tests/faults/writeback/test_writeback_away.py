"""W1, W2, W4: write-back on real mounts while the object store takes nothing at all."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.faults.checkpoint import MARKER, Writer
from tests.faults.program import Volume, needs_mounts, slicefs, succeed
from tests.faults.writeback.test_writeback import SHARD_BYTES, SHARDS, staged

pytestmark = needs_mounts


def test_w4_flush_says_what_waits(embedded: Volume) -> None:
    embedded.format()
    mine = staged(embedded)
    hidden = _hide(embedded.bucket)
    try:
        begun = time.time()
        for number in range(6):
            file = mine.path / f"file{number}"
            file.write_bytes(os.urandom(1 << 18))
        assert os.getxattr(file, "user.slicefs.durable") == b"0"
        done = slicefs("flush", file)
        assert (done.code, done.err) == (1, f"slicefs: {file}: not in the store yet\n")
        assert slicefs("flush", "--wait", "--timeout", "0.1", file).code == 1
        numbers, now = mine.numbers(), time.time()
        assert numbers["staging_bytes"] > 0
        assert 0 < numbers["staging_lag_seconds"] < now - begun
        assert begun < numbers["staging_durable_through_seconds"] < now
    finally:
        _show(hidden, embedded.bucket)
    succeed("flush", "--wait", file)
    assert os.getxattr(file, "user.slicefs.durable") == b"1"
    before, numbers, now = time.time(), mine.numbers(), time.time()
    assert (numbers["staging_changes"], numbers["staging_lag_seconds"]) == (0, 0)
    assert before - 0.001 <= numbers["staging_durable_through_seconds"] <= now + 0.001
    embedded.end("uploads wait for the object store")


def test_w2_domains_do_not_wait_for_each_other(served: Volume) -> None:
    """A job whose blocks can't be uploaded, and one whose blocks are there already."""
    served.format()
    mine = staged(served)
    other = served.mount(name="other")
    for name in ("large", "small"):
        (mine.path / name).mkdir()
    (mine.path / "small" / "old").write_bytes(b"1")
    succeed("flush", "--wait", mine.path)
    hidden = _hide(served.bucket)
    try:
        for number in range(8):
            (mine.path / "large" / f"file{number}").write_bytes(os.urandom(1 << 19))
        (mine.path / "large" / MARKER).touch()
        (mine.path / "small" / "old").rename(mine.path / "small" / "new")
        (mine.path / "small" / MARKER).touch()
        succeed("flush", "--wait", mine.path / "small")
        assert (other.path / "small" / MARKER).exists()
        assert not (other.path / "large" / MARKER).exists()
        for path in (mine.path / "large", mine.path):
            assert os.getxattr(path, "user.slicefs.durable") == b"0"
    finally:
        _show(hidden, served.bucket)
    succeed("flush", "--wait", mine.path / "large")
    assert (other.path / "large" / MARKER).exists()
    served.end("uploads wait for the object store")


def test_w1_a_store_that_is_away_for_a_while(embedded: Volume) -> None:
    store_away(embedded, 3)


@pytest.mark.soak
def test_w1_a_store_that_is_away_for_a_minute(embedded: Volume) -> None:
    store_away(embedded, 60)


def store_away(embedded: Volume, seconds: float) -> None:
    """A checkpoint is written while nothing can be put."""
    embedded.format()
    mine = staged(embedded, "--object-timeout", "1")
    (mine.path / "before").write_bytes(b"before")
    succeed("flush", "--wait", mine.path)
    hidden = _hide(embedded.bucket)
    try:
        writer = Writer(mine.path / "step", SHARDS, SHARD_BYTES, random.Random(6))
        writer.write()
        time.sleep(seconds)
        assert writer.judge(writer.folder) == (SHARDS, True)
        assert mine.numbers()["staging_changes"] > 0
    finally:
        _show(hidden, embedded.bucket)
    succeed("flush", "--wait", mine.path)
    mine.umount()
    embedded.end("uploads wait for the object store")


def _hide(bucket: Path) -> Path:
    """Take a directory of objects away, so that nothing can be put there."""
    hidden = bucket.with_name("hidden")
    bucket.rename(hidden)
    bucket.touch()  # no directory can be made in its place
    return hidden


def _show(hidden: Path, bucket: Path) -> None:
    bucket.unlink()
    hidden.rename(bucket)
