"""The manager does the same on a directory, a volume and a bucket."""

from __future__ import annotations

import os

import pytest

from slicefs.checkpoint.files import Checkpoint
from slicefs.checkpoint.layout import new_token
from slicefs.checkpoint.manager import StepManager
from slicefs.stores.tree import Tree


def test_steps_on_each_tree(tree: Tree) -> None:
    manager = StepManager(tree, keep_last=2)
    assert manager.latest() is None
    for step in range(1, 5):
        with manager.save(step) as saving:
            saving.put("a/model.bin", bytes([step]) * 100_000)
            saving.put("empty", b"")
    assert manager.steps() == [3, 4]
    latest = manager.latest(digest=True)
    assert latest is not None
    assert latest.read("a/model.bin") == bytes([4]) * 100_000
    assert latest.read("empty") == b""
    with pytest.raises(FileExistsError):
        manager.save(4)
    manager.remove(4)
    assert manager.steps() == [3]


def test_two_savers_on_each_tree(tree: Tree) -> None:
    one, two = StepManager(tree), StepManager(tree)
    first, second = one.save(3), two.save(3)
    for saving, data in ((first, b"first"), (second, b"second")):
        for name in ("a", "b"):
            saving.put(name, data)
    second.publish()
    with pytest.raises(FileExistsError), first:
        pass
    step = one.latest(digest=True)
    assert step is not None
    assert step.read("a") == step.read("b") == b"second"
    assert [info.path for info in tree.list("") if "saving" in info.path] == []


def test_what_ended_savers_leave_goes(tree: Tree) -> None:
    manager = StepManager(tree)
    saving = manager.save(1)
    saving.put("a", b"left")
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    token = new_token(9).replace(f".{os.getpid()}.", f".{ended}.")
    left = saving.folder.replace(saving.token, token)
    tree.rename(f"{saving.folder}/a", f"{left}/a")
    saving.abort()
    assert manager.remove_abandoned() == [left]
    assert list(tree.list("")) == []


def test_files_on_each_tree(tree: Tree) -> None:
    checkpoint = Checkpoint(tree)
    data = os.urandom(1 << 20)
    with checkpoint.writer("deep/a.pt") as file:
        for _ in range(9):
            file.write(data)
    with checkpoint.reader("deep/a.pt") as stream:
        stream.seek((1 << 20) - 5)
        assert stream.read(10) == data[-5:] + data[:5]
    writer = checkpoint.writer("deep/a.pt")
    writer.write(b"half")
    writer.abort()
    assert [info.size for info in tree.list("deep/")] == [9 << 20]
