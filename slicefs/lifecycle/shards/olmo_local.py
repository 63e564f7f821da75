"""Checkpoints of OLMo's `local` kind: flat parameters of FSDP as each rank holds them.

Called by `layouts`. `metadata.yaml` says how many ranks there were. `model/rankN.pt` has, for each
FSDP module, the rank's part of its flat parameter, with names, shapes and where each parameter is
in that part. `optim/rankN.pt` is the optimizer's state of these parts, by number; `param_names` of
its groups lead to the names. `train/`, `config.yaml` and `metadata.yaml` stay.
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
    missing_ranks,
    part_of,
    plain_json,
    planned_file,
    require_flat,
    same_type,
    scalar,
)
from slicefs.lifecycle.shards.torch_file import StandIn, StoredTensor, read_torch_file
from slicefs.stores.tree import Tree

WORLD: Final = "metadata.yaml"
RANK_FILE: Final = re.compile(r"(model|optim)/rank(\d{1,6})\.pt")
_WORLD_SIZE: Final = re.compile(r"^world_size:\s*(\d{1,7})\s*$", re.MULTILINE)
_WORLD_BYTES_MAX: Final = 64 << 10
_WRAPPED: Final = "_fsdp_wrapped_module."
_REMEDY: Final = "copy all files of the step, or use another step"


class Fragment(NamedTuple):
    """A rank's items `begin..end` of a parameter, and where they are in its flat tensor."""

    shape: tuple[int, ...]
    begin: int
    end: int
    flat: StoredTensor
    at: int


Fragments = Mapping[str, Fragment]


def plan_olmo_local(
    tree: Tree, folder: str, names: Collection[str], *, model_only: bool
) -> ShardPlan:
    """The files of a step of this kind, from its shards. Raises: ConfigError."""
    count = _world_size(tree, folder, names)
    _require(folder, names, "model", count)
    ranks: list[Fragments] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(count):
        path = joined(folder, f"model/rank{rank}.pt")
        ranks.append(_fragments(read_torch_file(tree, path), path, shapes))
    model: dict[str, PlannedTensor] = {}
    for name, shape in shapes.items():
        pieces = [(each[name], each[name].flat, each[name].at) for each in ranks if name in each]
        model[name] = _joined(joined(folder, "model"), name, shape, pieces)
    files = [planned_file(MODEL, model)]
    if not model_only:
        _require(folder, names, "optim", count)
        optimizer, about = _optimizer(tree, folder, ranks)
        if optimizer:
            files.append(planned_file(OPTIMIZER, optimizer, {"param_groups": about}))
    kinds = ("model",) if model_only else ("model", "optim")
    shards = [f"{kind}/rank{rank}.pt" for rank in reversed(range(count)) for kind in kinds]
    return ShardPlan(tuple(files), tuple(shards))


def _world_size(tree: Tree, folder: str, names: Collection[str]) -> int:
    path = joined(folder, WORLD)
    if WORLD not in names:
        raise ConfigError(f"{path}: is missing, the save may not have ended: {_REMEDY}")
    text = tree.read(path, 0, _WORLD_BYTES_MAX).decode("utf-8", "replace")
    found = _WORLD_SIZE.search(text)
    if found is None or not int(found[1]):
        raise ConfigError(f"{path}: has no world_size: {_REMEDY}")
    return int(found[1])


def _require(folder: str, names: Collection[str], kind: str, count: int) -> None:
    """Raises: ConfigError where a rank's file is missing, or is one too many."""
    matches = [RANK_FILE.fullmatch(name) for name in names]
    found = [int(match[2]) for match in matches if match and match[1] == kind]
    lost = missing_ranks(found, count)
    if lost:
        raise ConfigError(
            f"{joined(folder, f'{kind}/rank{lost[0]}.pt')}: is missing, {WORLD} says {count} "
            f"ranks: {_REMEDY}"
        )
    if max(found) >= count:
        raise ConfigError(
            f"{joined(folder, f'{kind}/rank{max(found)}.pt')}: is too many, {WORLD} says "
            f"{count} ranks: keep the files of one save"
        )


def _fragments(state: Any, path: str, shapes: dict[str, tuple[int, ...]]) -> Fragments:
    """What one rank has of each parameter; the shapes of all are added to `shapes`."""
    found: dict[str, Fragment] = {}
    try:
        for module in state["modules"]:
            prefix = module["name"].replace(_WRAPPED, "").removesuffix("_fsdp_wrapped_module")
            for handle in module["handles"]:
                _add_handle(handle, prefix, path, found, shapes)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{path}: is no model state of OLMo's local checkpoints ({error!r}): {_REMEDY}"
        ) from error
    return found


def _add_handle(
    handle: Mapping[str, Any],
    prefix: str,
    path: str,
    found: dict[str, Fragment],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Raises: ConfigError, and what a handle of another kind leads to."""
    flat = require_flat(handle["flat_param.data"], path, "flat_param.data")
    names = [f"{prefix}.{name}" if prefix else name for name in handle["flat_param._fqns"]]
    every = [tuple(shape) for shape in handle["flat_param._shapes"]]
    for name, shape in zip(names, every, strict=True):
        if shapes.setdefault(name, shape) != shape:
            raise ConfigError(
                f"{path}: has {name} with shape {shape}, not {shapes[name]}: keep the files of "
                "one save"
            )
    for index, begin, end, at in _ranges(handle):
        name, shape = names[index], every[index]
        inside = 0 <= begin <= end <= math.prod(shape) and 0 <= at <= at + end - begin <= flat.numel
        if not inside:
            raise ConfigError(
                f"{path}: has items {begin} to {end} of {name} with shape {shape} in a part of "
                f"{flat.numel}: keep the files of one save"
            )
        found[name] = Fragment(shape, begin, end, flat, at)


def _ranges(handle: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int]]:
    """Each parameter in the rank's part: its index, its items `begin..end`, and where they are."""
    if "flat_param._shard_indices" in handle:  # torch up to 2.0
        first = handle["flat_param._shard_indices"][0]
        at = 0
        for index, (begin, last) in enumerate(handle["flat_param._shard_param_offsets"], first):
            yield index, begin, last + 1, at
            at += last + 1 - begin
        return
    infos = handle["flat_param._shard_param_infos"]
    if len(infos) != len(handle["flat_param._fqns"]):
        raise ValueError("names and places are not as many")
    for index, info in enumerate(infos):
        if not isinstance(info, StandIn) or info.name != "_ShardParamInfo":
            raise TypeError("a place of an unknown type")
        in_shard, at, count, begin, last = info.values
        if in_shard:
            if last + 1 - begin != count:
                raise ValueError("a place that is not as long as it says")
            yield index, begin, last + 1, at


Piece = tuple[Fragment, StoredTensor, int]


def _joined(where: str, name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> Flat:
    """A parameter, of its fragments. Where ranks hold the same items, those of the first are taken.

    Raises: ConfigError where items are missing.
    """
    count, at, parts = math.prod(shape), 0, []
    for fragment, flat, first in sorted(pieces, key=lambda each: (each[0].begin, each[0].end)):
        if fragment.begin > at:
            break
        if fragment.end > at:
            skipped = at - fragment.begin
            last = first + fragment.end - fragment.begin
            parts.append(part_of(flat, first + skipped, last))
            at = fragment.end
    if at != count:
        raise ConfigError(
            f"{where}: the ranks have {at} of the {count} items of {name} in order: {_REMEDY}"
        )
    stored = same_type([flat for _, flat, _ in pieces]) if pieces else "F32"
    return Flat(TensorSpec(stored, shape), stored, tuple(parts))


def _optimizer(
    tree: Tree, folder: str, ranks: Sequence[Fragments]
) -> tuple[dict[str, PlannedTensor], str]:
    """The optimizer's tensors, as `optim.state.NAME.KEY`, and its groups as JSON."""
    pieces: dict[tuple[str, str], list[Piece]] = {}
    scalars: dict[str, PlannedTensor] = {}
    about = ""
    for rank, fragments in enumerate(ranks):
        path = joined(folder, f"optim/rank{rank}.pt")
        state = read_torch_file(tree, path)
        with told_of(path):
            names, groups = _names(state, path)
            about = about or groups
            if groups != about:
                raise ConfigError(f"{path}: has other param_groups: keep the files of one save")
            _add_state(state["state"], names, fragments, path, pieces, scalars)
    found: dict[str, PlannedTensor] = {}
    for (name, key), each in pieces.items():
        found[f"optim.state.{name}.{key}"] = _joined(
            joined(folder, "optim"), f"{name}.{key}", each[0][0].shape, each
        )
    return {**found, **scalars}, about


def _add_state(
    state: Mapping[Any, Any],
    names: Mapping[Any, str],
    fragments: Fragments,
    path: str,
    pieces: dict[tuple[str, str], list[Piece]],
    scalars: dict[str, PlannedTensor],
) -> None:
    """Add what one rank has of the optimizer. Raises: ConfigError."""
    for number, held in state.items():
        if number not in names or not isinstance(held, Mapping):
            raise ConfigError(f"{path}: has a state of no parameter: use --model-only")
        name = names[number]
        for key, value in held.items():
            alone = scalar(value) if not getattr(value, "shape", ()) else None
            if alone is not None:
                scalars.setdefault(f"optim.state.{name}.{key}", alone)
                continue
            piece = _piece(value, fragments.get(name), f"{path}: {name}: {key}")
            if piece is not None:
                pieces.setdefault((name, key), []).append(piece)


def _names(state: Any, path: str) -> tuple[dict[Any, str], str]:
    """The parameter of each number, and the groups as JSON. Raises: ConfigError."""
    names: dict[Any, str] = {}
    try:
        groups = [dict(each) for each in state["param_groups"]]
        for group in groups:
            group["param_names"] = [each.replace(_WRAPPED, "") for each in group["param_names"]]
            names.update(zip(group["params"], group["param_names"], strict=True))
        if not isinstance(state["state"], Mapping):
            raise TypeError("its state is no dictionary")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path}: does not name the parameters (param_names of OLMo): use --model-only"
        ) from error
    return names, plain_json(groups)


def _piece(value: Any, fragment: Fragment | None, where: str) -> Piece | None:
    """A rank's part of a tensor of the optimizer; None where the rank has nothing of it."""
    tensor = value if isinstance(value, StoredTensor) and value.is_dense() else None
    if tensor is not None and tensor.numel == 0 and fragment is None:
        return None
    if tensor is None or fragment is None or tensor.numel != fragment.end - fragment.begin:
        raise ConfigError(f"{where} is not cut as the weights are: use --model-only")
    flat = tensor._replace(shape=(tensor.numel,), strides=(1,))
    return fragment, flat, 0
