"""P1: what reading does to atime on mounts, beside tmpfs with the same flags."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from fsclient.files.handles import atimes
from fsclient.fuse.mount.mount import find_flags
from fsclient.fuse.mount.mount_options import parse_options, with_atime
from fsmeta.errors import ConfigError
from fsmeta.types import ROOT_CALLER, Attr
from tests.posix.inproc import memory
from tests.posix.volumes import Volume, can_mount
from tests.posix.writeback.test_writeback import Pair, read, write
from tests.support.waiting import wait_until

NOT_S = 0.2  # what has not been put down by then is believed not to be
OLD_NS = 10**18

Volumes = Callable[[str, str], AbstractContextManager[Volume]]
needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs root and /dev/fuse")


@contextmanager
def _tmpfs(path: Path, flags: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", flags, "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def _settle(root: Path) -> None:
    """Return when what was read until now has been put down: it goes in order."""
    marker = root / "marker"
    marker.write_bytes(b"x")
    os.utime(marker, ns=(OLD_NS, OLD_NS))
    marker.read_bytes()
    wait_until(lambda: marker.stat().st_atime_ns > OLD_NS)
    time.sleep(NOT_S)  # close(2) does not wait for the client to hear of it
    marker.unlink()


def _map(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:1]


def _read_with(flags: int) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        fd = os.open(path, flags)
        os.read(fd, 100)
        os.close(fd)

    return act


def _put_back(path: Path) -> None:
    """tar(1) with --atime-preserve."""
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, 100)
    os.utime(fd, ns=(OLD_NS, OLD_NS))
    os.close(fd)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


ACTS: dict[str, Callable[[Path], object]] = {
    "read": Path.read_bytes,
    "mapped": _map,
    "read and write": _read_with(os.O_RDWR),
    "noatime": _read_with(os.O_RDONLY | os.O_NOATIME),
    "put back": _put_back,
    "appended": _append,
    "run": lambda path: subprocess.run([path], check=True),
    "dir": os.listdir,
    "link": os.readlink,
    "stat": os.stat,
}


def _make(root: Path) -> None:
    for name in ACTS:
        path = root / name
        if name == "dir":
            path.mkdir()
            (path / "entry").touch()
        elif name == "link":
            path.symlink_to("nowhere")
        elif name == "run":
            shutil.copy("/bin/true", path)
        else:
            path.write_bytes(b"x" * 5000)


class _Turn:
    """All acts once, on one file system."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._before = {name: os.lstat(root / name) for name in ACTS}
        time.sleep(0.02)  # coarse clocks
        for name, act in ACTS.items():
            act(root / name)

    def moved(self) -> set[str]:
        """Which acts have moved atime by now."""
        before = self._before.items()
        return {n for n, was in before if os.lstat(self._root / n).st_atime_ns > was.st_atime_ns}

    def check(self) -> None:
        """No other times have changed."""
        for name, was in self._before.items():
            now = os.lstat(self._root / name)
            if name not in ("put back", "appended"):
                assert (now.st_mtime_ns, now.st_ctime_ns) == (was.st_mtime_ns, was.st_ctime_ns)
        assert os.lstat(self._root / "put back").st_atime_ns == OLD_NS


@needs_mounts
@pytest.mark.parametrize("mode", ["relatime", "strictatime"])
@pytest.mark.parametrize("engine", ["sqlite", "redis"])
def test_p1_reading_moves_atime_as_on_tmpfs(
    volumes: Volumes, tmp_path: Path, engine: str, mode: str
) -> None:
    """Reads of pages that the kernel has included; another mount shows it, and moves none."""
    with volumes(engine, f"atime-{mode}") as volume, _tmpfs(tmp_path / "t", mode) as local:
        root, there = volume.mount("mnt", "--atime-mode", mode), volume.mount("there")
        assert ("relatime" in find_flags(str(root))) == (mode == "relatime")
        assert "noatime" in find_flags(str(there))
        for place in (root, local):
            _make(place)
        for open_to_both in (set(), {"link"}):  # where it leads the kernel knows by then
            right, turn = _Turn(local), _Turn(root)
            wanted = right.moved() - {"put back"} - open_to_both
            wait_until(lambda t=turn, w=wanted: t.moved() >= w)  # type: ignore[misc]
            _settle(root)
            assert turn.moved() - {"put back"} - open_to_both == wanted
            for each in (right, turn):
                each.check()
        path = "read"
        wait_until(lambda: (there / path).stat().st_atime_ns == (root / path).stat().st_atime_ns)
        before = (there / path).stat().st_atime_ns
        (root / path).chmod(0o600)  # relatime would move it now
        assert (there / path).read_bytes()
        os.listdir(there)
        _settle(root)
        assert (there / path).stat().st_atime_ns == before


@needs_mounts
def test_p1_remount_says_what_reading_does(volumes: Volumes) -> None:
    """/proc/mounts never says what is not so."""
    helper = os.path.join(os.path.dirname(sys.executable), "mount.slicefs")
    with volumes("sqlite", "atime-remount") as volume:
        root = volume.mount()
        (root / "dir").mkdir()

        def moves(flags: str, wanted: tuple[bool, bool]) -> bool:
            if flags:
                command = [helper, "testvol", str(root), "-o", f"remount,{flags}"]
                subprocess.run(command, check=True)
            paths = [root / "file", root / "dir"]
            if "ro" not in flags:
                paths[0].write_bytes(b"x")
                (paths[1] / "entry").write_bytes(flags.encode())
                (paths[1] / "entry").unlink()
            before = [path.stat().st_atime_ns for path in paths]
            assert paths[0].read_bytes() == b"x"
            os.listdir(paths[1])

            def moved() -> tuple[bool, ...]:
                now = [path.stat().st_atime_ns for path in paths]
                return tuple(after > was for after, was in zip(now, before, strict=True))

            if any(wanted):
                wait_until(lambda: moved() == wanted)
            time.sleep(NOT_S)
            return moved() == wanted

        assert moves("", (False, False))
        assert "noatime" in find_flags(str(root))
        assert moves("relatime", (True, True))
        assert moves("relatime,nodiratime", (True, False))
        assert moves("rw,strictatime", (True, True))
        assert moves("ro,strictatime", (False, False))
        assert moves("rw,noatime", (False, False))
        assert "noatime" in find_flags(str(root))


def test_p1_what_is_not_published_yet_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W2: a mount that writes back puts atime down when others see the file."""
    monkeypatch.setattr(atimes, "HELD_S", 0.1)
    pair = Pair(memory(), tmp_path)
    try:
        pair.mine.vfs.atimes.obey(("rw",))
        pair.me.mkdir(b"/d")
        pair.hold()
        write(pair.me, b"/d/file", b"x" * 100)
        assert read(pair.me, b"/d/file") == b"x" * 100
        ino = pair.me.stat(b"/d/file").ino
        time.sleep(3 * atimes.GATHER_S)
        assert not _read_since(pair.me.stat(b"/d/file"))
        pair.release()
        wait_until(lambda: _read_since(pair.mine.meta.getattr(ROOT_CALLER, ino)))
        assert _read_since(pair.theirs.meta.getattr(ROOT_CALLER, ino))
    finally:
        pair.end()


def _read_since(attr: Attr) -> bool:
    return attr.atime_ns > attr.mtime_ns


def test_p1_one_word_about_atime() -> None:
    assert with_atime(("ro",), None) == ("ro", "noatime")
    assert with_atime((), "relatime") == ("relatime",)
    assert with_atime(("atime",), "relatime") == ("atime",)
    assert parse_options(("noatime", "relatime")) == parse_options(("relatime",))
    with pytest.raises(ConfigError, match="--atime-mode strictatime and -o noatime"):
        with_atime(("noatime",), "strictatime")
    assert parse_options(("relatime", "nosuid")).words() == ["nosuid"]
    with pytest.raises(ConfigError, match="strictatime: fusermount3"):
        parse_options(("strictatime",)).words()
