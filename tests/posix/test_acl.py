"""P2 on real mounts: getfacl, setfacl, chattr, setcap and what copies them; two mounts; limits.

The rules themselves are in the model and its corners; here are the tools that people use, and what
a kernel believes.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from fsmeta.schema.acl import ENTRIES_MAX
from tests.model.corners_acl import acl
from tests.model.inodes import ACCESS_ACL, APPEND, IMMUTABLE
from tests.model.syscalls import get_flags, set_flags
from tests.posix.conftest import Twins
from tests.posix.volumes import Volume
from tests.support.waiting import wait_until

ALICE, BOB, GROUP = 60001, 60002, 60100
PERMS = ("u::7 u:60001:6 u:60002:4 g::5 g:60100:1 m::7 o::0", "u::7 u:60001:7 g::5 m::7 o::0")


def needs(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def run_as(uid: int, script: str, groups: tuple[int, ...] = ()) -> str:
    """What a Python script prints; it becomes `uid` once the interpreter has started."""
    become = f"import os; os.setgroups({groups!r}); os.setgid({uid}); os.setuid({uid})\n"
    return run(sys.executable, "-Sc", become + script)


def can(path: Path, mode: str, uid: int, groups: tuple[int, ...] = ()) -> bool:
    """Whether a process of `uid` can open `path`."""
    script = f"try: open({str(path)!r}, {mode!r}).close()\nexcept PermissionError as e: print(e)"
    return not run_as(uid, script, groups)


def fails(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match="Errno") as caught:
        call()
    assert caught.value.errno == code


@pytest.fixture(scope="module", params=("redis", "sqlite"))
def volume(
    request: pytest.FixtureRequest,
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> Iterator[Volume]:
    with volumes(request.param, f"acl-{request.param}") as made:
        made.mount("mnt", "-o", "acl")
        yield made


@pytest.fixture(scope="module", params=("redis", "sqlite"))
def pair(
    request: pytest.FixtureRequest,
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> Iterator[Twins]:
    """Two mounts of a volume."""
    with volumes(request.param, f"acls-{request.param}") as made:
        yield Twins(made, request.param, "-o", "acl")


@pytest.fixture
def root(volume: Volume, request: pytest.FixtureRequest) -> Path:
    """A directory of one's own on a mount."""
    path: Path = volume.folder / "mnt" / request.node.name.replace("[", ".").strip("]")
    path.mkdir()
    path.chmod(0o755)
    return path


# --- tools ---------------------------------------------------------------------------------------


@needs("setfacl", "getfacl")
def test_setfacl_and_getfacl(root: Path) -> None:
    file = root / "f"
    file.write_text("x")
    file.chmod(0o600)
    run("setfacl", "-m", f"u:{ALICE}:rw,g:{GROUP}:r", file)
    shown = run("getfacl", "-cnp", file).split()
    assert shown == [
        "user::rw-", f"user:{ALICE}:rw-", "group::---", f"group:{GROUP}:r--", "mask::rw-",
        "other::---",
    ]  # fmt: skip
    assert run("ls", "-l", file).split()[0] == "-rw-rw----+"
    assert can(file, "r+", ALICE)
    assert can(file, "r", BOB, (GROUP,))
    assert not can(file, "r+", BOB, (GROUP,))
    assert not can(file, "r", BOB)
    file.chmod(0o640)
    assert not can(file, "r+", ALICE)
    assert can(file, "r", ALICE)
    run("setfacl", "-b", file)
    assert not can(file, "r", ALICE)
    assert run("ls", "-l", file).split()[0] == "-rw-------"  # the group had no entry of its own


@needs("setfacl", "getfacl")
def test_defaults_and_umask(root: Path) -> None:
    run("setfacl", "-d", "-m", f"u:{ALICE}:rwx,o::-", root)
    run("sh", "-c", f"umask 077; mkdir {root}/d; touch {root}/d/f")
    assert "default:user" in run("getfacl", "-cnp", root / "d")
    shown = run("getfacl", "-cnp", root / "d" / "f")
    assert f"user:{ALICE}:rwx" in shown
    assert "mask::rw-" in shown
    assert can(root / "d" / "f", "r+", ALICE)
    run("setfacl", "-k", root / "d")
    run("sh", "-c", f"umask 077; touch {root}/d/g")
    assert (root / "d" / "g").stat().st_mode & 0o777 == 0o600


COPIES = {
    "cp": ("cp", "-a"),
    "rsync": ("rsync", "-aAX"),
    "tar": ("sh", "-c", 'mkdir "$1" && tar -C "$0" --acls -c . | tar -C "$1" --acls -x'),
}


@needs("cp", "rsync", "tar", "getfacl")
@pytest.mark.parametrize("how", COPIES)
def test_copies_keep_acls(root: Path, how: str) -> None:
    source, target = root / "from", root / f"to-{how}"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("x")
    os.setxattr(source / "d" / "f", ACCESS_ACL, acl(PERMS[0]))
    os.setxattr(source / "d", "system.posix_acl_default", acl(PERMS[1]))
    (source / "d" / "g").write_text("inherits")
    begin = (f"{source}/", f"{target}/") if how == "rsync" else (str(source), str(target))
    run(*COPIES[how], *begin)
    shown = [run("sh", "-c", f"cd {each} && getfacl -Rn .") for each in (source, target)]
    assert shown[0] == shown[1]
    assert shown[0].count("user:60001:") == 3
    shutil.rmtree(source)


@needs("chattr", "lsattr")
def test_chattr_and_lsattr(root: Path) -> None:
    file = root / "f"
    file.write_text("x")
    run("chattr", "+i", file)
    assert run("lsattr", file).split()[0].count("i") == 1
    with pytest.raises(PermissionError):
        file.unlink()
    run("chattr", "-i", "+a", file)
    with pytest.raises(PermissionError):
        file.write_text("y")
    with open(file, "a") as out:
        out.write("y")
    assert file.read_text() == "xy"
    run("chattr", "-a", file)
    run("chattr", "+dA", root)
    assert {"d", "A"} <= set(run("lsattr", "-d", root).split()[0])
    done = subprocess.run(["chattr", "+S", file], capture_output=True, text=True, check=False)
    assert "not supported" in done.stderr


@needs("xfs_io")
def test_flags_by_fsxattr(root: Path) -> None:
    """The newer ioctl says the same in other bits."""
    file = root / "f"
    file.touch()
    run("xfs_io", "-r", "-c", "chattr +a", file)
    assert get_flags(os.fsencode(file)) == APPEND
    assert run("xfs_io", "-r", "-c", "lsattr", file).split()[0].strip("-") == "a"
    run("xfs_io", "-r", "-c", "chattr -a", file)
    assert get_flags(os.fsencode(file)) == 0


@needs("setcap", "getcap", "setpriv")
def test_a_program_with_a_capability(root: Path) -> None:
    """It has it when nobody runs it, until it is written to or given away."""
    program = root / "show"
    shutil.copy("/bin/cat", program)
    program.chmod(0o755)
    nobody = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")

    def effective() -> int:
        status = run(*nobody, program, "/proc/self/status")
        return int(status.partition("CapEff:")[2].split()[0], 16)

    assert effective() == 0
    run("setcap", "cap_net_bind_service=ep", program)
    assert "cap_net_bind_service" in run("getcap", program)
    assert effective() == 1 << 10
    with open(program, "ab") as out:
        out.write(b"\0")
    assert run("getcap", program) == ""
    assert effective() == 0
    run("setcap", "cap_net_bind_service=ep", program)
    os.chown(program, 0, 1)
    assert run("getcap", program) == ""


def test_info_shows_both(root: Path) -> None:
    folder = root / "d"
    folder.mkdir()
    os.setxattr(folder, ACCESS_ACL, acl("u::7 u:60001:6 g::5 m::7 o::0"))
    os.setxattr(folder, "system.posix_acl_default", acl("u::7 g::5 o::0"))
    set_flags(os.fsencode(folder), APPEND)
    shown = run(Path(sys.executable).with_name("slicefs"), "info", folder)
    set_flags(os.fsencode(folder), 0)
    assert "acl         u::rwx,u:60001:rw-,g::r-x,m::rwx,o::---" in shown
    assert "default acl u::rwx,g::r-x,o::---" in shown
    assert "flags       a" in shown


# --- limits --------------------------------------------------------------------------------------


def test_the_largest_acl(root: Path) -> None:
    file = root / "f"
    file.touch()
    users = " ".join(f"u:{number}:4" for number in range(1, ENTRIES_MAX - 3))
    full = acl(f"u::6 {users} g::4 m::4 o::0")
    os.setxattr(file, ACCESS_ACL, full)
    assert os.getxattr(file, ACCESS_ACL) == full
    more = acl(f"u::6 {users} u:7000:4 g::4 m::4 o::0")
    fails(errno.E2BIG, lambda: os.setxattr(file, ACCESS_ACL, more))
    assert os.getxattr(file, ACCESS_ACL) == full


def test_limits_of_xattrs(root: Path) -> None:
    file = root / "f"
    file.touch()
    longest = "user." + "n" * 250
    os.setxattr(file, longest, b"v" * 65536)
    assert os.getxattr(file, longest) == b"v" * 65536
    for name, value, code in (
        (longest + "n", b"", errno.ERANGE),
        ("user.a", b"v" * 65537, errno.E2BIG),
        ("user.", b"", errno.EINVAL),
        ("trusted.", b"", errno.EINVAL),
        ("security.", b"", errno.EINVAL),
        ("system.other", b"", errno.EOPNOTSUPP),
        ("nowhere", b"", errno.EOPNOTSUPP),
    ):
        fails(code, partial(os.setxattr, file, name, value))
    for number in range(270):
        os.setxattr(file, f"user.{number:0250}", b"")
    fails(errno.E2BIG, lambda: os.listxattr(file))  # as listxattr(2) says of so many names
    for number in range(270):
        os.removexattr(file, f"user.{number:0250}")
    assert os.listxattr(file) == [longest]


def test_trusted_is_roots(root: Path) -> None:
    file = root / "f"
    file.touch()
    os.setxattr(file, "trusted.t", b"1")
    os.setxattr(file, "user.u", b"2")
    os.setxattr(file, "security.s", b"3")
    script = (
        f"import os; p = {str(file)!r}; print(*sorted(os.listxattr(p)));"
        "print(os.getxattr(p, 'security.s'))\n"
        "for call in (lambda: os.getxattr(p, 'trusted.t'),"
        " lambda: os.setxattr(p, 'trusted.t', b''), lambda: os.setxattr(p, 'security.s', b'')):\n"
        "    try: call()\n"
        "    except OSError as e: print(e.errno)"
    )
    shown = run_as(ALICE, script).splitlines()
    assert shown == [
        "security.s user.u", "b'3'", str(errno.ENODATA), str(errno.EPERM), str(errno.EPERM)
    ]  # fmt: skip
    assert sorted(os.listxattr(file)) == ["security.s", "trusted.t", "user.u"]


def _why_not(call: Callable[[], object]) -> int:
    """The errno of a call; 0 where it works."""
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


def _asked(root: Path) -> str | None:
    """How often the kernel has asked for an xattr."""
    lines = (root / ".stats").read_text().splitlines()
    return next((line for line in lines if 'operations_total{op="getxattr"}' in line), None)


def test_a_volume_without_acls(
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> None:
    """Nobody is asked for ACLs before there is one: kernels would ask at each path walk."""
    with volumes("sqlite", "noacl") as volume:
        before, asked = volume.mount("before"), volume.mount("asked", "-o", "acl")
        file = asked / "f"
        file.write_text("x")
        file.chmod(0o640)
        value = acl("u::6 u:60001:6 g::4 m::6 o::0")
        for call in (
            lambda: os.setxattr(before / "f", ACCESS_ACL, value),
            lambda: os.getxattr(before / "f", ACCESS_ACL),
            lambda: os.removexattr(before / "f", ACCESS_ACL),
        ):
            assert _why_not(call) == errno.EOPNOTSUPP
        asks = _asked(before)
        assert not can(before / "f", "r", ALICE)
        assert _asked(before) == asks
        os.setxattr(file, ACCESS_ACL, value)
        assert can(file, "r+", ALICE)
        after, without = volume.mount("after"), volume.mount("without", "-o", "noacl")
        assert can(after / "f", "r+", ALICE)
        assert not can(without / "f", "r", ALICE)
        assert os.listxattr(without / "f") == []
        (without / "f").chmod(0o644)
        changed = acl("u::6 u:60001:6 g::4 m::4 o::4")
        # without tracking another mount believes what it saw for a second
        wait_until(lambda: os.getxattr(asked / "f", ACCESS_ACL) == changed)


# --- two mounts ----------------------------------------------------------------------------------


def test_acls_of_another_mount(pair: Twins) -> None:
    """A kernel that has judged by an ACL judges anew when another mount changes it."""
    here, there = pair.first / "acl", pair.second / "acl"
    here.write_text("x")
    here.chmod(0o640)
    assert not can(there, "r", ALICE)
    os.setxattr(here, ACCESS_ACL, acl("u::6 u:60001:6 g::4 m::6 o::0"))
    pair.wait_until(lambda: can(there, "r+", ALICE))
    assert not can(there, "r", BOB)
    here.chmod(0o644)
    pair.wait_until(lambda: not can(there, "r+", ALICE))
    assert can(there, "r", ALICE)
    os.removexattr(here, ACCESS_ACL)
    pair.wait_until(lambda: os.listxattr(there) == [])
    here.unlink()


def test_defaults_of_another_mount(pair: Twins) -> None:
    """What a client remembers of a directory does not decide what is inherited: the commit does."""
    here, there = pair.first / "heir", pair.second / "heir"
    here.mkdir()
    (there / "before").touch()
    os.setxattr(here, "system.posix_acl_default", acl(PERMS[1]))
    (there / "after").touch()
    assert os.listxattr(there / "before") == []
    assert os.getxattr(there / "after", ACCESS_ACL) == acl("u::6 u:60001:7 g::5 m::6 o::0")
    os.removexattr(here, "system.posix_acl_default")
    (there / "later").touch()
    assert os.listxattr(there / "later") == []
    shutil.rmtree(here)


def test_flags_of_another_mount(pair: Twins) -> None:
    """Immutability holds at once, for every mount, whatever its kernel believes."""
    here, there = pair.first / "fixed", pair.second / "fixed"
    here.mkdir()
    (here / "f").write_text("x")
    assert (there / "f").read_text() == "x"
    for path in (here, here / "f"):
        set_flags(os.fsencode(path), IMMUTABLE)
    for change in (
        lambda: (there / "f").unlink(),
        lambda: (there / "f").rename(there / "g"),
        lambda: (there / "f").chmod(0o600),
        lambda: (there / "f").write_text("y"),
        lambda: (there / "n").touch(),
        lambda: os.truncate(there / "f", 0),
        lambda: os.link(there / "f", pair.second / "l"),
        lambda: os.setxattr(there / "f", "user.a", b""),
        lambda: there.rename(pair.second / "moved"),
    ):
        with pytest.raises(PermissionError):
            change()
    set_flags(os.fsencode(there), 0)
    set_flags(os.fsencode(there / "f"), 0)
    (here / "f").unlink()
    here.rmdir()
