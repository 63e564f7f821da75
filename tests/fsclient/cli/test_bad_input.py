"""Bad input: one clear line, the right exit code, and nothing changed on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
from pathlib import Path

import pytest

from fsmeta.schema import keys
from tests.faults.program import Volume, needs_mounts, slicefs, succeed, wait_until, without_waits
from tests.faults.redis_server import DurableRedis
from tests.fsclient.cli.trees import snapshot

SECRET = "s3cr3t"
FSCK_CODES = {1: 8, 2: 16}  # of fsck(8)
CLOSED_PORT = 1  # nobody listens on it
REFUSED_WITHIN_S = 90.0  # a client gives up after 4 s, and a busy machine starts one in seconds


def refused(words: str, expected: str, code: int = 1, within_s: float = REFUSED_WITHIN_S) -> None:
    """`slicefs words` ends with `code` and says `expected` in one line, without secrets."""
    done = slicefs(*words.split())
    code = FSCK_CODES.get(code, code) if words.startswith("fsck ") else code
    assert done.code == code, done
    assert done.out == "", done
    assert re.fullmatch(r"slicefs: [^\n]+\n", without_waits(done.err)), done
    assert re.search(expected, done.err), done
    assert SECRET not in done.err, done
    assert done.seconds < within_s, done


S3 = "sqlite:///{base}/x.db testvol --storage s3 --bucket http://127.0.0.1:1/bucket "
# {base} is a directory with: text, a file that is no database; empty, an empty directory
FORMAT = [
    ("foo:///x.db testvol", "scheme 'foo' is unknown: use redis://", 1),
    ("/x.db testvol", "has no scheme: use redis://", 1),
    (f"redis:/me:{SECRET}@x/0 testvol", "'x/0' has no scheme", 1),
    ("redis://127.0.0.1:1/x testvol", "'x' is no database number: use redis://", 1),
    ("redis://127.0.0.1:1/1/2 testvol", "'1/2' is no database number", 1),
    ("redis://127.0.0.1:1/1?db=2 testvol", "write the database as redis://HOST:PORT/DB", 1),
    ("redis://127.0.0.1:1/1?fast=2 testvol", "parameter 'fast': use one of db", 1),
    ("redis://127.0.0.1:1/1?ssl_ca_certs=/x testvol", "parameter 'ssl_ca_certs': use", 1),
    ("rediss://127.0.0.1:1/1?ssl_cert_reqs=x testvol", "use one of none, optional, requ", 1),
    ("rediss://127.0.0.1:1/1?ssl_keyfile=/x testvol", "ssl_keyfile: /x does not exist", 1),
    ("redis://[::1:1/0 testvol", "can't read metadata URL redis://.*Invalid IPv6", 1),
    ("unix://?db=1 testvol", "names no socket: use unix:///PATH", 1),
    (f"redis://127.0.0.1:1/0?password=x@{SECRET} testvol", "write @ as %40", 1),
    (f"redis://:x/{SECRET}@127.0.0.1:1/0 testvol", "redis://127.0.0.1:1/0: .* / as %2F", 1),
    (f"redis://:{SECRET}?x@127.0.0.1:1/0 testvol", r"\? as %3F", 1),
    (f"redis://:{SECRET}#x@127.0.0.1:1/0 testvol", "# as %23", 1),
    ("sqlite:// testvol", "names no file", 1),
    ("sqlite:///{base}/none/x.db testvol", "/none of the metadata file is not there: create", 1),
    ("sqlite:///{base}/empty testvol", "is a directory: name a file", 1),
    ("sqlite:///{base}/text testvol", "text: file is not a database", 1),
    (f"redis://me:{SECRET}@127.0.0.1:{CLOSED_PORT}/0 testvol", "can't reach redis://127.0.0.1", 1),
    (
        f"redis://me:{SECRET}@127.0.0.1:port/0 testvol",
        "can't read metadata URL redis://127.0.0.1:port/0: write",
        1,
    ),
    ("redis://nowhere.invalid/0 testvol", "can't reach redis://nowhere.invalid/0", 1),
    ("sqlite:///{base}/x.db ab", "'ab': use 3 to 63 of", 1),
    ("sqlite:///{base}/x.db Odd_Name", "'Odd_Name': use 3 to 63 of", 1),
    ("sqlite:///{base}/x.db ../../etc", "use 3 to 63 of", 1),
    ("sqlite:///{base}/x.db testvol --block-size 3MiB", "--block-size: use a power of two", 1),
    ("sqlite:///{base}/x.db testvol --block-size 32KiB", "from 64KiB to 4MiB", 1),
    ("sqlite:///{base}/x.db testvol --block-size 0", "from 64KiB to 4MiB", 1),
    ("sqlite:///{base}/x.db testvol --block-size much", "'--block-size': size 'much': write", 2),
    ("sqlite:///{base}/x.db testvol --frame-size 2KiB", "--frame-size: use a power of two", 1),
    ("sqlite:///{base}/x.db testvol --frame-size 12KiB", "from 4KiB to 64KiB", 1),
    ("sqlite:///{base}/x.db testvol --frame-size 128KiB", "from 4KiB to 64KiB", 1),
    ("sqlite:///{base}/x.db testvol --capacity -1", "'--capacity': size '-1': write", 2),
    ("sqlite:///{base}/x.db testvol --capacity ٣G", "'--capacity': size '٣G': write", 2),
    ("sqlite:///{base}/x.db testvol --storage", "requires an arg.*: see `slicefs format", 2),
    ("sqlite:///{base}/x.db testvol --capacity 9999999999E", "at most 8EiB", 2),
    (
        "sqlite:///{base}/x.db testvol --capacity 100",
        "'--capacity': '100' is 100 bytes: write a unit, as in 100GiB, or 100B if it is meant",
        2,
    ),
    ("sqlite:///{base}/x.db testvol --inodes -1", "'--inodes': -1 is not in the range", 2),
    ("sqlite:///{base}/x.db testvol --inodes many", "'--inodes': 'many' is not a valid", 2),
    ("sqlite:///{base}/x.db testvol --compress best", "'--compress': 'best' is not one of", 2),
    ("sqlite:///{base}/x.db testvol --storage tape", "--storage tape: use one of file", 1),
    (S3 + "--store-option timeout=x", "--store-option timeout: use whole seconds from 1 to 600", 1),
    (S3 + "--store-option path-style=maybe", "--store-option path-style: use yes or no", 1),
    (S3 + "--store-option region", "--store-option region: write region=VALUE", 1),
    (S3 + "--store-option colour=red", "storage s3 does not know it: use one of region", 1),
    (S3 + "--bucket elsewhere", "--bucket elsewhere: name it, as http.s.://HOST/BUCKET or s3", 1),
    (S3 + "--bucket s3://Über", "--bucket s3://Über: name it, as http", 1),
    ("sqlite:///{base}/x.db testvol --storage rados --bucket p:q", "--bucket p:q: ", 1),
    (
        "sqlite:///{base}/x.db v01 --storage rados --bucket p%d --shards 2",
        "Ceph spreads objects",
        1,
    ),
    ("sqlite:///{base}/x.db testvol --trash-days -1", "'--trash-days': -1 is not", 2),
    ("sqlite:///{base}/x.db testvol --fast", "No such option.*--fast.*see `slicefs format", 2),
    ("sqlite:///{base}/x.db", "Missing argument 'NAME': see `slicefs format --help`", 2),
]


@pytest.mark.parametrize(("words", "expected", "code"), FORMAT)
def test_format(base: Path, words: str, expected: str, code: int) -> None:
    (base / "text").write_text("this is no database")
    (base / "empty").mkdir()
    before = snapshot(base)
    refused(f"format --bucket {base}/bucket {words.format(base=base)}", expected, code)
    assert snapshot(base) == before


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        ("", "--bucket: name the directory"),
        ("--bucket {base}/text", "text/testvol': Not a directory; name a directory"),
        ("--bucket /proc/none", "/proc/none/testvol': No such file"),
        ("--bucket s3://host/bucket", "--bucket s3://host/bucket: name a directory"),
    ],
)
def test_format_with_a_bad_bucket(base: Path, bucket: str, expected: str) -> None:
    (base / "text").touch()
    before = snapshot(base)
    refused(f"format sqlite:///{base}/x.db testvol {bucket.format(base=base)}", expected)
    assert snapshot(base) == before


def test_format_twice(embedded: Volume) -> None:
    embedded.format()
    before = snapshot(embedded.base)
    refused(
        f"format {embedded.meta} other --bucket {embedded.bucket}",
        "there is a volume 'testvol' already: choose another",
    )
    assert snapshot(embedded.base) == before


def test_format_over_data_of_another_volume(embedded: Volume) -> None:
    embedded.format()
    before = snapshot(embedded.base)
    refused(
        f"format sqlite:///{embedded.base}/second.db testvol --bucket {embedded.bucket}",
        "bucket/testvol holds data of another volume: choose",
    )
    assert snapshot(embedded.base) == before


def test_dry_run_writes_nothing(base: Path) -> None:
    done = slicefs("format", f"sqlite://{base}/x.db", "testvol", "--bucket", base, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert "would make volume testvol" in done.out
    assert snapshot(base) == {}


def test_a_redis_that_does_not_answer(base: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        meta = f"redis://me:{SECRET}@127.0.0.1:{port}/0"
        refused(f"format {meta} testvol --bucket {base}/b", "can't reach")
        refused(f"status {meta}", "can't reach")
    assert snapshot(base) == {}


def test_a_redis_that_wants_a_password(served: Volume, durable_redis: DurableRedis) -> None:
    durable_redis.ask("CONFIG", "SET", "requirepass", SECRET)
    refused(
        f"status {served.meta}", "127.0.0.1:.* Authentication required; check user and password"
    )
    wrong = served.meta.replace("//", f"//me:{SECRET}x@")
    refused(f"status {wrong}", "can't reach redis://127.0.0.1")
    right = served.meta.replace("//", f"//:{SECRET}@")
    done = slicefs("format", right, "testvol", "--bucket", served.bucket)
    assert (done.code, done.err) == (0, "")
    assert SECRET not in done.out
    served.meta = right
    assert SECRET not in json.dumps(served.status())


@needs_mounts
def test_nobody_else_reads_the_password(served: Volume, durable_redis: DurableRedis) -> None:
    durable_redis.ask("CONFIG", "SET", "requirepass", SECRET)
    right, plain = served.meta.replace("//", f"//:{SECRET}@"), served.meta
    served.meta = right
    served.format()
    mount = served.mount("--debug")
    arguments = Path(f"/proc/{mount.pid}/cmdline").read_bytes()
    assert plain.encode() in arguments
    assert SECRET.encode() not in arguments
    assert SECRET not in (mount.path / ".config").read_text()
    mount.umount()
    assert SECRET not in "\n".join(served.log_lines())
    served.end()


def test_a_url_from_the_environment(embedded: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    done = slicefs("status", "env:URL_OF_TEST")
    assert (done.code, done.out) == (1, "")
    assert done.err == "slicefs: env:URL_OF_TEST: the environment has no URL_OF_TEST: export it\n"
    monkeypatch.setenv("URL_OF_TEST", embedded.meta)
    embedded.format()
    assert json.loads(succeed("status", "env:URL_OF_TEST", "--json")) == embedded.status()


# {base} has besides: mnt, an empty directory; the volume is in {meta}
MOUNT = [
    ("{meta} {base}/none", "none does not exist: `mkdir -p", 1),
    ("-d {meta} {base}/none", "none does not exist: `mkdir -p", 1),
    ("{meta} {base}/text", "text is not a directory: mount on a directory", 1),
    ("{meta} /proc", "/proc is a mount of proc: mount on an empty", 1),
    ("sqlite:///{base}/none.db {base}/mnt", "there is no metadata file .*/none.db: run", 1),
    ("sqlite:///{base}/text {base}/mnt", "text: file is not a database", 1),
    ("sqlite:///{base}/foreign.db {base}/mnt", "foreign.db is not a SliceFS metadata file", 1),
    ("{meta} {base}/mnt --fast", "No such option.*--fast", 2),
    ("{meta} {base}/mnt -o ro,fast", "unknown mount option 'fast'", 1),
    ("{meta} {base}", "can't mount on .*: .*meta.db of this volume is in it: mount on", 1),
    ("-d {meta} {base}/bucket", "bucket/testvol of this volume is in it: mount on", 1),
    ("{meta} {base}/bucket/testvol", "bucket/testvol of this volume is in it: mount on", 1),
    ("{meta} {base}/mnt -o debug=no", "-o debug=no: debug has no value", 1),
    ("{meta} {base}/mnt --buffer-size 8000000G", "--buffer-size: this host has", 1),
    ("{meta} {base}/mnt -o max_read=7", "max_read=7: give a number from 4096", 1),
    ("{meta} {base}/mnt -o max_read=²", "max_read=²: give a number from 4096", 1),
    ("{meta} {base}/mnt -o threads=x", "'-o threads=x': 'x' is not a valid", 2),
    ("{meta} {base}/mnt -o threads=1e9", "'-o threads=1e9'", 2),
    ("{meta} {base}/mnt -o meta_timeout=nan", "'-o meta_timeout=nan'", 2),
    ("{meta} {base}/mnt --meta-timeout nan", "'--meta-timeout': 'nan' is not a number", 2),
    ("{meta} {base}/mnt --heartbeat 1h", "'--heartbeat': '1h' is not a number of sec", 2),
    ("{meta} {base}/mnt --heartbeat 60", "'--heartbeat': 60.0 is not in the range", 2),
    ("{meta} {base}/mnt --buffer-size 1MiB", "--buffer-size: at least 16MiB", 1),
    ("{meta} {base}/mnt -o buffer-size=big", "size 'big': write a number", 2),
    ("{meta} {base}/mnt --pack-below -1", "'--pack-below': size '-1': write", 2),
    ("{meta} {base}/mnt -o pack-below=big", "size 'big': write a number", 2),
    ("{meta} {base}/mnt --cache-dir {base}/text", "--cache-dir .*/text: .*: name a dir", 1),
    ("{meta} {base}/mnt --cache-dir {base}/no/no", "--cache-dir .*/no/no: No such file", 1),
    ("{meta} {base}/mnt --cache-dir {base}/empty:", "--cache-dir .*an empty name", 1),
    ("{meta} {base}/mnt --cache-dir {base}/x*", "--cache-dir .*x.: no directory is named", 1),
    ("{meta} {base}/mnt --cache-dir {base}/c:{base}/c", "--cache-dir .*/c: name it once", 1),
    ("{meta} {base}/mnt --cache-dir {base}/c --cache-dir {base}/c", "/c: name it once", 1),
    (
        "{meta} {base}/mnt --cache-dir none:{base}/c",
        "/c: none stands alone; .* is ./none",
        1,
    ),
    ("{meta} {base}/mnt --cache-dir {base}/c --cache-dir auto", "auto: auto stands alone", 1),
    ("{meta} {base}/mnt --cache-dir {base}/c --cache-size 0", "0: write --cache-dir none to", 1),
    ("{meta} {base}/mnt --upload-limit 100", "--upload-limit': '100': .* write a unit, as", 2),
    ("{meta} {base}/mnt -o download-limit=8K", "-o download-limit=8K': '8K': at least 64KiB", 2),
    ("{meta} {base}/mnt --cache-dir {base}/mnt/c", "/mnt/c: it is in the mount point", 1),
    ("{meta} {base}/mnt --cache-dir {base}/c --cache-size 102400", "100.0 KiB .*: at least", 1),
    ("{meta} {base}/mnt --cache-dir {base}/c --cache-size big", "--cache-size: size 'big'", 1),
    ("{meta} {base}/mnt --cache-dir {base}/c --cache-size /x=1G", "/x=…: --cache-dir does", 1),
    ("{meta} {base}/mnt --prefetch 65", "--prefetch", 2),
    ("{meta} {base}/mnt --free-space-ratio 20", "--free-space-ratio: a share from 0", 1),
    ("{meta} {base}/mnt --cache-eviction fifo", "'fifo' is not one of 'none', '2-random'", 2),
    ("{meta} {base}/mnt --staging-dir {base}/s", "--staging-dir is for --writeback: add it", 1),
    ("{meta} {base}/mnt --staging-size 1GiB", "--staging-size is for --writeback: add it", 1),
    ("{meta} {base}/mnt -o order-domain=2", "--order-domain is for --writeback: add it", 1),
    ("{meta} {base}/mnt --drain-timeout 0", "--drain-timeout is for --writeback: add it", 1),
    ("{meta} {base}/mnt --fsync journal", "--fsync is for --writeback: add it", 1),
    (
        "{meta} {base}/mnt --writeback --staging-dir {base}/c --cache-dir {base}/c",
        "--staging-dir .*/c: it overlaps --cache-dir .*/c: emptying",
        1,
    ),
    (
        "{meta} {base}/mnt --writeback --staging-dir {base}/c/deep --cache-dir {base}/c",
        "--staging-dir .*/c/deep: it overlaps --cache-dir .*/c: emptying",
        1,
    ),
    (
        "{meta} {base}/mnt --writeback --staging-dir {base} --cache-dir {base}/c",
        "it overlaps --cache-dir .*/c: emptying the cache would empty the journal",
        1,
    ),
    (
        "{meta} {base}/mnt --no-supervisor --hang-after 30",
        "--hang-after is for a mount with a supervisor: leave it out",
        1,
    ),
    (
        "{meta} {base}/mnt -o no-supervisor,hang-after=9",
        "--hang-after is for a mount with a supervisor: leave it out",
        1,
    ),
    ("{meta} {base}/mnt --direct-writes", "--direct-writes is for --writeback: add it", 1),
    ("{meta} {base}/mnt --writeback --staging-size 1MiB", "--staging-size: at least 64MiB", 1),
    ("{meta} {base}/mnt -o cache-writes=1", "cache-writes has no value", 1),
    ("-d --log /proc/none/log {meta} {base}/mnt", "can't write the log /proc/none/log: ", 1),
    ("{meta}", "Missing argument 'MOUNTPOINT'", 2),
]


@pytest.mark.parametrize(("words", "expected", "code"), MOUNT)
def test_mount(embedded: Volume, words: str, expected: str, code: int) -> None:
    base = embedded.base
    embedded.format()
    (base / "text").write_text("this is no database")
    (base / "mnt").mkdir()
    with sqlite3.connect(base / "foreign.db") as foreign:
        foreign.execute("CREATE TABLE precious (x)")
    foreign.close()
    before = snapshot(base)
    log = f"--log {base}/log" if "--log" not in words else ""
    refused(f"mount {log} {words.format(base=base, meta=embedded.meta)}", expected, code)
    assert snapshot(base) == before


def test_an_empty_mount_point_is_not_the_working_directory(embedded: Volume) -> None:
    embedded.format()
    done = slicefs("mount", embedded.meta, "")
    assert done.code == 1
    assert done.err == "slicefs: the mount point is empty: name a directory\n"


@pytest.mark.parametrize("command", ["umount", "info"])
def test_an_empty_path_is_named(command: str) -> None:
    done = slicefs(command, "")
    assert done.code == 1
    assert re.fullmatch(r"slicefs: the (mount point|path) is empty: name a .*\n", done.err)


def test_mount_without_its_data(embedded: Volume) -> None:
    embedded.format()
    (embedded.base / "mnt").mkdir()
    embedded.bucket.rename(embedded.base / "elsewhere")
    words = f"mount {embedded.meta} {embedded.base}/mnt"
    refused(words, "bucket/testvol is not there: mount its disk")
    (embedded.bucket / "testvol").mkdir(parents=True)
    (embedded.bucket / "testvol/volume").write_text("5f1d")
    refused(words, "belongs to volume 5f1d, not to .*: mount the right disk")


def test_a_volume_from_the_future(embedded: Volume) -> None:
    embedded.format()
    (embedded.base / "mnt").mkdir()
    settings = {**keys.unpack_map(b"F", b"format", embedded.value(b"F", b"format"))}
    embedded.set_value(b"F", b"format", keys.pack_map({**settings, "version": 99}))
    for words in ("status {}", "fsck {}", "mount {} " + f"{embedded.base}/mnt"):
        refused(words.format(embedded.meta), "metadata version 99, .*: upgrade slicefs")


def test_settings_that_do_not_decode(embedded: Volume) -> None:
    embedded.format()
    embedded.set_value(b"F", b"format", b"\xc1")
    refused(f"status {embedded.meta}", "corrupt metadata at row b'F' field b'format'")
    refused(f"fsck {embedded.meta}", "corrupt metadata at row b'F' field b'format'", code=4)


@pytest.mark.parametrize(
    ("words", "expected", "code"),
    [
        ("status {base}/none", "has no scheme", 1),
        ("status sqlite:///{base}/none.db", "there is no metadata file", 1),
        ("status sqlite:///{base}/text", "text: file is not a database", 1),
        ("fsck sqlite:///{base}/none.db", "there is no metadata file", 1),
        ("fsck sqlite:///{base}/text", "text: file is not a database", 1),
        ("info {base}/none", "none does not exist", 1),
        ("info {base}/text", "text is not a file or directory of a SliceFS mount", 1),
        ("umount {base}/none", "none is not a SliceFS mount: see `findmnt", 1),
        ("umount {base}/text", "text is not a SliceFS mount", 1),
        (f"info redis://:{SECRET}@host/0", "redis://host/0 does not exist", 1),
        (f"status a redis://:{SECRET}@host/0", "extra argument .redis://host/0.: see", 2),
        ("umount /proc", "/proc is not a SliceFS mount", 1),
        ("frobnicate", "No such command 'frobnicate': see `slicefs --help`", 2),
        ("--frobnicate", "No such option.*--frobnicate", 2),
    ],
)
def test_other_commands(base: Path, words: str, expected: str, code: int) -> None:
    (base / "text").write_text("this is no database")
    before = snapshot(base)
    refused(words.format(base=base), expected, code)
    assert snapshot(base) == before


def test_a_group_of_commands_alone_shows_its_help() -> None:
    """It once came as an error of one long line."""
    shown = succeed("quota")
    assert shown.startswith("Usage: slicefs quota ")
    assert re.search(
        r"^  set +Limit a directory, a user or a group of the volume in META\.$", shown, re.M
    )


def test_a_database_without_a_volume(served: Volume) -> None:
    """The line names the URL, which once was left to the reader."""
    meta = served.meta.replace("redis://", f"redis://default:{SECRET}@")  # any password will do
    advice = f"there is no volume in {served.meta}: make one with `slicefs format {served.meta} N"
    (served.base / "mnt").mkdir()
    for command in ("status", "fsck", "mount"):
        mountpoint = f" {served.base}/mnt" if command == "mount" else ""
        refused(f"{command} {meta}{mountpoint}", re.escape(advice))
    refused(f"mount -d --log {served.log} {meta} {served.base}/mnt", re.escape(advice))


def test_memory_is_no_place_for_data(base: Path) -> None:
    done = slicefs("format", f"sqlite://{base}/x.db", "testvol", "--storage", "mem")
    assert done.code == 0, done
    assert re.fullmatch("slicefs: warning: --storage mem .* use it for tests only\n", done.err)


@needs_mounts
def test_mounted_already_and_busy(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    words = f"mount -d --log {embedded.log} {embedded.meta} {mount.path}"
    refused(words, "mnt is mounted already .testvol.: `slicefs umount")
    with (mount.path / "open").open("w"):
        refused(f"umount {mount.path}", "it is in use: `fuser -vm .*; --lazy")
    embedded.end("is mounted already")


@needs_mounts
def test_a_mount_whose_client_has_died(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--no-supervisor")
    os.kill(mount.pid, signal.SIGKILL)
    wait_until("the client ends", 100, mount.has_ended)
    refused(f"info {mount.path}/file", "file is on a mount whose client has died: `slicefs umount")
    words = f"mount -d --log {embedded.log} {embedded.meta} {mount.path}"
    refused(words, "mnt is mounted already .testvol.: `slicefs umount .*/mnt` first")
    succeed("umount", mount.path)
    embedded.end("is mounted already")
