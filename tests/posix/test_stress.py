"""P1: one file's bytes, and one small tree's names, under everything at once on real mounts.

`fsx` and `fsstress` say what they do. Two mounts take turns at a file, or are used at the same
time. What ends every volume's tests here is `slicefs fsck --data`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fsmeta.types import CHUNK_BYTES
from tests.faults.program import REPOSITORY
from tests.posix.conftest import Twins
from tests.posix.fsstress import broken, tree
from tests.posix.fsx import SPAN_BYTES, Fsx
from tests.posix.volumes import Volume
from tests.support.waiting import SOON_S

_ACROSS = (CHUNK_BYTES - SPAN_BYTES // 2) // 4096 * 4096  # a chunk's end is in the middle


def _fsx(twins: Twins, roots: int, seed: int, begin: int, count: int) -> None:
    name = f"p1-{seed}-{begin}-{roots}"
    places = [twins.first, twins.second][:roots]
    fsx = Fsx(places, name, seed, begin, lambda: twins.settle(name))
    fsx.run(count)
    fsx.close()
    twins.settle(name)
    fsx.check(twins.first / name)
    fsx.check(twins.second / name)
    fsx.path.unlink()


@pytest.mark.parametrize("begin", [0, _ACROSS])
@pytest.mark.parametrize("roots", [1, 2])
def test_p1_fsx(twins: Twins, roots: int, begin: int) -> None:
    _fsx(twins, roots, roots, begin, 200)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize("begin", [0, _ACROSS])
@pytest.mark.parametrize("roots", [1, 2])
def test_p1_fsx_long(twins: Twins, roots: int, begin: int, seed: int) -> None:
    _fsx(twins, roots, seed, begin, 4000)


@pytest.mark.parametrize("where", ["tmp", "disk"])
def test_p1_fsx_is_right_elsewhere(where: str, tmp_path: Path) -> None:
    """It finds nothing wrong with what is right."""
    root = Path("/dev/shm") if where == "tmp" else tmp_path
    fsx = Fsx([root, root], f"p1-{tmp_path.name}", 3)
    try:
        fsx.run(400)
        fsx.check()
    finally:
        fsx.close()
        fsx.path.unlink()


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["sqlite", "redis"])
def test_p1_fsx_with_little_memory(
    volumes: Callable[[str, str], AbstractContextManager[Volume]], engine: str
) -> None:
    with volumes(engine, f"p1-small-{engine}") as volume:
        root = volume.mount("mnt", "--buffer-size", "16MiB")
        for seed in range(6):
            fsx = Fsx([root], f"f{seed}", seed, _ACROSS)
            fsx.run(2000)
            fsx.close()
            fsx.check()


def _differences(first: Path, second: Path) -> list[str]:
    """What two mounts show of one tree, where they differ; or why it can't be read.

    A kernel may believe for a second what has changed since, if that is all.
    """
    try:
        views = [tree(str(root)) for root in (first, second)]
    except (AssertionError, FileNotFoundError) as error:
        return [f"{type(error).__name__}: {error}"]
    names = sorted({name for view in views for name in view})
    return [
        f"{name}: {views[0].get(name)} on the first, {views[1].get(name)} on the second"
        for name in names
        if views[0].get(name) != views[1].get(name)
    ]


def _stress(twins: Twins, seed: int, count: int) -> None:
    name = f"p1-names-{seed}"
    (twins.first / name).mkdir()
    twins.wait_until((twins.second / name).is_dir)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.posix.fsstress", root / name, str(number), str(count)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, root in enumerate([twins.first, twins.second] * 2, seed * 10)
    ]
    said = [process.communicate(timeout=200)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    assert all("'held'" in text for text in said), said
    assert any("'rename'" in text for text in said), said  # one has 1 to 8 on tmpfs

    deadline = time.monotonic() + SOON_S
    while differ := _differences(twins.first / name, twins.second / name):
        assert time.monotonic() < deadline, "the mounts differ:\n" + "\n".join(differ)
        time.sleep(0.2)
    subprocess.run(["rm", "-r", twins.first / name], check=True)


def test_p1_fsstress(twins: Twins) -> None:
    _stress(twins, 1, 300)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 8))
def test_p1_fsstress_long(twins: Twins, seed: int) -> None:
    _stress(twins, seed, 4000)


def test_p1_a_torn_record_is_noticed() -> None:
    assert broken(bytes(640)) == -1
    assert broken(bytes(64) + b"x" * 64) == 64
