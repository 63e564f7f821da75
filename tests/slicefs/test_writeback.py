"""A1: a client that writes back: what is durable when, and what a killed one has left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from slicefs.client.client import Client
from tests.posix.volumes import PATIENCE_S, Volume, new_volume

COUNT = 40
WRITER = """
import sys
from slicefs.client.client import Client

fs = Client(sys.argv[1], staging_dir=sys.argv[2], uid=0, gid=0, upload_limit="64KiB")
fs.makedirs("d")
for number in range(int(sys.argv[3])):
    with fs.open(f"d/{number:03}", "wb") as file:
        file.write(b"%d" % number * 5000)
        file.flush()
        file.raw.sync()  # fsync: the journal has it
print("written", flush=True)
sys.stdin.read()
"""


def opened(volume: Volume, staging: Path, **more: object) -> Client:
    options = {"uid": 0, "gid": 0, "meta_timeout": PATIENCE_S, **more}
    return Client(volume.meta, staging_dir=str(staging), **options)  # type: ignore[arg-type]


def check(fs: Client) -> None:
    names = [f"d/{number:03}" for number in range(COUNT)]
    found = fs.read_many(names)
    assert [bytes(each) for each in found] == [b"%d" % number * 5000 for number in range(COUNT)]


def test_what_waits_is_seen_here_and_durable_when_it_is_said(
    volume: Volume, tmp_path: Path
) -> None:
    with opened(volume, tmp_path / "staging", upload_limit="2MiB") as fs:
        fs.makedirs("d")
        for number in range(COUNT):
            with fs.open(f"d/{number:03}", "wb") as file:
                file.write(b"%d" % number * 5000)
        with fs.open("big", "wb") as file:
            file.write(os.urandom(2 << 20))
        check(fs)  # from the journal
        report = fs.drain(0.0)
        assert report.error is None
        assert report.durable or report.left_bytes >= 0
        assert fs.wait_durable("d/007")
        with Client(volume.meta, uid=0, gid=0, meta_timeout=PATIENCE_S) as other:
            assert bytes(other.read_many(["d/007"])[0]) == b"7" * 5000
            assert fs.drain(600).durable
            check(other)
            assert other.stat("big").st_size == 2 << 20
        assert fs.drain(600) == (True, 0, None)


def test_a_killed_writer_has_left_its_journal_to_the_next(tmp_path: Path, redis_url: str) -> None:
    staging = tmp_path / "staging"
    with new_volume(tmp_path / "vol", redis_url) as volume:
        words = [sys.executable, "-c", WRITER, volume.meta, str(staging), str(COUNT)]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "written\n"
            writer.send_signal(signal.SIGKILL)
        with opened(volume, staging) as fs:
            assert fs.wait_durable(timeout=600)
            check(fs)
        with Client(volume.meta, uid=0, gid=0) as other:
            check(other)
