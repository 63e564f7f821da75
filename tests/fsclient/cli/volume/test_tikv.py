"""M2: the program on TiKV: a volume's life, and every way not to reach one."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.program import COMMAND_S, Volume, needs_mounts, succeed
from tests.fsclient.cli.test_bad_input import CLOSED_PORT, SECRET, refused
from tests.fsclient.cli.test_every_command import CODES, ON_VOLUMES
from tests.fsclient.cli.test_trouble import LONG, WAIT, program_that
from tests.fsclient.cli.trees import snapshot
from tests.support.tikv_server import TikvServer
from tests.support.waiting import wait_until

AWAY_S = 2.0  # shorter than a call waits for its metadata
LEADS_WITHIN_S = 100.0  # of a mount that is alone: seconds, unless the machine is busy
REFUSED_WITHIN_S = 90.0  # a client gives up after 4 s


@pytest.fixture
def volume(base: Path, tikv_server: TikvServer) -> Iterator[Volume]:
    """A volume on TiKV, not formatted yet."""
    made = Volume(base, tikv_server.empty_url())
    yield made
    tikv_server.heal()
    made.clean_up()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tikv://", "'' is no HOST:PORT: write tikv://PD:PORT"),
        ("tikv:///vol", "'' is no HOST:PORT"),
        ("tikv://host/vol", "'host' is no HOST:PORT"),
        ("tikv://host:port/vol", "'host:port' is no HOST:PORT"),
        ("tikv://host:99999/vol", "'host:99999' is no HOST:PORT"),
        ("tikv://a:1,,b:2/vol", "'' is no HOST:PORT"),
        ("tikv://a:1", "the prefix '' of the volume's keys: use 1 to 64 of"),
        ("tikv://a:1/", "the prefix '' of"),
        ("tikv://a:1/x/y", "the prefix 'x/y' of"),
        (f"tikv://a:1/{'x' * 65}", "use 1 to 64 of"),
        ("tikv://a:1/x?ca=/file", "without password or TLS"),
        (f"tikv://me:{SECRET}@a:1/x", "without password or TLS"),
        (f"tikv://127.0.0.1:{CLOSED_PORT}/x", "can't reach TiKV by its PD at 127.0.0.1:1: .*check"),
    ],
)
def test_bad_urls(base: Path, url: str, expected: str) -> None:
    before = snapshot(base)
    for command in ("status", "fsck", f"format --bucket {base}/bucket"):
        refused(f"{command} {url}{' testvol' if 'format' in command else ''}", expected)
    assert snapshot(base) == before


def test_timestamps_that_do_not_come(volume: Volume, tikv_server: TikvServer) -> None:
    """Whoever asks is told so in time, and nothing is left behind."""
    volume.format()
    before = snapshot(volume.base)
    tikv_server.fault("Tso", "freeze")
    why = "can't reach TiKV by its PD at .*: no answer in time; check"
    mountpoint = volume.base / "mnt"
    for command in ("status", "fsck", "mount"):
        place = f" {mountpoint}" if command == "mount" else ""
        mountpoint.mkdir(exist_ok=True)
        refused(f"{command} {volume.meta}{place}", why, within_s=REFUSED_WITHIN_S)
    mountpoint.rmdir()
    assert snapshot(volume.base) == before
    tikv_server.heal()
    assert volume.status()["sessions"] == []


@needs_mounts
def test_m2_who_leads_has_old_values_dropped(volume: Volume, tikv_server: TikvServer) -> None:
    def asked() -> int:
        return tikv_server.counts().get("UpdateGCSafePoint", 0)

    volume.format()
    before = asked()
    volume.mount()
    wait_until(lambda: asked() > before, LEADS_WITHIN_S)
    volume.mounts[0].umount()
    before = asked()
    mount = volume.mount("--tikv-gc", "off", "--heartbeat", "0.1")
    (mount.path / "file").write_bytes(b"1")
    (mount.path / "file").unlink()
    wait_until(lambda: mount.numbers()["inodes_purged_total"] == 1, LEADS_WITHIN_S)  # it leads
    assert asked() == before
    volume.end()
    expected = "'no' is not one of 'auto', 'off'"
    refused(f"mount {volume.meta} {mount.path} --tikv-gc no", expected, code=2)


def test_format_twice(volume: Volume) -> None:
    volume.format()
    refused(f"format {volume.meta} other --bucket {volume.bucket}", "there is a volume 'testvol'")


@needs_mounts
def test_a_volumes_life(volume: Volume) -> None:
    volume.format("--compress", "lz4")
    root = volume.mount().path
    (root / "dir").mkdir()
    (root / "dir/file").write_bytes(b"some bytes" * 10_000)
    os.link(root / "dir/file", root / "link")
    os.symlink("dir/file", root / "symlink")
    os.rename(root / "dir/file", root / "renamed")
    assert (root / "symlink").is_symlink()
    assert (root / "link").read_bytes() == b"some bytes" * 10_000
    assert sorted(os.listdir(root)) == ["dir", "link", "renamed", "symlink"]
    os.truncate(root / "link", 5)
    volume.mounts[0].umount()
    root = volume.mount().path
    assert (root / "renamed").read_bytes() == b"some "
    assert os.stat(root / "renamed").st_nlink == 2
    status = volume.status()
    assert (status["usage"]["inodes_used"], len(status["sessions"])) == (4, 1)
    volume.end()
    assert volume.status()["sessions"] == []


@needs_mounts
def test_a_mount_waits_for_a_tikv_that_is_away(volume: Volume, tikv_server: TikvServer) -> None:
    """Calls wait and then go on; nothing was seen to fail."""
    volume.format()
    root = volume.mount("--heartbeat", "1").path
    (root / "before").write_text("1")
    for method in ("Tso", "KvBatchGet", "KvPrewrite"):
        tikv_server.fault(method, "freeze" if method == "Tso" else "before")
        healing = threading.Timer(AWAY_S, tikv_server.heal)
        healing.start()
        (root / method).write_text(method)
        healing.join()
        assert (root / method).read_text() == method
    volume.end("heartbeat:")


@needs_mounts
def test_a_killed_mount_leaves_nothing_in_the_way(volume: Volume, tikv_server: TikvServer) -> None:
    """It dies in the middle of a commit, over and over; the next mount works at once."""
    volume.format()
    for turn in range(3):
        mount = volume.mount("--no-supervisor")
        (mount.path / f"kept{turn}").write_text("kept")
        tikv_server.fault("KvCommit", "freeze", skip=turn)
        writer = threading.Thread(target=_write_until_it_fails, args=(mount.path,))
        writer.start()
        time.sleep(0.3)
        mount.kill()
        writer.join()
        tikv_server.heal()
    root = volume.mount().path
    for turn in range(3):
        assert (root / f"kept{turn}").read_text() == "kept"
        (root / f"kept{turn}").unlink()
    volume.end("a dead session|ended session")


def _write_until_it_fails(root: Path) -> None:
    try:
        for n in range(1000):
            (root / f"some{n}").write_text("x")
    except OSError:
        pass


@pytest.mark.parametrize("words", LONG)
def test_tikv_is_lost_in_the_middle_of_a_command(
    words: str, volume: Volume, tikv_server: TikvServer, tmp_path: Path
) -> None:
    """It names the URL and says what to do, as of Redis; then the same command works."""
    volume.format()
    call = "everything" if words == "dump" else "scan_rows"
    program = program_that(f"fsmeta.store.tikv.engine:TikvStore.{call}", WAIT)
    text = ON_VOLUMES[words].format(meta=volume.meta, dir=tmp_path).split()
    with subprocess.Popen(
        [*program, words, *text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "here\n"
        for method in ("Tso", "KvScan", "KvGet", "KvBatchGet"):
            tikv_server.fault(method, "freeze")
        out, err = run.communicate("\n", timeout=COMMAND_S)
    tikv_server.heal()
    assert (run.returncode, out) == (CODES.get(words, {}).get(1, 1), ""), err
    (line,) = err.splitlines()
    assert line.startswith(f"slicefs: {volume.meta}: "), err
    assert line.endswith(": run the command again when it answers"), err
    assert list(tmp_path.iterdir()) == []
    succeed(words, *text)
