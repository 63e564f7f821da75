"""Q1 on real mounts: df, du, EDQUOT of every call, two mounts, and exact counters after SIGKILL."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disks.test_full import put
from tests.faults.judge import Worker, start
from tests.faults.program import Mount, Volume, needs_mounts, slicefs, succeed, wait_until
from tests.faults.test_kill import GONE

pytestmark = needs_mounts

MIB = 1 << 20
FULL = "quota of .*: (8|9|10)[0-9]*% full|data written and not stored is lost: .*quota is full"


def set_quota(volume: Volume, *words: str) -> Any:
    return json.loads(succeed("quota", "set", volume.meta, *words, "--json"))


def get(volume: Volume, *words: str) -> Any:
    return json.loads(succeed("quota", "get", volume.meta, *words, "--json"))


def edquot(act: Callable[[], object]) -> None:
    with pytest.raises(OSError, match="quota exceeded") as caught:
        act()
    assert caught.value.errno == errno.EDQUOT


def du(path: Path) -> tuple[int, int]:
    """Bytes that du(1) finds in files below `path`, and how many inodes."""
    space = inodes = 0
    for top, dirs, files in os.walk(path):
        inodes += len(dirs) + len(files)
        space += sum(os.lstat(os.path.join(top, name)).st_blocks * 512 for name in files)
    return space, inodes


def agree(volume: Volume, mount: Mount, name: str) -> None:
    """What the quota of a directory says is what du(1) says."""
    found = get(volume, "--path", f"/{name}")
    assert (found["space_used"], found["inodes_used"]) == du(mount.path / name)


def everything_is_refused(volume: Volume) -> None:
    volume.format()
    root = volume.mount().path
    d, other = root / "d", root / "other"
    (d / "in").mkdir(parents=True)
    other.mkdir()
    put(d / "f", b"x" * MIB)
    put(other / "g", b"y" * MIB)
    (other / "tree").mkdir()
    found = set_quota(volume, "--path", "/d", "--capacity", "1MiB", "--inodes", "2")
    assert (found["space_used"], found["inodes_used"], found["percent"]) == (MIB, 2, 100.0)
    (other / "tree").chmod(0o700)  # with its next commit the mount knows that there are quotas
    with (d / "f").open("r+b") as f:
        edquot(lambda: os.pwrite(f.fileno(), b"x" * 4097, MIB))  # refused early
        assert os.pwrite(f.fileno(), b"z" * 4096, 0) == 4096  # over what is there
    for act in (
        (d / "new").touch,
        (d / "in/new").mkdir,
        lambda: (d / "new").symlink_to("f"),
        lambda: os.mkfifo(d / "new"),
        lambda: (other / "g").rename(d / "new"),
        lambda: (other / "tree").rename(d / "in/new"),
    ):
        edquot(act)
    assert sorted(path.name for path in d.iterdir()) == ["f", "in"]
    os.link(d / "f", other / "link")  # counts where it was
    df = os.statvfs(d / "in")
    assert (df.f_blocks * df.f_frsize, df.f_bavail) == (MIB, 0)
    assert (df.f_files, df.f_ffree) == (2, 0)
    assert os.statvfs(other).f_blocks * df.f_frsize > MIB
    os.truncate(d / "f", 4096)
    (d / "in").rmdir()
    (other / "g").rename(other / "h")
    edquot(lambda: (other / "h").rename(d / "h"))  # 1 MiB where there is a page less
    put(d / "small", b"s" * 4096)
    agree(volume, volume.mounts[0], "d")
    assert slicefs("quota", "check", volume.meta).code == 0
    volume.end(FULL)


def test_everything_is_refused(embedded: Volume) -> None:
    everything_is_refused(embedded)


def test_everything_is_refused_with_redis(served: Volume) -> None:
    everything_is_refused(served)


def test_what_write_let_pass_close_refuses(served: Volume) -> None:
    """Each of many files is within the quota, all together are not; what was stored stays."""
    served.format()
    root = served.mount().path
    (root / "d").mkdir()
    set_quota(served, "--path", "/d", "--capacity", "4MiB")
    fds = [os.open(root / f"d/{n}", os.O_CREAT | os.O_RDWR) for n in range(8)]
    for fd in fds:
        os.write(fd, b"x" * MIB)
    errors = []
    for fd in fds:
        try:
            os.fsync(fd)
        except OSError as error:
            errors.append(error.errno)
        try:
            os.close(fd)
        except OSError as error:
            assert error.errno == errno.EDQUOT
    assert errors == [errno.EDQUOT] * 4
    agree(served, served.mounts[0], "d")
    assert get(served, "--path", "/d")["space_used"] == 4 * MIB
    served.end(FULL)


def test_users_and_groups(served: Volume) -> None:
    served.format()
    root = served.mount().path
    root.chmod(0o777)
    set_quota(served, "--uid", "1234", "--capacity", "1MiB", "--inodes", "3")
    set_quota(served, "--gid", "4321", "--inodes", "1")
    script = f"cd {root} && touch a b && head -c 1M /dev/zero > a && touch c"
    as_user = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "sh", "-c"]
    subprocess.run([*as_user, script], check=True)
    done = subprocess.run(
        [*as_user, f"cd {root}; touch d; head -c 5000 /dev/zero > b"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stderr.count("Disk quota exceeded") == 2
    put(root / "roots", b"x" * 4096)
    edquot(lambda: os.chown(root / "roots", 1234, -1))
    os.chown(root / "roots", -1, 4321)
    edquot(lambda: os.chown(root / "a", -1, 4321))
    (root / "a").unlink()
    os.chown(root / "roots", 1234, -1)
    found = get(served, "--uid", "1234")
    assert (found["space_used"], found["inodes_used"]) == (4096, 3)
    served.end(FULL)


def test_a_new_limit_holds_on_two_mounts_at_once(served: Volume) -> None:
    """Also the volume's own (F3), and a mount that does nothing hears of that with a beat."""
    served.format()
    first, second = (served.mount(name=name) for name in ("one", "two"))
    (first.path / "d").mkdir()
    put(second.path / "d/f", b"x" * 8192)
    set_quota(served, "--path", "/d", "--inodes", "1")
    for mount in (first, second):
        edquot((mount.path / "d/g").touch)
    set_quota(served, "--path", "/d", "--inodes", "3")
    (first.path / "d/g").touch()
    (second.path / "d/h").touch()
    edquot((first.path / "d/i").touch)
    succeed("config", served.meta, "--inodes", "6")
    (second.path / "last").touch()
    with pytest.raises(OSError, match="No space") as caught:
        (first.path / "more").touch()
    assert caught.value.errno == errno.ENOSPC
    succeed("config", served.meta, "--capacity", "1GiB")
    wait_until("df shows it", 60, lambda: os.statvfs(first.path).f_blocks * 4096 == 1 << 30)
    succeed("quota", "delete", served.meta, "--path", "/d")
    succeed("config", served.meta, "--inodes", "0")
    (first.path / "d/i").touch()
    assert served.status()["volume"]["accounting"] == ""
    served.end(FULL)


def test_what_is_nearly_full_is_said(served: Volume) -> None:
    served.format()
    mount = served.mount()
    (mount.path / "d").mkdir()
    (mount.path / "e").mkdir()
    put(mount.path / "d/f", b"x" * 8192)
    set_quota(served, "--path", "/d", "--capacity", "9000B")
    set_quota(served, "--path", "/e", "--capacity", "1GiB")
    warning = "WARNING fsclient.background.quota_alerts: quota of /d: 91% full"
    wait_until("a warning", 100, lambda: any(warning in line for line in served.log_lines()))
    wait_until("numbers", 60, lambda: mount.numbers()["quotas_near_full"] == 1)
    assert mount.numbers()["quotas"] == 2
    quotas = served.status()["quotas"]
    assert quotas["count"] == 2
    assert [each["path"] for each in quotas["near_full"]] == ["/d"]
    assert "91.0%  /d" in succeed("status", served.meta)
    assert len([line for line in served.log_lines() if warning in line]) == 1
    served.end(FULL)


def kill_once(volume: Volume, mount: Mount, workers: list[Worker], load_s: float) -> Mount:
    """The next mount; every counter is that of a recount, which `fsck` makes."""
    start(workers)
    time.sleep(load_s)
    mount.kill()
    for worker in workers:
        worker.wait()
        assert worker.failure is None or worker.failure["errno"] in GONE, worker.failure
    volume.fsck()
    mount = volume.mount("--no-supervisor")
    for worker in workers:
        worker.judge()
    return mount


def counters_after_kills(volume: Volume, kills: int) -> None:
    """Quotas are set while the workers work; then the client is killed again and again."""
    volume.format()
    mount = volume.mount("--no-supervisor")
    (mount.path / "d").mkdir()
    workers = [
        Worker(mount.path / f"d/w{n}", volume.base / f"journal{n}", 7 + 1000 * n) for n in range(2)
    ]
    try:
        start(workers)
        set_quota(volume, "--path", "/d", "--capacity", "1TiB", "--inodes", "100000")
        set_quota(volume, "--uid", "0", "--capacity", "1TiB")
        succeed("quota", "check", volume.meta, "--repair")
        for worker in workers:
            worker.stop()
        for kill in range(kills):
            mount = kill_once(volume, mount, workers, 0.1 + kill % 7 * 0.13)
    finally:
        for worker in workers:
            worker.abandon()
    agree(volume, mount, "d")
    assert slicefs("quota", "check", volume.meta).code == 0
    succeed("quota", "check", volume.meta, "--repair")
    agree(volume, mount, "d")
    volume.end()


def test_counters_after_kills_with_redis(served: Volume) -> None:
    counters_after_kills(served, 6)


def test_counters_after_kills_with_sqlite(embedded: Volume) -> None:
    counters_after_kills(embedded, 3)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_counters_after_fifty_kills(served: Volume) -> None:
    counters_after_kills(served, 50)
