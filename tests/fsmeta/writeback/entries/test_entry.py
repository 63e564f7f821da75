"""W1: entries of a journal as bytes: what is packed comes back, whichever thread packs it."""

from __future__ import annotations

from functools import partial

import msgpack

from fsmeta.ops.names.create import NewNode
from fsmeta.runtime import SystemRuntime
from fsmeta.types import Caller, Ino, SetAttr, Slice, SliceId
from fsmeta.writeback.entries.intents import (
    CreateIntent,
    SetAttrIntent,
    SetFlagsIntent,
    WriteIntent,
)
from fsmeta.writeback.entries.log_entry import After, Guard, LogEntry, Need, unpack

RUNTIME = SystemRuntime()
THREADS = 4
ENTRIES = 300
CALLER = Caller(1000, 100, (100, 27), 4242, True)


def entries(thread: int) -> list[LogEntry]:
    """Creates and writes, no two alike."""
    made: list[LogEntry] = []
    for number in range(ENTRIES):
        ino, name = Ino(thread * ENTRIES + number), b"%d of %d" % (number, thread)
        create = LogEntry(
            "create", CALLER, number, CreateIntent(Ino(1), name, NewNode(ino, 0o100644))
        )
        create.guards = (Guard(b"d", name, b"dentry"),)
        piece = Slice(0, SliceId(ino), 1 << 17, 0, 1 << 17)
        write = LogEntry(
            "write", CALLER, number, WriteIntent(ino, ((0, piece),), 1 << 17, number, None)
        )
        write.needs = (Need(f"chunks/0/0/{ino}_0_131072", 3, number, 131_100, thread),)
        made += [create, write]
    return made


def test_w1_threads_pack_at_once() -> None:
    """A packer that two of them used would mix what they say."""
    packed: dict[int, list[bytes]] = {}

    def work(thread: int) -> None:
        packed[thread] = [entry.pack() for entry in entries(thread)]

    threads = [RUNTIME.spawn(f"packs-{each}", partial(work, each)) for each in range(THREADS)]
    for each in threads:
        each.join()
    for thread in range(THREADS):
        for entry, data in zip(entries(thread), packed[thread], strict=True):
            found = unpack(data)
            assert (found.name, found.caller, found.intent) == (entry.name, CALLER, entry.intent)
            assert (found.guards, found.needs) == (entry.guards, entry.needs)


def test_w1_what_does_not_pack_spoils_no_other() -> None:
    bad = LogEntry("create", CALLER, 0, SetFlagsIntent(Ino(1), object()))  # type: ignore[arg-type]
    good = entries(0)[1]
    before = good.pack()
    for _ in range(3):
        try:
            bad.pack()
        except TypeError:
            continue
        raise AssertionError("an object is not an argument of a verb")
    assert good.pack() == before


def test_w1_entries_of_a_journal_from_before_a_field_came() -> None:
    """A record ends where it ended then; what is missing has its default."""
    want = SetAttr(size=0, kill_suid=True)

    def shortened(code: int, data: bytes) -> msgpack.ExtType:
        fields = msgpack.unpackb(data)
        is_want = fields == list(want)
        return msgpack.ExtType(code, msgpack.packb(fields[:-1]) if is_want else data)

    packed = LogEntry("setattr", CALLER, 0, SetAttrIntent(Ino(7), want)).pack()
    old = msgpack.packb(msgpack.unpackb(packed, ext_hook=shortened))
    assert len(old) == len(packed) - 1
    assert unpack(old).intent == (7, want)


def test_w1_entries_from_before_they_named_the_last_commit() -> None:
    """Version 1 ends before `after`."""
    entry = LogEntry("setattr", CALLER, 0, SetAttrIntent(Ino(7), SetAttr(size=0)))
    entry.after = After(b"s1", b"w1", 5)
    assert unpack(entry.pack()).after == entry.after
    _, *fields, _ = msgpack.unpackb(entry.pack())
    old = unpack(msgpack.packb([1, *fields]))
    assert old.after is None
    assert old.intent == entry.intent
