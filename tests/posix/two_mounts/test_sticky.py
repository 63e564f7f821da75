"""P1, P6: the sticky bit keeps files of others, also from who remembers another owner of them."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsclient.client.client import MountClient
from fsclient.files import setid_bits
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, SetAttr
from tests.posix import inproc
from tests.posix.conftest import Twins

ONE, OTHER = 1001, 1002
KERNEL = Caller(ONE, ONE, (), 0, True)  # it has judged: this user may
RENAME_EXCHANGE = 2

Removal = Callable[[MountClient, Caller, Ino], object]
REMOVALS: dict[str, Removal] = {
    "unlink": lambda c, who, at: c.vfs.unlink(who, at, b"theirs"),
    "rmdir": lambda c, who, at: c.vfs.rmdir(who, at, b"their-dir"),
    "rename": lambda c, who, at: c.vfs.rename(who, at, b"theirs", at, b"new", 0),
    "replace": lambda c, who, at: c.vfs.rename(who, at, b"mine", at, b"theirs", 0),
    "exchange": lambda c, who, at: c.vfs.rename(who, at, b"mine", at, b"theirs", RENAME_EXCHANGE),
}


@pytest.fixture
def client() -> Iterator[MountClient]:
    with inproc.client(inproc.memory()) as made:
        yield made


def _shared(client: MountClient) -> Ino:
    """A sticky directory with files of two users."""
    meta = client.meta
    directory = meta.create(ROOT_CALLER, ROOT_INO, b"shared", stat.S_IFDIR | 0o777).ino
    meta.setattr(ROOT_CALLER, directory, SetAttr(mode=0o1777))
    for uid, name, mode in (
        (ONE, b"mine", stat.S_IFREG | 0o644),
        (OTHER, b"theirs", stat.S_IFREG | 0o644),
        (OTHER, b"their-dir", stat.S_IFDIR | 0o755),
    ):
        meta.create(Caller(uid, uid), directory, name, mode)
    return directory


@pytest.mark.parametrize("name", REMOVALS)
def test_p1_who_was_let_pass_by_old_attributes_is_to_look_again(
    client: MountClient, name: str
) -> None:
    directory, remove = _shared(client), REMOVALS[name]
    with pytest.raises(OSError, match="sticky") as caught:
        remove(client, KERNEL, directory)
    assert caught.value.errno == errno.ESTALE
    remove(
        client,
        KERNEL._replace(uid=OTHER) if name in ("unlink", "rmdir") else ROOT_CALLER,
        directory,
    )


def test_p1_capabilities_overrule_the_sticky_bit(
    client: MountClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CAP_FOWNER, which the kernel knows and FUSE does not say."""
    directory = _shared(client)
    capable = KERNEL._replace(pid=os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(setid_bits, "_status", lambda _pid, _name: [b"fffffffffffffff7"])
        with pytest.raises(OSError, match="sticky"):
            client.vfs.unlink(capable, directory, b"theirs")
        patch.setattr(setid_bits, "_status", lambda _pid, _name: [b"0000000000000008"])
        client.vfs.unlink(capable, directory, b"theirs")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_p1_capabilities_in_a_namespace_of_its_own_overrule_nothing(client: MountClient) -> None:
    """Any user could make one, and there remove what others had in a sticky directory."""
    directory = _shared(client)
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", "echo ready; read line"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            pytest.skip("this machine makes no user namespaces")
        with pytest.raises(OSError, match="sticky"):
            client.vfs.unlink(KERNEL._replace(pid=process.pid), directory, b"theirs")
        process.communicate(b"end\n", timeout=60)
    client.vfs.unlink(KERNEL._replace(pid=os.getpid()), directory, b"theirs")


_PROGRAM = """
import os, sys
os.setgroups([]); os.setgid(1001); os.setuid(1001)
os.stat(sys.argv[1])
print("seen", flush=True)
sys.stdin.readline()
try:
    os.unlink(sys.argv[1])
except OSError as error:
    print(error.errno, flush=True)
"""


def test_p6_a_file_that_was_given_to_another_user_is_not_removed(twins: Twins, root: Path) -> None:
    """Its old owner has just seen it as its own, on a mount that is told nothing."""
    shared = root / "shared"
    root.chmod(0o755)
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "file").touch()
    os.chown(shared / "file", ONE, ONE)
    there = twins.second / root.name / "shared" / "file"
    twins.wait_until(there.exists)
    twins.wait_until(lambda: there.stat().st_uid == ONE)
    command = [sys.executable, "-c", _PROGRAM, str(there)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "seen\n"
        os.chown(shared / "file", OTHER, OTHER)
        out, _ = process.communicate("go\n", timeout=60)
    assert out == f"{errno.EPERM}\n"
    assert (shared / "file").exists()
    (shared / "file").unlink()
    shared.rmdir()
