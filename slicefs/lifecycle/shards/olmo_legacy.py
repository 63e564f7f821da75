"""Checkpoints of OLMo's `torch_legacy` kind: a `rankN.pt` of ShardedTensors from each rank.

Called by `layouts`. Each file has the state of the whole trainer: `model` by name, `optim` with
`state` by name, and the trainer's own values. A ShardedTensor says of which size it is and which
shards there are on all ranks; a file has the shards of its rank. What is no ShardedTensor is the
same on all ranks, and is read from rank 0. `config.yaml` stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import TensorSpec
from slicefs.checkpoint.step import joined
from slicefs.lifecycle.shards.pickles import is_plain, told_of
from slicefs.lifecycle.shards.plan import (
    MODEL,
    OPTIMIZER,
    Flat,
    Placed,
    PlannedTensor,
    ShardPlan,
    StorageRange,
    missing_ranks,
    plain_json,
    planned_file,
    same_type,
    scalar,
    whole,
)
from slicefs.lifecycle.shards.strides import are_apart
from slicefs.lifecycle.shards.torch_file import (
    ShardedRecord,
    StandIn,
    StoredTensor,
    read_torch_file,
)
from slicefs.stores.tree import Tree

LEGACY_FILE: Final = re.compile(r"rank(\d{1,6})\.pt")
_REMEDY: Final = "copy all files of the step, or use another step"
_TENSORS: Final = ("model", "optim")


class ShardBlock(NamedTuple):
    """A shard: where it begins in its tensor, and its items."""

    offsets: tuple[int, ...]
    tensor: StoredTensor


class ShardedItems(NamedTuple):
    """A ShardedTensor: its shape, all its shards by their offsets, and those that were found."""

    shape: tuple[int, ...]
    expected: Mapping[tuple[int, ...], tuple[int, ...]]  # sizes
    blocks: list[ShardBlock]


def plan_olmo_legacy(
    tree: Tree, folder: str, names: Collection[str], *, model_only: bool
) -> ShardPlan:
    """The files of a step of this kind, from its shards. Raises: ConfigError."""
    ranks = sorted(int(found[1]) for each in names if (found := LEGACY_FILE.fullmatch(each)))
    lost = missing_ranks(ranks, ranks[-1] + 1)
    if lost:
        raise ConfigError(f"{joined(folder, f'rank{lost[0]}.pt')}: is missing: {_REMEDY}")
    kinds = _TENSORS[:1] if model_only else _TENSORS
    state: dict[str, dict[str, PlannedTensor | ShardedItems]] = {kind: {} for kind in kinds}
    first: Mapping[str, Any] = {}
    for rank in ranks:
        path = joined(folder, f"rank{rank}.pt")
        found = read_torch_file(tree, path)
        if not isinstance(found, Mapping) or not isinstance(found.get("model"), Mapping):
            raise ConfigError(f"{path}: has no model: it is of no known layout: {_REMEDY}")
        first = first or found
        for kind in kinds:
            with told_of(path):
                for name, value in _entries(found, kind, path):
                    _add(state[kind], name, value, path, is_first=found is first)
    others = {name: first[name] for name in first if name not in _TENSORS}
    trainer = plain_json({name: each for name, each in others.items() if name != "rng"})
    left_out = tuple(str(n) for n, each in others.items() if n == "rng" or not is_plain(each))
    model = _planned(state["model"], folder)
    files = [planned_file(MODEL, model, {"trainer": trainer})]
    if not model_only and state["optim"]:
        optimizer = _planned(state["optim"], folder)
        held = first.get("optim")
        about = {"param_groups": plain_json(dict(held or {}).get("param_groups"))}
        files.append(planned_file(OPTIMIZER, optimizer, about))
    shards = tuple(f"rank{rank}.pt" for rank in reversed(ranks))
    return ShardPlan(tuple(files), shards, lost=left_out)


def _entries(found: Mapping[str, Any], kind: str, path: str) -> list[tuple[str, Any]]:
    """What a rank has of the model or of the optimizer, by the name that is written."""
    if kind == "model":
        return [(str(name), value) for name, value in found["model"].items()]
    optimizer = found.get("optim") or {}
    state = optimizer.get("state", {}) if isinstance(optimizer, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(e, Mapping) for e in state.values()):
        raise ConfigError(f"{path}: the optimizer's state is of no known layout: use --model-only")
    return [
        (f"optim.state.{name}.{key}", value)
        for name, held in state.items()
        for key, value in held.items()
    ]


def _add(
    state: dict[str, PlannedTensor | ShardedItems],
    name: str,
    value: Any,
    path: str,
    *,
    is_first: bool,
) -> None:
    """Raises: ConfigError."""
    if isinstance(value, ShardedRecord):
        found = _sharded(value, name, path)
        known = state.setdefault(name, found)
        if known is not found:
            if not isinstance(known, ShardedItems) or known[:2] != found[:2]:
                raise ConfigError(
                    f"{path}: has {name} in other shards than rank 0: keep the files of one save"
                )
            known.blocks.extend(found.blocks)
        return
    tensor = whole(value) if isinstance(value, StoredTensor) else scalar(value)
    if tensor is None:
        raise ConfigError(f"{path}: {name} is neither a tensor nor a number: load it with torch")
    if is_first:
        state[name] = tensor
        return
    first = state.get(name)
    if first is None or isinstance(first, ShardedItems) or first.spec != tensor.spec:
        raise ConfigError(
            f"{path}: has {name} as a tensor of its own, which rank 0 has not: load it with torch"
        )


def _fields(value: Any) -> Mapping[str, Any]:
    """The fields of an object of torch. Raises: TypeError."""
    state = value.state if isinstance(value, StandIn) else None
    if isinstance(state, tuple) and len(state) == 2:  # of a class with __slots__
        return {**(state[0] or {}), **(state[1] or {})}
    if not isinstance(state, Mapping):
        raise TypeError("an object without fields")
    return state


def _sharded(record: ShardedRecord, name: str, path: str) -> ShardedItems:
    """Raises: ConfigError."""
    try:
        shards, metadata = record.state[:2]
        about = _fields(metadata)
        shape = tuple(about["size"])
        expected: dict[tuple[int, ...], tuple[int, ...]] = {}
        for each in about["shards_metadata"]:
            fields = _fields(each)
            offsets, sizes = tuple(fields["shard_offsets"]), tuple(fields["shard_sizes"])
            if math.prod(expected.setdefault(offsets, sizes)) == 0:
                expected[offsets] = sizes
            elif math.prod(sizes) and expected[offsets] != sizes:
                raise ValueError(f"two shards at {offsets}")
        blocks = []
        for each in shards:
            fields = _fields(each)
            place, tensor = _fields(fields["metadata"]), fields["tensor"]
            offsets, sizes = tuple(place["shard_offsets"]), tuple(place["shard_sizes"])
            if not isinstance(tensor, StoredTensor) or tensor.shape != sizes:
                raise ValueError(f"a shard of shape {getattr(tensor, 'shape', '?')}, not {sizes}")
            blocks.append(ShardBlock(offsets, tensor))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: {name} is no ShardedTensor ({error}): {_REMEDY}") from error
    return ShardedItems(shape, expected, blocks)


def _planned(
    state: Mapping[str, PlannedTensor | ShardedItems], folder: str
) -> dict[str, PlannedTensor]:
    """The tensors, of their shards. Raises: ConfigError where shards are missing."""
    found: dict[str, PlannedTensor] = {}
    for name, value in state.items():
        found[name] = _covered(value, name, folder) if isinstance(value, ShardedItems) else value
    return found


def _covered(value: ShardedItems, name: str, folder: str) -> PlannedTensor:
    """A tensor of its shards; of replicas (HYBRID_SHARD) the first. Raises: ConfigError."""
    there: dict[tuple[int, ...], StoredTensor] = {}
    for offsets, tensor in value.blocks:
        known = there.setdefault(offsets, tensor)
        if not known.numel:
            there[offsets] = tensor
        elif tensor.numel and known.spec != tensor.spec:
            raise ConfigError(f"{folder}: has two kinds of a shard of {name}: {_REMEDY}")
    count = sum(tensor.numel for tensor in there.values())
    shapes = {offsets: tensor.shape for offsets, tensor in there.items()}
    if shapes != dict(value.expected) or count != math.prod(value.shape) or not there:
        raise ConfigError(
            f"{folder}: the files have {len(there)} of the {len(value.expected)} shards of {name} "
            f"({count} of {math.prod(value.shape)} items): {_REMEDY}"
        )
    blocks = sorted(there.items())
    if not are_apart(value.shape, shapes):
        raise ConfigError(
            f"{folder}: a shard of {name} is outside of it, or overlaps another: {_REMEDY}"
        )
    spec = TensorSpec(same_type([tensor for _, tensor in blocks]), value.shape)
    rows_only = all(
        tensor.is_dense() and tensor.shape[1:] == value.shape[1:] and value.shape
        for _, tensor in blocks
    )
    if rows_only:  # none overlap and together they are all, so each begins where one ends
        parts = tuple(StorageRange(tensor.storage, *tensor.span()) for _, tensor in blocks)
        return Flat(spec, spec.dtype, parts)
    return Placed(spec, tuple(blocks))
