"""Mounts through pyfuse3, as a user has them: `slicefs mount --transport pyfuse3`.

What a mount must do at all is tested on it as on the native one: `tests/posix` has it as a driver.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from tests.faults.program import (
    Mount,
    Volume,
    is_mounted,
    kill_client,
    slicefs,
    succeed,
    wait_until,
)
from tests.faults.user import as_user, needs_namespaces
from tests.support.binding import needs_pyfuse3

pytestmark = [*needs_namespaces, needs_pyfuse3]

THROUGH = ("--transport", "pyfuse3")
FALLOC_FL_KEEP_SIZE = 1


@pytest.fixture
def mount(embedded: Volume) -> Mount:
    embedded.format()
    return embedded.mount(*THROUGH)


def ended(mount: Mount) -> None:
    wait_until("the client has ended", 60, mount.has_ended)


def test_two_transports_see_each_others_changes(served: Volume) -> None:
    served.format()
    mounts = served.mount(name="native"), served.mount(*THROUGH, name="through")
    for here, there in (mounts, mounts[::-1]):
        _see_changes(here.path, there.path)
    served.end()


def _see_changes(mine: Path, other: Path) -> None:
    """What is changed through `mine` is seen through `other`."""
    (mine / "d").mkdir()
    wait_until("the directory is there", 60, (other / "d").is_dir)
    (mine / "d/file").write_bytes(b"first")
    wait_until("the file is there", 60, (other / "d/file").exists)
    assert (other / "d/file").read_bytes() == b"first"
    (mine / "d/file").write_bytes(b"second one")
    wait_until("its content", 60, lambda: (other / "d/file").read_bytes() == b"second one")
    (mine / "d/file").chmod(0o600)
    wait_until("its mode", 60, lambda: (other / "d/file").stat().st_mode == 0o100600)
    (mine / "d/file").rename(mine / "d/moved")
    wait_until("its name", 60, lambda: os.listdir(other / "d") == ["moved"])
    wait_until("that the old name is gone", 60, lambda: not (other / "d/file").exists())
    (other / "d/moved").unlink()
    wait_until("that it is gone", 60, lambda: not (mine / "d/moved").exists())
    (other / "d").rmdir()
    wait_until("that all is gone", 60, lambda: os.listdir(mine) == [])


def test_appends_of_two_transports_stay_whole(served: Volume) -> None:
    served.format()
    mounts = served.mount(name="native"), served.mount(*THROUGH, name="through")
    (mounts[0].path / "log").touch()
    wait_until("the file is there", 60, (mounts[1].path / "log").exists)

    def append(mount: Mount, who: str) -> None:
        with open(mount.path / "log", "a", buffering=1) as log:
            for number in range(200):
                log.write(f"{who} {number}\n")

    threads = [
        threading.Thread(target=append, args=(mount, who))
        for mount, who in zip(mounts, "ab", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [f"{who} {number}" for who in "ab" for number in range(200)]
    for mount in mounts:
        wait_until("all lines", 60, partial(_has_lines, mount, sorted(wanted)))
    served.end()


def _has_lines(mount: Mount, wanted: list[str]) -> bool:
    return sorted((mount.path / "log").read_text().splitlines()) == wanted


def test_a_long_directory_is_listed_once(embedded: Volume, mount: Mount) -> None:
    """Names of all lengths, two of one file among them; listed again while the kernel knows all."""
    (mount.path / "d").mkdir()
    names = [f"{number:04}{'x' * (number % 200)}" for number in range(600)]
    for name in names:
        (mount.path / "d" / name).touch()
    os.link(mount.path / "d" / names[0], mount.path / "d" / "again")
    wanted = sorted([*names, "again"])
    for _ in range(3):
        assert sorted(os.listdir(mount.path / "d")) == wanted
        with os.scandir(mount.path / "d") as entries:
            inos = {each.name: each.inode() for each in entries}
        assert inos[names[0]] == inos["again"]
        assert len(set(inos.values())) == len(names)
    again = embedded.mount(*THROUGH, name="again")  # which knows nothing
    with os.scandir(again.path / "d") as entries:
        found = {each.name: each.stat() for each in entries}
    assert sorted(found) == wanted
    assert found["again"].st_nlink == 2
    subprocess.run(["rm", "-r", again.path / "d"], check=True)
    embedded.end()


def test_maps_and_appends_of_one_file(embedded: Volume, mount: Mount) -> None:
    """The kernel writes pages back through handles that may be O_APPEND."""
    file = mount.path / "file"
    file.write_bytes(bytes(10000))
    with open(file, "ab+") as opened, mmap.mmap(opened.fileno(), 10000) as mapped:
        mapped[4096:4100] = b"page"
        opened.write(b"tail")
        opened.flush()
        mapped.flush()
    data = file.read_bytes()
    assert (len(data), data[4096:4100], data[-4:]) == (10004, b"page", b"tail")
    embedded.end()


def test_what_is_not_supported(embedded: Volume, mount: Mount) -> None:
    """As the man page says: each answers as Linux does for a file system without it."""
    file = mount.path / "file"
    file.write_bytes(bytes(100))
    libc = ctypes.CDLL(None, use_errno=True)
    with open(file, "rb+") as opened:
        fd = opened.fileno()
        assert libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(10)) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP
        assert os.lseek(fd, 0, os.SEEK_HOLE) == 100
        with pytest.raises(OSError, match="Inappropriate ioctl"):
            fcntl.ioctl(fd, 0x80086601, bytes(8))  # FS_IOC_GETFLAGS
    with pytest.raises(OSError, match="not supported"):
        os.open(mount.path, os.O_TMPFILE | os.O_RDWR)
    assert not (mount.path / ".accesslog").exists()
    assert "or --transport pyfuse3;" in slicefs("top", mount.path).err
    subprocess.run(["cp", "--sparse=always", file, mount.path / "copy"], check=True)
    assert (mount.path / "copy").read_bytes() == bytes(100)
    embedded.end()


def test_locks_are_the_hosts_own(embedded: Volume, mount: Mount) -> None:
    """They exclude programs that use the same mount, and no others."""
    (mount.path / "file").touch()
    native = embedded.mount(name="native")
    with (
        open(mount.path / "file", "rb+") as first,
        open(mount.path / "file", "rb+") as second,
        open(native.path / "file", "rb+") as elsewhere,
    ):
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(elsewhere, fcntl.LOCK_EX | fcntl.LOCK_NB)
    embedded.end()


def test_numbers(embedded: Volume, mount: Mount) -> None:
    before = mount.numbers()
    (mount.path / "file").write_bytes(bytes(5000))
    assert not (mount.path / "none").exists()
    after = mount.numbers()

    def rise(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert rise('operations_total{op="create"}') == 1, sorted(after)
    assert rise('operations_total{op="write"}') >= 1
    assert rise('operation_errors_total{op="lookup"}') + rise('operations_total{op="lookup"}') >= 1
    embedded.end()


def test_fusermount3_ends_it(embedded: Volume, mount: Mount) -> None:
    (mount.path / "file").write_bytes(b"data")
    subprocess.run(["fusermount3", "-u", mount.path], check=True)
    ended(mount)
    again = embedded.mount()
    assert (again.path / "file").read_bytes() == b"data"
    embedded.end()


def test_a_signal_unmounts(embedded: Volume, mount: Mount) -> None:
    (mount.path / "file").write_bytes(b"data")
    os.kill(mount.pid, signal.SIGTERM)
    ended(mount)
    assert not is_mounted(mount.path)
    assert any("SIGTERM: unmounting" in line for line in embedded.log_lines())
    again = embedded.mount(*THROUGH)
    assert (again.path / "file").read_bytes() == b"data"
    embedded.end()


def test_a_signal_detaches_what_is_in_use(embedded: Volume, mount: Mount) -> None:
    (mount.path / "file").write_bytes(b"data")
    held = os.open(mount.path / "file", os.O_RDONLY)
    try:
        os.kill(mount.pid, signal.SIGTERM)
        ended(mount)
        assert not is_mounted(mount.path)
    finally:
        with pytest.raises(OSError, match="not connected"):
            os.close(held)
    embedded.end("it is in use")


def test_killed(embedded: Volume, mount: Mount) -> None:
    with open(mount.path / "file", "wb", buffering=0) as file:
        file.write(b"synced")
        os.fsync(file.fileno())
    kill_client(mount)
    ended(mount)
    with pytest.raises(OSError, match="not connected"):
        os.stat(mount.path / "file")
    mount.was_killed = True
    succeed("umount", mount.path)
    again = embedded.mount(*THROUGH)
    assert (again.path / "file").read_bytes() == b"synced"
    embedded.end()


def test_writeback(embedded: Volume) -> None:
    embedded.format()
    staging = embedded.base / "staging"
    mount = embedded.mount(*THROUGH, "--writeback", "--staging-dir", str(staging))
    for number in range(50):
        (mount.path / f"f{number}").write_bytes(b"%d" % number)
    succeed("flush", "--wait", mount.path)
    mount.umount()
    again = embedded.mount()
    assert {each: (again.path / each).read_bytes() for each in os.listdir(again.path)} == {
        f"f{number}": b"%d" % number for number in range(50)
    }
    embedded.end()


def test_a_directory_of_the_volume_for_reading(embedded: Volume, mount: Mount) -> None:
    (mount.path / "a/b").mkdir(parents=True)
    (mount.path / "a/file").write_bytes(b"data")
    below = embedded.mount(*THROUGH, "--subdir", "a", "--read-only", name="below")
    assert sorted(os.listdir(below.path)) == ["b", "file"]
    assert (below.path / "b/../file").read_bytes() == b"data"
    with pytest.raises(OSError, match="Read-only"):
        (below.path / "new").touch()
    embedded.end()


def test_squash(embedded: Volume, mount: Mount) -> None:
    """Root is judged as the anonymous user: also along paths that the kernel has walked before."""
    (mount.path / "closed").mkdir(mode=0o700)
    (mount.path / "closed/file").touch()
    (mount.path / "open").mkdir()
    (mount.path / "open").chmod(0o777)
    squashed = embedded.mount(*THROUGH, "--squash", "root", name="squashed")
    with pytest.raises(PermissionError):
        os.listdir(squashed.path / "closed")
    with pytest.raises(PermissionError):
        (squashed.path / "closed/file").stat()
    (squashed.path / "open/file").touch()
    assert (squashed.path / "open/file").stat().st_uid == 65534
    assert os.listdir(squashed.path / "open") == ["file"]
    embedded.end()


REFUSED = (
    "--passthrough",
    "--supervisor",
    "--open-requests always",
    "--idle-poll never",
    "--threads 4",
    "--access-log /dev/null",
    "--slow-op-log 5",
    "--writeback --direct-writes",
    "-o idle-poll=always",
)


def test_what_it_can_not_do_is_refused(embedded: Volume) -> None:
    embedded.format()
    place = embedded.base / "mnt"
    place.mkdir()
    for words in REFUSED:
        done = slicefs("mount", "-d", *THROUGH, *words.split(), embedded.meta, place)
        assert done.code == 1, words
        assert done.err.count("\n") == 1, words
        assert "--transport pyfuse3 has no --" in done.err, words
        assert not is_mounted(place), words


def test_where_it_is_missing(embedded: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.format()
    (embedded.base / "mnt").mkdir()
    (embedded.base / "pyfuse3.py").write_text("raise ImportError('no module named pyfuse3')\n")
    monkeypatch.setenv("PYTHONPATH", str(embedded.base))
    done = slicefs("mount", *THROUGH, embedded.meta, embedded.base / "mnt")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "slicefs[pyfuse3]" in done.err
    assert "libfuse3-dev" in done.err


AS_A_USER = """
set -ex
umask 022
meta=sqlite:///$HOME/meta.db
mkdir "$HOME/mnt"
slicefs format $meta testvol --bucket $HOME/bucket
slicefs mount -d -o transport=pyfuse3,noatime $meta $HOME/mnt
findmnt -n -o FSTYPE,SOURCE $HOME/mnt
grep '"transport": "pyfuse3"' $HOME/mnt/.config
cp -a $B/repo/docs $HOME/mnt/
diff -r $B/repo/docs $HOME/mnt/docs
stat -c '%n %U' $HOME/mnt/docs
if chown root $HOME/mnt/docs; then exit 1; fi
slicefs umount $HOME/mnt
slicefs mount -d -o transport=pyfuse3 $meta $HOME/mnt
fusermount3 -u $HOME/mnt
slicefs fsck --data $meta
"""


def test_as_an_ordinary_user(base: Path) -> None:
    done = as_user(AS_A_USER, base)
    assert done.code == 0, done.err
    assert "fuse.slicefs testvol" in done.out
    assert "docs nobody" in done.out
    assert done.out.splitlines()[-1] == "clean"
    log = (base / "home/.slicefs/slicefs.log").read_text()
    assert log.count("WARNING") + log.count("ERROR") + log.count("Traceback") == 0, log
