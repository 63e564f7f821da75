"""`slicefs stats`, `top` and `profile`, run as users run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.program import SLICEFS, Mount, Volume, needs_mounts, slicefs, succeed, wait_until

DATA = b"x" * 300_000


def _start(*words: str | Path) -> subprocess.Popen[str]:
    """A command that runs until it is ended."""
    return subprocess.Popen(
        [SLICEFS, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _reads(mount: Mount) -> bool:
    return mount.numbers()["accesslog_readers"] == 1


@needs_mounts
def test_stats(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    command = _start("stats", mount.path, "--interval", "0.2", "--json")
    assert command.stdout is not None
    rows: list[Any] = [json.loads(command.stdout.readline())]
    (mount.path / "file").write_bytes(DATA)
    while rows[-1]["write_bytes_per_second"] == 0:
        rows.append(json.loads(command.stdout.readline()))
    assert rows[-1]["operations_per_second"] > 0
    assert rows[-1]["mountpoint"] == str(mount.path)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, ""), "Ctrl-C is its usual end"
    lines = succeed("stats", mount.path, "--interval", "0.1", "--count", "2").splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:3] == ["ops/s", "err/s", "ms/op"]
    command = _start("stats", mount.path, "--interval", "0.1")
    assert command.stdout is not None
    assert command.stdout.readline()
    subprocess.run(["umount", "-l", mount.path], check=True)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, f"slicefs: {mount.path} is no longer mounted\n")
    wait_until("it has ended", 60, mount.has_ended)
    embedded.end()


@needs_mounts
def test_profile_of_a_mount_and_of_a_file(embedded: Volume) -> None:
    embedded.format()
    file = embedded.base / "access"
    mount = embedded.mount("--access-log", str(file))
    command = _start("profile", mount.path, "--json")
    wait_until("it reads", 60, lambda: mount.numbers()["accesslog_readers"] == 2)
    for number in range(5):
        (mount.path / f"file{number}").write_bytes(b"x")
    with pytest.raises(FileNotFoundError):
        (mount.path / "absent").read_bytes()
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, "")
    mount.umount()
    live = {each["verb"]: each for each in json.loads(out)["verbs"]}
    told = json.loads(succeed("profile", file, "--json"))
    whole = {each["verb"]: each for each in told["verbs"]}
    for verbs in (live, whole):
        assert verbs["create"]["count"] == 5
        assert verbs["create"]["errors"] == 0
        assert verbs["lookup"]["errors"] <= verbs["lookup"]["count"]
        assert verbs["create"]["total_seconds"] >= verbs["create"]["average_seconds"] > 0
    lines = succeed("profile", file, "--pid", str(os.getpid())).splitlines()
    assert lines[0].split()[0] == "verb"
    assert any(line.split()[:3] == ["create", "5", "0"] for line in lines)
    assert len(succeed("profile", file, "--uid", "12345").splitlines()) == 1
    embedded.end()


@needs_mounts
def test_top(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    for by, key in (("pid", os.getpid()), ("uid", 0)):
        command = _start("top", mount.path, "--by", by, "--interval", "0.2", "--json")
        wait_until("it reads", 60, lambda: _reads(mount))
        (mount.path / "file").write_bytes(DATA)
        assert command.stdout is not None
        found: list[Any] = []
        while not found:
            rows = json.loads(command.stdout.readline())["rows"]
            found = [row for row in rows if row[by] == key and row["write_bytes"]]
        assert found[0]["requests"] > 0
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        assert (command.returncode, err) == (0, "")
        wait_until("it has left", 60, lambda: not mount.numbers()["accesslog_readers"])
    command = _start("top", mount.path, "--by", "file", "--interval", "0.2")
    wait_until("it reads", 60, lambda: _reads(mount))
    (mount.path / "another").write_bytes(DATA)
    assert command.stdout is not None
    line = ""
    while not line.endswith("  another\n"):
        line = command.stdout.readline()
    assert line.split()[0] == str((mount.path / "another").stat().st_ino)
    os.kill(mount.pid, signal.SIGTERM)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, f"slicefs: {mount.path} is no longer mounted\n")
    wait_until("it has ended", 60, mount.has_ended)
    embedded.end(expected="busy|detaching")


@pytest.mark.parametrize("name", ["stats", "top", "profile"])
def test_no_mount(name: str, tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "absent"), ""):
        refused = slicefs(name, path)
        assert refused.code == 1, refused
        assert len(refused.err.splitlines()) == 1
        assert "is no mount point" in refused.err
    text = succeed(name, "--help")
    assert text.count(f"  slicefs {name} ") == 2, "two examples"


def test_profile_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("this is no access log\n")
    refused = slicefs("profile", tmp_path / "file")
    assert (refused.code, len(refused.err.splitlines())) == (1, 1)
    assert "has no line of an access log" in refused.err
