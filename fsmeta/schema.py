"""Every key and value in a metadata store. `docs/FORMAT.md` is this page in prose.

    row          field        value
    i<ino8>      a            stable attributes, ATTR_*; changes seldom, so verbs *check* it
                 v            volatile attributes, VOLATILE; changes often, so verbs *merge* into it
                 c<index4>    slices of one 64 MiB chunk, SLICE records appended
                 l            symlink target
                 x<name>      extended attribute, 0x01 then its value
                 p<parent8>   decimal count of names in that directory; only when `a.parent` is 0
    d<ino8>      <name>       DENTRY; a directory without names has no row
    s<session8>  a            the session is alive (FENCE_FIELD)
                 w<worker2>   last sequence this worker has committed, 8 bytes
                 h<ino8>      the session holds this orphan open
    S            <session8>   msgpack: what `status` shows, and the session's beat
    C            ino slice session   decimal: the next id not handed out yet
    U            space inodes        decimal: usage of the volume
    F            format       msgpack: the volume's settings
    O            <ino8>       an inode without names, waiting for its last close: unix time, 8 bytes
    X            <slice8>     slices of one chunk no file refers to any more: DEAD records; the
                              field is the id of the first
    Z            sync         1; rewritten to force the log to disk (SQLite only)
    G            leader       session of the client that does background work, 8 bytes
                 round        decimal: the deletion round that sessions are asked to confirm

Numbers in names and records are big-endian, so they sort. `<ino8>` is 8 raw bytes.
Invariants (what `check` verifies):
- a dentry's inode exists and has its type; a directory has exactly one dentry, in `a.parent`;
- `v.nlink` is the number of names of a file, 2 + subdirectories for a directory, 0 for an orphan;
- `a.parent` is the only directory that names a file, or 0 and then the `p` fields count names;
- an inode is in O exactly when nlink is 0; its chunks stay until no session holds it;
- `v.used` is the bytes its chunks cover; `U` is the sum over inodes that have names;
- a slice in X is in no chunk; every chunk's slices fit into the chunk;
- a chunk begins below the file's size.
"""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgpack

from fsmeta.errors import Corrupt
from fsmeta.store import Key, Parts
from fsmeta.types import (
    CHUNK_BYTES,
    FILE_TYPES,
    Attr,
    Dentry,
    FileType,
    Ino,
    SessionId,
    Slice,
    SliceId,
    SliceKind,
)

METADATA_VERSION: Final = 1

_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor

_U64 = struct.Struct(">Q")
_U32 = struct.Struct(">I")
_U16 = struct.Struct(">H")
pack_u64 = _U64.pack
pack_u32 = _U32.pack

# --- rows and fields -----------------------------------------------------------------------------

ATTR_FIELD: Final = b"a"
VOLATILE_FIELD: Final = b"v"
LINK_FIELD: Final = b"l"
ATTR_FIELDS: Final = (ATTR_FIELD, VOLATILE_FIELD)
INODE_PREFIX: Final = b"i"
DIR_PREFIX: Final = b"d"
SESSION_PREFIX: Final = b"s"

SESSIONS: Final = b"S"
COUNTERS: Final = b"C"
USAGE: Final = b"U"
FORMAT: Final = b"F"
ORPHANS: Final = b"O"
DEAD_SLICES: Final = b"X"
BACKGROUND: Final = b"G"

NEXT_INO: Final = b"ino"
NEXT_SLICE: Final = b"slice"
NEXT_SESSION: Final = b"session"
SPACE: Final = b"space"
INODES: Final = b"inodes"
FORMAT_FIELD: Final = b"format"
LEADER: Final = b"leader"
ROUND: Final = b"round"


def inode_row(ino: int) -> bytes:
    """The row of an inode."""
    return b"i" + pack_u64(ino)


def inode_rows(inos: Iterable[int]) -> list[bytes]:
    """`inode_row` of many."""
    pack = pack_u64
    return [b"i" + pack(ino) for ino in inos]


def dir_row(ino: int) -> bytes:
    """The row of a directory's names."""
    return b"d" + pack_u64(ino)


def session_row(session: int) -> bytes:
    """The row of a session, its fence."""
    return b"s" + pack_u64(session)


def chunk_field(index: int) -> bytes:
    """Where an inode's row lists the slices of a chunk."""
    return b"c" + pack_u32(index)


def xattr_field(name: bytes) -> bytes:
    """Where an inode's row keeps an extended attribute."""
    return b"x" + name


def parent_field(parent: int) -> bytes:
    """Where a hard-linked file counts its names in a directory."""
    return b"p" + pack_u64(parent)


def hold_field(ino: int) -> bytes:
    """Where a session says that it holds an orphan."""
    return b"h" + pack_u64(ino)


def worker_field(worker: int) -> bytes:
    """Where a session remembers a worker's last sequence."""
    return b"w" + _U16.pack(worker)


def id_of(name: bytes) -> int:
    """The number in `i<ino8>`, `c<index4>` or a plain `<ino8>`, whichever its length says."""
    if len(name) in (8, 9):
        return int(_U64.unpack(name[-8:])[0])
    if len(name) == 5:
        return int(_U32.unpack(name[1:])[0])
    raise ValueError(f"no id in {name!r}")


def corrupt(ino: int, field: bytes, why: str) -> Corrupt:
    """The error for an inode whose fields contradict each other."""
    return Corrupt(inode_row(ino), field, why)


# --- inode attributes ----------------------------------------------------------------------------

# version, mode with type, uid, gid, parent, birth time; 27 bytes, which keeps the hash of a small
# file within the allocator's 128-byte class on Redis
_ATTR: Final = struct.Struct(">BHIIQQ")
# the tail: rdev, chattr flags, access ACL id, default ACL id; only written when one is not zero
_ATTR_TAIL: Final = struct.Struct(">IIII")
_VOLATILE: Final = struct.Struct(">BQIQQQQ")  # version, size, nlink, used, atime, mtime, ctime
assert _ATTR.size == 27
assert _ATTR_TAIL.size == 16
assert _VOLATILE.size == 45

_ATTR_V1: Final = 1
_VOLATILE_V1: Final = 1
_NLINK_AT: Final = 9
_MTIME_AT: Final = 29
_CTIME_AT: Final = 37
_EPOCH: Final = 1 << 63  # times are stored unsigned with this bias, so years before 1970 sort too


def pack_attr(attr: Attr) -> bytes:
    """The `a` record of `attr`."""
    base = _ATTR.pack(_ATTR_V1, attr.mode, attr.uid, attr.gid, attr.parent, attr.btime_ns + _EPOCH)
    if attr.rdev or attr.flags:
        return base + _ATTR_TAIL.pack(attr.rdev, attr.flags, 0, 0)
    return base


def pack_volatile(attr: Attr) -> bytes:
    """The `v` record of `attr`."""
    return _VOLATILE.pack(
        _VOLATILE_V1,
        attr.size,
        attr.nlink,
        attr.used,
        attr.atime_ns + _EPOCH,
        attr.mtime_ns + _EPOCH,
        attr.ctime_ns + _EPOCH,
    )


class Stable(NamedTuple):
    """What the `a` record holds: all that permission checks and most parents need."""

    mode: int
    uid: int
    gid: int
    rdev: int
    flags: int
    parent: Ino
    btime_ns: int


def unpack_stable(ino: int, a: bytes) -> Stable:
    """Raises: Corrupt."""
    return _new(Stable, _stable_values(ino, a))


def _stable_values(ino: int, a: bytes) -> tuple[int, int, int, int, int, Ino, int]:
    """The values of `Stable`."""
    try:
        version, mode, uid, gid, parent, btime = _ATTR.unpack_from(a)
        rdev = flags = 0
        if len(a) != 27:
            rdev, flags, _, _ = _ATTR_TAIL.unpack(a[27:])
    except struct.error as error:
        raise Corrupt(inode_row(ino), ATTR_FIELD, f"length {len(a)}") from error
    if version != _ATTR_V1:
        raise Corrupt(inode_row(ino), ATTR_FIELD, f"version {version}")
    if mode >> 12 not in FILE_TYPES:
        raise Corrupt(inode_row(ino), ATTR_FIELD, f"mode {mode:o}")
    return mode, uid, gid, rdev, flags, parent, btime - _EPOCH


def unpack_inode(ino: Ino, a: bytes, v: bytes) -> Attr:
    """The attributes that the two records of an inode hold.

    Raises: Corrupt.
    """
    try:
        version, size, nlink, used, atime, mtime, ctime = _VOLATILE.unpack(v)
    except struct.error as error:
        raise Corrupt(inode_row(ino), VOLATILE_FIELD, f"length {len(v)}") from error
    if version != _VOLATILE_V1:
        raise Corrupt(inode_row(ino), VOLATILE_FIELD, f"version {version}")
    mode, uid, gid, rdev, flags, parent, btime_ns = _stable_values(ino, a)
    return _new(
        Attr,
        (
            ino,
            mode,
            uid,
            gid,
            rdev,
            flags,
            parent,
            btime_ns,
            size,
            nlink,
            used,
            atime - _EPOCH,
            mtime - _EPOCH,
            ctime - _EPOCH,
        ),
    )


_KINDS: Final = {int(kind): kind for kind in SliceKind}


def touch_parts(now_ns: int, nlink_delta: int = 0) -> Parts:
    """A MERGE into `v` that sets mtime and ctime and moves the link count.

    The last commit wins, even with an earlier clock: a change that left mtime as it was would be
    missed by whoever compares times.
    """
    stamp = pack_u64(now_ns + _EPOCH)
    times = (_MTIME_AT, stamp + stamp)
    return (*times, _NLINK_AT, nlink_delta) if nlink_delta else times


def ctime_parts(now_ns: int) -> Parts:
    """A MERGE into `v` that sets only ctime."""
    return _CTIME_AT, pack_u64(now_ns + _EPOCH)


def attr_keys(ino: int) -> tuple[Key, Key]:
    """Where the two records of an inode's attributes are."""
    row = inode_row(ino)
    return (row, ATTR_FIELD), (row, VOLATILE_FIELD)


# --- dentries ------------------------------------------------------------------------------------

_DENTRY: Final = struct.Struct(">BQ")  # type, ino
assert _DENTRY.size == 9
DENTRY_INO_AT: Final = 1  # where the inode's id begins, for `read_linked`


def pack_dentry(kind: FileType, ino: Ino) -> bytes:
    """The value of a name."""
    return _DENTRY.pack(kind, ino)


def unpack_dentry(row: bytes, name: bytes, value: bytes) -> tuple[FileType, Ino]:
    """Type and inode of the name `name` in the directory row `row`.

    Raises: Corrupt.
    """
    if len(value) != 9 or value[0] not in FILE_TYPES:
        raise Corrupt(row, name, f"dentry {value!r}")
    kind, ino = _DENTRY.unpack(value)
    return FILE_TYPES[kind], ino


def unpack_dentries(row: bytes, items: Iterable[tuple[bytes, bytes]]) -> list[Dentry]:
    """The names among the fields of a directory's row.

    Raises: Corrupt.
    """
    try:
        return [
            _new(Dentry, (name, ino, FILE_TYPES[kind]))
            for name, value in items
            for kind, ino in (_DENTRY.unpack(value),)
        ]
    except (struct.error, KeyError):
        for name, value in items:
            unpack_dentry(row, name, value)  # raises, and says which
        raise


# --- slices --------------------------------------------------------------------------------------

_SLICE: Final = struct.Struct(">BIQIII")  # version and kind, pos, id, size, off, length
assert _SLICE.size == 25
SLICE_BYTES: Final = _SLICE.size
_SLICE_V1: Final = 0x10  # the upper half of the first byte is the version, the lower the kind


def pack_slices(slices: Iterable[Slice]) -> bytes:
    """Records of one chunk, ready to append to its field."""
    return b"".join(
        _SLICE.pack(_SLICE_V1 | s.kind, s.pos, s.id, s.size, s.off, s.length) for s in slices
    )


def unpack_slices(ino: Ino, index: int, value: bytes | None) -> list[Slice]:
    """The slices of one chunk, oldest first.

    Raises: Corrupt.
    """
    if not value:
        return []
    if len(value) % SLICE_BYTES:
        raise Corrupt(inode_row(ino), chunk_field(index), f"length {len(value)}")
    slices = []
    for head, pos, sid, size, off, length in _SLICE.iter_unpack(value):
        kind = head ^ _SLICE_V1
        if kind not in _KINDS or pos + length > CHUNK_BYTES or off + length > size:
            raise Corrupt(inode_row(ino), chunk_field(index), f"slice {sid} at {pos}")
        slices.append(Slice(pos, sid, size, off, length, _KINDS[kind]))
    return slices


_DEAD: Final = struct.Struct(">QI")  # id, size
assert _DEAD.size == 12


def pack_dead(slices: Iterable[tuple[int, int]]) -> bytes:
    """Ids and sizes of slices that wait for deletion."""
    return b"".join(_DEAD.pack(sid, size) for sid, size in slices)


def unpack_dead(field: bytes, value: bytes) -> list[tuple[SliceId, int]]:
    """Raises: Corrupt."""
    if len(value) % _DEAD.size:
        raise Corrupt(DEAD_SLICES, field, f"length {len(value)}")
    return [(SliceId(sid), size) for sid, size in _DEAD.iter_unpack(value)]


def hole(pos: int, length: int) -> Slice:
    """A record that makes a range of a chunk read as zeros."""
    return Slice(pos, SliceId(0), length, 0, length, SliceKind.HOLE)


# --- cold records: msgpack maps ------------------------------------------------------------------


def pack_map(record: Mapping[str, Any]) -> bytes:
    """A cold record."""
    return bytes(msgpack.packb(dict(record), use_bin_type=True))


def unpack_map(row: bytes, field: bytes, value: bytes) -> dict[str, Any]:
    """A cold record; fields this version does not know are kept by whoever rewrites it.

    Raises: Corrupt.
    """
    try:
        record = msgpack.unpackb(value, raw=False)
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise Corrupt(row, field, str(error)) from error
    if not isinstance(record, dict):
        raise Corrupt(row, field, f"{type(record).__name__} where a map belongs")
    return record


class SessionRecord(NamedTuple):
    """One row of `slicefs status`, and the beat by which others see that it lives."""

    id: SessionId
    beat: int  # grows with every heartbeat
    confirmed: int  # the last deletion round this session has agreed to
    info: dict[str, Any]  # host, pid, mountpoint, version, started


def pack_session(record: SessionRecord) -> bytes:
    """The value of a session in S."""
    return pack_map({"beat": record.beat, "confirmed": record.confirmed, "info": record.info})


def unpack_session(field: bytes, value: bytes) -> SessionRecord:
    """Raises: Corrupt."""
    record = unpack_map(SESSIONS, field, value)
    try:
        session = SessionId(id_of(field))
    except ValueError as error:
        raise Corrupt(SESSIONS, field, str(error)) from error
    beat, confirmed, info = (record.get(name) for name in ("beat", "confirmed", "info"))
    if type(beat) is not int or type(confirmed) is not int or not isinstance(info, dict):
        raise Corrupt(SESSIONS, field, f"not a session: {record!r}")
    return SessionRecord(session, beat, confirmed, info)


def unpack_count(row: bytes, field: bytes, value: bytes | None) -> int:
    """A decimal counter; an absent one is 0.

    Raises: Corrupt.
    """
    if value is None:
        return 0
    if not _COUNT.fullmatch(value):
        raise Corrupt(row, field, f"counter {value!r}")
    return int(value)


# what Redis takes for a number too; int() alone would also believe in "1_0" and " 1"
_COUNT: Final = re.compile(rb"0|-?[1-9][0-9]{0,18}")


def new_attr(
    ino: Ino, mode: int, uid: int, gid: int, parent: Ino, now_ns: int, rdev: int = 0
) -> Attr:
    """Attributes of an inode that is born now."""
    is_dir = stat.S_ISDIR(mode)
    nlink = 2 if is_dir else 1
    size = DIR_SIZE if is_dir else 0
    return Attr(
        ino, mode, uid, gid, rdev, 0, parent, now_ns, size, nlink, 0, now_ns, now_ns, now_ns
    )


DIR_SIZE: Final = 4096  # what stat(2) shows as the size of any directory
