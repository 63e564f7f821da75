"""`--log-format`, `--log-max-size` and the ids of requests, on real mounts."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from fsclient.observe.log_file import LogFile
from tests.faults.program import Volume, needs_mounts, slicefs, wait_until


@needs_mounts
def test_json_lines_with_request_ids(embedded: Volume) -> None:
    """A file whose object is lost is EIO; the error names its request."""
    embedded.format()
    mount = embedded.mount("--log-format", "json", "--slow-op-log", "0.001")
    (mount.path / "file").write_bytes(os.urandom(100_000))
    mount.umount()
    records = [json.loads(line) for line in embedded.log_lines()]
    assert {"time", "level", "logger", "pid", "thread", "message"} <= set(records[0])
    assert any("mounted on" in record["message"] for record in records)
    slow = [record for record in records if record["message"].startswith("slow operation")]
    assert slow[0]["level"] == "WARNING"
    assert all(f",req:{record['request']}]" in record["message"] for record in slow)
    assert all("request" not in record for record in records if record["level"] == "INFO")
    embedded.end()


@needs_mounts
def test_a_log_begins_anew(embedded: Volume) -> None:
    """Text, in the background: standard error goes along."""
    embedded.format()
    mount = embedded.mount("--log-max-size", "64KiB", "--slow-op-log", "0.001")
    older = embedded.log.with_name(embedded.log.name + ".1")

    def is_rotated() -> bool:
        (mount.path / "file").write_bytes(b"x")
        return older.exists()

    wait_until("it starts again", 60, is_rotated)
    now = embedded.log.stat()
    for fd in (1, 2):
        told = os.stat(f"/proc/{mount.pid}/fd/{fd}")
        assert (told.st_dev, told.st_ino) == (now.st_dev, now.st_ino)
    assert older.stat().st_size <= 64 << 10
    assert " [req " in older.read_text()
    embedded.end(expected="slow operation")


@needs_mounts
def test_no_file_to_begin_anew(embedded: Volume) -> None:
    embedded.format()
    path = embedded.base / "mnt"
    path.mkdir()
    words = ("mount", "--cache-dir", "none", embedded.meta, path)
    refused = slicefs(*words, "--log-max-size", "1MiB")
    assert refused.code == 1
    assert "name one with --log" in refused.err
    refused = slicefs(*words, "--log-max-size", "10")
    assert refused.code == 1
    assert "--log-max-size: at least 64KiB" in refused.err
    embedded.end()


def test_a_log_that_can_not_begin_anew_keeps_older_ones(tmp_path: Path) -> None:
    """Each line that was written moved them up by one, until none was left."""
    for number in (1, 2):
        (tmp_path / f"log.{number}").write_text(f"older {number}")
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def refuse(_path: str) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    file = LogFile(str(path), fd, 100, refuse)
    for number in range(12):
        file.write(b"line %02d\n" % number * 6)
    os.close(fd)
    assert path.read_bytes().count(b"\n") == 72
    assert (tmp_path / "log.1").read_text() == "older 1"
    assert (tmp_path / "log.2").read_text() == "older 2"
