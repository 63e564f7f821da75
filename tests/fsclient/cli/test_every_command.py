"""V: each command alike: help with examples that parse, `--json`, and how it ends when it can't.

The table below names, for each command, what a user would type; a command that is missing there
fails the first test, so that a new one can't be forgotten.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from fsclient.cli import main
from tests.faults.program import Volume, needs_mounts, slicefs, succeed
from tests.fsdata.stores import fresh_name
from tests.slicefs.checkpoint.test_lifecycle import DCP
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster

Capture = pytest.CaptureFixture[str]
CODES = {"fsck": {1: 8, 2: 16, 130: 32}}  # fsck(8)'s
# {meta} is a metadata URL, {dir} a directory that is on no mount
ON_VOLUMES = {
    "mount": "{meta} {dir}",
    "status": "{meta}",
    "config": "{meta}",
    "qos set": "{meta} --path / --read 1GiB",
    "qos get": "{meta} --path /",
    "qos list": "{meta}",
    "qos delete": "{meta} --path /",
    "quota set": "{meta} --path / --capacity 1TiB",
    "quota get": "{meta} --path /",
    "quota list": "{meta}",
    "quota delete": "{meta} --path /",
    "quota check": "{meta}",
    "fsck": "{meta}",
    "scrub": "{meta}",
    "gc": "{meta}",
    "rekey": "{meta} --to-passphrase",
    "restore": "{meta}",
    "dump": "{meta} {dir}/dump",
    "destroy": "{meta} vol --yes",
    "sync": "{meta}#a {dir}/b",
}
ON_MOUNTS = {
    "umount": "{dir}",
    "clone": "{dir} {dir}/copy",
    "snapshot create": "{dir}",
    "snapshot list": "{dir}",
    "snapshot delete": "{dir} v1",
    "flush": "{dir}",
    "warmup": "{dir}",
    "stats": "{dir}",
    "top": "{dir}",
    "profile": "{dir}",
    "info": "{dir}",
    "compact": "{dir}",
    "doctor": "{dir}",
    "upgrade": "{dir}",
}
ELSEWHERE = (  # trees of any kind, new volumes, or nothing at all
    "format", "load", "restore-meta", "objbench", "rmr", "summary", "bench", "mdtest", "version",
    "ckpt clean", "ckpt verify", "ckpt unshard", "ckpt move", "ckpt export", "ckpt map",
    "ckpt pipeline", "export", "attach",
)  # fmt: skip
ALONE = ("version",)  # needs no argument
BY_OPTIONS = ("warmup", "flush", "objbench")  # what they want may come in other ways


def _commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command that does something, by the words that call it."""
    top = click.Context(main.commands, info_name="slicefs")
    for name in main.commands.list_commands(top):
        command = main.commands.get_command(top, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=top)
        if not isinstance(command, click.Group):
            yield name, command, context
            continue
        for inner in command.list_commands(context):
            below = command.get_command(context, inner)
            assert below is not None
            yield f"{name} {inner}", below, click.Context(below, info_name=inner, parent=context)


EVERY = {words: (command, context) for words, command, context in _commands()}


def _typed(words: str, text: str) -> list[str]:
    return [*words.split(), *shlex.split(text)]


def run_typed(words: str, text: str) -> int:
    """The exit code of a command; a mount wants the descriptors of a process of its own."""
    if words != "mount":
        return main.run(_typed(words, text))
    done = slicefs(*_typed(words, text))
    print(done.out, end="")
    print(done.err, end="", file=sys.stderr)
    return done.code


def say_one_line(code: int, expected: int, words: str, capsys: Capture) -> str:
    """What a command said that failed: one line, without a traceback."""
    said = capsys.readouterr()
    assert code == CODES.get(words, {}).get(expected, expected), said
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("slicefs: "), said.err
    assert said.out == "", said.out
    return said.err


def test_the_table_has_every_command() -> None:
    assert {*EVERY} == {*ON_VOLUMES, *ON_MOUNTS, *ELSEWHERE}


@pytest.fixture(autouse=True)
def _passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLICEFS_PASSPHRASE", "old")
    monkeypatch.setenv("SLICEFS_NEW_PASSPHRASE", "new")


@pytest.mark.parametrize("words", EVERY)
def test_help_ends_with_examples_that_parse(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda _self, value, *_: value)  # they are not here
    command, _ = EVERY[words]
    lines = (command.epilog or "").splitlines()
    assert lines[:2] == ["\b", "Examples:"], "fsclient/cli/options/examples.py makes them"
    found = [line.strip() for line in lines[2:]]
    assert 2 <= len(found) <= 3
    for line in found:
        calls = [part.strip() for part in line.split("|") if "slicefs" in part]
        for call in calls:
            typed = shlex.split(call.removeprefix("sudo "))
            assert typed[: len(words.split()) + 1] == ["slicefs", *words.split()], line
            command.make_context(words, typed[len(words.split()) + 1 :], resilient_parsing=False)


@pytest.mark.parametrize("words", EVERY)
def test_each_tells_scripts(words: str) -> None:
    command, _ = EVERY[words]
    options = [each for each in command.params if "--json" in each.opts]
    assert [each.get_help_record(EVERY[words][1]) is not None for each in options] == [True]


@pytest.mark.parametrize("words", [words for words in EVERY if words not in ALONE])
def test_without_arguments_it_says_what_is_missing(words: str, capsys: Capture) -> None:
    code = main.run(words.split())
    said = say_one_line(code, 1 if words in BY_OPTIONS and code == 1 else 2, words, capsys)
    assert f"see `slicefs {words} --help`" in said or "name " in said


@pytest.mark.parametrize("words", ON_VOLUMES)
def test_where_there_is_no_volume(words: str, tmp_path: Path, capsys: Capture) -> None:
    """A SQLite file that is not there; it is not made, either."""
    meta = f"sqlite://{tmp_path}/none.db"
    code = run_typed(words, ON_VOLUMES[words].format(meta=meta, dir=tmp_path))
    said = say_one_line(code, 1, words, capsys)
    assert "none.db" in said
    assert [each.name for each in tmp_path.iterdir()] == []


@pytest.mark.parametrize("words", ON_VOLUMES)
def test_where_the_metadata_store_is_away(words: str, tmp_path: Path, capsys: Capture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # bound, and nobody listens
        meta = f"redis://:s3cr3t@127.0.0.1:{port}/0"
        code = run_typed(words, ON_VOLUMES[words].format(meta=meta, dir=tmp_path))
    said = say_one_line(code, 1, words, capsys)
    assert f"127.0.0.1:{port}" in said
    assert "s3cr3t" not in said


@pytest.mark.parametrize("words", ON_MOUNTS)
def test_where_there_is_no_mount(words: str, tmp_path: Path, capsys: Capture) -> None:
    code = run_typed(words, ON_MOUNTS[words].format(dir=tmp_path))
    said = say_one_line(code, 1, words, capsys)
    assert str(tmp_path) in said


INTERRUPTED = """
import os, signal, sys
from fsclient.cli import main
from fsmeta.store import sqlite
inner = sqlite.SqliteStore.{verb}
def stop(*args, **words):
    os.kill(os.getpid(), signal.SIGINT)
    return inner(*args, **words)
sqlite.SqliteStore.{verb} = stop
sys.exit(main.run(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> str:
    base = tmp_path_factory.mktemp("volume")
    meta = f"sqlite://{base}/meta.db"
    succeed("format", meta, "vol", "--bucket", base / "data")
    return meta


@pytest.mark.parametrize("words", ["fsck", "gc", "scrub", "dump"])
def test_ctrl_c_in_the_middle(words: str, volume: str, tmp_path: Path) -> None:
    """It comes while the metadata is asked: one line, its exit code, and the volume is well."""
    text = ON_VOLUMES[words].format(meta=volume, dir=tmp_path)
    script = INTERRUPTED.format(verb="read")
    done = subprocess.run(
        [sys.executable, "-c", script, *_typed(words, text)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "SLICEFS_TRACEBACK": ""},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        check=False,
    )
    assert done.returncode == CODES.get(words, {}).get(130, 130), done
    assert done.stderr == "\nslicefs: interrupted\n", done  # behind what the terminal echoes
    assert main.run(["fsck", volume]) == 0


Subject = dict[str, str | list[str]]
# What each prints with --json: the words, and which of them it repeats as its subject. They are run
# in this order; {mnt} is a mount of {meta}, {base} a directory beside it.
TOLD: tuple[tuple[str, str, Subject], ...] = (
    ("format", "{meta} testvol --bucket {base}/bucket", {"meta": "{meta}"}),
    ("mount", "-d --log {base}/log --cache-dir none --access-log {base}/access {meta} {mnt}",
     {"meta": "{meta}", "mountpoint": "{mnt}"}),
    ("status", "{meta}", {"meta": "{meta}"}),
    ("config", "{meta} --trash-days 2", {"meta": "{meta}"}),
    ("qos set", "{meta} --path /d --write 1GiB", {"meta": "{meta}", "path": "/d"}),
    ("qos get", "{meta} --path /d", {"meta": "{meta}", "path": "/d"}),
    ("qos list", "{meta}", {"meta": "{meta}"}),
    ("qos delete", "{meta} --path /d", {"meta": "{meta}"}),
    ("quota set", "{meta} --path /d --capacity 1GiB", {"meta": "{meta}", "path": "/d"}),
    ("quota get", "{meta} --path /d", {"meta": "{meta}", "path": "/d"}),
    ("quota list", "{meta}", {"meta": "{meta}"}),
    ("quota check", "{meta}", {"meta": "{meta}"}),
    ("quota delete", "{meta} --path /d", {"meta": "{meta}"}),
    ("restore", "{meta}", {"meta": "{meta}"}),
    ("restore", "{meta} --path /gone --put-back", {"meta": "{meta}", "path": "/gone"}),
    ("info", "-r {mnt}/d/file", {"path": "{mnt}/d/file"}),
    ("summary", "{mnt}/d", {"path": "{mnt}/d"}),
    ("flush", "{mnt}/d", {"paths": ["{mnt}/d"]}),
    ("warmup", "{mnt}/d/file --check", {"path": "{mnt}/d/file"}),
    ("compact", "{mnt}/d", {"paths": ["{mnt}/d"]}),
    ("clone", "{mnt}/d {mnt}/e", {"source": "{mnt}/d", "target": "{mnt}/e"}),
    ("snapshot create", "{mnt}/d v1", {"path": "{mnt}/d"}),
    ("snapshot list", "{mnt}/d", {"path": "{mnt}/d"}),
    ("snapshot delete", "{mnt}/d v1", {"path": "{mnt}/d"}),
    ("rmr", "{mnt}/e", {"paths": ["{mnt}/e"]}),
    ("sync", "{mnt}/d/ {base}/copy/", {"source": "{mnt}/d/", "target": "{base}/copy/"}),
    ("stats", "{mnt} --interval 0.1 --count 1", {"mountpoint": "{mnt}"}),
    ("top", "{mnt} --interval 0.1 --count 1", {"mountpoint": "{mnt}"}),
    ("profile", "{base}/access", {"source": "{base}/access"}),
    ("bench", "{mnt} --big-file-size 64KiB --small-file-count 1", {"path": "{mnt}"}),
    ("mdtest", "{mnt} --depth 0 --files 1", {"path": "{mnt}"}),
    ("doctor", "{mnt} --out {base}/report.tar.gz", {"mountpoint": "{mnt}"}),
    ("umount", "{mnt}", {"mountpoint": "{mnt}"}),
    ("fsck", "{meta} --path /d", {"meta": "{meta}", "paths": ["/d"]}),
    ("scrub", "{meta} /d", {"meta": "{meta}", "paths": ["/d"]}),
    ("gc", "{meta}", {"meta": "{meta}"}),
    ("dump", "{meta} {base}/dump", {"meta": "{meta}", "file": "{base}/dump"}),
    ("load", "{meta}.copy {base}/dump", {"meta": "{meta}.copy", "file": "{base}/dump"}),
    ("restore-meta", "{meta}.new testvol --bucket {base}/bucket --list", {"meta": "{meta}.new"}),
    ("objbench", "--bucket {base}/objects --blocks 1 --small-objects 1 --skip-functional-tests",
     {"storage": "file", "bucket": "{base}/objects"}),
    ("version", "", {}),
    ("destroy", "{meta} testvol --yes --sole", {"meta": "{meta}"}),
)  # fmt: skip
LIBRARY_TOLD: tuple[tuple[str, str, Subject], ...] = (
    ("ckpt verify", "{base}/run", {"paths": ["{base}/run"]}),
    ("ckpt unshard", "{base}/run {base}/out", {"source": "{base}/run", "target": "{base}/out"}),
    ("ckpt export", "{base}/run {base}/plain", {"source": "{base}/run", "target": "{base}/plain"}),
    ("ckpt map", "--table {base}/table {base}/run", {"{base}/run": "team/run"}),
    ("ckpt move", "-n {base}/run {base}/new", {"source": "{base}/run", "target": "{base}/new"}),
    ("ckpt move", "{base}/run {base}/new", {"source": "{base}/run", "target": "{base}/new"}),
    ("export", "-n {base}/new {base}/copy", {"source": "{base}/new", "target": "{base}/copy"}),
    ("export", "{base}/new {base}/copy", {"source": "{base}/new", "target": "{base}/copy"}),
    ("ckpt pipeline", "-n {base}/plan", {"path": "{base}/plan"}),
    ("ckpt pipeline", "{base}/plan", {"path": "{base}/plan"}),
    ("ckpt clean", "-n {base}/new", {"paths": ["{base}/new"]}),
    ("ckpt clean", "{base}/new", {"paths": ["{base}/new"]}),
    ("attach", "s3://{bucket}/t {meta}#data", {"source": "s3://{bucket}/t", "path": "{meta}#data"}),
)
# on an encrypted volume, and a mount with a supervisor
GUARDED_TOLD: tuple[tuple[str, str, Subject], ...] = (
    ("upgrade", "{mnt}", {"mountpoint": "{mnt}"}),
    ("rekey", "{meta} --to-passphrase", {"meta": "{meta}"}),
)
SIZES = re.compile(r"(^|_)(bytes|size|space|capacity|space_used|space_limit)$")
TIMES = {"created", "started", "deleted_at"}
OTHER_UNITS = re.compile(r"(^|_)(ms|us|ns|millis\w*|micros\w*|[kmgt]i?b|[kmg]ib_s|per_s|s)$")
WITH_UNIT = re.compile(r"\d+(\.\d+)? ?([KMGTP]i?B|B|ms|µs|s)")


def _alike(value: Any, name: str = "") -> None:
    """Sizes are whole bytes, durations seconds, points in time Unix seconds; no text has a unit."""
    assert not OTHER_UNITS.search(name), name
    if isinstance(value, dict):
        for key, inner in value.items():
            _alike(inner, key)
    elif isinstance(value, list):
        for inner in value:
            _alike(inner, name)
    elif isinstance(value, str):
        assert not WITH_UNIT.fullmatch(value), (name, value)
    elif SIZES.search(name):
        assert type(value) is int, (name, value)
    elif name.endswith("seconds") and value is not None:
        assert type(value) in (int, float), (name, value)
    elif name in TIMES:
        assert value > 1_600_000_000, (name, value)


def _objects(text: str) -> list[dict[str, Any]]:
    """One object, or one on each line."""
    try:
        found = [json.loads(text)]
    except ValueError:
        found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        assert isinstance(each, dict), text
    return found


def _require_told(
    found: list[dict[str, Any]], subject: Subject, places: dict[str, str | Path]
) -> None:
    """The objects name their subject as it was typed, and are like all others."""
    for key, value in subject.items():
        if isinstance(value, list):
            expected: object = [each.format(**places) for each in value]
        else:
            expected = value.format(**places)
        assert found[0][key.format(**places)] == expected, found
    for each in found:
        _alike(each)


@needs_mounts
def test_all_tell_scripts_alike(embedded: Volume, capfd: Capture) -> None:
    """Each command is run; its JSON names what it was about, and has the units of all others."""
    assert {*EVERY} == {words for words, _, _ in (*TOLD, *LIBRARY_TOLD, *GUARDED_TOLD)}
    mnt = embedded.base / "mnt"
    mnt.mkdir()
    places: dict[str, str | Path] = {"meta": embedded.meta, "base": embedded.base, "mnt": mnt}
    for words, text, subject in TOLD:
        typed = [*_typed(words, text.format(**places)), "--json"]
        if words == "mount":
            out = succeed(*typed)
        else:
            assert main.run(typed) == 0, (words, capfd.readouterr())
            out = capfd.readouterr().out
        _require_told(_objects(out), subject, places)
        if words == "mount":
            (mnt / "d").mkdir()
            (mnt / "d" / "file").write_bytes(b"x" * 5000)
            (mnt / "gone").write_bytes(b"x")
        if words == "config":
            (mnt / "gone").unlink()


@needs_mounts
def test_commands_on_guarded_volumes_tell_scripts_alike(
    embedded: Volume, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLICEFS_PASSPHRASE", "SLICEFS_NEW_PASSPHRASE"):
        monkeypatch.setenv(name, f"{name} of the test")
    embedded.format("--encrypt-passphrase")
    mount = embedded.mount("--supervisor")
    places: dict[str, str | Path] = {"meta": embedded.meta, "mnt": mount.path}
    for words, text, subject in GUARDED_TOLD:
        assert main.run([*_typed(words, text.format(**places)), "--json"]) == 0, words
        _require_told(_objects(capfd.readouterr().out), subject, places)
    mount.umount()
    monkeypatch.setenv("SLICEFS_PASSPHRASE", os.environ["SLICEFS_NEW_PASSPHRASE"])
    embedded.end()


def test_commands_of_the_library_tell_scripts_alike(
    ceph: CephCluster, embedded: Volume, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.format()
    base, bucket = embedded.base, fresh_name()
    (base / "run" / "wandb" / "run-20260101_000000-ipzq9ab9").mkdir(parents=True)
    (base / "run" / "config.yaml").write_bytes(b"text")
    with zipfile.ZipFile(DCP) as archive:
        archive.extractall(base / "run" / "step20")
    (base / "table").write_text('{"ipzq9ab9": "team/run"}')
    (base / "plan").write_text(f'target = "{base}/target"\nruns = ["{base}/new"]\n')
    ceph.make_bucket(bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", ceph.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    places: dict[str, str | Path] = {"meta": embedded.meta, "base": base, "bucket": bucket}
    for words, text, subject in LIBRARY_TOLD:
        code = main.run([*_typed(words, text.format(**places)), "--json"])
        said = capfd.readouterr()
        assert code == 0, (words, said)
        _require_told(_objects(said.out), subject, places)
    embedded.end()
