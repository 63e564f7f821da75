"""An entry of the log of held commits: the verb, its arguments, and the entries that come before.

`StagedStore` makes entries, a journal keeps them as msgpack, `publish` runs them on the store. They
name the verb instead of its writes, so it can be run again after other clients' changes.
Only the verbs named here can be held back.

Threading: an entry is written by one thread at a time; functions only besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgpack

from fsmeta.errors import StoreError
from fsmeta.ops.data import extent, packing, ranges
from fsmeta.ops.data.ranges import Span
from fsmeta.ops.names import atime, attr, create, flags, link, remove, rename, xattr
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules.context import Env
from fsmeta.rules.settings import VolumeFormat
from fsmeta.schema import slices as schema_slices
from fsmeta.schema.segments import OpenSegment
from fsmeta.schema.trash import hour_at
from fsmeta.types import Caller, JudgedCaller, SetAttr, Slice, SliceId, SliceKind, SpaceUsage
from fsmeta.writeback.entries.intents import Intent, WriteIntent, intent_of, plain
from fsmeta.writeback.overlay.overlay import Laid

VERSION: Final = 2  # 1 has no `after`
EVERY: Final = 0  # the domain of what must wait for all, and all for it; no inode has this number
_NO_LIMITS: Final = SpaceUsage(0, 0)  # what was accepted is not refused later

# What programs rely on when another mount sees it, so what is to be seen in order.
VERBS: Final[dict[str, Callable[..., Any]]] = {
    "create": create.create,
    "unlink": remove.unlink,
    "rmdir": remove.rmdir,
    "rename": rename.rename,
    "link": link.link,
    "setattr": attr.setattr_,
    "setflags": flags.setflags,
    "setxattr": xattr.setxattr,
    "removexattr": xattr.removexattr,
    "write": extent.write,
    "fallocate": ranges.fallocate,
}
# What is only worth doing where nothing is in its way: EBUSY then.
GIVING_WAY: Final = frozenset((extent.replace_prefix, packing.pack, atime.touch_atime))
# What lets a file list slices of another one: only where other clients can read them.
SHARING: Final = frozenset((ranges.copy_file_range,))
NAMES: Final = {verb: name for name, verb in VERBS.items()}
_RECORDS: Final[Sequence[type]] = (Caller, NewNode, DentryLocation, SetAttr, Slice, Span)
_CODES: Final = {kind: code for code, kind in enumerate(_RECORDS, 1)}
_packers: Final[list[Any]] = []  # unused ones; as many a thread as records are nested


class VerbRules(NamedTuple):
    """What today's settings say to verbs: marks of inodes that count and of new ones; the trash."""

    charged: int
    born: int
    trash: bool

    @classmethod
    def of(cls, settings: VolumeFormat) -> VerbRules:
        """Those of a volume."""
        return cls(settings.charged, settings.born, settings.trash_days > 0)


class Guard(NamedTuple):
    """A name that must lead where it did when the program relied on it."""

    row: bytes
    name: bytes
    dentry: bytes


class Need(NamedTuple):
    """An object that must be in the store first, and where it is until then."""

    key: str
    segment: int
    offset: int
    length: int
    crc: int


class After(NamedTuple):
    """The last commit that this mount had sent to the store before an entry was accepted.

    A store that has lost it with the power has lost what the entry relies on.
    """

    fence: bytes
    worker: bytes
    number: int


class Log(Protocol):
    """What keeps entries and blocks on a disk of this host."""

    def needs(self, slices: Sequence[tuple[SliceId, int]]) -> tuple[Need, ...]:
        """Where the blocks of slices are that the store does not have yet."""

    def append(self, sequence: int, payload: bytes) -> int:
        """Have an entry written behind all earlier ones; its position."""

    def flush(self, position: int) -> bool:
        """Return when all up to `position` is written; False where the disk failed."""

    def sync(self) -> bool:
        """Return when all that was appended survives a loss of power, and before it all that the
        store has; False where the disk failed. Raises: StoreError.
        """


class Moved(NamedTuple):
    """The part of an open segment that the only slice of a write has become."""

    piece: Slice
    segment: OpenSegment


class LogEntry:
    """One change that is held back."""

    __slots__ = (
        "after", "caller", "domains", "guards", "inos", "intent", "laid", "moved", "name", "needs",
        "now_ns", "sequence", "since",
    )  # fmt: skip

    def __init__(self, name: str, caller: Caller, now_ns: int, intent: Intent) -> None:
        self.name = name
        self.caller = caller
        self.now_ns = now_ns
        self.intent = intent
        self.sequence = 0
        self.domains: frozenset[int] = frozenset((EVERY,))
        self.guards: tuple[Guard, ...] = ()
        self.needs: tuple[Need, ...] = ()
        self.inos: tuple[int, ...] = ()  # what it changes: files, not the directories around them
        self.after: After | None = None
        self.laid: Laid | None = None  # None: the own mount could not be shown what it leads to
        self.since = 0.0  # when it was accepted, by our own clock
        self.moved: Moved | None = None  # where its bytes are in the store, if not where it says

    @property
    def write(self) -> WriteIntent:
        """The intent of a write."""
        assert isinstance(self.intent, WriteIntent), self.name
        return self.intent

    @property
    def piece(self) -> Slice:
        """The only slice of a write, as the program has written it."""
        ((_, piece),) = self.write.batch
        return piece

    @property
    def published(self) -> Intent:
        """What its verb is run with on the store."""
        if self.moved is None:
            return self.intent
        ((index, _),) = self.write.batch
        return self.write._replace(batch=((index, self.moved.piece),))

    @property
    def record(self) -> bytes:
        """The only slice of a write, as its chunk will list it."""
        piece = self.piece if self.moved is None else self.moved.piece
        return schema_slices.pack_slices([piece])

    def env(self, rules: VerbRules) -> Env:
        """As which call the verb runs: it was checked when it was made, by the kernel or by us."""
        caller = self.caller
        if not caller.checked:
            caller = JudgedCaller(*caller._replace(checked=True))
        env = Env(caller, self.now_ns, _NO_LIMITS, rules.charged, rules.born)
        if rules.trash:
            env = env._replace(trash=hour_at(self.now_ns), trash_is_new=True)
        return env

    def pack(self) -> bytes:
        """The entry as bytes."""
        fields = (
            VERSION, self.sequence, self.name, self.caller, self.now_ns, plain(self.intent),
            sorted(self.domains), [list(each) for each in self.guards],
            [list(each) for each in self.needs], list(self.inos),
            None if self.after is None else list(self.after),
        )  # fmt: skip
        return _packed(fields)

    def __str__(self) -> str:
        """How a message names it where it can't be published."""
        names = [each for each in self.intent if isinstance(each, bytes)]
        names += [each.name for each in self.intent if isinstance(each, DentryLocation)]
        shown = " ".join(name.decode(errors="replace") for name in names[:2])
        return f"{self.name} {shown or f'of inode {self.inos[0]}'}"


def unpack(data: bytes) -> LogEntry:
    """The entry that `pack` made bytes of. Raises: StoreError."""
    try:
        fields = msgpack.unpackb(data, ext_hook=_record, use_list=False, strict_map_key=False)
        version, sequence, name, caller, now_ns, args, domains, guards, needs, inos, *more = fields
        if version not in (1, VERSION) or name not in VERBS:
            raise StoreError(f"entry {name!r} of version {version}: upgrade slicefs")
        (after,) = more if version == VERSION else (None,)
        entry = LogEntry(name, caller, now_ns, intent_of(name, args))
        entry.sequence = sequence
        entry.domains = frozenset(domains)
        entry.guards = tuple(Guard(*each) for each in guards)
        entry.needs = tuple(Need(*each) for each in needs)
        entry.inos = inos
        entry.after = None if after is None else After(*after)
    except (ValueError, TypeError, IndexError) as error:
        raise StoreError(f"an entry does not decode: {error}") from error
    return entry


def _packed(value: Any) -> bytes:
    """`value` as bytes, by a packer of its own: a new one costs more than what it packs."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(default=_plain, strict_types=True)
    packed: bytes = packer.pack(value)
    _packers.append(packer)
    return packed


def _plain(value: Any) -> Any:
    code = _CODES.get(type(value))
    if code is not None:
        return msgpack.ExtType(code, _packed(list(value)))
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"{value!r} is not an argument of a verb")


def _record(code: int, data: bytes) -> Any:
    fields = msgpack.unpackb(data, ext_hook=_record, use_list=False)
    kind = _RECORDS[code - 1]
    if kind is Slice:
        pos, slice_id, size, off, length, way = fields
        return Slice(pos, slice_id, size, off, length, SliceKind(way))
    return kind(*fields)
