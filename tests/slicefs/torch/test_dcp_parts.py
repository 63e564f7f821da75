"""Parts of stored tensors: the bytes that are read, and that they are the right ones."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from slicefs.torch.dcp_parts import HEAD_BYTES, TAIL_BYTES, plan_part

TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
TYPES += [torch.float8_e4m3fn, torch.uint16]  # stored without a type of storage of their own


def archive(value: Any) -> memoryview:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return memoryview(buffer.getvalue())


def part_of(
    stored: memoryview, offsets: list[int], lengths: list[int], gap: int
) -> tuple[torch.Tensor, int]:
    """The part, and how many bytes were read for it."""
    ends = stored[:HEAD_BYTES], stored[-TAIL_BYTES:]
    plan = plan_part(*ends, len(stored), offsets, lengths, gap)
    assert plan is not None
    runs = [stored[begin:end] for begin, end in plan.runs]
    return plan.assemble(runs), sum(len(run) for run in runs)


def bytes_of(tensor: torch.Tensor) -> list[int]:
    """The items as bytes: types without arithmetic compare, too."""
    dense = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    found: list[int] = dense.view(torch.uint8).tolist()
    return found


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A shape, and a part of it."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    lengths = [
        draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    ]
    return shape, offsets, lengths


@settings(deadline=None)
@given(parts(), st.sampled_from(TYPES), st.sampled_from([0, 1, 8, 100, 1 << 20]), st.integers(0, 3))
def test_a_part_is_what_narrowing_gives(
    part: tuple[list[int], list[int], list[int]], dtype: torch.dtype, gap: int, before: int
) -> None:
    shape, offsets, lengths = part
    count = int(torch.tensor(shape).prod()) if shape else 1
    numbers = torch.arange(count + before, dtype=torch.int64).to(dtype)
    whole = numbers[before:].reshape(shape)  # it begins in the middle of its storage
    found, size = part_of(archive(whole), offsets, lengths, gap)
    wanted = whole
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        wanted = wanted.narrow(axis, offset, length)
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    assert bytes_of(found) == bytes_of(wanted)
    if gap == 0:
        assert size == wanted.numel() * dtype.itemsize


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6000).reshape(60, 100).t(),
        torch.arange(10).expand(4, 10),
        {"a": torch.arange(10)},
        torch.zeros(4, 10).to_sparse(),
        torch.ones(4, 10, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(4, 10)),
    ],
    ids=["transposed", "repeated", "dictionary", "sparse", "conjugated", "negated"],
)
def test_what_is_no_plain_tensor_is_read_whole(value: Any) -> None:
    stored = archive(value)
    ends = stored[:HEAD_BYTES], stored[-TAIL_BYTES:]
    assert plan_part(*ends, len(stored), [0, 0], [1, 5], 0) is None


def test_a_part_outside_of_its_tensor_is_none() -> None:
    stored = archive(torch.arange(600).reshape(20, 30))
    ends = stored[:HEAD_BYTES], stored[-TAIL_BYTES:]
    for offsets, lengths in (([0], [5]), ([15, 0], [6, 30]), ([0, 29], [20, 2]), ([-1, 0], [1, 1])):
        assert plan_part(*ends, len(stored), offsets, lengths, 0) is None


def test_no_flipped_byte_of_the_ends_moves_a_part() -> None:
    """A place that is wrong would give wrong items without an error."""
    whole = torch.arange(100_000, dtype=torch.int32)
    stored = archive(whole)
    ends = bytearray(bytes(stored[:HEAD_BYTES]) + bytes(stored[-TAIL_BYTES:]))
    for at in range(len(ends)):
        for flip in (0x01, 0x02, 0x10, 0x40, 0x80):
            ends[at] ^= flip
            view = memoryview(ends)
            plan = plan_part(view[:HEAD_BYTES], view[HEAD_BYTES:], len(stored), [5000], [300], 0)
            ends[at] ^= flip
            if plan is not None:
                [(begin, end)] = plan.runs
                found = plan.assemble([stored[begin:end]])
                assert found.dtype == torch.int32, (at, flip)
                assert torch.equal(found, whole[5000:5300]), (at, flip)
