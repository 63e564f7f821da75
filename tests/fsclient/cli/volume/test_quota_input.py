"""Q1: bad input to `slicefs quota` and `slicefs config` is one clear line, and changes nothing."""

from __future__ import annotations

import json

import pytest

from tests.faults.program import Volume, needs_mounts, slicefs, succeed
from tests.fsclient.cli.test_bad_input import refused
from tests.fsclient.cli.trees import snapshot

NAMED = "name one of --path DIR, --uid USER and --gid GROUP: see `slicefs quota"
QUOTA = [
    ("set {meta} --inodes 1", f"{NAMED} set --help", 2),
    ("set {meta} --path /d --uid 1 --inodes 1", NAMED, 2),
    ("get {meta}", f"{NAMED} get --help", 2),
    ("delete {meta}", f"{NAMED} delete --help", 2),
    ("set {meta} --path /d", "name a limit: --capacity SIZE, --inodes N or both", 2),
    ("set {meta} --path /d --capacity much", "'--capacity': size 'much': write", 2),
    ("set {meta} --path /d --capacity 5", "'5' is 5 bytes: write a unit, as in 5GiB", 2),
    ("set {meta} --path /d --capacity -1", "'--capacity': size '-1': write", 2),
    ("set {meta} --path /d --inodes -1", "'--inodes': -1 is not in the range", 2),
    ("set {meta} --path /d --inodes 9999999999999999999", "'--inodes': 9999999.* not in the", 2),
    ("set {meta} --path d --inodes 1", "--path d: start with /", 1),
    ("set {meta} --path /none --inodes 1", "--path /none: no such name in the volume", 1),
    ("set {meta} --path /d/none/deeper --inodes 1", "no such name in the volume", 1),
    ("set {meta} --path /d/f --inodes 1", "f is no directory; limit one, a user", 1),
    ("set {meta} --path /d/f/x --inodes 1", "f is no directory; limit one, a user", 1),
    ("set {meta} --path /link --inodes 1", "link is no directory", 1),
    (
        "set {meta} --path / --inodes 1",
        "the whole volume has its limits by `slicefs config META",
        1,
    ),
    ("set {meta} --uid nobody-at-all --inodes 1", "nobody-at-all: no such name on this host", 1),
    ("set {meta} --gid -1 --inodes 1", "--gid -1: no such name on this host; use a number", 1),
    ("set {meta} --uid 4294967295 --inodes 1", "--uid 4294967295: at most 4294967294", 1),
    ("get {meta} --path /d", "no quotas yet, so nothing is counted: set one first", 1),
    ("delete {meta} --path /d", "/d has no quota: see `slicefs quota list`", 1),
    ("check {meta}", "no quotas: there is nothing to check", 1),
    ("check {meta} --repair", "no quotas: there is nothing to repair", 1),
    ("set", "Missing argument 'META': see `slicefs quota set --help`", 2),
    ("fly {meta}", "No such command 'fly'", 2),
    ("list sqlite:///none/x.db", "/none of the metadata file is not there|no such", 1),
]
CONFIG = [
    ("{meta} --capacity 99999", "'99999' is 99999 bytes: write a unit, as in", 2),
    ("{meta} --capacity much", "'--capacity': size 'much': write", 2),
    ("{meta} --inodes -3", "'--inodes': -3 is not in the range", 2),
    ("{meta} --frame-size 1KiB", "--frame-size: use a power of two from 4KiB to 64KiB", 1),
    ("{meta} --block-size 1MiB", "No such option.*--block-size", 2),
    ("", "Missing argument 'META': see `slicefs config --help`", 2),
]


@pytest.fixture
def volume(embedded: Volume) -> Volume:
    """With a directory, a file in it and a symlink."""
    embedded.format()
    mount = embedded.mount()
    (mount.path / "d").mkdir()
    (mount.path / "d/f").write_text("x")
    (mount.path / "link").symlink_to("d")
    mount.umount()
    return embedded


@needs_mounts
def test_quota(volume: Volume) -> None:
    before = snapshot(volume.base)
    settings = volume.status()
    for words, expected, code in QUOTA:
        refused(f"quota {words.format(meta=volume.meta)}", expected, code)
    for words, expected, code in CONFIG:
        refused(f"config {words.format(meta=volume.meta)}", expected, code)
    assert volume.status() == settings
    assert snapshot(volume.base).keys() == before.keys()
    volume.end()


@needs_mounts
def test_what_commands_print(volume: Volume) -> None:
    meta = volume.meta
    assert json.loads(succeed("quota", "list", meta, "--json"))["quotas"] == []
    succeed("quota", "set", meta, "--path", "/d/", "--capacity", "1MiB")
    succeed("quota", "set", meta, "--uid", "nobody", "--inodes", "10")
    table = succeed("quota", "list", meta).splitlines()
    assert [line.split()[0] for line in table] == ["QUOTA", "/d", "user"]
    both = json.loads(succeed("quota", "list", meta, "--json"))["quotas"]
    assert {each["type"] for each in both} == {"directory", "user"}
    assert json.loads(succeed("config", meta, "--inodes", "50", "--json"))["inodes"] == 50
    assert "50" in succeed("config", meta)
    assert json.loads(succeed("quota", "check", meta, "--json"))["quotas"][0]["state"] == "right"
    row, field = b"Q", b"d\0\0\0\0\0\0\0\2i"
    volume.set_value(row, field, b"77")
    done = slicefs("quota", "check", meta)
    assert done.code == 3
    assert "problem: /d: says 4096 bytes and 77 inodes, there are 4096 and 1; repair" in done.err
    assert slicefs("fsck", meta).code == 4
    assert "2 quotas, 0 wrong" in succeed("quota", "check", meta, "--repair")
    assert volume.value(row, field) == b"1"
    succeed("quota", "delete", meta, "--path", "/d")
    refused(f"quota delete {meta} --path /d", "/d has no quota")
    volume.end()
