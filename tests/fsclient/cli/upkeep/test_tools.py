"""R1: `bench`, `mdtest`, `doctor`, `version` and `-q`, `-v`, as an operator runs them."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import click
import pytest

from fsclient.cli import main
from fsclient.mount.fstab import fstab_line, update_fstab
from fsclient.upkeep.doctor import cleaned
from fsmeta.errors import ConfigError
from tests.faults.program import Volume, needs_mounts, slicefs, succeed


@needs_mounts
def test_a_mount_is_measured_and_described(embedded: Volume, tmp_path: Path) -> None:
    embedded.format()
    mount = embedded.mount()
    words = ("--big-file-size", "2MiB", "--small-file-size", "4KiB", "--small-file-count", "5")
    table = succeed("bench", mount.path, *words).splitlines()
    assert table[0].split()[:2] == ["MiB/s", "ops/s"]
    assert [line[:16].strip() for line in table[1:]] == [
        "write big file",
        "read big file",
        "write small file",
        "read small file",
        "stat file",
    ]
    told = json.loads(succeed("mdtest", mount.path, "--depth", "1", "--files", "2", "--json"))
    counts = {each["what"]: each["operations"] for each in told["phases"]}
    assert (counts["mkdir"], counts["create"], counts["rename"]) == (16, 32, 32)
    assert os.listdir(mount.path) == []
    out = tmp_path / "report.tar.gz"
    with embedded.log.open("a") as log:
        log.write("redis://admin:hunter2@host/1 is away\n")
    words = ("--meta", embedded.meta, "--log", str(embedded.log), "--out", str(out))
    said = succeed("doctor", mount.path, *words)
    assert said.startswith(f"{out}: ")
    assert out.stat().st_mode & 0o777 == 0o600
    with tarfile.open(out) as tar:
        found = {each.name.partition("/")[2]: tar.extractfile(each) for each in tar}
        read = {name: file.read().decode() for name, file in found.items() if file is not None}
    assert json.loads(read["status.json"])["volume"]["name"] == "testvol"
    assert json.loads(read["config"])["mount"]["pid"] == mount.pid
    assert "slicefs_open_handles" in read["stats"]
    assert "VmRSS" in read["process/status"]
    assert "redis://***@host/1 is away" in read["log"]
    assert "hunter2" not in "".join(read.values())
    again = slicefs("doctor", mount.path, "--out", out)
    assert (again.code, "exists already" in again.err) == (1, True)
    embedded.end()


def test_secrets_are_replaced() -> None:
    text = "SECRET_KEY=abc access-key: 'AKIAABCDEFGHIJKLMNOP' tikv://h/p redis://:p%40w@h/1"
    assert cleaned(text) == "SECRET_KEY=*** access-key: '***' tikv://h/p redis://***@h/1"


def test_places_that_are_none(tmp_path: Path) -> None:
    assert "is no directory" in slicefs("bench", tmp_path / "none").err
    said = slicefs("doctor", tmp_path)
    assert (said.code, len(said.err.splitlines())) == (1, 1)
    assert "is no SliceFS mount" in said.err
    assert slicefs("-q", "-v", "version").code == 2


def test_version_tells_scripts() -> None:
    told = json.loads(succeed("-q", "version", "--json"))
    assert told["slicefs"]
    assert told["metadata_version"] >= 3
    assert told["kernel"] == os.uname().release


def test_new_commands_end_their_help_with_examples() -> None:
    context = click.Context(main.commands)
    names = (
        "rmr",
        "summary",
        "sync",
        "destroy",
        "bench",
        "mdtest",
        "doctor",
        "version",
        "info",
        "compact",
    )
    for name in (*names, "compact"):
        command = main.commands.get_command(context, name)
        assert command is not None
        assert command.epilog is not None
        assert command.epilog.count("\n  slicefs ") in (2, 3), name
        assert any("--json" in each.opts for each in command.params), name


@needs_mounts
def test_a_mount_gets_its_line_in_fstab(embedded: Volume, tmp_path: Path) -> None:
    """Once however often it is mounted; other lines stay, and a foreign one is never replaced."""
    embedded.format()
    fstab = tmp_path / "fstab"
    fstab.write_text("# mine\n/dev/sda1 / ext4 defaults 0 1\n")
    fstab.chmod(0o640)
    words = ("--update-fstab", "--fstab", str(fstab), "--backup-meta", "2h", "--no-supervisor")
    mount = embedded.mount(*words)
    lines = fstab.read_text().splitlines()
    assert lines[:2] == ["# mine", "/dev/sda1 / ext4 defaults 0 1"]
    assert lines[2:] == [
        f"{embedded.meta} {mount.path} slicefs log={embedded.log},backup-meta=7200,"
        "cache-dir=none,no-supervisor,_netdev,nofail 0 0"
    ]
    assert fstab.stat().st_mode & 0o777 == 0o640
    assert update_fstab(lines[2], str(fstab)) is False
    foreign = f"x {mount.path} ext4 defaults 0 0\n"
    fstab.write_text(foreign)
    with pytest.raises(ConfigError, match="has a ext4 file system on"):
        update_fstab(lines[2], str(fstab))
    assert fstab.read_text() == foreign
    with pytest.raises(ConfigError, match="has a password"):
        fstab_line("redis://:secret@host/1", "/mnt", ())
    assert fstab_line("redis://h/1", "/m n", ("ro",)) == (
        "redis://h/1 /m\\040n slicefs ro,_netdev,nofail 0 0"
    )
    refused = slicefs("mount", "--update-fstab", embedded.meta, mount.path)
    assert "for mounts in the background: add -d" in refused.err
    embedded.end()
