"""Counters that many clients move and none may move past a limit: their parts, and what these mean.

A counter is the sum of its base, `<field>`, and of its parts, `<field> 00 <part>`. A part is room
that was taken ahead, below zero: a client that takes room adds it to the base and subtracts it from
its part, in one transaction. So the base is never less than the counter (what is used and what is
taken ahead), and while it is within the limit, so is all that is spent of the parts:

- a client with room in its part moves that part alone, and conflicts with no client;
- a client without room takes more, as long as the base stays within the limit: a share of what is
  left, so the less there is, the less is taken ahead, down to exactly what is wanted;
- where not even that is left in the base, all parts are read, which gives the exact value; they are
  deleted, which takes back what other clients have ahead, and the base becomes that value.

No client owns a part and nothing is cached of one: a commit reads and writes it in its own
transaction, checked and fenced like all else. What a dead client has ahead is taken back like that
of any other. To make or delete a part is to write the base (or to lock it), so a transaction that
has read all parts, and the base, conflicts with every change.

A new limit takes all parts back, so that commits under way conflict with it.

Behind a base there may be a claim, `<base> SP <name>` (`tikv/counter_claims`): a transaction needs
the counter with all its parts, and transactions that have not begun let it go first. It is no part
of the value.

Used by `tikv/batch`, `tikv/group_commit` and `tikv/engine`; reasons are in docs/design/tikv.
Threading: `load` on the loop thread; the rest is pure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final, NamedTuple

from fsmeta.store.contract import Key, Record
from fsmeta.store.tikv.client import SCAN_MAX, Snapshot, TikvClient
from fsmeta.store.tikv.keys import PARTS, KeySpace, counter_of, is_counter, is_sum

SHARE: Final = 16  # of the room that is left one part takes this fraction at a time
UNLIMITED: Final = 1 << 40  # taken where there is no limit: a part then lasts for 1 TiB, or files
FEW: Final = 16  # counters are read side by side; more in one walk over their row
FIELDS_MAX: Final = PARTS + 1  # of one counter
CLAIM_BYTES: Final = 8  # of a claim's name: two that are the same would not wait for each other
_CLAIMED: Final = re.compile(rb"(-?[0-9]+) ([0-9a-f]{%d})" % (2 * CLAIM_BYTES))


class Sides(NamedTuple):
    """A base, and the part of the client that moves the counter; None: there is no such part."""

    base: int
    own: int | None


def moved(sides: Sides, delta: int, limit: int | None, known_limit: int | None) -> Sides | None:
    """Both after the counter has moved by `delta`; None where all parts have to be known for that.

    `limit` is to be kept, `known_limit` only says how much may be taken ahead.
    """
    base, own = sides
    within = delta <= 0 or limit is None or base <= limit
    if own is not None and own + delta <= 0 and within:
        return Sides(base, own + delta)
    own = own or 0
    wanted = max(0, own + delta)
    if delta > 0 and limit is not None and base + wanted > limit:
        return None
    ahead = _ahead(base + wanted, known_limit) if delta > 0 else 0
    return Sides(base + wanted + ahead, own + delta - wanted - ahead)


def moved_exactly(value: int, delta: int, limit: int | None) -> Sides | None:
    """Both after a counter that has no other part has moved; None where that passes the limit."""
    value += delta
    if delta > 0 and limit is not None and value > limit:
        return None
    ahead = _ahead(value, limit) if delta > 0 and limit is not None else 0
    return Sides(value + ahead, -ahead if ahead else None)


def _ahead(base: int, limit: int | None) -> int:
    return UNLIMITED if limit is None else max(0, limit - base) // SHARE


# --- claims --------------------------------------------------------------------------------------


def bare(base: bytes) -> bytes:
    """A base without the claim behind it."""
    found = _CLAIMED.fullmatch(base)
    return found[1] if found is not None else base


def claim_of(base: bytes) -> bytes:
    """The name of the claim behind a base; empty where there is none."""
    found = _CLAIMED.fullmatch(base)
    return found[2] if found is not None else b""


def with_claim(base: bytes, name: bytes) -> bytes:
    """A base that is claimed."""
    return b"%b %b" % (bare(base), name)


# --- reading -------------------------------------------------------------------------------------


def total(field: bytes, stored: Mapping[bytes, bytes]) -> bytes | None:
    """The value of a counter, of which all that is stored is given; None where it is not there.

    What is no number is shown as it is, for the reader to complain about.
    """
    values = [stored[name] for name in sorted(stored) if counter_of(name) == field]
    if field in stored:
        values[0] = bare(values[0])
    odd = next((value for value in values if not _is_number(value)), None)
    if odd is not None or len(values) < 2:
        return odd or (values[0] if values else None)
    return b"%d" % sum(map(int, values))


def _is_number(value: bytes) -> bool:
    return value.removeprefix(b"-").isdigit()


def folded(records: Iterable[Record]) -> Iterator[Record]:
    """Records in the order of their keys, with one for each counter."""
    for (row, field), group in groupby(records, _owner):
        if is_counter(row, field):
            value = total(field, {stored: value for _, stored, value in group})
            assert value is not None
            yield row, field, value
        else:
            yield from group


def _owner(record: Record) -> Key:
    row, field, _ = record
    return row, counter_of(field) if is_sum(row) else field


async def load(
    link: TikvClient, space: KeySpace, reader: Snapshot, counters: Collection[Key]
) -> dict[Key, dict[bytes, bytes]]:
    """All that is stored of some counters, by field."""
    if len(counters) <= FEW:
        found = await asyncio.gather(*(_load_one(link, space, reader, key) for key in counters))
        return dict(zip(counters, found, strict=True))
    rows: dict[bytes, list[bytes]] = {}
    for row, field in counters:
        rows.setdefault(row, []).append(field)
    walks = await asyncio.gather(
        *(_walk(link, space, reader, row, sorted(fields)) for row, fields in rows.items())
    )
    return {key: fields for walk in walks for key, fields in walk.items()}


async def _load_one(
    link: TikvClient, space: KeySpace, reader: Snapshot, counter: Key
) -> dict[bytes, bytes]:
    row, field = counter
    begin, skip = space.key(row, field), len(space.begin(row))
    pairs = await link.scan(reader, begin, begin + b"\1", FIELDS_MAX)
    return {key[skip:]: value for key, value in pairs}


async def _walk(
    link: TikvClient, space: KeySpace, reader: Snapshot, row: bytes, fields: list[bytes]
) -> dict[Key, dict[bytes, bytes]]:
    """The counters `fields` of one row, which are sorted, skipping what is between pages."""
    found: dict[Key, dict[bytes, bytes]] = {(row, field): {} for field in fields}
    begin, end = space.begin(row), space.key(row, fields[-1]) + b"\1"
    at, cursor = 0, space.key(row, fields[0])
    while True:
        pairs = await link.scan(reader, cursor, end, SCAN_MAX)
        for key, value in pairs:
            stored = key[len(begin) :]
            wanted = found.get((row, counter_of(stored)))
            if wanted is not None:
                wanted[stored] = value
        if len(pairs) < SCAN_MAX:
            return found
        cursor = pairs[-1][0] + b"\0"
        while space.key(row, fields[at]) + b"\1" <= cursor:
            at += 1  # the last one ends where the walk does
        cursor = max(cursor, space.key(row, fields[at]))
