"""`--log-format`, `--log-max-size` and the ids of requests, on real mounts."""

from __future__ import annotations

import json
import os

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

    wait_until("it begins anew", 60, is_rotated)
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
