"""Each corner of the tables on each driver.

What a writer of verbs should know, in the order in which Linux decides:

- Any name: search permission of the directory (EACCES), the name's length, existence, and only
  then rights to change. So mkdir of what exists is EEXIST even where nothing may be created.
- unlink and rmdir: ENOENT, write permission, stickiness (EPERM), then the type (EISDIR, ENOTDIR),
  then ENOTEMPTY. link of a directory: EPERM, after EEXIST and after write permission.
- rename: flags; dots (EBUSY; EEXIST with NOREPLACE for the target); source ENOENT; target EEXIST
  with NOREPLACE, ENOENT with EXCHANGE; trailing slashes ENOTDIR; source above target EINVAL; target
  above source ENOTEMPTY (EXCHANGE: EINVAL); the same inode: success, nothing done, no right asked;
  then rights on the source's directory and its stickiness, the same for the target, with the type
  (ENOTDIR for a directory onto a file, EISDIR for a file onto a directory, empty or not); then
  write permission on a *moved directory itself* where the parent changes; last ENOTEMPTY.
- open: the directory-ness (EISDIR for writing, O_TRUNC or O_CREAT) comes before EACCES. O_CREAT
  of a path with a trailing slash is EISDIR. The maker of a file may use it whatever its mode.
- S_ISUID and S_ISGID go at: a write of at least one byte, truncate (same size too), O_TRUNC, by
  anybody but root; chown of anything but a directory, by root too. S_ISGID without group execute
  stays unless the actor is not in the file's group. chmod drops S_ISGID in silence where the
  caller is not in the group. mkdir ignores S_ISUID and S_ISGID of its mode; in a setgid directory
  a file loses S_ISGID only where it has group execute and its maker is not in the group.
- utimensat: both NOW need write permission or ownership (EACCES); anything else ownership (EPERM),
  NOW with OMIT included.
- Times: rename touches ctime of what moved and both directories; link and unlink ctime of the
  inode; chmod, chown, utimens and xattrs ctime; a write of no bytes nothing; ftruncate and O_TRUNC
  mtime and ctime always, truncate(2) where the size changes.
- xattrs: stickiness of a directory (EPERM), EACCES, then EOPNOTSUPP for other prefixes and EINVAL
  for "user."; links and special files: EPERM to set, ENODATA to get.
- Flags: immutability comes before EACCES wherever it is about writing, and before ownership.
  On a FUSE mount it comes last, because the kernel asks us last.
"""

from __future__ import annotations

import pytest

from tests.model.corners import fits
from tests.model.corners_acl import ACLS, FLAGS, OPEN_IMMUTABLE
from tests.model.corners_files import ATTRIBUTES, FILES
from tests.model.corners_names import NAMES, RENAMES
from tests.model.drivers import Driver
from tests.model.tree import Sysctls

CORNERS = NAMES | RENAMES | FILES | ATTRIBUTES | ACLS | FLAGS


def skip_by_sysctls(corner: str) -> None:
    """Skip a test of `corner` where this host has other rules."""
    if Sysctls.of_host() != Sysctls() and corner in ("link_rules", "sticky_o_creat"):
        pytest.skip("fs.protected_* are not those of the table")


@pytest.mark.parametrize("corner", CORNERS)
def test_corner(driver: Driver, corner: str) -> None:
    skip_by_sysctls(corner)
    if corner == OPEN_IMMUTABLE and driver.name == "disk":
        pytest.skip("decided: as tmpfs, where who has a file open may go on")
    for number, (user, op, expected) in enumerate(CORNERS[corner]):
        result = driver.run(user, op)
        assert fits(result, expected), f"step {number}: uid {user.uid} {op} → {result}"
