"""What the log is to say of a commit: the verb behind it, its order, what it relies on.

`StagedStore` asks before it decides whether a commit is held back.

Threading: none; functions only.
"""

from __future__ import annotations

from fsmeta.schema import keys
from fsmeta.store.contract import Commit, Key
from fsmeta.writeback.entries.intents import CreateIntent, intent_of, slices_of, subjects
from fsmeta.writeback.entries.log_entry import Guard, Log, LogEntry
from fsmeta.writeback.entries.order_domains import Get, OrderDomains


def entry_of(
    name: str,
    commit: Commit,
    reads: dict[Key, bytes | None],
    log: Log,
    domains: OrderDomains,
    get: Get,
) -> LogEntry:
    """What the log would say of a commit of the verb `name`, which has checked `reads`."""
    assert commit.call is not None, name
    _, caller, now_ns, args = commit.call
    caller = caller._replace(groups=tuple(caller.groups))  # they may come from /proc, at this point
    intent = intent_of(name, args)
    entry = LogEntry(name, caller, now_ns, intent)
    entry.needs = log.needs(slices_of(intent))
    entry.domains = domains.of(get, intent)
    what = subjects(intent)
    for place in what.names:
        row = keys.dir_row(place.parent)
        dentry = reads.get((row, place.name))
        if dentry is not None:
            entry.guards += (Guard(row, place.name, dentry),)
    made = (intent.node.ino,) if isinstance(intent, CreateIntent) else ()
    moved = tuple(keys.unpack_dentry(b"", g.name, g.dentry)[1] for g in entry.guards)
    entry.inos = (*what.inos, *made, *moved)
    return entry


def is_first_name(entry: LogEntry, commit: Commit) -> bool:
    """Whether link(2) names a file of O_TMPFILE: it is no more if its client dies before that."""
    return entry.name == "link" and any(
        field == keys.NAMELESS_FIELD and value is not None for _, field, value in commit.checks
    )
