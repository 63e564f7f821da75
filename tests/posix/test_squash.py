"""`mount --squash`: root, or everybody, is judged as the anonymous user; two mounts of a volume.

One mount squashes, the other one does not and prepares what the tests need.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.program import slicefs
from tests.posix.test_acl import ALICE, can, fails, needs, run, run_as
from tests.posix.volumes import Volume

NOBODY, ANON = 65534, 61000
OTHER = 60100  # a group


class Pair(NamedTuple):
    """One directory of a volume, seen by a mount that squashes and by one that does not."""

    squashed: Path
    plain: Path
    volume: Volume


def _pair(
    volumes: Callable[[str, str], AbstractContextManager[Volume]], *how: str
) -> Iterator[Pair]:
    with volumes("redis", "squash") as made:
        plain = made.mount("plain", "-o", "acl")
        plain.chmod(0o777)
        yield Pair(made.mount("squashed", *how), plain, made)


@pytest.fixture(scope="module")
def pair(volumes: Callable[[str, str], AbstractContextManager[Volume]]) -> Iterator[Pair]:
    """Root is squashed."""
    yield from _pair(volumes, "--squash", "root")


@pytest.fixture(scope="module")
def everyone(volumes: Callable[[str, str], AbstractContextManager[Volume]]) -> Iterator[Pair]:
    """Everybody is, through options as fstab has them."""
    yield from _pair(volumes, "-o", f"squash=all,anon-uid={ANON},anon-gid={ANON}")


def _file(path: Path, mode: int, uid: int = 0, gid: int = 0) -> Path:
    path.write_bytes(b"content")
    path.chmod(mode)
    os.chown(path, uid, gid)
    return path


def test_p1_root_is_the_anonymous_user(pair: Pair) -> None:
    mine = _file(pair.plain / "roots", 0o600)
    there = pair.squashed / "roots"
    for call in (
        lambda: there.read_bytes(),
        lambda: there.write_bytes(b""),
        lambda: os.truncate(there, 0),
    ):
        fails(errno.EACCES, call)
    assert not os.access(there, os.R_OK)
    for call in (
        lambda: there.chmod(0o666),
        lambda: os.chown(there, 1, 1),
        lambda: os.utime(there, (1, 1)),
        lambda: os.mknod(pair.squashed / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3)),
        lambda: os.setxattr(there, "trusted.x", b"1"),
        lambda: os.setxattr(there, "security.x", b"1"),
    ):
        fails(errno.EPERM, call)
    assert mine.read_bytes() == b"content"
    assert stat.S_IMODE(there.stat().st_mode) == 0o600
    made = pair.squashed / "made"
    made.write_bytes(b"by nobody")
    (pair.squashed / "dir").mkdir()
    for path in (made, pair.squashed / "dir"):
        assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, NOBODY)
    made.chmod(0o640)  # its own
    assert (there.stat().st_uid, (pair.plain / "made").stat().st_uid) == (0, NOBODY)


def test_p1_names_that_the_kernel_knows_lead_root_nowhere(pair: Pair) -> None:
    """The owner walks first, so that its kernel knows each name of the path."""
    closed = pair.plain / "closed"
    closed.mkdir()
    os.chown(closed, ALICE, ALICE)
    _file(closed / "open", 0o644, ALICE, ALICE)
    closed.chmod(0o700)
    inside = pair.squashed / "closed" / "open"
    assert can(inside, "r", ALICE)
    for call in (
        lambda: inside.read_bytes(),
        lambda: inside.stat(),
        lambda: os.listdir(inside.parent),
        lambda: os.chdir(inside.parent),
        lambda: (inside.parent / "new").mkdir(),
        lambda: inside.unlink(),
        lambda: inside.rename(pair.squashed / "stolen"),
    ):
        fails(errno.EACCES, call)
    assert can(inside, "r", ALICE)


def test_p1_other_users_are_who_they_are(pair: Pair) -> None:
    shared = _file(pair.plain / "shared", 0o640, ALICE, OTHER)
    there = pair.squashed / shared.name
    assert can(there, "w", ALICE)
    assert can(there, "r", ALICE + 1, (OTHER,))  # /proc says which groups a caller has
    assert not can(there, "w", ALICE + 1, (OTHER,))
    assert not can(there, "r", ALICE + 1)
    os.chown(pair.plain / "shared", ALICE, 0)
    assert not can(there, "r", ALICE + 1, (0,))  # root's group is squashed, too
    run_as(ALICE, f"open({str(pair.squashed / 'alices')!r}, 'w').close()")
    assert (pair.plain / "alices").stat().st_uid == ALICE


def test_p1_programs_are_judged_by_their_bit_x(pair: Pair) -> None:
    for name, mode, allowed in (("for-all", 0o711, True), ("for-owner", 0o744, False)):
        program = pair.plain / name
        program.write_bytes(Path("/bin/true").read_bytes())
        program.chmod(mode)
        ran = True
        try:
            subprocess.run([pair.squashed / name], check=True)
        except PermissionError:
            ran = False
        assert ran is allowed, name
    fails(errno.EACCES, lambda: (pair.squashed / "for-all").read_bytes())  # to run is not to read


@needs("setfacl")
def test_p1_acls_count_and_are_not_shown(pair: Pair) -> None:
    private = _file(pair.plain / "with-acl", 0o600, ALICE, ALICE)
    there = pair.squashed / private.name
    fails(errno.EACCES, lambda: there.read_bytes())
    run("setfacl", "-m", f"u:{NOBODY}:r", private)
    assert there.read_bytes() == b"content"
    fails(errno.EOPNOTSUPP, lambda: os.getxattr(there, "system.posix_acl_access"))


def test_p1_everyone_is_the_anonymous_user(everyone: Pair) -> None:
    _file(everyone.plain / "alices", 0o600, ALICE, ALICE)
    assert not can(everyone.squashed / "alices", "r", ALICE)
    made = everyone.squashed / "made"
    run_as(ALICE, f"open({str(made)!r}, 'w').close()")
    assert (made.stat().st_uid, made.stat().st_gid) == (ANON, ANON)
    assert can(made, "r+", ALICE + 1)  # all are one
    run_as(ALICE + 1, f"import os; os.chmod({str(made)!r}, 0o600)")
    assert stat.S_IMODE((everyone.plain / "made").stat().st_mode) == 0o600


def test_p1_the_mount_s_own_files_know_root(pair: Pair) -> None:
    assert (pair.squashed / ".stats").read_text().startswith("slicefs_")
    assert can(pair.squashed / ".stats", "r", ALICE)
    os.close(os.open(pair.squashed / ".accesslog", os.O_RDONLY))
    assert not can(pair.squashed / ".accesslog", "r", ALICE)


def test_p1_options_that_contradict_are_refused(pair: Pair) -> None:
    for words, said in (
        (("--squash", "root", "-o", "acl"), "the kernel checks permissions"),
        (("--anon-uid", "5"), "name the users with"),
    ):
        done = slicefs("mount", pair.volume.meta, "/mnt", *words)
        assert done.code == 1, done
        assert said in done.err, done
