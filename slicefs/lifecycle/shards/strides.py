"""Items of tensors, moved: from a view with strides into order, and a block to its place.

Pure; called by `dcp_metadata`, `reading` and `lifecycle/unshard`. Shapes, strides and offsets are
in items, `item` is the bytes of one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

Block = tuple[Sequence[int], Sequence[int]]  # offsets and sizes


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the items of a view stand in row-major order, without gaps."""
    count = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != count:
            return False
        count *= size
    return True


def are_apart(
    shape: Sequence[int], blocks: Mapping[tuple[int, ...], tuple[int, ...]] | Sequence[Block]
) -> bool:
    """Whether blocks, sizes by offsets, lie inside a tensor of `shape` without overlap."""
    every = [*(blocks.items() if isinstance(blocks, Mapping) else blocks)]
    for offsets, sizes in every:
        for begin, size, end in zip(offsets, sizes, shape, strict=True):
            if begin < 0 or size < 0 or begin + size > end:
                return False
    full = [(tuple(o), tuple(s)) for o, s in every if math.prod(s)]
    if len(full) < 2:
        return True
    # A sweep along the axis with most cuts: blocks that end before the next begins are let go.
    axis = max(range(len(shape)), key=lambda at: len({o[at] for o, _ in full}), default=None)
    if axis is None:
        return False
    active: list[Block] = []
    for offsets, sizes in sorted(full, key=lambda block: block[0][axis]):
        active = [(o, s) for o, s in active if o[axis] + s[axis] > offsets[axis]]
        for other, other_sizes in active:
            pairs = zip(offsets, sizes, other, other_sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in pairs):
                return False
        active.append((offsets, sizes))
    return True


def in_order(
    stored: memoryview, shape: Sequence[int], strides: Sequence[int], item: int
) -> memoryview:
    """The items of a view in row-major order; `stored` begins with the first of them."""
    count = math.prod(shape)
    if count == 0 or is_dense(shape, strides):
        return stored[: count * item]
    out = bytearray(count * item)
    length, step = shape[-1] * item, strides[-1] * item
    at = 0
    for index in itertools.product(*(range(size) for size in shape[:-1])):
        begin = item * sum(i * s for i, s in zip(index, strides, strict=False))
        if step == item:
            out[at : at + length] = stored[begin : begin + length]
        elif step == 0:
            out[at : at + length] = bytes(stored[begin : begin + item]) * shape[-1]
        else:
            end = begin + (shape[-1] - 1) * step
            for byte in range(item):
                out[at + byte : at + length : item] = stored[begin + byte : end + byte + 1 : step]
        at += length
    return memoryview(out)


def place(
    out: bytearray,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    data: memoryview,
) -> None:
    """Copy a block of `sizes` to its place in a tensor of `shape`, run by run.

    Raises: ValueError where it lies outside.
    """
    ends = [o + n for o, n in zip(offsets, sizes, strict=True)]
    if any(end > size for end, size in zip(ends, shape, strict=True)):
        raise ValueError("it lies outside of its tensor")
    if not data:
        return
    axis = len(shape) - 1  # the last axis that is not whole: a run goes over it and all behind
    while axis > 0 and sizes[axis] == shape[axis]:
        axis -= 1
    strides = [len(data) // math.prod(sizes)] * len(shape)
    for each in range(len(shape) - 2, -1, -1):
        strides[each] = strides[each + 1] * shape[each + 1]
    run = sizes[axis] * strides[axis]
    view, at = memoryview(out), 0
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    for index in itertools.product(*(range(size) for size in sizes[:axis])):
        begin = base + sum(i * s for i, s in zip(index, strides, strict=False))
        view[begin : begin + run] = data[at : at + run]
        at += run
