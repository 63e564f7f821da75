"""R3: what users are told when the object store is sick: it hangs, refuses, or is another one."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.places import s3_place
from tests.faults.program import (
    SLICEFS,
    Volume,
    is_mounted,
    needs_mounts,
    slicefs,
    wait_until,
    without_waits,
)
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind

pytestmark = needs_mounts

PATIENCE_S = 5  # more than the machine may stand still while the store is well
IMPATIENT = (
    *("--object-timeout", f"{PATIENCE_S}", "--store-option", f"timeout={PATIENCE_S}"),
    *("--pack-below", "0"),
)
LOST = "data written and not stored is lost|no answer in time|detaching it"
FILES = 60


@pytest.fixture
def proxy(ceph: CephCluster) -> Iterator[HttpProxy]:
    """What stands before the store."""
    with HttpProxy(ceph.s3_port) as made:
        yield made


@pytest.fixture
def volume(base: Path, proxy: HttpProxy) -> Iterator[Volume]:
    """A formatted volume on an S3 store behind `proxy`."""
    made = Volume(base, place=s3_place(base, proxy.endpoint))
    made.format()
    yield made
    made.clean_up()


def hang(proxy: HttpProxy) -> None:
    """From now on nobody answers."""
    proxy.add(Fault(Kind.STUCK, math.inf))


def test_r3_umount_says_that_data_are_lost(volume: Volume, proxy: HttpProxy) -> None:
    """It ended with 0 and without a word; only the log had it."""
    mount = volume.mount(*IMPATIENT)
    (mount.path / "before").write_bytes(b"stored")
    hang(proxy)
    for name in ("removed", "file"):
        with pytest.raises(OSError, match="Input/output") as caught:
            (mount.path / name).write_bytes(b"x" * 100_000)
        assert caught.value.errno == errno.EIO
    (mount.path / "removed").unlink()
    done = slicefs("umount", mount.path, "--json")
    assert done.code == 1
    assert len(without_waits(done.err).splitlines()) == 1
    assert "data written to /file could not be stored and are lost: http://" in done.err
    assert f"no answer in time; see the log: {volume.log}" in done.err
    lost = json.loads(done.out)["lost"]
    assert (lost["files"], lost["first"]) == (1, "/file")
    proxy.heal()
    mount = volume.mount(*IMPATIENT)
    assert (mount.path / "before").read_bytes() == b"stored"
    hang(proxy)
    with pytest.raises(OSError, match="Input/output"):
        (mount.path / "removed").write_bytes(b"x")
    proxy.heal()
    (mount.path / "removed").unlink()
    mount.umount()
    volume.end(LOST)


def test_r3_umount_notices_a_client_that_dies_while_it_stores(embedded: Volume) -> None:
    """It took any end for a good one."""
    embedded.format()
    staging = ("--writeback", "--staging-dir", str(embedded.base / "staging"))
    mount = embedded.mount(*staging, "--upload-limit", "64KiB", "--no-supervisor")
    (mount.path / "file").write_bytes(os.urandom(8 << 20))
    words = [SLICEFS, "umount", str(mount.path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as umount:
        wait_until("it is unmounted", 60, lambda: not is_mounted(mount.path))
        os.kill(mount.pid, signal.SIGKILL)
        _, err = umount.communicate(timeout=60)
    assert umount.returncode == 1
    assert "the client has ended before everything was stored; see the log: " in err
    assert len((embedded.mount(*staging).path / "file").read_bytes()) == 8 << 20
    embedded.end()


def test_r3_many_files_wait_for_a_store_that_hangs_as_long_as_one(
    volume: Volume, proxy: HttpProxy
) -> None:
    """One after another, SIGTERM took FILES times --object-timeout."""
    mount = volume.mount(*IMPATIENT)
    files = [os.open(mount.path / f"f{n}", os.O_CREAT | os.O_WRONLY) for n in range(FILES)]
    for fd in files:
        os.write(fd, b"x" * 5000)
    hang(proxy)
    begin = time.monotonic()
    os.kill(mount.pid, signal.SIGTERM)
    wait_until("the client ends", 150, mount.has_ended)
    seconds = time.monotonic() - begin
    for fd in files:
        with pytest.raises(OSError, match=r"endpoint|abort"):
            os.close(fd)
    lost = [line for line in volume.log_lines() if "data written and not stored is lost" in line]
    assert len(lost) == FILES
    assert seconds < FILES * PATIENCE_S / 3, seconds
    proxy.heal()
    volume.end(LOST)


def test_r3_mount_says_whom_it_waits_for(base: Path) -> None:
    """Two seconds after it began to, and without the password."""
    (base / "mnt").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}/1"
        words = ("mount", "-d", f"redis://:hidden@{address}", base / "mnt", "--log", base / "log")
        done = slicefs(*words)
    assert done.code == 1
    waits, error = done.err.splitlines()
    assert waits == f"slicefs: waiting for the metadata in redis://{address}"
    assert error.startswith(f"slicefs: can't reach redis://{address}: ")
    assert "check host and port" in error
    assert "hidden" not in (base / "log").read_text()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("storage-class=NOPE", "InvalidArgument (see storage-class, sse and sse-kms-key of"),
        ("sse=aws:kms", "InvalidRequest (see storage-class, sse and sse-kms-key of"),
    ],
)
def test_o1_mount_tries_options_of_its_own(volume: Volume, option: str, expected: str) -> None:
    """It mounted, and each put was repeated for two minutes before it was EIO."""
    path = volume.base / "mnt"
    path.mkdir()
    words = ("mount", "-d", "--log", volume.log, volume.meta, path, "--store-option", option)
    done = slicefs(*words)
    assert (done.code, done.out) == (1, "")
    assert "object store is not usable: objects can't be written (" in done.err
    assert expected in done.err
    assert len(without_waits(done.err).splitlines()) == 1
    volume.mount("--store-option", "storage-class=STANDARD")
    volume.end("the mount has failed: ")


def test_o1_what_is_refused_for_good_is_not_repeated(volume: Volume, proxy: HttpProxy) -> None:
    """Each block was repeated for --object-timeout."""
    mount = volume.mount("--pack-below", "0")
    refused = Fault(Kind.STATUS, math.inf, method="PUT", status=400, code="InvalidStorageClass")
    proxy.add(refused)
    begin = time.monotonic()
    with pytest.raises(OSError, match="Input/output"):
        (mount.path / "file").write_bytes(b"x" * (20 << 20))
    assert time.monotonic() - begin < 100, "of --object-timeout"
    assert refused.hits > 0
    assert mount.numbers()["object_repeats_total"] == 0
    said = [line for line in volume.log_lines() if "InvalidStorageClass" in line]
    assert 1 <= len(said) <= 3, said
    (mount.path / "file").unlink()
    proxy.heal()
    volume.end("InvalidStorageClass")


def test_r3_a_store_that_hangs_is_named_with_a_remedy(volume: Volume, proxy: HttpProxy) -> None:
    """It took 31 s to say `no answer in time`."""
    hang(proxy)
    path = volume.base / "mnt"
    path.mkdir()
    assert slicefs("fsck", volume.meta).seconds < 25, "two attempts of 5 s"
    commands: list[tuple[str | Path, ...]] = [
        (name, volume.meta) for name in ("fsck", "gc", "scrub")
    ]
    new = f"sqlite://{volume.base}/new.db"
    commands.append(("format", new, "other", *volume.place))
    commands.append(("format", new, "other", *volume.place, "--dry-run"))
    commands.append(("mount", "-d", "--log", volume.log, volume.meta, path))
    with ThreadPoolExecutor() as pool:
        for each, done in zip(
            commands, pool.map(lambda words: slicefs(*words), commands), strict=True
        ):
            assert (done.code, done.out) == (8 if each[0] == "fsck" else 1, "")
            error = without_waits(done.err)
            assert f"{proxy.endpoint}/" in error
            assert "no answer in time: check the address, and whether the store runs" in error
            assert len(error.splitlines()) == 1
    assert f"slicefs: waiting for the object store, {proxy.endpoint}/" in done.err
    assert not (volume.base / "new.db").exists()
    proxy.heal()
    volume.end("the mount has failed: ")
