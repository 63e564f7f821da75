"""Small sharded checkpoints in the layouts of their libraries, and what they are whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.slicefs.lifecycle.torch_files import FakeTensor, Made, sharded_tensor, size, torch_save

Values = Mapping[str, tuple[tuple[int, ...], Sequence[float]]]


def numbers(begin: int, *shape: int) -> tuple[tuple[int, ...], list[float]]:
    """A tensor: its shape, and floats that count from `begin`."""
    return shape, [float(begin + each) for each in range(math.prod(shape))]


GROUPS: list[Values] = [
    {"embed.weight": numbers(0, 5, 3), "norm.weight": numbers(100, 7)},
    {"head.bias": numbers(200, 4), "scale": numbers(300)},
]
STAGE = "deepspeed.runtime.zero.config"


def zero_flat(folder: Path, ranks: int, stage: int, groups: Sequence[Values] | None = None) -> None:
    """A step of ZeRO, stage 1 or 2: each group is one vector, cut into equal parts."""
    every = GROUPS if groups is None else groups
    cut: list[list[list[float]]] = []  # by group, then by rank
    for group in every:
        flat = [each for _, values in group.values() for each in values]
        each = 2 * -(-len(flat) // (2 * ranks))
        cut.append([flat[rank * each : (rank + 1) * each] for rank in range(ranks)])  # no padding
    for rank in range(ranks):
        state = {
            index: {
                "step": 7,
                "exp_avg": FakeTensor([-x for x in parts[rank]] + [0.0] * (rank == ranks - 1)),
            }
            for index, parts in enumerate(cut)
        }
        groups_of = [{"lr": 0.5, "params": [index]} for index in range(len(cut))]
        _optimizer_file(
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            {
                "loss_scaler": Made("deepspeed.runtime.fp16.loss_scaler", "LossScaler", 1.0),
                "base_optimizer_state": {"state": state, "param_groups": groups_of},
                "single_partition_of_fp32_groups": [FakeTensor(parts[rank]) for parts in cut],
                "zero_stage": Made(STAGE, "ZeroStageEnum", stage),
                "partition_count": [ranks] * len(cut),
            },
        )
    shape, values = numbers(400, 2, 3)
    frozen = FakeTensor(values, shape, "F16")
    _model_file(folder / "mp_rank_00_model_states.pt", every, frozen)


def zero_three(folder: Path, ranks: int, sub_groups: int = 1) -> None:
    """A step of ZeRO, stage 3: each parameter is cut into parts of the ranks."""
    every = [each for group in GROUPS for each in group.values()]
    for rank in range(ranks):
        mine: list[float] = []
        for _, values in every:
            each = -(-len(values) // ranks)
            part = list(values[rank * each : (rank + 1) * each])
            mine += part + [-1.0] * (each - len(part))
        step = -(-len(mine) // sub_groups)
        cuts = [mine[at : at + step] for at in range(0, len(mine), step)]
        state = {
            index: {"step": FakeTensor([7.0], ()), "exp_avg": FakeTensor([-x for x in cut])}
            for index, cut in enumerate(cuts)
        }
        _optimizer_file(
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            {
                "zero_stage": Made(STAGE, "ZeroStageEnum", 3),
                "partition_count": ranks,
                "optimizer_state_dict": {"state": state, "param_groups": [{"lr": 0.5}]},
                "fp32_flat_groups": [FakeTensor(cut) for cut in cuts],
            },
        )
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        _model_file(path, GROUPS, _frozen(ranks, rank))


def _frozen(ranks: int, rank: int) -> FakeTensor:
    """A rank's part of the frozen parameter in stage 3."""
    _, values = numbers(400, 2, 3)
    each = -(-len(values) // ranks)
    part = values[rank * each : (rank + 1) * each]
    return FakeTensor(part + [0.0] * (each - len(part)), (each,), "F16")


def _optimizer_file(path: Path, state: Mapping[str, Any]) -> None:
    torch_save({"optimizer_state_dict": dict(state), "ds_version": "0.17.0"}, path)


def _model_file(path: Path, groups: Sequence[Values], frozen: FakeTensor) -> None:
    shapes = [{name: size(*shape) for name, (shape, _) in group.items()} for group in groups]
    torch_save(
        {
            "module": {
                "counts": FakeTensor([1, 2, 3, 4], (2, 2), "I64", strides=(1, 2)),
                "table": FakeTensor([0x3F80, 0x4000, 0x4040], (3,), "BF16"),
                "embed.weight": FakeTensor([0.0] * 15, (5, 3), "F16"),
            },
            "buffer_names": ["counts", "table"],
            "param_shapes": shapes,
            "frozen_param_shapes": {"frozen": size(2, 3)},
            "frozen_param_fragments": {"frozen": frozen},
            "shared_params": {"head.weight": "embed.weight", "lost": "not there"},
            "args": Made("argparse", "Namespace", state={"lr": 0.5}),
            "client": Made("mytrainer.state", "Progress", 3),
            "ds_version": "0.17.0",
        },
        path,
    )


def zero_whole() -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """What a step of ZeRO is whole."""
    found = {name: (shape, list(v)) for group in GROUPS for name, (shape, v) in group.items()}
    found["head.weight"] = found["embed.weight"]
    found["frozen"] = numbers(400, 2, 3)
    found["counts"] = ((2, 2), [1.0, 3.0, 2.0, 4.0])
    found["table"] = ((3,), [1.0, 2.0, 3.0])
    return found


MODULES: dict[str, Values] = {
    "": {"wte.weight": numbers(0, 7, 3), "ln.bias": numbers(100, 5)},
    "_fsdp_wrapped_module.blocks.0": {"ff.weight": numbers(200, 3, 3)},
}


def olmo_local(folder: Path, ranks: int, *, old: bool = False) -> None:
    """A step of OLMo's local checkpoints; `old` as torch 2.0 had the flat parameters."""
    for rank in range(ranks):
        modules = []
        state: dict[int, Any] = {}
        names: list[str] = []
        for prefix, parameters in MODULES.items():
            handle, held = _handle(parameters, rank, ranks, old)
            modules.append({"handles": [handle], "name": prefix})
            for name in parameters:
                if name in held:
                    first = FakeTensor([-x for x in held[name]])
                    state[len(names)] = {"step": FakeTensor([7.0], ()), "exp_avg": first}
                names.append(f"{prefix}.{name}" if prefix else name)
        groups = [{"lr": 0.5, "params": list(range(len(names))), "param_names": names}]
        torch_save({"modules": modules}, folder / f"model/rank{rank}.pt")
        torch_save({"state": state, "param_groups": groups}, folder / f"optim/rank{rank}.pt")
        torch_save({"epoch": 0}, folder / f"train/rank{rank}.pt")
    (folder / "metadata.yaml").write_text(f"world_size: {ranks}\n")
    (folder / "config.yaml").write_text("model: {}\n")


def _handle(
    parameters: Values, rank: int, ranks: int, old: bool
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """A flat parameter as a rank has it, and the rank's items of each parameter."""
    flat = [each for _, values in parameters.values() for each in values]
    each = -(-len(flat) // ranks)
    begin, end = rank * each, min((rank + 1) * each, len(flat))
    padding = each - max(0, end - begin)
    held: dict[str, list[float]] = {}
    infos, offsets, at = [], [], 0
    first = None
    for index, (name, (_, values)) in enumerate(parameters.items()):
        low, high = max(begin, at), min(end, at + len(values))
        if low < high:
            held[name] = list(values[low - at : high - at])
            place: tuple[Any, ...] = (True, low - begin, high - low, low - at, high - at - 1)
            offsets.append((low - at, high - at - 1))
            first = index if first is None else first
        else:
            place = (False, None, None, None, None)
        module = "torch.distributed.fsdp._flat_param"
        infos.append(Made(module, "_ShardParamInfo", *place))
        at += len(values)
    handle: dict[str, Any] = {
        "flat_param.data": FakeTensor(flat[begin:end] + [0.0] * padding),
        "flat_param._fqns": tuple(parameters),
        "flat_param._shapes": tuple(size(*shape) for shape, _ in parameters.values()),
        "flat_param._shard_numel_padded": padding,
    }
    if old:
        handle["flat_param._shard_indices"] = (first or 0, (first or 0) + len(offsets) - 1)
        handle["flat_param._shard_param_offsets"] = tuple(offsets)
    else:
        handle["flat_param._shard_param_infos"] = tuple(infos)
    return handle, held


def olmo_whole() -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """What a step of OLMo's is whole."""
    return {
        f"{prefix}.{name}".lstrip(".").replace("_fsdp_wrapped_module.", ""): (shape, list(values))
        for prefix, parameters in MODULES.items()
        for name, (shape, values) in parameters.items()
    }


def olmo_legacy(folder: Path, ranks: int) -> None:
    """A step of OLMo's torch_legacy checkpoints: rows on ranks, and one tensor by columns."""
    for rank in range(ranks):
        model: dict[str, Any] = {
            name: _rows(*each, rank, ranks) for name, each in olmo_whole().items()
        }
        model["columns"] = _columns(rank, ranks)
        model["plain"] = FakeTensor([1.0, 3.0, 2.0, 4.0], (2, 2), strides=(1, 2))
        state = {"wte.weight": {"step": FakeTensor([7.0], ()), "exp_avg": model["wte.weight"]}}
        torch_save(
            {
                "model": model,
                "optim": {"state": state, "param_groups": [{"lr": 0.5, "params": ["wte.weight"]}]},
                "epoch": 1,
                "rng": {"python": Made("mytrainer", "Random")},
            },
            folder / f"rank{rank}.pt",
        )
    (folder / "config.yaml").write_text("model: {}\n")


def _rows(shape: tuple[int, ...], values: Sequence[float], rank: int, ranks: int) -> Made:
    each = -(-shape[0] // ranks)
    row = math.prod(shape[1:])
    begins = list(range(0, shape[0], each))
    every = [
        ((at, *[0] * (len(shape) - 1)), (min(each, shape[0] - at), *shape[1:])) for at in begins
    ]
    mine = {}
    if rank < len(begins):
        sizes = every[rank][1]
        part = values[begins[rank] * row : (begins[rank] + sizes[0]) * row]
        mine[rank] = FakeTensor(part, sizes)
    return sharded_tensor(shape, every, mine)


def _columns(rank: int, ranks: int) -> Made:
    """A tensor of 2 rows, two columns on each rank."""
    every = [((0, 2 * each), (2, 2)) for each in range(ranks)]
    first = float(2 * rank)
    part = [first, first + 1, 100 + first, 101 + first]
    return sharded_tensor((2, 2 * ranks), every, {rank: FakeTensor(part, (2, 2))})
