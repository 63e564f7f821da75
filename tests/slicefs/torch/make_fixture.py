"""Makes `checkpoint/data/dcp.zip`: a small DCP step of two ranks, for tests without torch.

`python -m tests.slicefs.torch.make_fixture RANK STORE DIRECTORY`, for ranks 0 and 1; then zip
DIRECTORY.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main(rank: int, store: str, directory: str) -> None:
    """One rank's part."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.arange(60, dtype=torch.float32)
    state = {
        "model": {
            "rows": distribute_tensor(numbers.reshape(6, 10), mesh, [Shard(0)]),
            "columns": distribute_tensor(numbers.reshape(6, 10) + 100, mesh, [Shard(1)]),
            "middle": distribute_tensor(numbers.reshape(3, 4, 5) + 200, mesh, [Shard(1)]),
            "turned": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "scalar": torch.tensor(7.0, dtype=torch.float64),
            "empty": torch.empty(0, 4),
        },
        "optim": {"exp_avg": numbers, "lr": 0.5},
        "step": 12,
    }
    dcp.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
