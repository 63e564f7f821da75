"""A rank of FSDP on CPUs, which saves as OLMo does: run by `test_unshard.py`.

`python -m tests.slicefs.torch.fsdp_ranks RANK WORLD STORE FOLDER`: into FOLDER/local/step5 go the
flat parameters as the rank holds them, into FOLDER/legacy/step5 ShardedTensors. Rank 0 also writes
what both are whole, made without FSDP.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

METADATA = (
    *("_fqns", "_shard_param_offsets", "_shard_indices", "_numels", "_numels_with_padding"),
    *("_shapes", "_shard_numel_padded", "_shard_param_infos"),
)


def model() -> torch.nn.Module:
    """A small model with odd sizes, the same on each rank."""
    torch.manual_seed(3)
    block = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5))
    return torch.nn.ModuleDict(
        {
            "wte": torch.nn.Embedding(11, 7),
            "block": block,
            "head": torch.nn.Linear(5, 3, bias=False),
        }
    )


def stepped(module: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer with the names of its parameters, after one step."""
    named = list(module.named_parameters())
    names = [name for name, _ in named]
    group = {"params": [each for _, each in named], "param_names": names}
    optimizer = torch.optim.AdamW([group], lr=0.1)
    for _, each in named:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return optimizer


def local_state(module: FullyShardedDataParallel) -> dict[str, Any]:
    """Flat parameters, with what describes them."""
    modules = []
    for name, each in module.named_modules():
        if not isinstance(each, FullyShardedDataParallel):
            continue
        handle = getattr(each, "_handle", None)
        handles = []
        if handle is not None:
            flat = handle.flat_param
            held = {f"flat_param.{k}": getattr(flat, k) for k in METADATA if hasattr(flat, k)}
            handles.append({"flat_param.data": flat.detach(), **held})
        modules.append({"handles": handles, "name": name})
    return {"modules": modules}


def save(value: Any, path: Path) -> None:
    """As OLMo does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def main(rank: int, world: int, store: str, folder: Path) -> None:
    """One rank's part."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    cpu = torch.device("cpu")
    inner = model()
    inner["block"] = FullyShardedDataParallel(inner["block"], use_orig_params=True, device_id=cpu)
    module = FullyShardedDataParallel(inner, use_orig_params=True, device_id=cpu)
    optimizer = stepped(module)
    local = folder / "local/step5"
    save(local_state(module), local / f"model/rank{rank}.pt")
    save(optimizer.state_dict(), local / f"optim/rank{rank}.pt")
    save({"epoch": 1}, local / f"train/rank{rank}.pt")
    with FullyShardedDataParallel.state_dict_type(
        module,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True),
        ShardedOptimStateDictConfig(offload_to_cpu=True),
    ):
        state = {
            "model": module.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(module, optimizer),
            "epoch": 1,
            "rng": {"torch": torch.get_rng_state()},
        }
        save(state, folder / f"legacy/step5/rank{rank}.pt")
    if rank == 0:
        (local / "metadata.yaml").write_text(f"world_size: {world}\n")
        plain = model()
        done = stepped(plain)
        names = [name for name, _ in plain.named_parameters()]
        states = {names[at]: each for at, each in done.state_dict()["state"].items()}
        save({"model": dict(plain.state_dict()), "state": states}, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
