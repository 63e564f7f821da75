"""`.accesslog`, `--access-log`, `--slow-op-log` and `--hide-internal` of real mounts."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fsclient.observe.access_line import Line, parse_line
from fsclient.observe.access_log import QUEUE_BYTES_MAX, AccessLog
from fsclient.observe.log_file import KEPT, LogFile
from fsmeta.runtime import SystemRuntime
from tests.faults.program import Volume, needs_mounts, slicefs, wait_until

SECRET = b"a-value-that-no-log-shows"


def _lines(text: str) -> list[Line]:
    found = [parse_line(line) for line in text.splitlines() if not line.startswith("#")]
    assert None not in found, text
    return [line for line in found if line is not None]


@needs_mounts
def test_accesslog_streams(embedded: Volume) -> None:
    """A reader sees what happens from its open on; it waits, a signal ends it, and it costs none
    of its lines to be read."""
    embedded.format()
    mount = embedded.mount()
    path = mount.path / ".accesslog"
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert ".accesslog" not in os.listdir(mount.path)
    seen = b""
    fd = os.open(path, os.O_RDONLY)
    try:
        file = mount.path / "file with ' and \n"
        file.write_bytes(b"x" * 1000)
        os.setxattr(file, "user.key", SECRET)
        with pytest.raises(FileNotFoundError):
            (mount.path / "absent").read_bytes()
        while b"absent" not in seen:
            seen += os.read(fd, 100)  # lines are longer: a read may end within one
        while not seen.endswith(b"\n"):
            seen += os.read(fd, 100)
    finally:
        os.close(fd)
    lines = _lines(seen.decode())
    (created,) = (line for line in lines if line.verb == "create")
    assert (created.uid, created.pid, created.outcome) == (0, os.getpid(), "OK")
    assert created.number == file.stat().st_ino
    (written,) = (line for line in lines if line.verb == "write")
    assert (written.ino, written.number) == (file.stat().st_ino, 1000)
    assert any(line.verb == "lookup" and line.name == "absent" for line in lines)
    assert SECRET not in seen
    assert len({line.request for line in lines}) == len(lines)
    reader = subprocess.Popen([sys.executable, "-c", f"open({str(path)!r}, 'rb').read()"])
    wait_until("it reads", 60, lambda: mount.numbers()["accesslog_readers"] == 1)
    reader.send_signal(signal.SIGKILL)
    assert reader.wait(60) == -signal.SIGKILL
    wait_until("it is gone", 60, lambda: mount.numbers()["accesslog_readers"] == 0)
    assert mount.numbers()["accesslog_dropped_total"] == 0
    embedded.end()


@needs_mounts
def test_accesslog_ends_with_the_mount(embedded: Volume) -> None:
    """A signal unmounts although there is a reader, which ends as well."""
    embedded.format()
    mount = embedded.mount()
    command = [sys.executable, "-c", f"open({str(mount.path / '.accesslog')!r}, 'rb').read()"]
    reader = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until("it reads", 60, lambda: mount.numbers()["accesslog_readers"] == 1)
    os.kill(mount.pid, signal.SIGTERM)
    reader.wait(60)
    wait_until("it has ended", 60, mount.has_ended)
    embedded.end(expected="busy|detaching")


@needs_mounts
def test_access_log_file_and_slow_operations(embedded: Volume) -> None:
    embedded.format()
    file = embedded.base / "access"
    mount = embedded.mount("--access-log", str(file), "--slow-op-log", "0.001")
    (mount.path / "name").write_bytes(b"x")
    wait_until("it is told", 60, lambda: b"'name'" in file.read_bytes())
    assert mount.numbers()["slow_operations_total"] > 0
    mount.umount()
    assert file.stat().st_mode & 0o777 == 0o600
    lines = _lines(file.read_text())
    assert {"create", "write", "flush"} <= {line.verb for line in lines}
    slow = [line for line in embedded.log_lines() if "slow operation: " in line]
    assert any("create (1,b'name'" in line and ",req:" in line for line in slow)
    embedded.end(expected="slow operation")


@needs_mounts
def test_hidden(embedded: Volume) -> None:
    """The names are as any others then."""
    embedded.format()
    mount = embedded.mount("-o", "hide-internal")
    assert not (mount.path / ".stats").exists()
    (mount.path / ".accesslog").write_bytes(b"mine")
    assert os.listdir(mount.path) == [".accesslog"]
    embedded.end()


@needs_mounts
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--access-log", "/nonexistent/file"), "can't write the access log /nonexistent/file"),
        (("--slow-op-log", "0"), "--slow-op-log"),
        (("--metrics", "here"), "--metrics 'here': write HOST:PORT"),
    ],
)
def test_bad_options(embedded: Volume, words: tuple[str, str], told: str) -> None:
    embedded.format()
    path = embedded.base / "mnt"
    path.mkdir()
    refused = slicefs("mount", "--cache-dir", "none", embedded.meta, path, *words)
    assert refused.code in (1, 2)
    assert told in refused.err.splitlines()[-1]
    embedded.end()


def test_a_reader_that_is_too_slow_loses_lines_and_is_told() -> None:
    access = AccessLog(SystemRuntime())
    queue = access.subscribe()
    line = b"x" * 1023 + b"\n"
    for _ in range(QUEUE_BYTES_MAX // len(line) + 3):
        queue.put(line)
    assert access.numbers()["accesslog_dropped_total"] == 3
    assert len(queue.read(QUEUE_BYTES_MAX)) == QUEUE_BYTES_MAX
    queue.put(b"next\n")
    assert queue.read(1000) == b"# 3 lines dropped: the reader was too slow\nnext\n"


def test_files_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"

    def reopen(name: str) -> int:
        return os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    file = LogFile(str(path), reopen(str(path)), 100, reopen)
    for number in range(40):
        file.write(b"%039d\n" % number)
    os.close(file.fd)
    names = sorted(os.listdir(tmp_path))
    assert names == ["log", *(f"log.{n}" for n in range(1, KEPT + 1))]
    kept = b"".join((tmp_path / name).read_bytes() for name in [*names[:0:-1], "log"])
    assert kept == b"".join(b"%039d\n" % n for n in range(28, 40)), "two lines a file, in order"


@needs_mounts
def test_umount_does_not_wait_for_readers(embedded: Volume) -> None:
    """They find the end of the stream; a file that is open keeps the mount busy, as ever."""
    embedded.format()
    mount = embedded.mount()
    with subprocess.Popen(["cat", mount.path / ".accesslog"], stdout=subprocess.DEVNULL) as reader:
        wait_until("a reader", 60, lambda: mount.numbers()["accesslog_readers"] == 1)
        with (mount.path / "file").open("wb"):
            busy = slicefs("umount", mount.path)
            assert busy.code == 1
            assert "it is in use" in busy.err
        assert reader.wait(60) == 0
    with subprocess.Popen(["cat", mount.path / ".accesslog"], stdout=subprocess.DEVNULL) as reader:
        wait_until("a reader", 60, lambda: mount.numbers()["accesslog_readers"] == 1)
        mount.umount()
        assert reader.wait(60) == 0
    embedded.end()
