"""Publishing held commits: the verb runs again on the store as it is now, and is ticked off.

The commit that applies an entry moves the marks of its domains in the journal's row, so an entry is
applied once, whichever client replays the journal and however often. An entry that no longer fits
what other clients have done meanwhile is decided here: their changes remain, and no data are lost
that were not deleted.

Entries of one domain whose turn it is are published in one commit where they can be: each sees what
those before it do (`fsmeta/txn/batch`), and the marks move behind the last of them. So all of them
happen or none does. Entries that cannot be batched are replayed in their own transaction.

`Publisher` in fsclient calls these.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Final, TypeAlias

from fsmeta.errors import Conflict, Unavailable
from fsmeta.ops.data import segments
from fsmeta.ops.names.create import create
from fsmeta.rules.context import find
from fsmeta.schema import keys
from fsmeta.schema.journal import (
    HOLDER_FIELD,
    JournalHolder,
    is_mark,
    journal_row,
    mark_field,
    pack_holder,
)
from fsmeta.store.writes import NO_LIMIT, Add, Shift
from fsmeta.txn.batch import BatchTxn
from fsmeta.txn.txn import Txn
from fsmeta.types import NAME_MAX, ROOT_INO, FileType, Ino
from fsmeta.writeback.entries.intents import CreateIntent
from fsmeta.writeback.entries.log_entry import EVERY, VERBS, LogEntry, VerbRules

LOST_AND_FOUND: Final = b"lost+found"
LOST_AND_FOUND_MAX: Final = 1000  # names that are tried: as many as users may have taken
Charging: TypeAlias = Callable[[], VerbRules]  # of today
CAREFUL: Final = 16  # entries after a conflict: each may cost a request


def publish(
    txn: Txn, journal: int, entry: LogEntry, charging: Charging, is_last: bool = False
) -> bool:
    """Run an entry's verb; False where that had been done before.

    `is_last`: no other file will list the segment that it moved to.
    Raises: OSError where it does not fit any more, ENOENT where a name leads elsewhere by now;
    Voided where the segment is not ours any more.
    """
    if is_published(txn, journal, entry):
        return False
    for guard in entry.guards:
        if txn.get(guard.row, guard.name) != guard.dentry:
            raise OSError(errno.ENOENT, "the name leads elsewhere by now")
    VERBS[entry.name](txn, entry.env(charging()), *entry.published)
    if entry.moved is not None:
        segments.join(txn, entry.moved.segment, entry.write.ino, is_last)
    _lift_limits(txn)
    _mark(txn, journal, entry)
    return True


def attempts(most: int) -> Iterator[int]:
    """How many entries to publish together, for the attempts of one `publish_run`."""
    return chain((most, min(most, CAREFUL)), repeat(1))


def publish_run(
    txn: Txn,
    together: Callable[[Txn], BatchTxn],
    journal: int,
    entries: Sequence[LogEntry],
    lasts: Sequence[bool],
    charging: Charging,
    most_at: Iterator[int],
) -> list[bool]:
    """`publish` the first of `entries`, and with it as many of those behind it as go together.

    `lasts` are their `is_last`, `most_at` is of `attempts`. An entry without a place in the commit
    ends it, and is the first of the next one. After a conflict, when nothing is assumed any more,
    the entries are few, and then one.
    Raises: as `publish`, about the first.
    """
    done: list[bool] = []
    most = next(most_at)
    if most > 1:
        many = together(txn)
        for entry, is_last in zip(entries[:most], lasts, strict=False):
            step = many.step()
            try:
                answer = publish(step, journal, entry, charging, is_last)
                many.take(step)
            except (Conflict, Unavailable):
                raise
            except Exception:  # noqa: BLE001  (alone its reads are proven)
                break
            done.append(answer)
        many.finish()
    return done or [publish(txn, journal, entries[0], charging, lasts[0])]


def is_published(txn: Txn, journal: int, entry: LogEntry) -> bool:
    """Whether the store has an entry."""
    row = journal_row(journal)
    marks = txn.get_many([(row, mark_field(domain)) for domain in sorted(entry.domains)])
    return all(mark is not None and keys.id_of(mark) >= entry.sequence for mark in marks)


def _lift_limits(txn: Txn) -> None:
    """What was accepted is not refused later."""
    for at, write in enumerate(txn.writes):
        if isinstance(write, Add | Shift):
            txn.writes[at] = write._replace(limit=NO_LIMIT)


def _mark(txn: Txn, journal: int, entry: LogEntry) -> None:
    row = journal_row(journal)
    for domain in entry.domains:
        txn.put(row, mark_field(domain), keys.pack_u64(entry.sequence))


def leave_out(txn: Txn, journal: int, entry: LogEntry) -> None:
    """Tick an entry off without doing it: other clients' changes remain."""
    if not is_published(txn, journal, entry):
        _mark(txn, journal, entry)


def keeps_data(entry: LogEntry) -> bool:
    """Whether leaving an entry out would lose a file's data."""
    return isinstance(entry.intent, CreateIntent) and not entry.intent.makes_dir


def rescue(txn: Txn, journal: int, entry: LogEntry, lost: Ino, charging: Charging) -> None:
    """Make the file of an entry in directory `lost`, under its name and number."""
    if is_published(txn, journal, entry):
        return
    intent = _creation(entry)
    create(txn, entry.env(charging()), lost, rescued_name(entry), intent.node)
    _lift_limits(txn)
    _mark(txn, journal, entry)


def rescued_name(entry: LogEntry) -> bytes:
    """What the file of an entry is called in LOST_AND_FOUND."""
    intent = _creation(entry)
    suffix = b".%d" % intent.node.ino
    return intent.name[: NAME_MAX - len(suffix)] + suffix


def _creation(entry: LogEntry) -> CreateIntent:
    assert isinstance(entry.intent, CreateIntent), entry.name
    return entry.intent


def lost_and_found_names() -> Iterator[bytes]:
    """What the directory for what lost its place may be called: users may take names in the root.

    The first that is free, or is root's directory, is used.
    """
    yield LOST_AND_FOUND
    for number in range(1, LOST_AND_FOUND_MAX):
        yield LOST_AND_FOUND + b".%d" % number


def lost_and_found(txn: Txn, name: bytes) -> Ino | None:
    """The directory `name` for what lost its place; None where that is not root's directory.

    Raises: ENOENT where it is not published yet.
    """
    found = find(txn, ROOT_INO, name)
    if found is None:
        raise OSError(errno.ENOENT, f"/{name.decode()} is not published yet")
    return found.attr.ino if found.type is FileType.DIR and not found.attr.uid else None


def announce(txn: Txn, journal: int, holder: JournalHolder) -> None:
    """Note the holder of a journal: from now on gc knows that it may be published."""
    txn.put(journal_row(journal), HOLDER_FIELD, pack_holder(holder))


def abandon(txn: Txn, journal: int) -> None:
    """No client will take up a journal. Its marks stay: if it is found, what is published stays so.

    One mark stays at least: a journal without a row is one that was drained.
    """
    row = journal_row(journal)
    if not any(is_mark(field) for field in txn.get_row(row)):
        txn.put(row, mark_field(EVERY), keys.pack_u64(0))
    txn.delete(row, HOLDER_FIELD)


def forget_journal(txn: Txn, journal: int) -> None:
    """A journal is empty and gone: its marks are not needed any more."""
    txn.delete_row(journal_row(journal))
