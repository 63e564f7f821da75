"""T2, W1, W2: real mounts that write back are killed while they take snapshots."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time

import pytest

from tests.faults.program import SLICEFS, Volume, needs_mounts, succeed, wait_until
from tests.faults.writeback.test_writeback import staged

pytestmark = needs_mounts

FILES = 400
SLOW = ("--upload-limit", "1MiB")
KILLS = 2


@pytest.mark.parametrize("keep_disk", [True, False], ids=["kept", "lost"])
def test_t2_w2_killed_while_it_takes_a_snapshot(served: Volume, keep_disk: bool) -> None:
    """It is whole, of all that was written before, or not there; that others have all of it, too,
    is no matter of the disk.
    """
    chance = random.Random(keep_disk)
    served.format()
    other = served.mount(name="other")
    for kill in range(KILLS):
        mine = staged(served, *SLOW, "--no-supervisor")
        run = mine.path / f"run{kill}"
        run.mkdir()
        wait_until("others see the directory", 60, (other.path / run.name).exists)
        for number in range(FILES):
            (run / f"file{number}").touch()
        data = os.urandom(400_000)
        (run / "shard").write_bytes(data)
        words = [SLICEFS, "snapshot", "create", str(run), "one"]
        taking = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.3, 2.0))
        mine.kill()
        taking.wait()
        theirs = other.path / run.name
        for each in json.loads(succeed("snapshot", "list", theirs, "--json"))["snapshots"]:
            assert each["inodes"] == FILES + 2
            assert (theirs / ".snapshots/one/shard").read_bytes() == data
        if not keep_disk:
            wait_until("nobody uses that disk", 60, mine.has_ended)
            shutil.rmtree(served.base / "staging")
            continue
        mine = staged(served)
        if not (theirs / ".snapshots/one").exists():
            succeed("snapshot", "create", run, "one")
        kept = mine.path / run.name / ".snapshots/one"
        assert (kept / "shard").read_bytes() == data
        assert len(os.listdir(kept)) == FILES + 1
        (run / "shard").write_bytes(b"other")
        assert (kept / "shard").read_bytes() == data
        mine.umount()
    served.end("session .* sent no heartbeat|staging journal")
