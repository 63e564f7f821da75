"""Steps in the layout of DeepSpeed's ZeRO, written by torch.

`python -m tests.slicefs.torch.zero_files FOLDER MIB` writes FOLDER/step2 and FOLDER/step3 with one
tensor of MIB and a small one, for `test_unshard.py` to measure the memory of a process without it.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


class ZeroStageEnum(enum.IntEnum):
    """DeepSpeed's: a pickle has it by DeepSpeed's name."""

    optimizer_states = 1
    gradients = 2
    weights = 3


def stages(put: Callable[[Any, str, Any], Any]) -> type[ZeroStageEnum]:
    """The enumeration, once `put` has made a module of DeepSpeed's name for it."""
    name = "deepspeed.runtime.zero.config"
    ZeroStageEnum.__module__ = name
    words = name.split(".")
    for count in range(1, len(words) + 1):
        at = ".".join(words[:count])
        put(sys.modules, at, types.ModuleType(at))
    sys.modules[name].ZeroStageEnum = ZeroStageEnum  # type: ignore[attr-defined]
    return ZeroStageEnum


def parameters() -> list[Tensors]:
    torch.manual_seed(5)
    sizes: list[dict[str, tuple[int, ...]]] = [
        {"embed.weight": (1001, 33), "a.weight": (64, 64), "empty": (0, 4)},
        {"a.bias": (63,), "scale": ()},
    ]
    return [{name: torch.randn(shape) for name, shape in group.items()} for group in sizes]


def model_state(groups: list[Tensors], frozen: torch.Tensor) -> dict[str, Any]:
    module = {name: each.bfloat16() for group in groups for name, each in group.items()}
    module["positions"] = torch.arange(90).reshape(9, 10).t()[::2].contiguous()
    module["table"] = torch.randn(50, generator=torch.Generator().manual_seed(1)).half()
    return {
        "module": module,
        "buffer_names": ["positions", "table"],
        "param_shapes": [{name: each.shape for name, each in group.items()} for group in groups],
        "frozen_param_shapes": {"frozen": torch.Size([5, 7])},
        "frozen_param_fragments": {"frozen": frozen},
        "shared_params": {"head.weight": "embed.weight"},
        "optimizer": None,
        "lr_scheduler": {"last_epoch": 3},
        "ds_version": "0.18.0",
    }


FROZEN = torch.arange(35, dtype=torch.bfloat16).reshape(5, 7) / 3


def whole(groups: list[Tensors]) -> Tensors:
    """What DeepSpeed's zero_to_fp32 makes of it."""
    state = model_state(groups, FROZEN)
    found = {name: each for group in groups for name, each in group.items()}
    found["head.weight"] = found["embed.weight"]
    found["frozen"] = FROZEN.float()
    for name in ("positions", "table"):
        found[name] = state["module"][name].float()
    return found


def save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def save_flat(step: Path, stage: Any, groups: list[Tensors], world: int) -> None:
    """Stages 1 and 2: vectors padded to twice the ranks, cut; the last part without padding."""
    parts: list[list[torch.Tensor]] = []
    paddings = []
    for group in groups:
        flat = torch.cat([each.reshape(-1) for each in group.values()])
        padding = -flat.numel() % (2 * world)
        padded = torch.cat([flat, torch.zeros(padding)])
        parts.append(list(padded.chunk(world)))
        paddings.append(padding)
    for rank in range(world):
        cut = [each[rank].clone() for each in parts]
        lean = [
            each[: each.numel() - padding].clone() if rank == world - 1 else each
            for each, padding in zip(cut, paddings, strict=True)
        ]
        state = {
            at: {"step": torch.tensor(4.0), "exp_avg": each * 2, "exp_avg_sq": each * each}
            for at, each in enumerate(cut)
        }
        optimizer = {
            "loss_scaler": None,
            "base_optimizer_state": {"state": state, "param_groups": [{"lr": 1.0, "params": [0]}]},
            "single_partition_of_fp32_groups": lean,
            "zero_stage": stage,
            "group_paddings": paddings,
            "partition_count": [world] * len(groups),
            "ds_version": "0.18.0",
        }
        save(
            {"optimizer_state_dict": optimizer},
            step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    save(model_state(groups, FROZEN), step / "mp_rank_00_model_states.pt")


def save_three(step: Path, stage: Any, groups: list[Tensors], world: int, sub: int) -> None:
    """Stage 3: each parameter padded and cut; a rank's parts in `sub` groups."""
    every = [each for group in groups for each in group.values()]
    for rank in range(world):
        flat = torch.cat(
            [
                padded(each, world).chunk(world)[rank] if each.numel() else each.reshape(-1)
                for each in every
            ]
        )
        cut = [each.clone() for each in flat.chunk(sub)]
        state = {
            at: {"step": 4, "exp_avg": each * 2, "exp_avg_sq": each * each}
            for at, each in enumerate(cut)
        }
        optimizer = {
            "zero_stage": stage,
            "partition_count": world,
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 1.0, "params": cut}]},
            "fp32_flat_groups": cut,
        }
        save(
            {"optimizer_state_dict": optimizer},
            step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        fragment = padded(FROZEN, world).chunk(world)[rank].clone()
        save(
            model_state(groups, fragment), step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        )


def padded(tensor: torch.Tensor, world: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.cat([flat, torch.zeros(-flat.numel() % world, dtype=flat.dtype)])


def main(folder: Path, mib: int) -> None:
    """Write both steps."""
    stage = stages(dict.__setitem__)
    group = {"large": torch.rand(mib << 18), "small": torch.rand(1000)}
    save_three(folder / "step3", stage(3), [group], 2, sub=1)
    save_flat(folder / "step2", stage(2), [group], 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
