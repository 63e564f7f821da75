"""V: Ctrl-C in the middle of commands that change a volume or a tree.

One line, exit code 130, and the same command completes what it had begun. `test_trouble` has those
that leave nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.faults.program import Volume, needs_mounts, slicefs, wait_until
from tests.fsclient.cli.test_trouble import interrupted
from tests.slicefs.checkpoint.test_lifecycle import DCP

FILES = 8
OLD, NEW = "the old passphrase", "the new passphrase"
COMMIT = "fsmeta.store.sqlite:SqliteStore.commit"
# {meta} is an encrypted volume whose directory `gone` is in the trash; it has quotas and a backup.
# The signal comes at the call of that number to what is named.
ON_VOLUMES = [
    ("restore", "{meta} --path /gone --put-back --threads 1", COMMIT, 3),
    ("quota check", "{meta}", "fsmeta.store.sqlite:SqliteStore.scan_rows", 1),
    ("quota check", "{meta} --repair", COMMIT, 2),
    ("restore-meta", "sqlite://{base}/new.db testvol --bucket {base}/bucket", COMMIT, 2),
    ("rekey", "{meta} --to-passphrase", COMMIT, 1),
]
# {base} has a sharded checkpoint in `run`, {other} is on another file system
ON_TREES = [
    ("ckpt unshard", "{base}/run {base}/out", "os:replace", 1),
    ("ckpt move", "{base}/run {other}/new", "os:replace", 2),
    ("ckpt move", "{other}/new {base}/newer", "os:unlink", 2),
]


def _interrupt(words: str, text: str, place: str, turn: int) -> None:
    done = interrupted(place, words, text, turn)
    assert done.returncode == 130, (words, done)
    assert re.fullmatch(r"\nslicefs: interrupted[^\n]*\n", done.stderr), (words, done)


def _complete(words: str, text: str) -> None:
    again = slicefs(*words.split(), *text.split())
    assert again.code == 0, (words, again)
    assert again.err == "", (words, again)


@needs_mounts
def test_ctrl_c_is_completed_by_the_same_command(
    embedded: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLICEFS_PASSPHRASE", OLD)
    monkeypatch.setenv("SLICEFS_NEW_PASSPHRASE", NEW)
    base = embedded.base
    embedded.format("--encrypt-passphrase", "--trash-days", "1")
    mount = embedded.mount("--backup-meta", "1s")
    (mount.path / "gone").mkdir()
    (mount.path / "kept").mkdir()
    for number in range(FILES):
        (mount.path / "gone" / f"file-{number}").write_bytes(os.urandom(20_000))
    slicefs("quota", "set", embedded.meta, "--path", "/kept", "--capacity", "1GiB")
    (mount.path / "kept" / "file").write_bytes(b"x" * 5000)
    shutil.rmtree(mount.path / "gone")
    made = mount.numbers()["meta_backups_total"]
    wait_until("a backup", 60, lambda: mount.numbers()["meta_backups_total"] > made)
    mount.umount()
    for words, text, place, turn in ON_VOLUMES:
        text = text.format(meta=embedded.meta, base=base)
        _interrupt(words, text, place, turn)
        assert slicefs("fsck", embedded.meta, "--data").code == 0, words
        _complete(words, text)
        if words == "rekey":
            monkeypatch.setenv("SLICEFS_PASSPHRASE", NEW)
    mount = embedded.mount()
    assert sorted(os.listdir(mount.path / "gone")) == [f"file-{n}" for n in range(FILES)]
    embedded.end()


def test_ctrl_c_of_commands_on_checkpoints(tmp_path: Path) -> None:
    """What is copied is removed at its old place only when all of it is there."""
    with zipfile.ZipFile(DCP) as archive:
        archive.extractall(tmp_path / "run" / "step20")
    names = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        for words, text, place, turn in ON_TREES:
            text = text.format(base=tmp_path, other=other)
            _interrupt(words, text, place, turn)
            _complete(words, text)
        assert os.listdir(other) == []
    assert any((tmp_path / "out").iterdir())
    assert not (tmp_path / "run").exists()
    assert {path.name for path in (tmp_path / "newer").rglob("*") if path.is_file()} == names
