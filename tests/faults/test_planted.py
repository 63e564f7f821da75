"""What other users could plant: caches, journals and logs in places where they may write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdata.resources.private_paths import make_private, open_private, require_private
from fsmeta.errors import ConfigError
from tests.faults.program import Volume, needs_mounts, slicefs

STRANGER = 1001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def open_to_all(path: Path) -> Path:
    """A directory as /tmp is."""
    path.mkdir()
    path.chmod(0o1777)
    return path


def refused(volume: Volume, *options: str | Path) -> str:
    """The line with which `mount` refuses."""
    mountpoint = volume.base / "refused"
    mountpoint.mkdir(exist_ok=True)
    done = slicefs("mount", "-d", volume.meta, mountpoint, *options)
    assert done.code == 1, done
    assert done.err.count("\n") == 1
    return done.err


@needs_mounts
def test_a_cache_that_others_may_write_to_is_refused(embedded: Volume) -> None:
    """A forged copy was served as a script that root ran: its checksums are no secret."""
    embedded.format()
    log = ("--log", embedded.log)
    shared = open_to_all(embedded.base / "shared")
    said = refused(embedded, *log, "--cache-dir", shared)
    assert f"--cache-dir {shared}: {shared}: other users may write to it" in said
    assert "chmod go-w" in said
    theirs = shared / "cache"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, STRANGER, STRANGER)
    assert f"it belongs to uid {STRANGER}" in refused(embedded, *log, "--cache-dir", theirs)
    below = theirs / "ours"
    below.mkdir(mode=0o700)
    assert f"{theirs}: it belongs to uid" in refused(embedded, *log, "--cache-dir", below)
    mount = embedded.mount("--cache-dir", str(shared / "mine"))  # as in /tmp
    (mount.path / "file").write_bytes(b"file")
    assert (shared / "mine").stat().st_mode & 0o777 == 0o700
    embedded.end("the mount has failed: ")


@needs_mounts
def test_a_planted_journal_is_not_published(embedded: Volume) -> None:
    """It became a file of root with its setuid bit set."""
    embedded.format()
    shared = open_to_all(embedded.base / "shared")
    back = ("--writeback", "--log", embedded.log, "--staging-dir")
    uuid = embedded.status()["volume"]["uuid"]
    slot = shared / uuid / "0"
    slot.mkdir(parents=True)
    (slot / "log-0000000000000001").write_bytes(b"planted")
    for path in (shared / uuid, slot, slot / "log-0000000000000001"):
        os.chown(path, STRANGER, STRANGER)
    assert f"{slot.parent}: it belongs to uid {STRANGER}" in refused(embedded, *back, shared)
    os.chown(slot.parent, 0, 0)
    assert f"{slot}: it belongs to uid {STRANGER}" in refused(embedded, *back, shared)
    os.chown(slot, 0, 0)
    assert "log-0000000000000001: it belongs to uid" in refused(embedded, *back, shared)
    (slot / "log-0000000000000001").unlink()
    (slot / "data-00000001").symlink_to("/etc/passwd")
    assert "data-00000001: it is no file" in refused(embedded, *back, shared)
    (slot / "data-00000001").unlink()
    mount = embedded.mount("--writeback", "--staging-dir", str(shared))
    (mount.path / "file").write_bytes(b"file")
    embedded.end("the mount has failed: ")


@needs_mounts
def test_a_planted_log_is_not_written_to(embedded: Volume) -> None:
    embedded.format()
    shared = open_to_all(embedded.base / "shared")
    log = shared / "log"
    log.write_bytes(b"")
    os.chown(log, STRANGER, STRANGER)
    assert f"can't write the log {log}: it is no file that is yours" in refused(
        embedded, "--log", log
    )
    log.unlink()
    target = embedded.base / "target"
    target.write_bytes(b"")
    log.symlink_to(target)
    os.lchown(log, STRANGER, STRANGER)
    assert f"can't write the log {log}: " in refused(embedded, "--log", log)
    assert target.read_bytes() == b""


@needs_root
def test_links_of_others_lead_nowhere(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    make_private(str(ours / "deep"))
    assert (ours / "deep").stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to("ours")
    require_private(str(link / "deep"), "it")  # as administrators have it
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=f"link: it belongs to uid {STRANGER}"):
        require_private(str(link / "deep"), "it")
    (ours / "file").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(str(ours / "file"), os.O_RDWR)
    (ours / "open").touch()
    (ours / "open").chmod(0o666)
    with pytest.raises(PermissionError):
        open_private(str(ours / "open"), os.O_RDWR)
