"""Options, and what is said when a mount can't be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsclient.fuse.mount import mount as mount_module
from fsclient.fuse.mount.mount import find_mount, mount, parse_mountinfo, raise_readahead, umount
from fsclient.fuse.mount.mount_options import is_known, parse_options
from fsmeta.errors import ConfigError
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.fsclient.fuse.ramfs import RamFS


def test_options() -> None:
    options = parse_options(["ro", "nosuid", "nodev", "suid", "x-systemd.automount", "_netdev"])
    assert options.words() == ["ro", "nodev"]
    assert options.allow_other is None
    assert parse_options(["allow_other"]).allow_other
    assert parse_options(["max_read=65536"]).max_read_bytes == 65536
    assert is_known("noatime")
    assert not is_known("cache-size")


@pytest.mark.parametrize(
    "option", ["frobnicate", "max_read=all", "max_read=1", "max_read=9999999", "ro=5"]
)
def test_bad_options(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        parse_options([option])


def test_no_such_mountpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: `mkdir"):
        mount(str(tmp_path / "none"), "vol")


def test_mountpoint_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a directory"):
        mount(str(tmp_path / "file"), "vol")


def test_mountpoint_is_something_else() -> None:
    with pytest.raises(ConfigError, match="is a mount of proc"):
        mount("/proc", "vol")


def test_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_module, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(ConfigError, match="modprobe fuse"):
        mount(str(tmp_path), "vol")


def test_no_table_of_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user could mount in a container without it, and then not unmount."""
    device = tmp_path / "fuse"
    device.touch()
    monkeypatch.setattr(mount_module, "DEVICE", str(device))
    monkeypatch.setattr(mount_module, "MTAB", str(tmp_path / "mtab"))
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(ConfigError, match=r"no \S+/mtab, .* as root run `ln -s /proc/self/mounts"):
        mount(str(tmp_path), "vol")


def test_umount_of_what_is_no_mount(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't unmount"):
        umount(str(tmp_path))


def test_mountinfo_line() -> None:
    line = "36 35 98:0 /mnt1 /mnt/two\\040words\\012x rw,noatime master:1 - fuse.slicefs a\\040b rw"
    info = parse_mountinfo(line)
    assert info == (36, "98:0", "/mnt/two words\nx", "fuse.slicefs", "a b")


@needs_root_and_fuse
class TestMounted:
    """With a mount to look at."""

    def test_how_it_looks(self, tmp_path: Path) -> None:
        root = tmp_path / "with space"
        with serving(RamFS(), root, options=("ro", "nodev", "noatime")):
            info = find_mount(str(root))
            assert info is not None
            assert (info.fstype, info.source) == ("fuse.slicefs", "testvol")
            assert os.statvfs(root).f_flag & os.ST_RDONLY
            assert os.statvfs(root).f_flag & os.ST_NODEV
            with pytest.raises(OSError, match="Read-only"):
                (root / "file").touch()
        assert find_mount(str(root)) is None
        assert not raise_readahead(str(root))

    def test_mounted_already(self, tmp_path: Path) -> None:
        root = tmp_path / "mnt"
        with serving(RamFS(), root), pytest.raises(ConfigError, match="mounted already"):
            mount(str(root), "vol")

    def test_busy(self, tmp_path: Path) -> None:
        root = tmp_path / "mnt"
        busy = pytest.raises(ConfigError, match="in use")
        with serving(RamFS(), root), (root / "file").open("w"), busy:
            umount(str(root))

    def test_readahead(self, tmp_path: Path) -> None:
        with serving(RamFS(), tmp_path / "mnt"):
            if not raise_readahead(str(tmp_path / "mnt"), 512):
                pytest.skip("may not write to /sys")
            info = find_mount(str(tmp_path / "mnt"))
            assert info is not None
            setting = Path(f"/sys/class/bdi/{info.device}/read_ahead_kb")
            assert setting.read_text() == "512\n"
