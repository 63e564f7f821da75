"""Journals of mounts that write back, as the metadata know them: the session that has each, or had
it last.

gc asks: blocks that such a mount has uploaded and not published look leaked once its session is
gone (docs/design/write-back).

Threading: functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.schema import keys
from fsmeta.schema.journal import (
    HOLDER_FIELD,
    JOURNAL_PREFIX,
    JournalHolder,
    journal_row,
    unpack_holder,
)
from fsmeta.txn.txn import Txn
from fsmeta.writeback import replay


def require_published(meta: Meta) -> None:
    """Raises: ConfigError where a mount that has ended left a journal that no mount took up."""
    found = [holder for _, holder in _left(meta)]
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise ConfigError(
            f"{found[0].place} on {found[0].host} has the journal of a mount that has ended{more}: "
            "gc would delete what it has uploaded and not published: mount there with --writeback "
            "as before, or, if that disk is lost, add --give-up-journals"
        )


def give_up_journals(meta: Meta) -> None:
    """Give up the journals that no mount holds: no client waits for them any more. Raises:
    StoreError."""
    for journal, _ in [*_left(meta)]:
        meta.transactor.run(partial(replay.abandon, journal=journal))


def _left(meta: Meta) -> Iterator[tuple[int, JournalHolder]]:
    """Journals that are in no session's hands."""
    held: list[tuple[int, JournalHolder]] = []
    cursor: bytes | None = b""
    while cursor is not None:
        page = meta.store.scan_rows(JOURNAL_PREFIX, cursor)
        for row in dict.fromkeys(row for row in page.rows if len(row) == 9):
            journal = keys.id_of(row)
            value = meta.transactor.view(partial(_holder, journal=journal))
            if value is not None:
                held.append((journal, unpack_holder(row, value)))
        cursor = page.cursor
    alive = {
        each.id for each in meta.sessions.all()
    }  # behind the rows: a mount that takes one up names itself
    yield from (each for each in dict(held).items() if each[1].session not in alive)


def _holder(txn: Txn, journal: int) -> bytes | None:
    return txn.get(journal_row(journal), HOLDER_FIELD)
