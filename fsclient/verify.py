"""Are the objects there, and right? The second half of `slicefs fsck`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fsdata.blocks import CHUNKS, object_key, parse_key
from fsdata.codec import decode
from fsdata.geometry import block_count, block_length
from fsdata.objects import ObjectStore
from fsmeta.errors import ObjectDamaged, ObjectMissing
from fsmeta.types import SliceId


class Verdict(NamedTuple):
    """What was found in the object store."""

    problems: list[str]
    objects: int
    leaked: int  # objects that neither a file nor a pending deletion knows


def verify_objects(
    objects: ObjectStore,
    block_bytes: int,
    slices: Mapping[SliceId, int],
    dead: Mapping[SliceId, int],
    data: bool,
) -> Verdict:
    """Compare the blocks of `slices` (id → size) with a listing; with `data`, read each one."""
    problems: list[str] = []
    seen: dict[SliceId, int] = {}
    count = leaked = 0
    for info in objects.list(f"{CHUNKS}/"):
        count += 1
        name = parse_key(info.key)
        size = None if name is None else slices.get(name.slice_id)
        if name is None or size is None:
            leaked += name is None or name.slice_id not in dead
            continue
        if name.block >= block_count(size, block_bytes):
            problems.append(f"object {info.key}: the slice has no such block")
        elif name.length != block_length(size, name.block, block_bytes):
            problems.append(f"object {info.key}: the block has another length")
        else:
            seen[name.slice_id] = seen.get(name.slice_id, 0) + 1
    for sid, size in slices.items():
        if seen.get(sid, 0) != block_count(size, block_bytes):
            problems += _missing(objects, sid, size, block_bytes)
    if data:
        for sid, size in slices.items():
            problems += _damaged(objects, sid, size, block_bytes)
    return Verdict(problems, count, leaked)


def _keys(sid: SliceId, size: int, block_bytes: int) -> list[str]:
    return [
        object_key(sid, index, block_length(size, index, block_bytes))
        for index in range(block_count(size, block_bytes))
    ]


def _missing(objects: ObjectStore, sid: SliceId, size: int, block_bytes: int) -> list[str]:
    keys = _keys(sid, size, block_bytes)
    return [f"object {key} is missing" for key in keys if objects.head(key) is None]


def _damaged(objects: ObjectStore, sid: SliceId, size: int, block_bytes: int) -> list[str]:
    problems = []
    for index, key in enumerate(_keys(sid, size, block_bytes)):
        try:
            block = decode(objects.get(key))
        except ObjectMissing:
            continue  # reported by the listing
        except ObjectDamaged as error:
            problems.append(f"object {key}: {error}")
            continue
        if len(block) != block_length(size, index, block_bytes):
            problems.append(f"object {key}: {len(block)} bytes")
    return problems
