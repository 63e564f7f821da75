"""Repairs what `check` finds, where there is one safe way to do it: `slicefs fsck --repair`.

The volume must not be in use. Nothing that still leads to data is removed: inodes that lost their
names come to /lost+found, and a name is removed only where there is no inode behind it at all.
While there is an unreadable record that may name what seems lost, only the next ids are repaired.

It works in passes, each a `check`, because one repair shows what the next has to be: a file that
is found again counts in its directory. `check` itself notes the right value of a field where that
depends on nothing else (`Remedy`); inodes are repaired here. Memory is that of a check. One thread.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import count as count_up, islice
from typing import Final

from fsmeta.check.check import Checked, Examination
from fsmeta.check.findings import KEPT_MAX, Known, Stage
from fsmeta.check.repair_snapshots import Shelves, spare_name
from fsmeta.errors import ConfigError, Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions import session
from fsmeta.rules.settings import ON
from fsmeta.schema import inode, keys, slices as schema_slices
from fsmeta.schema.inode_rows import read_inodes
from fsmeta.schema.scan import fields_of
from fsmeta.schema.sessions import unpack_session
from fsmeta.schema.snapshot_inos import is_snapshot_dir, is_snapshot_ino
from fsmeta.schema.trash import is_trash
from fsmeta.schema.xattrs import charged, counted
from fsmeta.slices import covered, reserved_end
from fsmeta.store.contract import COMMIT_OPS_ENOUGH
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    CHUNK_BYTES,
    FLAG_ATTACHED,
    FLAG_BEYOND,
    FLAGS,
    NO_PARENT,
    ROOT_CALLER,
    ROOT_INO,
    SNAPSHOTS_SHIFT,
    Attr,
    FileType,
    Ino,
    SessionId,
)

PASSES_MAX: Final = 8  # tables, names, inodes, found ones, their directory, counters: and to spare
FOUND_DIR: Final = b"lost+found"

Progress = Callable[[str], None]  # called now and then with how far it is


def plan(meta: Meta, now_s: int, progress: Progress = lambda _text: None) -> list[str]:
    """What the first pass of `repair` would do (the first KEPT_MAX lines); nothing is changed.

    Later passes find what the first one has made possible, which can't be known before.
    """
    with Examination(meta.store, progress) as examination:
        examination.run()
        return list(islice(_Pass(meta, examination, now_s, None, rehearses=True).run(), KEPT_MAX))


def repair(
    meta: Meta, now_s: int, progress: Progress = lambda _text: None
) -> tuple[list[str], Checked]:
    """What was done (the first KEPT_MAX lines), and what `check` says afterwards.

    Raises: ConfigError where it is in use.
    """
    done = list(_end_unreadable_sessions(meta))
    joined = meta.transactor.view(_joined)  # before the sessions: a later client changes it
    sessions = meta.sessions.all()
    if sessions:
        raise ConfigError(
            f"the volume is used by {len(sessions)} client(s), or was a minute ago: "
            "unmount it everywhere to repair it"
        )
    for number in range(PASSES_MAX + 1):
        step = 0
        with Examination(meta.store, progress) as examination:
            checked = examination.run()
            meta.transactor.view(partial(_require_unused, joined=joined))
            if number < PASSES_MAX:
                for line in _Pass(meta, examination, now_s, joined).run():
                    step += 1
                    done += [line] if len(done) < KEPT_MAX else []
        if not step:
            break
    return done, checked


def _joined(txn: Txn) -> bytes | None:
    """The number of the last session that has ever begun."""
    return txn.get(keys.COUNTERS, keys.NEXT_SESSION)


def _require_unused(txn: Txn, joined: bytes | None) -> None:
    """No session has begun since the first look; the commit checks it.

    Raises: ConfigError: what was found may be so no more.
    """
    if _joined(txn) != joined:
        raise ConfigError(
            "a client has mounted the volume during the repair, so nothing more is repaired: "
            "unmount it everywhere and repair it again"
        )


def _end_unreadable_sessions(meta: Meta) -> Iterator[str]:
    """End sessions whose record does not decode: such a client can't find its own beat there."""
    for field, value in fields_of(meta.store, keys.SESSIONS):
        try:
            unpack_session(field, value)
        except Corrupt:
            meta.transactor.run(partial(_end_session, field=field))
            yield f"session {field!r} could not be read: ended"


def _end_session(txn: Txn, field: bytes) -> None:
    txn.delete(keys.SESSIONS, field)
    if len(field) == 8:
        session.erase_session(txn, SessionId(keys.id_of(field)))


class _Pass:
    """What one check allows to be done."""

    def __init__(
        self,
        meta: Meta,
        found: Examination,
        now_s: int,
        joined: bytes | None,
        rehearses: bool = False,
    ) -> None:
        """`joined`: the last session that had begun when none was there. `rehearses`: nothing is
        changed; only the lines are wanted.
        """
        self._rehearses = rehearses
        self._meta = meta
        self._joined = joined
        self._store = meta.store
        self._notes = found.notes
        self._settings = found.settings
        self._now_s = now_s
        self._shelves = Shelves(found.notes, meta.store, self._commit, now_s)

    def run(self) -> Iterator[str]:
        """Mend; a line for each thing done. Counters come last, once the rest is right."""
        done = yield from _counted(self._ids())
        if self._notes.unreadable:  # there may be names, and links, that were not seen
            return
        done += yield from _counted(self._remedies(Stage.TABLES))
        made = yield from _counted(self._directories())
        made += yield from _counted(self._shelves.mend())
        if not made:
            done += yield from _counted(self._remedies(Stage.NAMES))
            done += yield from _counted(self._misnamed())
            done += yield from _counted(self._inodes())
        if not done + made:
            yield from self._usage()
            yield from self._remedies(Stage.COUNTERS)

    def _commit(self, *writes: tuple[bytes, bytes | None, bytes | None]) -> None:
        def verb(txn: Txn, part: Sequence[tuple[bytes, bytes | None, bytes | None]]) -> None:
            _require_unused(txn, self._joined)
            for row, field, value in part:
                if field is None:
                    txn.delete_row(row)
                elif value is None:
                    txn.delete(row, field)
                else:
                    txn.put(row, field, value)

        if self._rehearses:
            return
        for begin in range(0, len(writes), COMMIT_OPS_ENOUGH):
            self._meta.transactor.run(partial(verb, part=writes[begin : begin + COMMIT_OPS_ENOUGH]))
        self._meta.cache.drop({row for row, _, _ in writes})

    def _move(self, txn: Txn, row: bytes, field: bytes, delta: int) -> None:
        _require_unused(txn, self._joined)
        txn.add(row, field, delta)

    def _remedies(self, stage: Stage) -> Iterator[str]:
        """Fields whose right value is known."""
        for row, field, value, said in self._notes.remedies(stage):
            self._commit((row, field, value))
            yield said

    def _misnamed(self) -> Iterator[str]:
        """An inode with a name that no program can use gets another name in its place."""
        found = self._notes.spill.rows("SELECT parent, name, ino, kind FROM misnamed")
        for parent, name, ino, kind in found:
            if self._notes.inode(ino) is None:
                continue  # the name goes
            row, new = keys.dir_row(parent), spare_name(ino)
            for number in count_up(1):
                if self._store.read([(row, new)])[0] is None:
                    break
                new = b"%b.%d" % (spare_name(ino), number)
            dentry = keys.pack_dentry(FileType(kind), ino)
            self._commit((row, name, None), (row, new, dentry))
            yield f"name {name!r} in inode {parent} can't be used: it is {new.decode()} now"

    def _directories(self) -> Iterator[str]:
        """Names whose directory is gone get one again; /lost+found has it next."""
        for ino in self._notes.concerned():
            gone = self._notes.inode(ino) is None and self._notes.has("dir", ino)
            special = is_trash(ino) or is_snapshot_dir(ino)
            if not gone or special or self._store.scan(keys.inode_row(ino), limit=1).items:
                continue
            if self._store.scan(keys.dir_row(ino), limit=1).items:
                attr = inode.new_attr(ino, 0o40700, (0, 0), NO_PARENT, self._now_s * 10**9)
                self._put(attr, {}, {})
                yield f"directory {ino} was gone and its names were not: made again"

    # --- inodes ----------------------------------------------------------------------------------

    def _inodes(self) -> Iterator[str]:
        for ino in self._notes.concerned():
            known = self._notes.inode(ino)
            if known is None or self._notes.has("clone", ino):  # a mount will remove the clone
                continue
            fields = read_inodes(self._store, [keys.inode_row(ino)])[0].fields
            attr = inode.unpack_inode(ino, fields[keys.ATTR_FIELD], fields[keys.VOLATILE_FIELD])
            yield from self._inode(known, attr, fields)

    def _inode(self, known: Known, attr: Attr, fields: dict[bytes, bytes]) -> Iterator[str]:
        ino = known.ino
        names, counted = self._notes.names(ino), self._notes.counted(ino)
        trashed = known.is_dir and not is_snapshot_ino(ino) and any(map(is_trash, names))
        if trashed and self._is_in_use(ino):
            yield from self._out_of_the_trash(ino, attr)
            return
        sound, said = self._sound(attr)
        wanted = self._wanted(sound, fields, names)
        home = self._home(known, wanted or sound, names)
        if wanted is None and is_snapshot_ino(ino):
            yield from self._shelves.bring_back(known, attr, counted)
        elif wanted is None:
            yield from self._bring_back(ino, attr)
        elif wanted != attr or not _names_fit(wanted, counted, names) or home is not None:
            self._put(wanted, counted, names, home)
            yield said or f"inode {ino}: links, parent and used bytes are what names and slices say"
        yield from self._orphan(ino, wanted)

    def _sound(self, attr: Attr) -> tuple[Attr, str]:
        """Attributes without what is invalid: ACLs that are gone, unknown flags, a wrong mark;
        and the message about lost ACLs.

        It is unknown which users a lost ACL let in, so the group is let in no more.
        """
        said = ""
        if attr.acl and not self._has_acl(attr.acl, access=True):
            mode = attr.mode & ~0o070
            attr = attr._replace(acl=0, mode=attr.mode if stat.S_ISLNK(attr.mode) else mode)
            said = f"inode {attr.ino} had an ACL that is gone: its group has no rights until chmod"
        if attr.acl and stat.S_ISLNK(attr.mode):
            attr = attr._replace(acl=0)
        passed = attr.default_acl
        if passed and not (attr.is_dir and self._has_acl(passed, access=False)):
            attr = attr._replace(default_acl=0)
            said = said or f"inode {attr.ino} had a default ACL that is gone or was none"
        counts = not is_snapshot_ino(attr.ino)
        if counts and self._settings is not None and self._settings.accounting == ON:
            attr = attr._replace(mark=self._settings.epoch)
        taken = (
            self._notes.shelved(attr.ino) if attr.is_dir and not is_snapshot_ino(attr.ino) else 0
        )
        if taken != attr.flags >> SNAPSHOTS_SHIFT:
            said = said or f"inode {attr.ino} counts {taken} snapshots: so many there are"
        known = FLAGS | FLAG_ATTACHED | (FLAG_BEYOND if stat.S_ISREG(attr.mode) else 0)
        return attr._replace(flags=attr.flags & known | taken << SNAPSHOTS_SHIFT), said

    def _has_acl(self, number: int, access: bool) -> bool:
        found = self._notes.spill.one("SELECT access FROM acl WHERE id = ?", number)
        return found is not None and bool(found[0] or not access)

    def _wanted(self, attr: Attr, fields: dict[bytes, bytes], names: dict[Ino, int]) -> Attr | None:
        """What the attributes must be by names and slices; None where it has lost its names."""
        ino = attr.ino
        chunks = [(f, v) for f, v in fields.items() if f[:1] == b"c" and len(f) == 5]
        listed = [
            (keys.id_of(f), schema_slices.unpack_slices(ino, keys.id_of(f), v)) for f, v in chunks
        ]
        beside = charged(counted(keys.inode_row(ino), fields))
        attr = attr._replace(used=sum(covered(slices) for _, slices in listed) + beside)
        if any(index * CHUNK_BYTES + reserved_end(slices) > attr.size for index, slices in listed):
            attr = attr._replace(flags=attr.flags | FLAG_BEYOND)
        count = sum(names.values())
        if ino != ROOT_INO and not count:
            if attr.nlink and not self._notes.has("orphan", ino):
                return None
            if not attr.is_dir or not self._is_in_use(ino):
                return attr._replace(nlink=0, parent=NO_PARENT)
            return None
        if attr.is_dir:
            if count > 1:
                return attr  # it can't be known which is right
            parent = next(iter(names), ROOT_INO)
            return attr._replace(parent=parent, nlink=2 + self._notes.subdirs(ino))
        if count == 1 and attr.parent != NO_PARENT:
            return attr._replace(parent=next(iter(names)), nlink=1)
        return attr._replace(parent=NO_PARENT, nlink=count)

    def _is_in_use(self, directory: Ino) -> bool:
        """Whether it has names, or snapshots."""
        return self._notes.is_populated(directory) or self._notes.shelved(directory) > 0

    def _home(self, known: Known, attr: Attr, names: dict[Ino, int]) -> Ino | None:
        """Where a file with several names is to count, if that is not where it does."""
        counts = _is_linked(attr) and attr.mark == self._notes.epoch != 0
        if not counts or not names or known.home in names:
            return None
        return min(names, key=lambda ino: (ino == ROOT_INO, ino))

    def _put(
        self,
        attr: Attr,
        counted: dict[Ino, int],
        names: dict[Ino, int],
        home: Ino | None = None,
    ) -> None:
        row = keys.inode_row(attr.ino)
        counts = names if _is_linked(attr) else {}
        settled = [] if home is None else [(row, keys.HOME_FIELD, keys.pack_u64(home))]
        self._commit(
            (row, keys.ATTR_FIELD, inode.pack_attr(attr)),
            (row, keys.VOLATILE_FIELD, inode.pack_volatile(attr)),
            *((row, keys.parent_field(each), None) for each in counted.keys() - counts.keys()),
            *((row, keys.parent_field(each), b"%d" % n) for each, n in counts.items()),
            *settled,
        )

    def _orphan(self, ino: Ino, wanted: Attr | None) -> Iterator[str]:
        """An inode is listed as an orphan exactly when it has no links."""
        field = keys.pack_u64(ino)
        orphan = wanted is not None and wanted.nlink == 0
        listed = self._notes.has("orphan", ino)
        if orphan and not listed:
            self._commit((keys.ORPHANS, field, keys.pack_u64(self._now_s)))
            yield f"inode {ino} has no name: a mount will delete it"
        elif not orphan and listed:
            self._commit((keys.ORPHANS, field, None))
            yield f"inode {ino} has names: it is no orphan any more"

    def _out_of_the_trash(self, ino: Ino, attr: Attr) -> Iterator[str]:
        """A directory with names can't expire: it comes to /lost+found with all that it has."""
        query = "SELECT parent, name FROM name WHERE ino = ?"
        for parent, name in self._notes.spill.rows(query, ino):
            if is_trash(parent):
                self._commit((keys.dir_row(parent), name, None))
        yield f"directory {ino} was in the trash and not empty: it is taken out"
        yield from self._bring_back(ino, attr)

    def _bring_back(self, ino: Ino, attr: Attr) -> Iterator[str]:
        """An inode that no name leads to gets one in /lost+found."""
        try:
            found = self._meta.lookup(ROOT_CALLER, ROOT_INO, FOUND_DIR)
        except FileNotFoundError:
            if self._rehearses:
                yield f"inode {ino} had no name: it is in /{FOUND_DIR.decode()}"
                return
            found = self._meta.create(ROOT_CALLER, ROOT_INO, FOUND_DIR, 0o40700)
        if found.type is not FileType.DIR or found.ino == ino:
            return
        name = b"#%d" % ino
        row = keys.dir_row(found.ino)
        if self._store.read([(row, name)])[0] is None:
            self._commit((row, name, keys.pack_dentry(attr.type, ino)))
            yield f"inode {ino} had no name: it is /{FOUND_DIR.decode()}/{name.decode()}"

    # --- counters --------------------------------------------------------------------------------

    def _ids(self) -> Iterator[str]:
        """What is handed out next must not exist; first, because a directory may be made here."""
        notes = self._notes
        slices = max(notes.highest("used", "id"), notes.highest("dropped", "id"))
        yield from self._counter(keys.COUNTERS, keys.NEXT_SLICE, slices + 1, exact=False)
        inos = max(notes.highest_supplied(), notes.highest_supplied("problem"))
        yield from self._counter(keys.COUNTERS, keys.NEXT_INO, inos + 1, exact=False)

    def _usage(self) -> Iterator[str]:
        """What the inodes take together."""
        space, inodes = self._notes.usage()
        for field, count in ((keys.INODES, inodes), (keys.SPACE, space)):
            yield from self._counter(keys.USAGE, field, count, exact=True)

    def _counter(self, row: bytes, field: bytes, wanted: int, exact: bool) -> Iterator[str]:
        value = self._store.read([(row, field)])[0]
        try:
            count = keys.unpack_count(row, field, value)
        except Corrupt:
            count = -1
        if count == wanted or (not exact and count > wanted):
            return
        if exact and count != -1 and not self._rehearses:
            delta = wanted - count
            self._meta.transactor.run(partial(self._move, row=row, field=field, delta=delta))
        else:
            self._commit((row, field, b"%d" % wanted))
        yield f"{field.decode()} was {count} and is {wanted}"


def _is_linked(attr: Attr) -> bool:
    """Whether it is a file that has, or had, several names, so that they are counted."""
    return attr.parent == NO_PARENT and attr.nlink > 0 and not attr.is_dir


def _names_fit(attr: Attr, counted: dict[Ino, int], names: dict[Ino, int]) -> bool:
    """Whether the counts of names per directory are right."""
    return counted == names if _is_linked(attr) else True


def _counted(lines: Iterator[str]) -> Generator[str, None, int]:
    """Pass lines on; how many there were."""
    count = 0
    for line in lines:
        count += 1
        yield line
    return count
