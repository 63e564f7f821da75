"""How the program behaves where nothing is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import click
import pytest

from fsclient.cli import main
from fsclient.cli.mount.helper import helper_arguments
from fsclient.cli.mount.info import LINES_MAX
from fsclient.control.info_xattr import INFO_XATTR, SLICES_A_PAGE
from fsclient.volume.metadata_url import sqlite_path
from fsclient.volume.units import format_size, parse_size
from fsmeta.store.url import shown_url
from fsmeta.types import CHUNK_BYTES
from tests.faults.program import SLICEFS, Volume, is_mounted, needs_mounts, slicefs, succeed


def test_help_names_every_command_without_importing_them() -> None:
    code = (
        "import sys, fsclient.cli.main as m; m.run(['--help']); m.run(['umount', '--help']);"
        "print([n for n in sys.modules if n.startswith(('redis', 'msgpack', 'fsclient.vfs.vfs'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in ("format", "mount", "umount", "status", "fsck", "info", "_SLICEFS_COMPLETE"):
        assert name in done.stdout


def test_every_command_can_be_imported() -> None:
    context = click.Context(main.commands)
    for name in main.commands.list_commands(context):
        command = main.commands.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.help


def test_completion_script() -> None:
    environment = {**os.environ, "_SLICEFS_COMPLETE": "bash_source"}
    done = subprocess.run([SLICEFS], env=environment, capture_output=True, text=True, check=True)
    assert "complete -o nosort -F _slicefs_completion slicefs" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("slicefs resto", ["plain,restore", "plain,restore-meta"]),
        ("slicefs quota se", ["plain,set"]),
        ("slicefs format --compress z", ["plain,zstd"]),
        ("slicefs umount /m", ["dir,/m"]),
        ("slicefs mount META /m", ["dir,/m"]),
        ("slicefs mount --log /v", ["file,/v"]),
        ("slicefs load META /d", ["file,/d"]),
        ("slicefs warmup /m/a /m/b", ["file,/m/b"]),
    ],
)
def test_completion(words: str, expected: list[str]) -> None:
    """Of paths, too: the shell does those when it is told so."""
    count = str(len(words.split()) - 1)
    how = {"_SLICEFS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
    done = subprocess.run([SLICEFS], env={**os.environ, **how}, capture_output=True, text=True)
    assert done.stdout.splitlines() == expected


def test_status_and_fsck_as_text_and_json(embedded: Volume) -> None:
    embedded.format("--capacity", "1GiB", "--inodes", "1000")
    text = succeed("status", embedded.meta)
    assert "0 B of 1.0 GiB" in text
    assert "1 of 1000" in text
    assert embedded.status()["volume"]["name"] == "testvol"
    assert succeed("fsck", embedded.meta).splitlines()[-1] == "clean"
    assert json.loads(succeed("fsck", embedded.meta, "--json"))["problems"] == []


@pytest.mark.parametrize(
    ("url", "path"),
    [("/x.db", os.path.abspath("x.db")), ("/a/x.db", "/a/x.db"), ("//a/x.db", "/a/x.db")],
)
def test_sqlite_urls(url: str, path: str) -> None:
    assert sqlite_path(url) == path


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:1/2", "redis://host:1/2"),
        ("redis://host/2?password=secret", "redis://host/2"),
        (
            "rediss://host/2?ssl_ca_certs=/ca.pem&ssl_password=secret&ssl_cert_reqs=required",
            "rediss://host/2?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required",
        ),
        ("redis://host/2?username=me&passwd=secret", "redis://host/2"),
        ("unix://:secret@/run/redis.sock?password=secret&db=3", "unix:///run/redis.sock?db=3"),
        ("redis://:sec?ret@host/0", "redis://"),
        ("redis://host/0?password=sec@ret", "redis://"),
        ("redis:secret@host", "host"),
        ("sqlite:///name.db", "sqlite:///name.db"),
    ],
)
def test_shown_urls_lead_to_the_same_volume_without_the_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_sizes() -> None:
    assert [parse_size(text) for text in ("0", "4k", "1.5 GiB", "2TB")] == [
        0,
        4096,
        3 << 29,
        2 << 40,
    ]
    assert parse_size("9007199254740993") == 9007199254740993
    assert format_size(3 << 29) == "1.5 GiB"


def test_the_words_of_mount_8() -> None:
    words = ["meta", "/mnt", "-s", "-v", "-N", "ns", "-o", "rw,noatime", "-t", "fuse.slicefs"]
    assert helper_arguments(words) == ["mount", "-d", "meta", "/mnt", "-o", "rw,noatime"]
    assert helper_arguments(["meta", "/mnt", "-fv"]) is None


@needs_mounts
class TestMounted:
    """With a mount."""

    def test_the_helper_of_mount_8(self, embedded: Volume) -> None:
        embedded.format()
        mountpoint = embedded.base / "mnt"
        mountpoint.mkdir()
        helper = os.path.join(os.path.dirname(sys.executable), "mount.slicefs")
        log = f"log={embedded.log}"
        for program, options in (
            ([helper], "ro,noatime"),
            ([SLICEFS], "rw,dev,suid,nofail,relatime"),
        ):
            command = [*program, embedded.meta, str(mountpoint), "-o", f"{options},{log}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            flags = os.statvfs(mountpoint).f_flag
            assert bool(flags & os.ST_RDONLY) == options.startswith("ro")
            assert bool(flags & os.ST_NOATIME) == ("noatime" in options)
            succeed("umount", mountpoint)
        embedded.end()

    @pytest.mark.skipif(shutil.which("mount.fuse3") is None, reason="needs package fuse3")
    @pytest.mark.parametrize("kind", ["slicefs", "fuse.slicefs"])
    def test_mount_8(self, embedded: Volume, kind: str) -> None:
        """In a mount namespace of its own, where our programs are where mount(8) looks.

        Mounted read-only, then writable, then read-only: remounting changes the kernel's flags.
        """
        embedded.format()
        base = embedded.base
        for name in ("mnt", "upper", "work"):
            (base / name).mkdir()
        for name in ("slicefs", "mount.slicefs"):
            (base / "upper" / name).symlink_to(os.path.join(os.path.dirname(SLICEFS), name))
        script = f"""
        set -e
        sbin=$(readlink -f /sbin)
        mount --make-rprivate /
        umount -a -l -t fuse.slicefs  # copies of what others have mounted
        mount -t tmpfs none {base}/work
        mkdir {base}/work/upper {base}/work/work
        cp -P {base}/upper/* {base}/work/upper
        mount -t overlay none $sbin \
            -o lowerdir=$sbin,upperdir={base}/work/upper,workdir={base}/work/work
        export PATH=/sbin:$PATH
        mount -t {kind} {embedded.meta} {base}/mnt -o ro,noatime,log={embedded.log}
        findmnt -n -o FSTYPE,SOURCE,OPTIONS {base}/mnt
        mount -o remount,rw {base}/mnt
        echo kept > {base}/mnt/file
        mount -o remount,ro {base}/mnt
        findmnt -n -o FSTYPE,SOURCE,OPTIONS {base}/mnt
        ! touch {base}/mnt/other 2>/dev/null
        ! mount -o remount,cache-size=1G {base}/mnt 2>{base}/said
        cat {base}/mnt/file {base}/said
        umount {base}/mnt
        """
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert [line.startswith("fuse.slicefs testvol ro,") for line in lines[:2]] == [True, True]
        assert all("noatime" in line for line in lines[:2])
        assert lines[2] == "kept"
        assert lines[3].startswith("slicefs: unknown mount option 'cache-size=1G'")
        embedded.end()

    def test_mounting_returns_when_it_can_be_used(self, embedded: Volume) -> None:
        embedded.format()
        for round_ in range(3):
            mount = embedded.mount()
            (mount.path / f"file{round_}").write_text("data")
            assert mount.numbers()["read_only"] == 0
            mount.umount()
            assert not is_mounted(mount.path)
        log = "\n".join(embedded.log_lines())
        assert log.count(f"volume testvol mounted on {mount.path}") == 3
        assert log.count(f"unmounted {mount.path}") == 3
        embedded.end()

    def test_info_and_df(self, embedded: Volume) -> None:
        embedded.format("--capacity", "100MiB", "--inodes", "50")
        mount = embedded.mount()
        (mount.path / "file").write_bytes(b"x" * 100_000)
        text = succeed("info", mount.path / "file")
        assert "size        100000 (97.7 KiB)" in text
        assert "slice 1 at 0" in text
        found = json.loads(succeed("info", "--json", mount.path / "file"))
        assert found["chunks"][0]["slices"][0]["length"] == 100_000
        with (mount.path / "ahead").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4096)
        last = succeed("info", mount.path / "ahead").splitlines()[-1]
        assert last.split() == ["0..4096", "reserved"]
        df = os.statvfs(mount.path)
        assert df.f_blocks * df.f_frsize == 100 << 20
        assert df.f_files == 50
        embedded.end()

    def test_info_of_a_file_of_many_pieces(self, embedded: Volume) -> None:
        """It once stopped at 64 chunks and said nothing."""
        embedded.format()
        mount = embedded.mount()
        path = mount.path / "file"
        chunks = [*range(2 * SLICES_A_PAGE // 3), 1_000_000, 1_000_000_000]
        with path.open("wb", buffering=0) as file:
            for index in chunks:
                os.pwrite(file.fileno(), b"data", index * CHUNK_BYTES)
        parts = 3  # slices that don't touch
        for part in range(1, parts):
            with path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"more", 5 * CHUNK_BYTES + part * 1000)
        found = json.loads(succeed("info", "--json", path))
        assert [chunk["index"] for chunk in found["chunks"]] == chunks
        counts = [len(chunk["slices"]) for chunk in found["chunks"]]
        assert counts == [parts if index == 5 else 1 for index in chunks]
        assert "next" not in found
        *shown, last = succeed("info", path).splitlines()
        assert last == f"… more: `slicefs info --all {path}` lists them"
        assert len(shown) == 6 + LINES_MAX
        every = succeed("info", "--all", path).splitlines()
        assert len(every) == 6 + len(chunks) + sum(counts)
        assert every[: len(shown)] == shown
        with pytest.raises(OSError, match="No data available"):
            os.getxattr(path, f"{INFO_XATTR.decode()}.1.x")
        embedded.end()

    def test_a_link_to_the_mount_point_can_be_unmounted(self, embedded: Volume) -> None:
        embedded.format()
        mount = embedded.mount()
        (embedded.base / "link").symlink_to(mount.path)
        assert slicefs("umount", embedded.base / "link").code == 0
        assert not is_mounted(mount.path)
        embedded.end()
