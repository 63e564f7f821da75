"""Every key in a metadata store, and what is there. `docs/FORMAT.md` is this page in prose.

The records of attributes are in `schema/inode`, those of slices in `schema/slices`; the names of a
directory, and what is kept as a map, here.

    row          field        value
    i<ino8>      a            stable attributes; changes seldom, so verbs *check* it
                 v            volatile attributes; changes often, so verbs *merge* into it
                 c<index4>    slices of one 64 MiB chunk, SLICE records appended
                 l            symlink target
                 x<name>      extended attribute, 0x01 then its value
                 y            decimal: what those cost, see `schema/xattrs`
                 p<parent8>   decimal count of names in that directory; only when `a.parent` is 0
                 h            directory where it counts, 8 bytes; only when `a.parent` is 0
                 t            1: made without a name (O_TMPFILE), link(2) may give it one
                 o            in the trash: its whole name, where the one there is cut
    d<ino8>      <name>       DENTRY; a directory without names has no row
    s<session8>  a            the session is alive (FENCE_FIELD): the edition it must follow
                 w<worker2>   last sequence this worker has committed, 8 bytes; in E it stays
                 h<ino8>      the session holds this orphan open
                 n            Redis: token of the client, 8 bytes, highest sequence committed, 8
    E            <session8>   `n` of a session that another client ended, or 1: proof to rejoin
    A<id4>       e            an ACL, `fsmeta/schema/acl.py`; never changes
    a            <uid4>       decimal: the ACL records that a user has made
    j<journal8>  p<domain8>   see `schema/journal`
    S            <session8>   msgpack: what `status` shows, and the session's beat
    C            ino slice session   decimal: the next id not handed out yet
                 lineage      the past of the store that the last ids came from (`history`)
    U            space inodes        decimal: usage of the volume
    F            format       msgpack: the volume's settings
                 acl          1: there are ACLs, or were
    l<ino8>, g<session8>      file locks: `schema/locks`
    O            <ino8>       an inode without names, waiting for its last close: unix time, 8 bytes
    X            <slice8>     DEAD records of slices that a chunk has dropped; the first one's id
    K            <ino8>       the session that builds a clone with this root, 8 bytes; 0: none
                 s<slice8>    the session that fills a segment: `schema/segments`
    M            <root8>      see `schema/snapshots`
    T            <ino8>       1: this hour's directory of the trash has been used
    R            <slice8>     decimal: uses of a slice beyond the first; absent: none
    P            <slice8>     inodes that were packed into a segment: `schema/segments`
    Z            sync         1; rewritten to force the log to disk (SQLite only)
    G            leader       session of the client that does background work, 8 bytes
                 round        decimal: the deletion round that sessions are asked to confirm
                 void         decimal: slices below it that no chunk has, gc may delete
                 collecting   the gc that reads the chunks
    Y            <slice8>     1; a slice that was given to a further chunk meanwhile
    Q            <node>s, <node>i     decimal: space and inodes of what counts there (`quota`)
                 <node>s<, <node>i<   decimal: the limit of the counter
    q            <node>       1: the node has a limit

Numbers in names and records are big-endian, so they sort. `<ino8>` is 8 raw bytes.
Invariants (what `check` verifies):
- a dentry's inode exists and has its type; a directory has exactly one dentry, in `a.parent`;
- `v.nlink` is the number of names of a file, 2 + subdirectories for a directory, 0 for an orphan;
- `a.parent` is the only directory that names a file, or 0 and then the `p` fields count names;
- the root of a clone in K has no name; an hour of the trash with names is in T;
- an inode is in O exactly when nlink is 0; its chunks stay until no session holds it;
- `v.used` is the bytes its chunks cover, and what `y` has beyond a page;
- `U` is the sum over inodes that have names;
- a chunk's slices fit into it; the chunks that list a slice and its drops in X are one more than R;
- a chunk begins below the file's size; what is in P is in R;
- an ACL that an inode names exists, and F says that there are some; symlinks have none, only
  directories have a default ACL.
- a session whose row has a fence is in S;
- the counters in Q are what `check/quotas` sums up.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import msgpack

from fsmeta.dentries import Dentries
from fsmeta.errors import Corrupt
from fsmeta.types import FILE_TYPES, FileType, Ino

METADATA_VERSION: Final = 5  # the latest that is known; volume.py says what has which

_U64 = struct.Struct(">Q")
_NUMBERED = struct.Struct(">cQ")  # a row: its prefix and a number
_U32 = struct.Struct(">I")
_U16 = struct.Struct(">H")
pack_u64 = _U64.pack
pack_u32 = _U32.pack

# --- rows and fields -----------------------------------------------------------------------------

ATTR_FIELD: Final = b"a"
VOLATILE_FIELD: Final = b"v"
LINK_FIELD: Final = b"l"
HOME_FIELD: Final = b"h"
NAMELESS_FIELD: Final = b"t"
ORIGIN_FIELD: Final = b"o"
OBJECT_FIELD: Final = b"u"
ATTR_FIELDS: Final = (ATTR_FIELD, VOLATILE_FIELD)
INODE_PREFIX: Final = b"i"
DIR_PREFIX: Final = b"d"
SESSION_PREFIX: Final = b"s"
ACL_PREFIX: Final = b"A"
ACL_FIELD: Final = b"e"

SESSIONS: Final = b"S"
COUNTERS: Final = b"C"
USAGE: Final = b"U"
FORMAT: Final = b"F"
ORPHANS: Final = b"O"
DEAD_SLICES: Final = b"X"
SHARED_SLICES: Final = b"R"
TRASH: Final = b"T"
CLONES: Final = b"K"
BACKGROUND: Final = b"G"
SHARED: Final = b"Y"
ACCOUNTS: Final = b"Q"
LIMITED: Final = b"q"
ENDED: Final = b"E"
ACL_MAKERS: Final = b"a"
SYNCED: Final = b"Z"  # written by the SQLite engine

NEXT_INO: Final = b"ino"
NEXT_SLICE: Final = b"slice"
NEXT_SESSION: Final = b"session"
LINEAGE: Final = b"lineage"
PROOF_FIELD: Final = b"n"
SPACE: Final = b"space"
INODES: Final = b"inodes"
FORMAT_FIELD: Final = b"format"
HAS_ACLS: Final = b"acl"
LEADER: Final = b"leader"
ROUND: Final = b"round"
VOID: Final = b"void"
COLLECTING: Final = b"collecting"


def inode_row(ino: int) -> bytes:
    """The row of an inode."""
    return _NUMBERED.pack(b"i", ino)


def inode_rows(inos: Iterable[int]) -> list[bytes]:
    """`inode_row` of many."""
    pack = _NUMBERED.pack
    return [pack(b"i", ino) for ino in inos]


def dir_row(ino: int) -> bytes:
    """The row of a directory's names."""
    return _NUMBERED.pack(b"d", ino)


def session_row(session: int) -> bytes:
    """The row of a session, its fence."""
    return b"s" + pack_u64(session)


def acl_row(number: int) -> bytes:
    """The row of an ACL."""
    return b"A" + pack_u32(number)


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


def taken_over_field(worker: bytes) -> bytes:
    """Where a session remembers what a worker's field was before and after it was taken over."""
    return b"t" + worker[1:]


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


# --- dentries ------------------------------------------------------------------------------------

_DENTRY: Final = struct.Struct(">BQ")  # type, ino
_DENTRY_INO: Final = struct.Struct(">xQ")
assert _DENTRY.size == _DENTRY_INO.size == 9
_KINDS: Final = frozenset(FILE_TYPES)
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


def unpack_dentries(row: bytes, fields: Mapping[bytes, bytes]) -> Dentries:
    """The names among the fields of a directory's row.

    Raises: Corrupt.
    """
    values = b"".join(fields.values())
    kinds = values[:: _DENTRY.size]
    if not ({_DENTRY.size}.issuperset(map(len, fields.values())) and _KINDS.issuperset(kinds)):
        for name, value in fields.items():
            unpack_dentry(row, name, value)  # raises, and says which
    inos = [ino for (ino,) in _DENTRY_INO.iter_unpack(values)]
    return Dentries(list(fields), cast("list[Ino]", inos), kinds)


# --- cold records: msgpack maps ------------------------------------------------------------------


def pack_map(record: Mapping[str, Any]) -> bytes:
    """A cold record."""
    return bytes(msgpack.packb(dict(record), use_bin_type=True))


def unpack_map(row: bytes, field: bytes, value: bytes) -> dict[str, Any]:
    """A cold record; fields that this version does not know are kept when it is rewritten.

    Raises: Corrupt.
    """
    try:
        record = msgpack.unpackb(value, raw=False)
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise Corrupt(row, field, str(error)) from error
    if not isinstance(record, dict):
        raise Corrupt(row, field, f"{type(record).__name__} where a map belongs")
    return record


def unpack_count(row: bytes, field: bytes, value: bytes | None) -> int:
    """A decimal counter; an absent one is 0.

    Raises: Corrupt.
    """
    if value is None:
        return 0
    if not _COUNT.fullmatch(value):
        raise Corrupt(row, field, f"counter {value!r}")
    return int(value)


# what Redis takes for a number too; int() alone would also accept "1_0" and " 1"
_COUNT: Final = re.compile(rb"0|-?[1-9][0-9]{0,18}")
