"""O3, O4: blocks in units, compressed and sealed: golden bytes, ranges, damage, wrong keys."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, strategies as st

from fsdata.format.block_v1 import (
    Codec,
    Opener,
    UnitHead,
    check_object,
    decode,
    decode_range,
    encode,
    head_need,
    parse_head,
)
from fsdata.format.block_v2 import UNIT_BYTES, Buffer, units_front_bytes
from fsdata.format.encryption import KEY_BYTES, BlockCipher, Sealer
from fsmeta.errors import ObjectDamaged
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SliceId
from tests.fsdata.world import pattern

KEY = bytes(range(KEY_BYTES))
SLICE, BLOCK = SliceId(1234567), 2
NOISE = b"".join(hashlib.sha256(n.to_bytes(2, "big")).digest() for n in range(2500))
DATA = pattern(UNIT_BYTES) + NOISE + b"words and words " * 9000
CODECS = st.sampled_from(list(Codec))


def opener(key: bytes = KEY, slice_id: int = SLICE, block: int = BLOCK) -> Opener:
    sealer = Sealer(SystemRuntime(), key)
    return lambda salt: sealer.cipher(SliceId(slice_id), block, salt)


def sealed(data: bytes, codec: Codec, key: bytes = KEY) -> bytes:
    return b"".join(encode((data,), codec, Sealer(SystemRuntime(), key).fresh(SLICE, BLOCK)))


def test_golden_bytes_of_a_compressed_block() -> None:
    whole = b"".join(encode((b"\0" * 70_000,), Codec.LZ4))
    assert whole[:36].hex() == (
        "534653420201001070110100270100000e2136770b01008033d12f2c1c000080c5c3db34"
    )
    golden = "61fd2ba2b302166693b9ff1ae2947336a740dcd42af0427580150dcbebe7514e"
    assert hashlib.sha256(whole).hexdigest() == golden
    assert decode(whole) == b"\0" * 70_000


def test_golden_bytes_of_a_sealed_block() -> None:
    salt = bytes(range(16))
    lock = (salt, Sealer(SystemRuntime(), KEY).cipher(SLICE, BLOCK, salt))
    whole = b"".join(encode((b"slicefs",), Codec.NONE, lock))
    assert whole.hex() == (
        "53465342020001100700000017000000cba34b52000102030405060708090a0b0c0d0e0f"
        "17000000be82c196a08ad18e17598ef62a4e59aa0232e73f3b51a8e31fd2dd"
    )
    assert bytes(decode(whole, opener())) == b"slicefs"


@pytest.mark.parametrize(
    "whole",
    [
        "5346534201010010a80200001e000000e5cc70794dd2432dff02617320697420776173206265666f726520"
        "1100ffff8150666f726520",
        "5346534201020010a802000022000000c7ea1122c2dd868e28b52ffd60a801c5000088617320697420776173"
        "206265666f726520010029513597",
    ],
)
def test_a_block_compressed_as_one_is_still_read(whole: str) -> None:
    """Version 1 of the format, as older volumes have it."""
    assert decode(bytes.fromhex(whole)) == b"as it was before " * 40
    assert check_object(bytes.fromhex(whole)) == 17 * 40


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", [1, UNIT_BYTES, UNIT_BYTES + 1, len(DATA)])
def test_round_trip_sealed(codec: Codec, size: int) -> None:
    whole = sealed(DATA[:size], codec)
    assert check_object(whole) == size, "checked without a key"
    assert decode(whole, opener()) == DATA[:size]
    head = parse_head(whole)
    assert head.size == head_need(whole) == units_front_bytes(size, 0)


def test_no_two_objects_are_sealed_alike() -> None:
    assert sealed(b"the same", Codec.NONE) != sealed(b"the same", Codec.NONE)


@given(st.data(), CODECS, st.booleans())
def test_ranges(data: st.DataObject, codec: Codec, locked: bool) -> None:
    """Any range of any block needs the units it touches and no more."""
    size = data.draw(st.integers(1, len(DATA)))
    block = DATA[:size] if data.draw(st.booleans()) else DATA[-size:]
    whole = sealed(block, codec) if locked else b"".join(encode((block,), codec))
    begin = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(begin + 1, size))
    head = parse_head(whole)
    first, skip, stop = head.span(begin, end)
    assert begin - first < UNIT_BYTES
    assert stop - skip <= end - begin + 2 * UNIT_BYTES + 16 * 8
    part = bytearray(whole[head.size + skip : head.size + stop])
    key = opener() if locked else None
    assert decode_range(head, first, part, key)[begin - first :][: end - begin] == block[begin:end]
    part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ObjectDamaged):
        decode_range(head, first, part, key)


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7), CODECS, st.booleans())
def test_every_flipped_bit_is_noticed(at: float, bit: int, codec: Codec, locked: bool) -> None:
    """In magic, head, salt, table, payload and tags alike; also without the key."""
    small = DATA[UNIT_BYTES - 300 : UNIT_BYTES + 100] + bytes(UNIT_BYTES)
    whole = bytearray(sealed(small, codec) if locked else b"".join(encode((small,), codec)))
    # half of the places in head and table, which are the smaller part
    size = 60 if at < 0.5 else len(whole)
    whole[int(at * 2 % 1 * size)] ^= 1 << bit
    with pytest.raises(ObjectDamaged):
        decode(whole, opener() if locked else None)
    with pytest.raises(ObjectDamaged):
        check_object(whole)


@given(st.floats(0, 1, exclude_max=True), CODECS)
def test_every_torn_object_is_noticed(at: float, codec: Codec) -> None:
    whole = sealed(DATA[: UNIT_BYTES + 9], codec)
    for wrong in (whole[: int(at * len(whole))], whole + b"x"):
        with pytest.raises(ObjectDamaged):
            decode(wrong, opener())


@pytest.mark.parametrize(
    "wrong",
    [
        opener(key=bytes(KEY_BYTES)),
        opener(slice_id=SLICE + 1),
        opener(block=BLOCK + 1),
        None,
    ],
)
def test_what_is_sealed_opens_with_its_key_in_its_place_only(wrong: Opener | None) -> None:
    whole = sealed(DATA, Codec.ZSTD)
    with pytest.raises(ObjectDamaged):
        decode(whole, wrong)


def test_units_can_t_be_swapped_or_left_out() -> None:
    """Checksums are no secret: whoever makes them anew still fails at the tags."""
    salt = bytes(16)
    cipher = Sealer(SystemRuntime(), KEY).cipher(SLICE, BLOCK, salt)
    data = DATA[: 2 * UNIT_BYTES]

    class Swapped:
        """Seals units in each other's place, and opens them rightly."""

        def seal(self, unit: int, data: Buffer, about: bytes) -> bytes:
            return cipher.seal(1 - unit, data, about)

        open = cipher.open

    class Shorter:
        """Seals as if the object were another."""

        def seal(self, unit: int, data: Buffer, about: bytes) -> bytes:
            return cipher.seal(unit, data, about[:8] + bytes(8) + about[16:])

        open = cipher.open

    for forger in (Swapped(), Shorter()):
        whole = b"".join(encode((data,), Codec.NONE, (salt, forger)))
        assert check_object(whole) == len(data), "its checksums are right"
        with pytest.raises(ObjectDamaged, match="encrypted with another key"):
            decode(whole, opener())


def test_an_encrypted_volume_believes_nothing_else() -> None:
    for codec in Codec:
        plain = b"".join(encode((b"forged " * 100,), codec))
        with pytest.raises(ObjectDamaged, match="not encrypted"):
            decode(plain, opener())
        head = parse_head(plain)
        with pytest.raises(ObjectDamaged, match="not encrypted"):
            decode_range(head, 0, plain[head.size :], opener())


def test_heads_are_small() -> None:
    """4,096 of them are kept for ranged reads."""
    head = parse_head(sealed(bytes(4 << 20), Codec.LZ4))
    assert isinstance(head, UnitHead)
    assert len(head.table) + len(head.salt) + len(head.fixed) == 64 * 8 + 32


def test_ciphers_serve_many_threads() -> None:
    runtime = SystemRuntime()
    cipher = BlockCipher(KEY, b"place")
    sealed_units = [cipher.seal(n, DATA, b"about") for n in range(4)]
    opened: list[bool] = []

    def work(number: int) -> None:
        for _ in range(50):
            opened.append(cipher.open(number, sealed_units[number], b"about") == DATA)

    threads = [runtime.spawn("t", lambda n=n: work(n)) for n in range(4)]  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert opened == [True] * 200
