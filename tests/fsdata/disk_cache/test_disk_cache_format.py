"""C1: the head of a cache file, and the arithmetic of extents."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from fsdata.disk_cache.directory.format import (
    ALIGN,
    EXTENTS_MAX,
    HEAD_BYTES,
    RANGES_BASE,
    BadFile,
    add_extent,
    covers,
    is_ranges,
    pack_ranges,
    pack_whole,
    parse,
    whole_base,
)

KEY = b"chunks-0-12-12345_0_1000"


def test_golden_bytes() -> None:
    head = pack_whole(KEY, 1000)
    assert head.hex() == "534653430100180040000000e803000000000000eda4c1ef" + KEY.hex() + "00" * 16
    assert head.rstrip(b"\0").endswith(KEY)
    assert len(head) == 64 == whole_base(KEY)
    ranges = pack_ranges(KEY, ((0, 84), (65620, 131156)))
    assert len(ranges) == RANGES_BASE
    assert ranges[:24].hex() == "5346534301011800001000000000000002000000cd2713b1"
    assert ranges[24:64] == KEY + bytes.fromhex("00000000540000005400010054000200")


@given(st.binary(min_size=1, max_size=255), st.integers(0, 2**32 - 1))
def test_whole_heads_parse_back(key: bytes, size: int) -> None:
    head = pack_whole(key, size)
    assert len(head) % ALIGN == 0
    assert not is_ranges(head)
    assert parse(head[:HEAD_BYTES], key) == (len(head), size, None)


EXTENTS = st.lists(st.integers(0, 2**32 - 1), max_size=2 * EXTENTS_MAX, unique=True).map(
    lambda ends: tuple(zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False))
)


@given(EXTENTS)
def test_heads_of_ranges_parse_back(extents: tuple[tuple[int, int], ...]) -> None:
    head = pack_ranges(KEY, extents)
    assert is_ranges(head)
    assert parse(head, KEY) == (RANGES_BASE, 0, extents)


@pytest.mark.parametrize("head", [pack_whole(KEY, 1000), pack_ranges(KEY, ((0, 5), (9, 12)))])
def test_every_flipped_bit_is_noticed(head: bytes) -> None:
    used = 24 + len(KEY) + (16 if is_ranges(head) else 0)
    for bit in range(8 * used):
        wrong = bytearray(head)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFile):
            parse(bytes(wrong), KEY)
    for size in range(used):
        with pytest.raises(BadFile):
            parse(head[:size], KEY)
    with pytest.raises(BadFile, match="12345_0"):
        parse(head, b"chunks-0-12-12345_1_1000")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=12))
def test_extents_are_sets_of_bytes(parts: list[tuple[int, int]]) -> None:
    extents: tuple[tuple[int, int], ...] = ()
    have: set[int] = set()
    for begin, size in parts:
        extents = add_extent(extents, begin, begin + size)
        have |= set(range(begin, begin + size))
        assert {at for each in extents for at in range(*each)} == have
        assert all(a[1] < b[0] for a, b in pairwise(extents)), "apart"
    for begin in range(50):
        for end in range(begin + 1, 51):
            assert covers(extents, begin, end) == (set(range(begin, end)) <= have)
