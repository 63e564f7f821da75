"""A real mount, used as programs use one; each test leaves no lookup, handle or mount behind."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fsclient.fuse.session.init import KernelWants
from fsclient.fuse.session.session import Session, SessionConfig
from fsclient.kernel.contract import Buffer, OpenOut
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.fsclient.fuse.ramfs import RENAME_EXCHANGE, RENAME_NOREPLACE, RamFS
from tests.support.waiting import wait_until

pytestmark = needs_root_and_fuse
MIB = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def fs() -> RamFS:
    return RamFS()


@pytest.fixture
def root(fs: RamFS, tmp_path: Path) -> Iterator[Path]:
    with serving(fs, tmp_path / "mnt"):
        yield tmp_path / "mnt"
        wait_until(lambda: not fs.handles)  # close(2) waits for no RELEASE, umount(2) drops them


def renameat2(source: Path, target: Path, flags: int) -> None:
    at_fdcwd = -100
    if libc.renameat2(at_fdcwd, bytes(source), at_fdcwd, bytes(target), flags) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


def test_files(root: Path, fs: RamFS) -> None:
    file = root / "file"
    file.write_bytes(b"hello")
    assert file.read_bytes() == b"hello"
    with file.open("ab") as more:
        more.write(b" world")
    os.truncate(file, 8)
    assert file.read_bytes() == b"hello wo"
    file.chmod(0o600)
    os.chown(file, 12, 34)
    os.utime(file, ns=(-5, 1_234_567_890_123_456_789))
    status = file.stat()
    assert (status.st_mode, status.st_uid, status.st_gid) == (stat.S_IFREG | 0o600, 12, 34)
    assert (status.st_atime_ns, status.st_mtime_ns) == (-5, 1_234_567_890_123_456_789)
    assert (status.st_size, status.st_blocks) == (8, 8)
    assert status.st_ino == fs.nodes[ROOT_INO].names[b"file"]
    file.unlink()
    assert not file.exists()


def test_open_truncates_at_once(root: Path, fs: RamFS) -> None:
    (root / "file").write_bytes(b"old")
    fs.calls.clear()
    os.close(os.open(root / "file", os.O_WRONLY | os.O_TRUNC))
    assert (fs.calls["open"], fs.calls["setattr"]) == (1, 0)
    assert (root / "file").read_bytes() == b""


def test_unlinked_while_open(root: Path) -> None:
    with (root / "file").open("w+b", buffering=0) as file:
        file.write(b"still here")
        (root / "file").unlink()
        assert os.fstat(file.fileno()).st_nlink == 0
        assert os.pread(file.fileno(), 100, 0) == b"still here"


def test_directories_and_links(root: Path) -> None:
    (root / "dir" / "sub").mkdir(parents=True)
    assert (root / "dir").stat().st_nlink == 3
    with pytest.raises(OSError, match="not empty"):
        (root / "dir").rmdir()
    (root / "dir" / "sub").rmdir()
    (root / "dir" / "file").write_bytes(b"x")
    os.link(root / "dir" / "file", root / "hard")
    assert (root / "hard").stat().st_nlink == 2
    (root / "soft").symlink_to("dir/file")
    assert os.readlink(root / "soft") == "dir/file"
    assert (root / "soft").read_bytes() == b"x"
    (root / "long").symlink_to("t" * 4095)
    assert len(os.readlink(root / "long")) == 4095


def test_special_files(root: Path) -> None:
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert stat.S_ISFIFO((root / "fifo").stat().st_mode)
    assert (root / "null").stat().st_rdev == os.makedev(1, 3)


def test_umask_is_applied_by_the_kernel(root: Path) -> None:
    before = os.umask(0o027)
    try:
        os.close(os.open(root / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        (root / "dir").mkdir()
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((root / "dir").stat().st_mode) == 0o750


def test_big_requests(root: Path, fs: RamFS) -> None:
    data = os.urandom(MIB) * 4
    (root / "big").write_bytes(data)
    assert fs.calls["write"] == 4
    fs.opened = OpenOut(0, direct_io=True)
    fd = os.open(root / "big", os.O_RDONLY)
    try:
        fs.calls.clear()
        assert os.read(fd, 2 * MIB) == data[: 2 * MIB]
        assert fs.calls["read"] <= 3  # one more where the buffer is not page-aligned
    finally:
        os.close(fd)
    fs.opened = OpenOut(0)
    assert (root / "big").read_bytes() == data


def test_many_pieces(tmp_path: Path) -> None:
    class Pieces(RamFS):
        def read(
            self,
            caller: Caller,
            ino: Ino,
            fh: int,
            offset: int,
            size: int,
            past_pages: bool = False,
        ) -> Sequence[Buffer]:
            whole = b"".join(super().read(caller, ino, fh, offset, size, past_pages))
            return [whole[at : at + 1] for at in range(len(whole))]

    with serving(Pieces(), tmp_path / "mnt"):
        data = os.urandom(5000)
        (tmp_path / "mnt" / "file").write_bytes(data)
        assert (tmp_path / "mnt" / "file").read_bytes() == data


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("plus", [True, False])
def test_large_directory(tmp_path: Path, plus: bool, auto: bool) -> None:
    fs = RamFS(ttl=60)
    names = {f"entry-{i:04d}-{'n' * (i % 200)}" for i in range(5000)}
    for name in names:
        node = fs._make(ROOT_INO, name.encode(), stat.S_IFREG | 0o644, ROOT_CALLER)
        assert node.attr.nlink == 1
    wants = KernelWants(readdirplus=plus, readdirplus_auto=auto)
    with serving(fs, tmp_path / "mnt", SessionConfig(wants=wants)) as session:
        assert set(os.listdir(tmp_path / "mnt")) == names
        with os.scandir(tmp_path / "mnt") as entries:
            assert all(entry.is_file(follow_symlinks=False) for entry in entries)
        assert bool(session.snapshot().get("readdirplus")) is plus
        subprocess.run(["ls", "-l", tmp_path / "mnt"], check=True, stdout=subprocess.DEVNULL)


def test_rename_flags(root: Path) -> None:
    (root / "a").write_bytes(b"a")
    (root / "b").write_bytes(b"b")
    with pytest.raises(FileExistsError):
        renameat2(root / "a", root / "b", RENAME_NOREPLACE)
    renameat2(root / "a", root / "b", RENAME_EXCHANGE)
    assert (root / "a").read_bytes() == b"b"
    (root / "a").rename(root / "b")
    assert (root / "b").read_bytes() == b"b"
    assert os.listdir(root) == ["b"]


def test_xattrs(root: Path) -> None:
    file = root / "file"
    file.touch()
    os.setxattr(file, "user.key", b"va\0lue")
    os.setxattr(file, "user.big", b"v" * 65536)
    assert os.getxattr(file, "user.key") == b"va\0lue"
    assert os.getxattr(file, "user.big") == b"v" * 65536
    assert sorted(os.listxattr(file)) == ["user.big", "user.key"]
    with pytest.raises(FileExistsError):
        os.setxattr(file, "user.key", b"", os.XATTR_CREATE)
    os.removexattr(file, "user.key")
    with pytest.raises(OSError) as caught:  # noqa: PT011  (the errno is looked at)
        os.getxattr(file, "user.key")
    assert caught.value.errno == errno.ENODATA


def test_writes_drop_set_uid(root: Path, fs: RamFS) -> None:
    """Those of callers without CAP_FSETID."""
    root.chmod(0o777)
    program = root / "program"
    for action in ("echo x >>", ": >"):  # a write, an open that truncates
        program.touch()
        os.chown(program, 65534, 65534)
        program.chmod(0o6777)
        as_nobody(root, f"{action} program")
        assert stat.S_IMODE(program.stat().st_mode) == 0o777
        assert fs.callers["open"].uid == 65534


def test_security_capability_is_asked_for_once(root: Path, fs: RamFS) -> None:
    with (root / "file").open("wb", buffering=0) as file:
        for _ in range(10):
            file.write(b"x")
    assert fs.calls["getxattr"] <= 1


def as_nobody(cwd: Path, script: str, groups: str = "--clear-groups") -> None:
    """Run a script in `cwd`, which root enters for it.

    A shell does so: subprocess would hold the interpreter's lock, and wait for this very process to
    answer, for ever.
    """
    become = f"setpriv --reuid=65534 --regid=65534 {groups}"
    enter = f'cd "$1" && exec {become} sh -c "$2"'
    subprocess.run(["sh", "-c", enter, "sh", cwd, script], check=True)


def test_creations_carry_the_directory_s_group(root: Path, fs: RamFS) -> None:
    (root / "dir").mkdir()
    os.chown(root / "dir", 0, 777)
    (root / "dir").chmod(0o2777)
    as_nobody(root, "mkdir dir/new", "--groups=777,5")
    caller = fs.callers["mkdir"]
    assert (caller.uid, caller.gid, caller.checked) == (65534, 65534, True)
    assert caller.groups in ((777,), ())  # the latter before Linux 6.3


def test_statfs(root: Path) -> None:
    found = os.statvfs(root)
    assert found.f_blocks * found.f_frsize == 1 << 50
    assert (found.f_bsize, found.f_namemax, found.f_files) == (4096, 255, 10 << 20)


def test_birth_time(root: Path, fs: RamFS) -> None:
    (root / "file").touch()
    shown = subprocess.run(
        ["stat", "--format=%W", root / "file"], check=True, capture_output=True, text=True
    )
    ino = fs.nodes[ROOT_INO].names[b"file"]
    assert int(shown.stdout) in (fs.nodes[ino].attr.btime_ns // 10**9, 0)  # 0 before Linux 6.6


def test_what_we_leave_to_the_kernel(root: Path) -> None:
    """Seeking for holes, allocation and copying, without a verb of ours."""
    (root / "file").write_bytes(b"data")
    with (root / "file").open("r+b") as file, (root / "copy").open("w+b") as copy:
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4
        assert os.copy_file_range(file.fileno(), copy.fileno(), 4, 0) == 4
        assert libc.fallocate(file.fileno(), 0, 0, MIB) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
    assert (root / "copy").read_bytes() == b"data"


def test_names_longer_than_255(root: Path) -> None:
    (root / ("n" * 255)).touch()
    with pytest.raises(OSError) as caught:  # noqa: PT011  (the errno is looked at)
        (root / ("n" * 256)).touch()
    assert caught.value.errno == errno.ENAMETOOLONG


def test_negative_entries_are_believed(tmp_path: Path) -> None:
    fs = RamFS(negative_ttl=60)
    with serving(fs, tmp_path / "mnt"):
        for _ in range(3):
            assert not (tmp_path / "mnt" / "none").exists()
        assert fs.calls["lookup"] == 1


def test_attributes_are_believed(tmp_path: Path) -> None:
    fs = RamFS(ttl=60)
    with serving(fs, tmp_path / "mnt"):
        (tmp_path / "mnt" / "file").touch()
        (tmp_path / "mnt" / "file").stat()
        fs.calls.clear()
        for _ in range(3):
            (tmp_path / "mnt" / "file").stat()
        assert (fs.calls["lookup"], fs.calls["getattr"]) == (0, 0)


def test_no_flush(root: Path, fs: RamFS) -> None:
    fs.opened = OpenOut(0, no_flush=True)
    (root / "file").write_bytes(b"x")
    fs.calls.clear()
    assert (root / "file").read_bytes() == b"x"
    assert (fs.calls["open"], fs.calls["flush"]) == (1, 0)


def test_errno_of_a_method_reaches_the_caller(root: Path, fs: RamFS) -> None:
    def full() -> None:
        raise OSError(errno.EDQUOT, "full")

    fs.hooks["create"] = full
    with pytest.raises(OSError) as caught:  # noqa: PT011  (the errno is looked at)
        (root / "file").touch()
    assert caught.value.errno == errno.EDQUOT


class Emptied(RamFS):
    """Tells when every inode but the root's is gone: unlinked, closed and forgotten."""

    def __init__(self) -> None:
        super().__init__(ttl=60)
        self.empty = threading.Event()

    def forget(self, ino: Ino, lookups: int) -> None:
        super().forget(ino, lookups)
        if len(self.nodes) == 1:
            self.empty.set()


def test_lookups_are_forgotten_to_the_last(tmp_path: Path) -> None:
    fs, root = Emptied(), tmp_path / "mnt"
    with serving(fs, root, SessionConfig(wants=KernelWants(readdirplus_auto=False))):
        for number in range(200):
            (root / f"file-{number}").touch()
        for _ in range(2):
            subprocess.run(["ls", "-l", root], check=True, stdout=subprocess.DEVNULL)
        (root / "dir").mkdir()
        (root / "dir").rmdir()
        for number in range(200):
            (root / f"file-{number}").unlink()
        assert fs.empty.wait(60)


def test_two_mounts(tmp_path: Path) -> None:
    one, two = RamFS(), RamFS()
    with serving(one, tmp_path / "one"), serving(two, tmp_path / "two"):
        (tmp_path / "one" / "file").write_bytes(b"1")
        (tmp_path / "two" / "file").write_bytes(b"2")
        assert (tmp_path / "one" / "file").read_bytes() == b"1"


def test_metrics(tmp_path: Path) -> None:
    with serving(RamFS(), tmp_path / "mnt") as session:
        (tmp_path / "mnt" / "file").touch()
        assert not (tmp_path / "mnt" / "none").exists()
        check_metrics(session)


def check_metrics(session: Session) -> None:
    stats = session.snapshot()
    assert stats["create"].calls == 1
    assert stats["create"].total_ns > 0
    assert stats["lookup"].errors == stats["lookup"].calls > 0
