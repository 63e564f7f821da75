"""What the extended attributes of one inode cost, and how much of that counts as space.

An inode's row holds its attributes in `x<name>`, and in `y` the decimal sum of what they cost.
A volume from before that has inodes without `y`, or with less in it than its attributes cost; it
never holds more. What goes beyond XATTRS_FREE is part of `v.used`, so that it counts against all
limits like data. `docs/design/locks-permissions-quotas` says why.

`security.capability` is not counted: writes delete it without having read it. The kernel bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fsmeta.schema.keys import unpack_count, xattr_field

XATTRS_FIELD: Final = b"y"
XATTRS_MAX: Final = 256 << 10  # cost of one inode's attributes: one value of 64 KiB and 1000 names
XATTRS_FREE: Final = 4096  # as much fits into ext4's inode and its block of attributes
XATTR_COST: Final = 128  # of an attribute besides its bytes: about what Redis needs
CAPABILITY_FIELD: Final = xattr_field(b"security.capability")
XATTRS_COUNT_MAX: Final = XATTRS_MAX // XATTR_COST
_MARK_BYTES: Final = 1  # before each value


def is_xattr(field: bytes) -> bool:
    """Whether a field of an inode's row is an extended attribute."""
    return field[:1] == b"x"


def cost(field: bytes, value: bytes | None) -> int:
    """What an attribute adds to the sum; `value` is the stored one, None where there is none."""
    if value is None or field == CAPABILITY_FIELD:
        return 0
    return XATTR_COST + len(field) - 1 + len(value) - _MARK_BYTES


def cost_of(fields: Mapping[bytes, bytes]) -> int:
    """What all attributes among `fields` cost."""
    return sum(cost(field, value) for field, value in fields.items() if is_xattr(field))


def counted(row: bytes, fields: Mapping[bytes, bytes]) -> int:
    """The sum in an inode's row. Raises: Corrupt."""
    return unpack_count(row, XATTRS_FIELD, fields.get(XATTRS_FIELD))


def charged(total: int) -> int:
    """The part of a sum that is in `v.used`."""
    return max(0, total - XATTRS_FREE)


assert XATTRS_MAX > XATTRS_FREE
