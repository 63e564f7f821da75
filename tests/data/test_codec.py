"""The object format: golden bytes, round trips, and every damaged byte is noticed."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdata.codec import (
    FRAME_BYTES,
    Codec,
    decode,
    decode_range,
    encode,
    frame_range,
    head_bytes,
    parse_head,
)
from fsmeta.errors import ObjectDamaged
from tests.data.world import pattern

CODECS = st.sampled_from(list(Codec))


def test_golden_bytes() -> None:
    assert (
        b"".join(encode([b"slice", b"fs"])).hex()
        == ("534653420100001007000000070000000b0c9f30afe484d8") + b"slicefs".hex()
    )
    assert head_bytes(7) == 24


@given(st.lists(st.binary(max_size=200), min_size=1).filter(any), CODECS)
def test_round_trip(pieces: list[bytes], codec: Codec) -> None:
    assert decode(b"".join(encode(pieces, codec))) == b"".join(pieces)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", [1, FRAME_BYTES, FRAME_BYTES + 1, 5 * FRAME_BYTES - 3])
def test_round_trip_of_many_frames(codec: Codec, size: int) -> None:
    for data in (pattern(size), b"ab" * size):
        cut = len(data) // 3
        whole = b"".join(encode([data], codec))
        assert whole == b"".join(encode([data[:cut], data[cut:]], codec)), "pieces don't matter"
        assert decode(whole) == data


def test_uncompressed_payload_is_not_copied() -> None:
    data = bytearray(pattern(1000))
    assert encode([data])[1] is data
    whole = b"".join(encode([data]))
    assert decode(whole).obj is whole


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_incompressible_data_is_stored_as_it_is(codec: Codec) -> None:
    dense = b"".join(encode([b"\x00" * 9999], codec))
    assert parse_head(dense).codec is codec
    assert len(dense) < 999
    noise = b"".join(hashlib.sha256(bytes([n])).digest() for n in range(200))
    assert parse_head(b"".join(encode([noise], codec))).codec is Codec.NONE


@given(st.integers(0, 10**9), CODECS)
def test_every_flipped_bit_is_noticed(where: int, codec: Codec) -> None:
    whole = bytearray(b"".join(encode([b"some words " * 9], codec)))
    whole[where // 8 % len(whole)] ^= 1 << where % 8
    with pytest.raises(ObjectDamaged):
        decode(whole)


@given(st.integers(0, 10**9), CODECS)
def test_every_torn_object_is_noticed(where: int, codec: Codec) -> None:
    whole = b"".join(encode([b"some words " * 9], codec))
    with pytest.raises(ObjectDamaged):
        decode(whole[: where % len(whole)])
    with pytest.raises(ObjectDamaged):
        decode(whole + b"x")


@given(st.data())
def test_ranges(data: st.DataObject) -> None:
    block = pattern(3 * FRAME_BYTES + 77)
    whole = b"".join(encode([block]))
    begin = data.draw(st.integers(0, len(block) - 1))
    end = data.draw(st.integers(begin + 1, len(block)))
    first, last = frame_range(begin, end, len(block))
    head = parse_head(whole[: head_bytes(len(block))])
    part = bytearray(whole[head.size + first : head.size + last])
    assert decode_range(head, first, part)[begin - first : end - first] == block[begin:end]
    part[data.draw(st.integers(0, len(part) - 1))] ^= 4
    with pytest.raises(ObjectDamaged):
        decode_range(head, first, part)
