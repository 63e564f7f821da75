"""A step is saved by what differs from the newest one; each step stands by itself all the same."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from slicefs.checkpoint.manager import StepManager
from slicefs.checkpoint.manifest import PIECE_BYTES
from slicefs.stores.tree import Tree
from slicefs.stores.volume import VolumeTree
from tests.conftest import LogWatch

SIZE = 24 * PIECE_BYTES + 1000


def stored_bytes(tmp_path: Path) -> int:
    """Bytes of all objects of the volume."""
    found = (tmp_path / "vol" / "data").rglob("*")
    return sum(path.stat().st_size for path in found if path.is_file())


def changed(data: bytes, begin: int, length: int) -> bytes:
    return data[:begin] + os.urandom(length) + data[begin + length :]


def save(manager: StepManager, step: int, data: bytes) -> int:
    """Save in writes of odd sizes; how many bytes were taken from the step before."""
    cuts = random.Random(step)
    with manager.save(step) as saving:
        with saving.open("model.bin") as file:
            at = 0
            while at < len(data):
                end = at + cuts.choice([1, 1000, 300_000, 5 << 20])
                file.write(data[at:end])
                at = end
            assert file.tell() == len(data)
        saving.put("small", b"same")
    return saving.reused_bytes


def test_what_did_not_change_is_not_uploaded(tmp_path: Path, volume_tree: Tree) -> None:
    manager = StepManager(volume_tree, keep_last=2)
    first = os.urandom(SIZE)
    assert save(manager, 1, first) == 0
    begin = stored_bytes(tmp_path)
    second = changed(first, 10 * PIECE_BYTES - 5, 10)
    assert save(manager, 2, second) == SIZE - 2 * PIECE_BYTES + len(b"same")
    assert stored_bytes(tmp_path) - begin < 2.1 * PIECE_BYTES
    assert manager.step(1).read("model.bin") == first
    assert manager.step(2).read("model.bin") == second
    save(manager, 3, second + b"longer")  # and step 1 goes
    manager.remove(2)
    latest = manager.latest(digest=True)
    assert latest is not None
    assert latest.read("model.bin") == second + b"longer"
    assert isinstance(volume_tree, VolumeTree)
    volume_tree.copy("step3/model.bin", "copy")
    assert volume_tree.read("copy") == second + b"longer"


@pytest.mark.parametrize("dedupe", [False, True])
def test_on_any_tree_steps_are_whole(tree: Tree, dedupe: bool) -> None:
    manager = StepManager(tree, keep_last=None, dedupe=dedupe)
    data = [os.urandom(3 * PIECE_BYTES), b"", os.urandom(PIECE_BYTES)]
    data += [data[0], data[0][: 2 * PIECE_BYTES], data[0][: PIECE_BYTES + 7]]
    for step, each in enumerate(data):
        save(manager, step, each)
    assert [manager.step(step).read("model.bin") for step in range(len(data))] == data


def test_a_step_that_was_cut_is_no_base(tmp_path: Path, log_watch: LogWatch) -> None:
    log_watch.expect("step . is skipped")
    manager = StepManager(str(tmp_path), keep_last=None)
    data = os.urandom(3 * PIECE_BYTES)
    save(manager, 1, data)
    os.truncate(tmp_path / "step1/model.bin", PIECE_BYTES)
    save(manager, 2, data)
    os.unlink(tmp_path / "step2/model.bin")
    save(manager, 3, data)
    latest = manager.latest(digest=True)
    assert latest is not None
    assert (latest.number, latest.read("model.bin")) == (3, data)
