"""The examples that need torch run as their texts say, with tiny sizes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.posix.volumes import Volume, can_mount
from tests.slicefs.memory_disk import quick_volume
from tests.support.examples import EXAMPLES, ROOT, example_environment, run_example

needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting takes root and /dev/fuse")
STEPS, KILLED_AFTER = 9, 7


@pytest.fixture
def volume() -> Iterator[Volume]:
    """A volume on SQLite, clean in the end."""
    with quick_volume() as made:
        yield made


def test_a_residual_network_on_two_thousand_files(redis_url: str) -> None:
    with quick_volume(redis_url) as volume:
        printed = run_example("resnet_loop.py", f"{volume.meta}#images", "--make", 2000)
    found = re.findall(r"epoch \d: (\d+) images, loss ([\d.]+)", printed)
    assert [seen for seen, _ in found] == ["2000", "2000"]
    assert float(found[1][1]) < float(found[0][1])  # it has learnt something


@needs_mount
def test_a_gpt_goes_on_after_a_kill(volume: Volume) -> None:
    """The losses after the kill are those of a run that was not killed."""
    url = volume.mount() / "run"
    before: dict[int, str] = {}
    with torchrun("gpt_checkpoints.py", url, "--steps", 1000) as lines:
        assert next(lines) == "begins after step 0"
        for line in lines:
            step, loss = parsed(line)
            before[step] = loss
            if step == KILLED_AFTER:
                break
    assert sorted(before) == list(range(1, KILLED_AFTER + 1))
    with torchrun("gpt_checkpoints.py", url, "--steps", STEPS) as lines:
        begun = int(next(lines).rpartition(" ")[2])
        after = dict(parsed(line) for line in lines)
    assert begun in (4, 6)  # the save of 4 was waited for when that of 6 began
    assert list(after) == list(range(begun + 1, STEPS + 1))
    assert {step: after[step] for step in after if step in before} == {
        step: before[step] for step in range(begun + 1, KILLED_AFTER + 1)
    }
    steps = sorted(name for name in os.listdir(url) if name.startswith("step"))
    assert steps == ["step6", "step8"]
    assert not [name for name in os.listdir(url) if name.startswith(".saving")]


def parsed(line: str) -> tuple[int, str]:
    """`step 3: loss 5.5`."""
    step, loss = line.removeprefix("step ").split(": loss ")
    return int(step), loss


@contextmanager
def torchrun(name: str, *words: str | int | Path) -> Iterator[Iterator[str]]:
    """The lines of two ranks; what still runs at the end is killed."""
    command = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--nproc-per-node", "2"]
    command += ["--rdzv-endpoint", "localhost:0", str(EXAMPLES / name), *map(str, words)]
    with subprocess.Popen(
        [sys.executable, *command],
        env=example_environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        rest: list[str] = []
        try:
            yield _told(process.stdout, rest)
        except StopIteration:
            raise AssertionError("it has ended early: " + "\n".join(rest)) from None
        finally:
            ended = process.poll()
            if ended is None:
                for rank in children(process.pid):
                    os.kill(rank, signal.SIGKILL)
                process.kill()


def _told(lines: Iterator[str], rest: list[str]) -> Iterator[str]:
    """What the example says; the words of torch go to `rest`."""
    for line in lines:
        if line.startswith(("begins ", "step ")):
            yield line.rstrip()
        else:
            rest.append(line.rstrip())


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_lightning_saves_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "resumed: False, steps: 8" in run_example("lightning_fit.py", run)
    assert "resumed: True, steps: 16" in run_example("lightning_fit.py", run, "--epochs", 4)
