"""P4: a mount as the upper directory of overlayfs, as container runtimes use one."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.posix.conftest import Twins

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _WHITEOUT = -100, 4


def _is_whiteout(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _rename(old: Path, new: Path, flags: int) -> int:
    """0 or the errno."""
    done = _LIBC.renameat2(_AT_FDCWD, bytes(old), _AT_FDCWD, bytes(new), flags)
    return ctypes.get_errno() if done else 0


@pytest.fixture
def top(twins: Twins, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = twins.first / str(request.node.originalname)
    path.mkdir()
    yield path
    subprocess.run(["rm", "-r", path], check=True)


@pytest.fixture
def merged(top: Path, tmp_path: Path) -> Iterator[Path]:
    """An overlay of `tmp_path/lower` and `top/upper`."""
    lower, here = tmp_path / "lower", tmp_path / "merged"
    (lower / "dir" / "sub").mkdir(parents=True)
    for name in ("file", "gone", "moved", "dir/inside"):
        (lower / name).write_text(f"lower {name}")
    here.mkdir()
    for name in ("upper", "work"):
        (top / name).mkdir()
    options = f"lowerdir={lower},upperdir={top}/upper,workdir={top}/work"
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, here], capture_output=True, text=True
    )
    if "unknown filesystem type" in mounted.stderr:
        pytest.skip("this kernel has no overlayfs")
    assert mounted.returncode == 0, mounted.stderr
    yield here
    subprocess.run(["umount", here], check=True)


def test_p4_rename_leaves_a_whiteout(twins: Twins, top: Path) -> None:
    (top / "a").write_text("data")
    assert _rename(top / "a", top / "b", _WHITEOUT) == 0
    assert _is_whiteout(top / "a")
    assert (top / "b").read_text() == "data"
    with pytest.raises(OSError, match=r"No such device|not permitted|denied"):
        (top / "a").read_bytes()
    there = twins.second / top.name
    Twins.wait_until(lambda: (there / "b").exists() and _is_whiteout(there / "a"))
    assert _rename(top / "b", top / "a", _WHITEOUT | 2) == errno.EINVAL


def test_p4_an_upper_directory(top: Path, merged: Path) -> None:
    """What containers do: change, delete, move, replace directories; then mount it again."""
    upper = top / "upper"
    (merged / "file").write_text("changed")
    (merged / "gone").unlink()
    assert _is_whiteout(upper / "gone")
    os.rename(merged / "moved", merged / "dir" / "moved")
    assert _is_whiteout(upper / "moved")
    assert (upper / "dir" / "moved").read_text() == "lower moved"
    subprocess.run(["rm", "-r", merged / "dir"], check=True)
    assert _is_whiteout(upper / "dir")
    (merged / "dir").mkdir()
    assert os.getxattr(upper / "dir", "trusted.overlay.opaque") == b"y"
    (merged / "dir" / "new").write_text("new")
    assert sorted(os.listdir(merged)) == ["dir", "file"]
    assert sorted(os.listdir(merged / "dir")) == ["new"]
    assert (merged / "file").read_text() == "changed"
