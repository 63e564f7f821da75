"""`slicefs fsck` by path, and one that is killed and goes on from its notes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fsmeta.rules import quota
from fsmeta.schema import inode, keys
from fsmeta.types import Ino
from tests.faults.program import Volume, needs_mounts, slicefs, succeed, wait_until

KILLED = """
import os, signal, sys
from fsclient.cli import main
from fsdata.objects import file
from fsmeta.check import kept_table
from fsmeta.store import sqlite
kept_table.SAVE_EVERY_S = 0
calls, die_at = [0], int(sys.argv.pop(1))
inner, listing = sqlite.SqliteStore.scan_rows, file.FileObjects.list
def tick():
    calls[0] += 1
    if calls[0] == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
def scan_rows(self, prefix, cursor=b"", limit=10):
    tick()
    return inner(self, prefix, cursor, 10)
def list_objects(self, prefix, after=""):
    for each in listing(self, prefix, after):
        tick()
        yield each
sqlite.SqliteStore.scan_rows, file.FileObjects.list = scan_rows, list_objects
import fsclient.upkeep.verify_objects as verify
verify._TELL_EVERY = 10
code = main.run(sys.argv[1:])
print(calls[0], file=sys.stderr)
sys.exit(code)
"""
FILES = 60


def _fsck(die_at: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A run that is killed at its call number `die_at` of the stores, and prints their number."""
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(die_at), "fsck", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _fill(volume: Volume) -> None:
    volume.format()
    mount = volume.mount("--pack-below", "0")
    for number in range(FILES):
        folder = mount.path / f"d{number % 6}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(b"x" * number)
    mount.umount()


@needs_mounts
def test_a_killed_check_goes_on(embedded: Volume, tmp_path: Path) -> None:
    """Each run is killed some calls later than the last; together they read all of it once."""
    _fill(embedded)
    missing = embedded.objects()[0]
    aside = missing.with_name("aside")
    missing.rename(aside)
    whole = _fsck(0, embedded.meta, "--json")
    assert whole.returncode == 4
    calls = int(whole.stderr)
    notes = str(tmp_path / "notes")
    words = (embedded.meta, "--json", "--cursor", notes)
    kills = 0
    while (done := _fsck(calls // 5, *words)).returncode == -signal.SIGKILL:
        kills += 1
        assert kills < 20, "each run goes on behind the last one"
    assert kills >= 3
    assert json.loads(done.stdout) == json.loads(whole.stdout)
    assert list(tmp_path.iterdir()) == [], "the notes go when the check is through"
    aside.rename(missing)
    embedded.end()


@needs_mounts
def test_a_volume_that_was_used_is_checked_anew(embedded: Volume, tmp_path: Path) -> None:
    _fill(embedded)
    notes = str(tmp_path / "notes")
    assert _fsck(12, embedded.meta, "--cursor", notes).returncode == -signal.SIGKILL
    assert os.path.exists(notes)
    assert os.stat(notes).st_mode & 0o777 == 0o600
    mount = embedded.mount()
    (mount.path / "d0" / "f0").unlink()
    mount.umount()
    told = json.loads(succeed("fsck", embedded.meta, "--json", "--cursor", notes))
    assert (told["problem_count"], told["inodes"]) == (0, FILES - 1 + 6 + 1)
    embedded.end()


@needs_mounts
def test_a_part_of_a_volume(embedded: Volume) -> None:
    """What is wrong elsewhere is not told; links that lead out of the part are no problem."""
    embedded.format()
    mount = embedded.mount("--pack-below", "0")
    (mount.path / "a" / "b").mkdir(parents=True)
    (mount.path / "c").mkdir()
    good, bad = mount.path / "a" / "b" / "good", mount.path / "c" / "bad"
    good.write_bytes(b"x" * 5000)
    before = set(embedded.objects())
    bad.write_bytes(b"y" * 5000)
    os.link(good, mount.path / "c" / "again")
    ino = bad.stat().st_ino
    mount.umount()
    (lost,) = set(embedded.objects()) - before
    data = lost.read_bytes()
    lost.unlink()
    told = json.loads(succeed("fsck", "--path", "/a", embedded.meta, "--json"))
    assert (told["paths"], told["inodes"], told["objects"]) == (["/a"], 3, 1)
    done = slicefs("fsck", "--path", "/c", embedded.meta)
    assert (done.code, done.err) == (4, f"problem: object {_key(lost)} is missing: /c/bad\n")
    lost.write_bytes(data[:-1] + b"z")
    assert slicefs("fsck", "--path", "/c", embedded.meta).code == 0
    done = slicefs("fsck", "--data", "--path", "/c/bad", embedded.meta)
    assert (done.code, done.err.endswith(": /c/bad\n")) == (4, True)
    lost.write_bytes(data)
    row = keys.inode_row(Ino(ino))
    right = embedded.value(row, keys.VOLATILE_FIELD)
    attr = inode.unpack_inode(Ino(ino), embedded.value(row, keys.ATTR_FIELD), right)
    embedded.set_value(row, keys.VOLATILE_FIELD, inode.pack_volatile(attr._replace(nlink=7)))
    assert slicefs("fsck", "--path", "/a", embedded.meta).code == 0
    done = slicefs("fsck", "--path", "/c", embedded.meta)
    assert f"inode {ino}: has 7 links" in done.err
    embedded.set_value(row, keys.VOLATILE_FIELD, right)
    embedded.end()


@needs_mounts
def test_quotas_of_a_part_of_a_volume(embedded: Volume) -> None:
    """Counters of directories are compared, by nested paths, too; what is elsewhere is not told."""
    embedded.format()
    mount = embedded.mount()
    deep, other = mount.path / "a" / "b" / "c", mount.path / "other"
    deep.mkdir(parents=True)
    other.mkdir()
    for path in ("/a/b", "/other"):
        succeed("quota", "set", embedded.meta, "--path", path, "--capacity", "1GiB")
    wait_until("all is counted", 100, lambda: embedded.status()["volume"]["accounting"] == "on")
    (deep / "file").write_bytes(b"x" * 5000)
    (other / "file").write_bytes(b"x" * 5000)
    os.link(deep / "file", other / "second")
    os.link(other / "file", deep / "third")
    inos = {path: os.stat(mount.path / path).st_ino for path in ("a", "a/b", "a/b/c")}
    mount.umount()
    everywhere = ("--path", "/a", "--path", "/a/b", "--path", "/other")
    succeed("fsck", embedded.meta, *everywhere)
    for path, ino in inos.items():
        field = quota.space_field(quota.dir_node(ino))
        right = embedded.value(keys.ACCOUNTS, field)
        embedded.set_value(keys.ACCOUNTS, field, b"4096")
        done = slicefs("fsck", embedded.meta, *everywhere)
        said = f"problem: space of directory {ino} says 4096, there are {int(right)}"
        assert (done.code, done.err) == (4, f"{said}\n"), path
        assert slicefs("fsck", embedded.meta, "--path", "/other").code == 0
        embedded.set_value(keys.ACCOUNTS, field, right)
    embedded.set_value(keys.LIMITED, quota.dir_node(inos["a"]), b"1")
    done = slicefs("fsck", embedded.meta, "--path", "/a")
    assert (done.code, "is listed as limited" in done.err) == (4, True)
    with closing(sqlite3.connect(embedded.base / "meta.db")) as database, database:
        where = (keys.LIMITED, quota.dir_node(inos["a"]))
        database.execute("DELETE FROM kv WHERE row = ? AND field = ?", where)
    embedded.end()


def _key(path: Path) -> str:
    return str(path)[str(path).index("/chunks/") + 1 :]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--path", "/none"), "/none is not in the volume: no such name"),
        (("--repair", "--path", "/"), "--repair is for the whole volume"),
        (("--cursor", "{base}/text"), "text is not of an fsck of this version: remove it"),
        (("--cursor", "{base}/no/notes"), "No such file or directory: name a file"),
        (("--cursor", "{base}/x", "--path", "/"), "--cursor is for the whole volume"),
    ],
)
def test_what_is_refused(embedded: Volume, words: tuple[str, ...], why: str) -> None:
    embedded.format()
    (embedded.base / "text").write_text("not a table" * 1000)
    done = slicefs("fsck", embedded.meta, *(word.format(base=embedded.base) for word in words))
    assert (done.code, done.err.count("\n"), done.out) == (16 if "for the" in why else 8, 1, "")
    assert why in done.err
