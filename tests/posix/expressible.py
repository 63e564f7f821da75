"""What a mount on pyfuse3 can express of the steps that mounts are tested with.

pyfuse3 knows no fallocate(2), and no ioctl(2), so no flags of chattr(1). It has the kernel apply
the umask, also where a default ACL makes that void. Of setxattr(2) it knows no XATTR_CREATE |
XATTR_REPLACE.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from tests.model.corners import Line
from tests.model.ops import Fallocate, GetFlags, Mkdir, Mknod, Op, Open, SetFlags, SetXattr, Step

_UMASKS = ("acl_inherited", "acl_default_of_three")
NATIVE_FILES: Final = ("test_ranges.py",)  # fallocate, holes, files without a name
NATIVE_TESTS: Final = (
    "test_t2_a_file_is_cloned",  # O_TMPFILE
    "test_t2_a_snapshot_stays_what_it_was",
    "test_a_file_that_is_made_as_a_hole_is_not_fetched",  # pages of a truncated file are dropped
    "test_who_drops_setgid",  # fallocate
    "test_p1_what_fuse_does_not_pass_on",  # RWF_NOAPPEND is kept here
    "test_p1_access_does_not_see_immutable_files",
    "test_p1_offsets_at_the_limits",  # fallocate
)
"""Tests of two mounts that need what pyfuse3 does not know."""

_BOTH = os.XATTR_CREATE | os.XATTR_REPLACE


def expressible(steps: Sequence[Step]) -> list[Step]:
    """The steps that can be expressed, without umask."""
    out = []
    for step in steps:
        op = step.op
        if isinstance(op, Fallocate | GetFlags | SetFlags) or _is_both(op):
            continue
        if isinstance(op, Mkdir | Mknod | Open):
            step = step._replace(op=op._replace(umask=0))
        out.append(step)
    return out


def is_expressible(corner: str, lines: Sequence[Line]) -> bool:
    """Whether a corner of the model's tables can be expressed."""
    if corner in _UMASKS:
        return False
    ops = [op for _, op, _ in lines]
    return not any(isinstance(op, Fallocate | GetFlags | SetFlags) or _is_both(op) for op in ops)


def _is_both(op: Op) -> bool:
    return isinstance(op, SetXattr) and op.flags == _BOTH
