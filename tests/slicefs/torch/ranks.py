"""One rank of a group: `python -m tests.slicefs.torch.ranks RANK WORLD STORE WHAT URL`.

`save` saves two steps of a sharded model, `load` loads the newest on whatever number of ranks, and
compares each value; `fail` makes one rank fail in the middle of a save,
`process` saves in processes of torch's. `save-part` saves one tensor without a manager, `load-part`
loads it and prints the bytes that this rank read, and those that it needs.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from slicefs.torch.checkpoint import CheckpointManager, StorageReader, StorageWriter

ROWS, COLUMNS = 64, 1000


def full(name: str, step: int) -> torch.Tensor:
    """The whole tensor of a step."""
    base = {"w": 1.0, "v": 1000.0}[name]
    return base * torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step


def state(step: int) -> dict[str, Any]:
    """A model whose tensors are sharded by rows and by columns, and what all ranks share."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {
            "w": distribute_tensor(full("w", step), mesh, [Shard(0)]),
            "v": distribute_tensor(full("v", step), mesh, [Shard(1)]),
        },
        "optim": {"lr": 0.5 * step},
        "step": step,
    }


def compare(loaded: dict[str, Any], step: int) -> None:
    """Raises: AssertionError."""
    for name in ("w", "v"):
        tensor = loaded["model"][name]
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), full(name, step)), name
    assert loaded["step"] == step
    assert loaded["optim"]["lr"] == 0.5 * step


def large() -> torch.Tensor:
    """A tensor of 16 MiB, by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(4 << 20, dtype=torch.float32).reshape(64, 1 << 16)
    return distribute_tensor(whole, mesh, [Shard(0)])


def load_part(url: str) -> None:
    """Load it into zeros, and compare."""
    expected = large()
    wanted = {"w": torch.zeros_like(expected)}
    reader = StorageReader(url)
    tree, read = reader.fs.tree, [0]
    read_ranges = tree.read_ranges

    def counted(items: Any, *more: Any) -> list[memoryview]:
        found = read_ranges(items, *more)
        read[0] += sum(len(each) for each in found)
        return found

    tree.read_ranges = counted  # type: ignore[method-assign, assignment]
    dcp.load(wanted, storage_reader=reader)
    assert torch.equal(wanted["w"].to_local(), expected.to_local())
    print(read[0], expected.to_local().nbytes, flush=True)


def main(rank: int, world: int, store: str, what: str, url: str) -> None:
    """One rank's part."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    manager = CheckpointManager(url, keep_last=2)
    if what == "save":
        manager.save(1, state(1))
        assert manager.save(2, state(2), async_=True) is not None
        manager.wait()
        dist.barrier()
        assert manager.steps() == [1, 2]
    elif what == "process":
        manager.save(1, state(1))
        assert manager.save(2, state(2), async_="process") is not None
        manager.wait()
        dist.barrier()
        assert manager.steps() == [1, 2]
        assert manager.last_durable == 2
    elif what == "save-part":
        dcp.save({"w": large()}, storage_writer=StorageWriter(url))
    elif what == "load-part":
        load_part(url)
    elif what == "fail":
        broken = state(3)
        if rank == 1:
            broken["model"]["bad"] = _Unpicklable()
        with pytest.raises(CheckpointException, match="this rank fails"):
            manager.save(3, broken)
        dist.barrier()
        assert manager.steps() == [1, 2]
    else:
        wanted = state(0)
        assert manager.load(wanted) == 2
        compare(wanted, 2)
    dist.barrier()
    dist.destroy_process_group()


class _Unpicklable:
    """What no rank can write."""

    def __reduce__(self) -> Any:
        raise RuntimeError("this rank fails")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
