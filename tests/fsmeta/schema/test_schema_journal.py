"""W1: the rows of journals: golden bytes, and what does not decode."""

from __future__ import annotations

import pytest

from fsmeta.errors import Corrupt
from fsmeta.schema import keys
from fsmeta.schema.journal import (
    HOLDER_FIELD,
    JournalHolder,
    is_mark,
    journal_row,
    mark_field,
    pack_holder,
    unpack_holder,
)

HOLDER = JournalHolder(7, "alpha", "/s/0")
GOLDEN = "83 a7 73657373696f6e 07 a4 686f7374 a5 616c706861 a5 706c616365 a4 2f732f30"


def test_golden_bytes() -> None:
    """A difference here is a new format: it needs docs, a version and a way to read the old one."""
    assert pack_holder(HOLDER).hex() == GOLDEN.replace(" ", "")
    assert journal_row(1) == b"j\0\0\0\0\0\0\0\1"
    assert (mark_field(2), HOLDER_FIELD) == (b"p\0\0\0\0\0\0\0\2", b"h")


def test_a_holder_comes_back_or_is_corrupt() -> None:
    assert unpack_holder(journal_row(1), bytes.fromhex(GOLDEN)) == HOLDER
    for wrong in (b"", b"\x80", keys.pack_map({"session": "7", "host": "a", "place": "b"})):
        with pytest.raises(Corrupt):
            unpack_holder(journal_row(1), wrong)
    assert is_mark(mark_field(1))
    assert not is_mark(HOLDER_FIELD)
