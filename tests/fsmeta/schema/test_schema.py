"""Every record: its bytes for ever, what is refused, and that what was packed comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, strategies as st

from fsmeta.errors import ConfigError, Corrupt
from fsmeta.rules import quota, settings as volume
from fsmeta.schema import inode, keys, slices as schema_slices
from fsmeta.schema.acl import Acl, Named, pack_record, unpack_record
from fsmeta.schema.sessions import SessionRecord, pack_session, unpack_session
from fsmeta.store.writes import merge
from fsmeta.types import (
    CHUNK_BYTES,
    FILE_SIZE_MAX,
    Attr,
    FileType,
    Ino,
    SessionId,
    Slice,
    SliceId,
    SliceKind,
)

INO = Ino(0x0102030405060708)
ATTR = Attr(
    ino=INO,
    mode=0o100644,
    uid=1000,
    gid=100,
    rdev=0,
    flags=0,
    parent=Ino(2),
    btime_ns=1,
    size=0x1122334455,
    nlink=3,
    used=4096,
    atime_ns=-1,
    mtime_ns=2,
    ctime_ns=10**18,
)
LISTED = Acl(7, 5, 3, 0, (Named(False, 1000, 6), Named(True, 0xFFFFFFFE, 1)))
SHARED = ATTR._replace(mode=0o040770, acl=0xFF000001, default_acl=2)
DEVICE = ATTR._replace(mode=0o020600, rdev=0x0801, flags=0x10)
SLICES = [
    Slice(0, SliceId(7), 100, 10, 90),
    Slice(CHUNK_BYTES - 1, SliceId(0), 1, 0, 1, SliceKind.HOLE),
    Slice(5, SliceId(2**63), 2**32 - 1, 2**32 - 10, 9, SliceKind.SEGMENT),
]
SESSION = SessionRecord(SessionId(9), 3, 2, {"host": "h", "pid": 1})
FORMAT = volume.VolumeFormat(
    "vol", "u-u", "file", "/b", 1 << 22, "lz4", 10, 20, unknown={"later": [1]}
)

QUOTAS = FORMAT._replace(changes=3, epoch=15, accounting=volume.ON)
SPREAD = FORMAT._replace(shards=3, hash_prefix=True, options={"region": "eu"}, unknown=None)


# --- golden bytes --------------------------------------------------------------------------------

GOLDEN: dict[str, tuple[bytes, str]] = {
    "inode row": (keys.inode_row(INO), "69 0102030405060708"),
    "dir row": (keys.dir_row(1), "64 0000000000000001"),
    "session row": (keys.session_row(2), "73 0000000000000002"),
    "chunk": (keys.chunk_field(0x01020304), "63 01020304"),
    "xattr": (keys.xattr_field(b"user.\xff"), "78 757365722eff"),
    "parent": (keys.parent_field(3), "70 0000000000000003"),
    "hold": (keys.hold_field(4), "68 0000000000000004"),
    "worker": (keys.worker_field(0x0506), "77 0506"),
    "a": (
        inode.pack_attr(ATTR),
        "01 81a4 000003e8 00000064 0000000000000002 8000000000000001",
    ),
    "a with a tail": (
        inode.pack_attr(DEVICE),
        "01 2180 000003e8 00000064 0000000000000002 8000000000000001"
        "00000801 00000010 00000000 00000000",
    ),
    "a with ACLs": (
        inode.pack_attr(SHARED),
        "01 41f8 000003e8 00000064 0000000000000002 8000000000000001"
        "00000000 00000000 ff000001 00000002",
    ),
    "acl row": (keys.acl_row(0x01020304), "41 01020304"),
    "acl": (pack_record(LISTED), "01 07 05 03 00 06 000003e8 09 fffffffe"),
    "acl of a mode": (pack_record(Acl(7, 5, None, 0)), "01 07 05 08 00"),
    "v": (
        inode.pack_volatile(ATTR),
        "01 0000001122334455 00000003 0000000000001000"
        "7fffffffffffffff 8000000000000002 8de0b6b3a7640000",
    ),
    "a with a mark": (
        inode.pack_attr(ATTR._replace(mark=15)),
        "f1 81a4 000003e8 00000064 0000000000000002 8000000000000001",
    ),
    "dentry": (keys.pack_dentry(FileType.DIR, INO), "04 0102030405060708"),
    "slices": (
        schema_slices.pack_slices(SLICES),
        "11 00000000 0000000000000007 00000064 0000000a 0000005a"
        "10 03ffffff 0000000000000000 00000001 00000000 00000001"
        "12 00000005 8000000000000000 ffffffff fffffff6 00000009",
    ),
    "dead": (
        schema_slices.pack_dead([(7, 100), (2**63, 1)]),
        "0000000000000007 000000648000000000000000 00000001",
    ),
    "session": (
        pack_session(SESSION),
        "83 a4 62656174 03 a9 636f6e6669726d6564 02a4 696e666f 82 a4 686f7374 a1 68 a3 706964 01",
    ),
    "format": (
        volume.pack_format(FORMAT),
        "8a a5 6c61746572 91 01 a4 6e616d65 a3 766f6c a4 75756964 a3 752d75"
        "a7 73746f72616765 a4 66696c65 a6 6275636b6574 a2 2f62"
        "ab 626c6f636b5f6279746573 ce 00400000 ab 636f6d7072657373696f6e a3 6c7a34"
        "a8 6361706163697479 0a a6 696e6f646573 14 a7 76657273696f6e 01",
    ),
    "format of a spread volume": (
        volume.pack_format(SPREAD),
        "8c a4 6e616d65 a3 766f6c a4 75756964 a3 752d75"
        "a7 73746f72616765 a4 66696c65 a6 6275636b6574 a2 2f62"
        "ab 626c6f636b5f6279746573 ce 00400000 ab 636f6d7072657373696f6e a3 6c7a34"
        "a8 6361706163697479 0a a6 696e6f646573 14 a7 76657273696f6e 01"
        "a6 736861726473 03 ab 686173685f707265666978 c3 a7 6f7074696f6e73 81"
        "a6 726567696f6e a2 6575",
    ),
    "format of a volume with quotas": (
        volume.pack_format(QUOTAS._replace(unknown=None)),
        "8c a4 6e616d65 a3 766f6c a4 75756964 a3 752d75"
        "a7 73746f72616765 a4 66696c65 a6 6275636b6574 a2 2f62"
        "ab 626c6f636b5f6279746573 ce 00400000 ab 636f6d7072657373696f6e a3 6c7a34"
        "a8 6361706163697479 0a a6 696e6f646573 14 a7 76657273696f6e 01"
        "a7 6368616e676573 03 a5 65706f6368 0f aa 6163636f756e74696e67 a2 6f6e",
    ),
}


@pytest.mark.parametrize("record", GOLDEN)
def test_golden_bytes(record: str) -> None:
    """A difference here is a new format: it needs docs, a version and a way to read the old one."""
    packed, expected = GOLDEN[record]
    assert packed.hex() == expected.replace(" ", "")


def test_tables() -> None:
    names = (keys.SESSIONS, keys.COUNTERS, keys.USAGE, keys.FORMAT, keys.ORPHANS)
    assert (*names, keys.DEAD_SLICES, keys.BACKGROUND) == (
        b"S", b"C", b"U", b"F", b"O", b"X", b"G",
    )  # fmt: skip
    assert (keys.ACCOUNTS, keys.LIMITED, keys.HOME_FIELD) == (b"Q", b"q", b"h")
    assert quota.node_fields(quota.dir_node(5)) == (
        b"d\0\0\0\0\0\0\0\5s", b"d\0\0\0\0\0\0\0\5i",
        b"d\0\0\0\0\0\0\0\5s<", b"d\0\0\0\0\0\0\0\5i<",
    )  # fmt: skip
    assert (quota.user_node(1), quota.group_node(2)) == (b"u\0\0\0\1", b"g\0\0\0\2")
    assert (keys.SHARED_SLICES, keys.TRASH) == (b"R", b"T")
    assert (keys.NAMELESS_FIELD, keys.ORIGIN_FIELD) == (b"t", b"o")
    fields = (keys.NEXT_INO, keys.NEXT_SLICE, keys.NEXT_SESSION, keys.SPACE, keys.INODES)
    assert fields == (b"ino", b"slice", b"session", b"space", b"inodes")
    assert (keys.FORMAT_FIELD, keys.LEADER, keys.ROUND) == (b"format", b"leader", b"round")


def test_old_bytes_are_still_read() -> None:
    golden = {name: bytes.fromhex(text) for name, (_, text) in GOLDEN.items()}
    assert inode.unpack_inode(INO, golden["a"], golden["v"]) == ATTR
    assert inode.unpack_inode(INO, golden["a with a tail"], golden["v"]) == DEVICE
    assert inode.unpack_inode(INO, golden["a with ACLs"], golden["v"]) == SHARED
    assert unpack_record(1, golden["acl"]) == LISTED
    assert unpack_record(1, golden["acl of a mode"]) == Acl(7, 5, None, 0)
    assert keys.unpack_dentry(b"d", b"n", golden["dentry"]) == (FileType.DIR, INO)
    assert schema_slices.unpack_slices(INO, 0, golden["slices"]) == SLICES
    assert schema_slices.unpack_dead(b"", golden["dead"]) == [(7, 100), (2**63, 1)]
    assert unpack_session(keys.pack_u64(9), golden["session"]) == SESSION
    assert inode.unpack_inode(INO, golden["a with a mark"], golden["v"]).mark == 15
    assert volume.unpack_format(golden["format"]) == FORMAT
    assert volume.unpack_format(golden["format of a spread volume"]) == SPREAD
    later = pack_session(SESSION._replace(floor=7))
    assert later.hex().endswith("a5666c6f6f7207"), "what earlier clients don't say comes last"
    assert unpack_session(keys.pack_u64(9), later).floor == 7
    locked = FORMAT.with_encryption({"cipher": "c", "wrap": "w", "key": "k"})
    assert locked.version == 2, "earlier clients must not write what is not encrypted"
    assert volume.unpack_format(volume.pack_format(locked)) == locked
    assert "key" not in locked.shown()["encryption"]


# --- corruption ----------------------------------------------------------------------------------

A, V = inode.pack_attr(ATTR), inode.pack_volatile(ATTR)
READERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "a": (A, lambda data: inode.unpack_inode(INO, data, V)),
    "a with a tail": (
        inode.pack_attr(DEVICE),
        lambda data: inode.unpack_stable(INO, data),
    ),
    "acl": (pack_record(LISTED), lambda data: unpack_record(1, data)),
    "v": (V, lambda data: inode.unpack_inode(INO, A, data)),
    "dentry": (
        keys.pack_dentry(FileType.REG, INO),
        lambda data: keys.unpack_dentry(b"d", b"n", data),
    ),
    "slices": (
        schema_slices.pack_slices(SLICES),
        lambda data: schema_slices.unpack_slices(INO, 3, data),
    ),
    "dead": (
        schema_slices.pack_dead([(1, 2), (3, 4)]),
        lambda data: schema_slices.unpack_dead(b"12345678", data),
    ),
    "count": (b"-1234567890", lambda data: keys.unpack_count(b"U", b"space", data)),
    "session": (
        pack_session(SESSION),
        lambda data: unpack_session(keys.pack_u64(9), data),
    ),
    "format": (volume.pack_format(FORMAT), volume.unpack_format),
}
_WHOLE = {
    "slices": (0, 25, 50),
    "dead": (0, 12),
    "count": range(2, 11),
    "acl": (5, 10),
}  # shorter and sound too


@pytest.mark.parametrize("record", READERS)
def test_truncated_or_lengthened_is_corrupt(record: str) -> None:
    data, read = READERS[record]
    read(data)
    for length in range(len(data)):
        if length in _WHOLE.get(record, ()) or (record, length) == ("a with a tail", 27):
            read(data[:length])
            continue
        with pytest.raises(Corrupt):
            read(data[:length])
    for more in (b"\0", b"\xff", b" "):
        with pytest.raises(Corrupt):
            read(data + more)


@pytest.mark.parametrize("record", READERS)
@given(data=st.binary(max_size=200))
def test_garbage_is_corrupt_or_a_record(record: str, data: bytes) -> None:
    """Whatever is stored, nothing but Corrupt (or a later version) comes out of reading it."""
    try:
        READERS[record][1](data)
    except (Corrupt, ConfigError):
        pass  # ConfigError: a volume of a later version


@pytest.mark.parametrize("record", READERS)
@given(change=st.data())
def test_damage_is_corrupt_or_a_record(record: str, change: st.DataObject) -> None:
    data, read = READERS[record]
    damaged = bytearray(data)
    for _ in range(change.draw(st.integers(1, 3))):
        damaged[change.draw(st.integers(0, len(data) - 1))] = change.draw(st.integers(0, 255))
    try:
        read(bytes(damaged))
    except (Corrupt, ConfigError):
        pass  # ConfigError: a volume of a later version


@pytest.mark.parametrize(
    ("record", "at", "value"),
    [
        ("a", 0, 2),  # version
        ("a", 1, 0x71),  # no such type
        ("v", 0, 2),
        ("dentry", 0, 3),
        ("slices", 0, 0x21),  # version
        ("slices", 0, 0x14),  # kind
        ("slices", 1, 0x04),  # begins beyond the chunk
        ("slices", 24, 0x5B),  # longer than what it names
        ("slices", 49, 2),  # ends beyond the chunk
    ],
)
def test_impossible_values_are_corrupt(record: str, at: int, value: int) -> None:
    data, read = READERS[record]
    with pytest.raises(Corrupt):
        read(data[:at] + bytes([value]) + data[at + 1 :])


@pytest.mark.parametrize(
    "count", [b"", b"-", b"+1", b" 1", b"1 ", b"1_0", b"01", b"-0", b"1.5", b"0x1", b"\xd9\xa1"]
)
def test_numbers_are_written_one_way(count: bytes) -> None:
    with pytest.raises(Corrupt):
        keys.unpack_count(b"U", b"space", count)


@pytest.mark.parametrize(
    "record",
    [
        {"beat": 1, "confirmed": 1},
        {"beat": 1, "confirmed": 1, "info": []},
        {"beat": "1", "confirmed": 1, "info": {}},
        {"beat": True, "confirmed": 1, "info": {}},
        [1, 1, {}],
    ],
)
def test_a_session_has_all_its_fields(record: Any) -> None:
    with pytest.raises(Corrupt):
        unpack_session(keys.pack_u64(1), msgpack.packb(record))


def test_a_session_is_named_by_its_number() -> None:
    with pytest.raises(Corrupt):
        unpack_session(b"123", pack_session(SESSION))


SOMETIMES = {"shards", "hash_prefix", "options", "encryption", "changes", "epoch", "accounting"}
SOMETIMES |= {"trash_days", "frame_bytes"}


@pytest.mark.parametrize(
    "field", sorted(set(volume.VolumeFormat._fields) - SOMETIMES - {"unknown"})
)
def test_a_format_has_all_its_fields(field: str) -> None:
    record = msgpack.unpackb(volume.pack_format(FORMAT))
    others: list[Any] = [None, [], {}, 1.5, True]
    for wrong in others:
        with pytest.raises(Corrupt):
            volume.unpack_format(keys.pack_map({**record, field: wrong}))
    del record[field]
    with pytest.raises(Corrupt):
        volume.unpack_format(keys.pack_map(record))


def test_a_format_has_only_what_it_needs() -> None:
    assert not SOMETIMES & msgpack.unpackb(volume.pack_format(FORMAT)).keys()
    kept = volume.pack_format(FORMAT._replace(trash_days=7))
    assert volume.unpack_format(kept).trash_days == 7
    for wrong in (
        {"trash_days": "1"},
        {"shards": None},
        {"hash_prefix": 1},
        {"options": None},
        {"options": {"a": 1}},
        {"changes": None},
        {"epoch": "1"},
        {"accounting": "odd"},
        {"frame_bytes": "4096"},
        {"frame_bytes": 2048},
        {"frame_bytes": 12288},
    ):
        record = msgpack.unpackb(volume.pack_format(FORMAT))
        with pytest.raises(Corrupt):
            volume.unpack_format(keys.pack_map({**record, **wrong}))


def test_small_frames_are_of_a_later_version() -> None:
    """O4: who does not know them would take every block for damaged."""
    made = volume.new_format("vol", "mem", "")
    assert (made.frame_bytes, made.version) == (16 << 10, volume.FRAMES_VERSION)
    assert volume.unpack_format(volume.pack_format(made)) == made
    old = volume.new_format("vol", "mem", "", volume.FormatChoices(frame_bytes=64 << 10))
    assert old.version == volume.FIRST_VERSION
    kept = msgpack.unpackb(volume.pack_format(old))
    assert "frame_bytes" not in kept, "as volumes have it that were made before there was a choice"
    assert old.with_frames(4 << 10).version == volume.FRAMES_VERSION
    back = made.with_frames(64 << 10)
    assert back.version == volume.FRAMES_VERSION, "there may be blocks in small ones"


def test_a_later_version_says_what_to_do() -> None:
    record = {"version": keys.METADATA_VERSION + 1}
    with pytest.raises(ConfigError, match="upgrade slicefs"):
        volume.unpack_format(keys.pack_map(record))


def test_corrupt_names_the_place() -> None:
    with pytest.raises(Corrupt) as caught:
        schema_slices.unpack_slices(INO, 5, b"short")
    assert (caught.value.row, caught.value.field) == (keys.inode_row(INO), keys.chunk_field(5))


# --- round trips ---------------------------------------------------------------------------------

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
times = st.integers(-(2**63), 2**63 - 1)
attrs = st.builds(
    Attr,
    ino=u64,
    mode=st.builds(
        lambda kind, mode: kind << 12 | mode, st.sampled_from(FileType), st.integers(0, 0o7777)
    ),
    uid=u32,
    gid=u32,
    rdev=u32,
    flags=u32,
    parent=u64,
    btime_ns=times,
    size=st.integers(0, FILE_SIZE_MAX),
    nlink=u32,
    used=st.integers(0, FILE_SIZE_MAX),
    mark=st.integers(0, inode.MARKS - 1),
    atime_ns=times,
    mtime_ns=times,
    ctime_ns=times,
    acl=u32,
    default_acl=u32,
)


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    pos = draw(st.integers(0, CHUNK_BYTES))
    length = draw(st.integers(0, CHUNK_BYTES - pos))
    off = draw(st.integers(0, 2**32 - 1 - length))
    size = draw(st.integers(off + length, 2**32 - 1))
    return Slice(pos, SliceId(draw(u64)), size, off, length, draw(st.sampled_from(SliceKind)))


@given(attr=attrs)
def test_attributes_come_back(attr: Attr) -> None:
    a, v = inode.pack_attr(attr), inode.pack_volatile(attr)
    assert inode.unpack_inode(attr.ino, a, v) == attr
    stable = inode.unpack_stable(attr.ino, a)
    assert tuple(stable) == (*attr[1:8], attr.acl, attr.default_acl, attr.mark)
    plain = not (attr.rdev or attr.flags or attr.acl or attr.default_acl)
    assert len(a) == (27 if plain else 43)


@given(attr=attrs, now_ns=times, delta=st.integers(-1, 1))
def test_touching_is_merging(attr: Attr, now_ns: int, delta: int) -> None:
    attr = attr._replace(nlink=max(1, min(attr.nlink, 2**32 - 2)))
    merged = merge(inode.pack_volatile(attr), inode.touch_parts(now_ns, delta))
    expected = attr._replace(mtime_ns=now_ns, ctime_ns=now_ns, nlink=attr.nlink + delta)
    assert merged == inode.pack_volatile(expected)
    merged = merge(inode.pack_volatile(attr), inode.ctime_parts(now_ns))
    assert merged == inode.pack_volatile(attr._replace(ctime_ns=now_ns))


@given(listed=st.lists(slices(), max_size=5))
def test_slices_come_back(listed: list[Slice]) -> None:
    assert schema_slices.unpack_slices(INO, 0, schema_slices.pack_slices(listed)) == listed
    assert schema_slices.unpack_slices(INO, 0, None) == []


@given(dead=st.lists(st.tuples(u64, u32), max_size=5))
def test_dead_slices_come_back(dead: list[tuple[int, int]]) -> None:
    assert schema_slices.unpack_dead(b"", schema_slices.pack_dead(dead)) == dead


@given(kind=st.sampled_from(FileType), ino=u64)
def test_dentries_come_back(kind: FileType, ino: int) -> None:
    value = keys.pack_dentry(kind, Ino(ino))
    assert keys.unpack_dentry(b"", b"", value) == (kind, ino)
    assert value[keys.DENTRY_INO_AT :] == keys.inode_row(ino)[1:]


@pytest.mark.parametrize("wrong", [b"", b"\x08", b"\xff" + bytes(8), bytes(8), bytes(18)])
def test_a_wrong_dentry_among_others_is_told(wrong: bytes) -> None:
    """Also where lengths add up to what whole ones would have: all are taken apart at once."""
    value = keys.pack_dentry(FileType.REG, INO)
    fields = {b"a": value, b"b": value}
    found = [(b"a", INO, FileType.REG), (b"b", INO, FileType.REG)]
    assert list(keys.unpack_dentries(b"d", fields)) == found
    for other in (value, value[:-1], value + b"\x08"):
        with pytest.raises(Corrupt, match="dentry"):
            keys.unpack_dentries(b"d", {b"a": value, b"wrong": wrong, b"z": other})


@given(number=st.integers(-(2**63), 2**63 - 1))
def test_counts_come_back(number: int) -> None:
    assert keys.unpack_count(b"U", b"", b"%d" % number) == number
    assert keys.unpack_count(b"U", b"", None) == 0


@given(numbers=st.lists(u64, min_size=2, max_size=2))
def test_rows_sort_as_their_numbers(numbers: list[int]) -> None:
    low, high = sorted(numbers)
    for name in (keys.inode_row, keys.dir_row, keys.parent_field, keys.session_row):
        assert (name(low) < name(high)) == (low < high)
        assert keys.id_of(name(low)) == low
    assert keys.id_of(keys.pack_u64(low)) == low
    assert keys.id_of(keys.chunk_field(low & 0xFFFFFFFF)) == low & 0xFFFFFFFF


text = st.text(max_size=20)
maps = st.dictionaries(text, st.integers(-(2**63), 2**63) | text | st.booleans(), max_size=3)


@given(beat=u32, confirmed=u32, info=maps)
def test_sessions_come_back(beat: int, confirmed: int, info: dict[str, Any]) -> None:
    record = SessionRecord(SessionId(5), beat, confirmed, info)
    assert unpack_session(keys.pack_u64(5), pack_session(record)) == record


@given(unknown=maps, capacity=u64)
def test_formats_keep_what_they_do_not_know(unknown: dict[str, Any], capacity: int) -> None:
    extra = {f"x-{name}": value for name, value in unknown.items()}
    settings = FORMAT._replace(unknown=extra or None, capacity=capacity)
    assert volume.unpack_format(volume.pack_format(settings)) == settings
