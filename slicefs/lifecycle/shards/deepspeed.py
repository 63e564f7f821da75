"""ZeRO checkpoints of DeepSpeed, stages 1 to 3: full F32 weights, and the optimizer's state.

Called by `layouts`. A step has `*_model_states.pt` (names and shapes, buffers, frozen parameters)
and, for each data-parallel rank, `*_optim_states.pt` with the rank's part of flat F32 vectors.

- Stages 1 and 2: each group of parameters is one vector, cut into parts of the ranks. In it they
  stand one behind the other; padding is at its end.
- Stage 3: each parameter is padded and cut into one part for each rank. A rank's parts stand one
  behind the other in its vector, which may be stored as several groups.

The optimizer's flat tensors have the layout of the weights. As DeepSpeed's own tool has it, buffers
and frozen parameters become F32, and an alias of a shared parameter is written as another tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import TensorSpec
from slicefs.checkpoint.step import joined
from slicefs.lifecycle.shards.pickles import told_of
from slicefs.lifecycle.shards.plan import (
    MODEL,
    OPTIMIZER,
    Flat,
    PlannedTensor,
    ShardPlan,
    StorageRange,
    join_flat,
    missing_ranks,
    plain_json,
    planned_file,
    require_flat,
    same_type,
    scalar,
    whole,
)
from slicefs.lifecycle.shards.reading import is_convertible
from slicefs.lifecycle.shards.torch_file import StandIn, StoredTensor, read_torch_file
from slicefs.stores.tree import Tree

OPTIM_FILE: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt"
)
MODEL_FILE: Final = re.compile(
    r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})(?:_\d+)?_model_states\.pt"
)
_LAYER_FILE: Final = re.compile(r"layer_.*model_states\.pt|expp_rank_.*optim_states\.pt")
_OWN_TOOL: Final = "use DeepSpeed's ds_to_universal.py"
_ALIGN: Final = 2  # stages 1 and 2 pad each vector to twice the number of ranks
Shape = tuple[int, ...]


class Ranks(NamedTuple):
    """The files of a step: of the optimizer's state by rank, and of the model's."""

    optimizer: Mapping[int, str]
    model: Mapping[int, str]


class ModelState(NamedTuple):
    """What a `*_model_states.pt` says of the model."""

    path: str
    groups: Sequence[Mapping[str, Shape]]
    buffers: Mapping[str, StoredTensor]
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, StoredTensor]
    shared: Mapping[str, str]


class RankState(NamedTuple):
    """What a `*_optim_states.pt` holds: flat vectors by group, weights first."""

    path: str
    stage: int
    world: int  # how many ranks there are
    weights: Sequence[StoredTensor]
    state: Sequence[Mapping[str, Any]]  # of the optimizer, by group; empty where there is none
    param_groups: Any
    unknown: str  # why the optimizer's state can't be unsharded


def plan_deepspeed(
    tree: Tree, folder: str, names: Collection[str], *, model_only: bool
) -> ShardPlan:
    """The files of a step of DeepSpeed, from its shards. Raises: ConfigError."""
    files = _ranks(folder, names)
    first = _rank_state(tree, joined(folder, files.optimizer[min(files.optimizer)]))
    lost = missing_ranks(files.optimizer, first.world)
    if lost or len(files.optimizer) != first.world:
        raise ConfigError(
            f"{folder}: has {len(files.optimizer)} files *_optim_states.pt of {first.world} "
            f"(rank {lost[0] if lost else first.world} {'is missing' if lost else 'is too many'}): "
            "copy all files of one save"
        )
    ranks = [first]
    for rank in range(1, first.world):
        ranks.append(_rank_state(tree, joined(folder, files.optimizer[rank])))
        _compare(first, ranks[-1])
    models = _models(tree, folder, files, first)
    layout = _Layout(models[0].groups, ranks)
    weights = layout.tensors([each.weights for each in ranks], "F32")
    model = {**_buffers(models), **_frozen(models, first.stage), **weights}
    for alias, name in models[0].shared.items():
        if name in model:
            model[alias] = model[name]
    planned = [planned_file(MODEL, model)]
    if not model_only and any(rank.state or rank.unknown for rank in ranks):
        optimizer = _optimizer(layout, ranks)
        about = {"param_groups": plain_json(first.param_groups)}
        planned.append(planned_file(OPTIMIZER, optimizer, about))
    shards = tuple(files.optimizer[rank] for rank in reversed(range(first.world)))
    beside = tuple(files.model[rank] for rank in range(len(models)))
    return ShardPlan(tuple(planned), shards, beside)


def _ranks(folder: str, names: Collection[str]) -> Ranks:
    """The files by rank. Raises: ConfigError for what only DeepSpeed itself can put together."""
    optimizer: dict[int, str] = {}
    model: dict[int, str] = {}
    plain = False
    for name in sorted(names):
        if _LAYER_FILE.fullmatch(name):
            raise ConfigError(
                f"{joined(folder, name)}: is of pipeline or expert parallelism: {_OWN_TOOL}"
            )
        for pattern, found in ((OPTIM_FILE, optimizer), (MODEL_FILE, model)):
            match = pattern.fullmatch(name)
            if match is None:
                continue
            if int(match[2]):
                raise ConfigError(
                    f"{joined(folder, name)}: is of tensor parallelism (mp_size above 1): "
                    f"{_OWN_TOOL}"
                )
            rank = int(match[1] or 0)
            plain |= match[1] is None
            if rank in found:
                raise ConfigError(
                    f"{joined(folder, name)}: stands beside {found[rank]}: keep the files of "
                    "one save"
                )
            found[rank] = name
    if not optimizer:
        raise ConfigError(
            f"{folder}: has no *_optim_states.pt: copy all files of the step, or use another step"
        )
    if not model:
        raise ConfigError(f"{folder}: has no *_model_states.pt: copy all files of the step")
    if plain and len(model) > 1:
        raise ConfigError(
            f"{folder}: has files of stage 3 and of another stage: keep the files of one save"
        )
    return Ranks(optimizer, model)


def _rank_state(tree: Tree, path: str) -> RankState:
    """What a rank has. Raises: ConfigError."""
    found = read_torch_file(tree, path)
    with told_of(path):
        return _rank_state_of(found, path)


def _rank_state_of(found: Any, path: str) -> RankState:
    state = found.get("optimizer_state_dict") if isinstance(found, Mapping) else None
    if not isinstance(state, Mapping) or "zero_stage" not in state:
        raise ConfigError(f"{path}: is of no ZeRO optimizer: use the model's file as it is")
    stage = _number(state["zero_stage"])
    counts = state.get("partition_count")
    each = [_number(one) for one in (counts if isinstance(counts, (list, tuple)) else [counts])]
    if stage not in (1, 2, 3):
        raise ConfigError(f"{path}: is of ZeRO stage {stage}: 1 to 3 are known")
    if len(set(each)) != 1 or not 1 <= each[0] <= 1_000_000:
        raise ConfigError(f"{path}: has parts for {counts} ranks (experts?): {_OWN_TOOL}")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    vectors = state.get(key)
    if not isinstance(vectors, (list, tuple)) or not vectors:
        raise ConfigError(f"{path}: has no {key}: {_OWN_TOOL}")
    weights = [require_flat(one, path, key) for one in vectors]
    if not all(is_convertible(one.dtype) for one in weights):
        raise ConfigError(f"{path}: has weights that can't become F32: {_OWN_TOOL}")
    known, param_groups, unknown = _base_state(state, stage, len(weights))
    return RankState(path, stage, each[0], weights, known, param_groups, unknown)


def _number(value: Any) -> int:
    """A whole number; an enumeration's member is what it was made of."""
    if isinstance(value, StandIn) and len(value.values) == 1:
        value = value.values[0]
    return value if isinstance(value, int) else -1


def _base_state(
    state: Mapping[str, Any], stage: int, groups: int
) -> tuple[Sequence[Mapping[str, Any]], Any, str]:
    """The optimizer's state by group, its param_groups, and why it is not known."""
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if not base:
        return [], None, ""
    if any(state.get("whole_param_optimizer_states") or ()):
        return [], None, "has tensors that are not cut into parts"
    param_groups = None
    if isinstance(base, Mapping):
        param_groups = base.get("param_groups")
        by_id = base.get("state")
        if not isinstance(by_id, Mapping):
            return [], None, "has no `state`"
        if not by_id:  # no step was made
            return [], None, ""
        base = [by_id.get(index) for index in sorted(by_id, key=_order)]
    if not isinstance(base, (list, tuple)) or not all(isinstance(e, Mapping) for e in base):
        return [], None, "is of no known layout"
    if len(base) != groups:
        return [], None, f"has {len(base)} groups, the weights have {groups}"
    if isinstance(param_groups, (list, tuple)):
        param_groups = [
            {name: value for name, value in each.items() if name != "params"}
            for each in param_groups
            if isinstance(each, Mapping)
        ]
    return base, param_groups, ""


def _order(key: Any) -> tuple[int, str]:
    return (key, "") if isinstance(key, int) else (0, str(key))


def _compare(first: RankState, other: RankState) -> None:
    """Raises: ConfigError where two ranks are not of one save."""
    same = first.stage == other.stage and first.world == other.world
    if not same or len(first.weights) != len(other.weights):
        raise ConfigError(
            f"{other.path}: is not of the save of {first.path}: keep the files of one save"
        )


def _models(tree: Tree, folder: str, files: Ranks, first: RankState) -> list[ModelState]:
    """The model's states: of all ranks in stage 3, else the only one."""
    if first.stage != 3:
        name = files.model.get(0, "")
        if len(files.model) != 1 or name.startswith("zero_"):
            raise ConfigError(
                f"{folder}: has model files of stage 3, and optimizer files of stage "
                f"{first.stage}: keep the files of one save"
            )
        return [_model_state(tree, joined(folder, name))]
    if files.model.get(0, "").startswith("mp_rank"):
        raise ConfigError(
            f"{folder}: has optimizer files of stage 3, and the model file of another stage: "
            "keep the files of one save"
        )
    lost = missing_ranks(files.model, first.world)
    if lost:
        raise ConfigError(
            f"{folder}: zero_pp_rank_{lost[0]}_mp_rank_00_model_states.pt is missing: copy all "
            "files of the step"
        )
    zero = _model_state(tree, joined(folder, files.model[0]))
    if not zero.frozen:
        return [zero]
    others = [joined(folder, files.model[rank]) for rank in range(1, first.world)]
    return [zero, *(_model_state(tree, path) for path in others)]


def _model_state(tree: Tree, path: str) -> ModelState:
    """What a file says of the model. Raises: ConfigError."""
    found = read_torch_file(tree, path)
    with told_of(path):
        return _model_state_of(found, path)


def _model_state_of(found: Any, path: str) -> ModelState:
    if not isinstance(found, Mapping) or "buffer_names" not in found:
        raise ConfigError(f"{path}: is no model state of DeepSpeed: copy all files of the step")
    if found.get("ds_autoep_layers") or found.get("autoep_layers"):
        raise ConfigError(f"{path}: is of expert parallelism: {_OWN_TOOL}")
    groups, module = found.get("param_shapes"), found.get("module")
    if not isinstance(groups, (list, tuple)) or not isinstance(module, Mapping):
        raise ConfigError(f"{path}: has no param_shapes, so it is of no ZeRO optimizer")
    names = set(found["buffer_names"] or ())
    buffers = {name: each for name, each in module.items() if name in names}
    frozen = found.get("frozen_param_shapes") or {}
    fragments = found.get("frozen_param_fragments") or {}
    shared = found.get("shared_params") or {}
    tensors = [*buffers.values(), *fragments.values()]
    if not all(isinstance(e, StoredTensor) and is_convertible(e.dtype) for e in tensors):
        raise ConfigError(f"{path}: has a buffer or frozen parameter that can't become F32")
    return ModelState(
        path,
        [{name: _shape(each, path) for name, each in group.items()} for group in groups],
        buffers,
        {name: _shape(each, path) for name, each in frozen.items()},
        fragments,
        shared if isinstance(shared, Mapping) else dict(shared),
    )


def _shape(value: Any, path: str) -> Shape:
    if isinstance(value, int):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(size, int) and size >= 0 for size in value
    ):
        raise ConfigError(f"{path}: has a parameter of shape {value!r}: copy it again")
    return tuple(value)


class _Layout:
    """Where each parameter is in the flat vectors of the ranks."""

    def __init__(self, groups: Sequence[Mapping[str, Shape]], ranks: Sequence[RankState]) -> None:
        self.stage = ranks[0].stage
        self._groups = groups
        self._ranks = ranks
        self._path = ranks[0].path
        if self.stage == 3:
            self._groups = [{n: shape for each in groups for n, shape in each.items()}]
            self._check_stage3(self._groups[0])
        else:
            self._check_flat()

    def names(self) -> Iterator[tuple[int, str]]:
        """Each parameter, with its group."""
        for index, group in enumerate(self._groups):
            for name in group:
                yield index, name

    def tensors(
        self, vectors: Sequence[Sequence[StoredTensor]], dtype: str | None = None
    ) -> dict[str, PlannedTensor]:
        """Each parameter's tensor in such vectors: by rank, then by group."""
        found: dict[str, PlannedTensor] = {}
        for index, group in enumerate(self._groups):
            if self.stage == 3:
                found |= _cut_each(group, vectors, dtype)
                continue
            whole_vector = [each[index] for each in vectors]
            at = 0
            for name, shape in group.items():
                found[name] = join_flat(whole_vector, at, shape, dtype)
                at += math.prod(shape)
        return found

    def _check_stage3(self, group: Mapping[str, Shape]) -> None:
        count = len(self._ranks)
        needed = sum(-(-math.prod(shape) // count) for shape in group.values())
        for rank in self._ranks:
            self._equal(rank.path, needed, sum(each.numel for each in rank.weights))

    def _check_flat(self) -> None:
        if len(self._groups) != len(self._ranks[0].weights):
            raise ConfigError(
                f"{self._path}: has {len(self._ranks[0].weights)} groups of parameters, the "
                f"model's file {len(self._groups)}: keep the files of one save"
            )
        align = _ALIGN * len(self._ranks)
        for index, group in enumerate(self._groups):
            needed = sum(math.prod(shape) for shape in group.values())
            there = sum(rank.weights[index].numel for rank in self._ranks)
            if needed > there or -(-needed // align) != -(-there // align):
                self._equal(self._path, needed, there)

    def _equal(self, path: str, needed: int, there: int) -> None:
        if needed != there:
            raise ConfigError(
                f"{path}: the parts hold {there} items, the shapes of the model need {needed}: "
                "keep the files of one save"
            )


def _cut_each(
    group: Mapping[str, Shape], vectors: Sequence[Sequence[StoredTensor]], dtype: str | None
) -> dict[str, PlannedTensor]:
    """Stage 3: each parameter is a part of each rank's vector."""
    found: dict[str, PlannedTensor] = {}
    stored = same_type([each for vector in vectors for each in vector])
    at = 0
    for name, shape in group.items():
        count = math.prod(shape)
        each = -(-count // len(vectors))
        parts: list[StorageRange] = []
        left = count
        for vector in vectors:
            mine = join_flat(vector, at, (min(each, left),))
            parts += mine.parts
            left -= min(each, left)
        found[name] = Flat(TensorSpec(dtype or stored, shape), stored, tuple(parts))
        at += each
    return found


def _buffers(models: Sequence[ModelState]) -> dict[str, PlannedTensor]:
    return {name: whole(each, "F32") for name, each in models[0].buffers.items()}


def _frozen(models: Sequence[ModelState], stage: int) -> dict[str, PlannedTensor]:
    """Frozen parameters: in one piece, or in stage 3 a padded part in each rank's file."""
    found: dict[str, PlannedTensor] = {}
    for name, shape in models[0].frozen.items():
        fragments = []
        for model in models:
            if name not in model.fragments:
                raise ConfigError(
                    f"{model.path}: lacks the frozen parameter {name}: keep the files of one save"
                )
            fragments.append(model.fragments[name])
        count = math.prod(shape)
        if sum(each.numel for each in fragments) < count or (
            stage != 3 and fragments[0].shape != shape
        ):
            raise ConfigError(
                f"{models[0].path}: the parts of {name} are not of its shape {shape}: keep the "
                "files of one save"
            )
        if stage == 3:
            flat = [require_flat(each, models[0].path, name) for each in fragments]
            found[name] = join_flat(flat, 0, shape, "F32")
        else:
            found[name] = whole(fragments[0], "F32")
    return found


def _optimizer(layout: _Layout, ranks: Sequence[RankState]) -> dict[str, PlannedTensor]:
    """The optimizer's tensors, as `optim.state.NAME.KEY`. Raises: ConfigError."""
    for rank in ranks:
        if rank.unknown or len(rank.state) != len(rank.weights):
            raise ConfigError(
                f"{rank.path}: the optimizer's state {rank.unknown or 'is not complete'}: use "
                "--model-only"
            )
    found: dict[str, PlannedTensor] = {}
    for key in sorted({str(key) for rank in ranks for each in rank.state for key in each}):
        vectors = [[each.get(key) for each in rank.state] for rank in ranks]
        if all(isinstance(one, StoredTensor) and one.shape for each in vectors for one in each):
            flat = [_like_weights(rank, key) for rank in ranks]
            tensors = layout.tensors(flat)
        else:
            for other in ranks[1:]:
                _scalars(layout, other, key)
            tensors = _scalars(layout, ranks[0], key)
        for name, tensor in tensors.items():
            found[f"optim.state.{name}.{key}"] = tensor
    return found


def _like_weights(rank: RankState, key: str) -> list[StoredTensor]:
    """A rank's vectors of one key, without padding that those of the weights lack."""
    found = []
    for weights, state in zip(rank.weights, rank.state, strict=True):
        vector = require_flat(state[key], rank.path, key)
        if vector.numel < weights.numel:
            raise ConfigError(
                f"{rank.path}: {key} has {vector.numel} items, its weights {weights.numel}: use "
                "--model-only"
            )
        found.append(vector._replace(shape=weights.shape))
    return found


def _scalars(layout: _Layout, rank: RankState, key: str) -> dict[str, PlannedTensor]:
    """One value of a group, for each of its parameters."""
    found: dict[str, PlannedTensor] = {}
    for group, name in layout.names():
        value = rank.state[group].get(key)
        tensor = scalar(value)
        if tensor is None:
            raise ConfigError(
                f"{rank.path}: the optimizer's {key} is neither a number nor cut as the weights "
                "are: use --model-only"
            )
        found[name] = tensor
    return found
