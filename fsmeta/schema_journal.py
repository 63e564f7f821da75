"""Rows of clients that write back: up to where each has published what it holds back.

    row          field        value
    j<journal8>  p<domain8>   8 bytes: the last sequence of this journal that is published there

The domain is the inode of a directory, or 0. A row goes when its journal is empty and ends.
"""

from __future__ import annotations

from typing import Final

from fsmeta.schema import pack_u64

JOURNAL_PREFIX: Final = b"j"


def journal_row(journal: int) -> bytes:
    """The row of marks of a journal."""
    return JOURNAL_PREFIX + pack_u64(journal)


def mark_field(domain: int) -> bytes:
    """Up to where a journal is published in a domain."""
    return b"p" + pack_u64(domain)
