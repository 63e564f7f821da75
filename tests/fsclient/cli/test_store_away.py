"""R3, V: an object store that goes away in the middle of a command, and metadata that do (TiKV).

The commands end in one line that names what is away, with an exit code that is not 0; once it is
back the same command does all of its work.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest

from tests.faults.places import s3_place
from tests.faults.program import Done, Volume, needs_mounts, slicefs, wait_until
from tests.fsclient.cli.test_every_command import CODES
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind, Request

IMPATIENT = """
import sys
from fsclient.volume import object_stores
object_stores.Pacing.__new__.__defaults__ = (1.0, 0, 0)
from fsclient.cli import main
sys.exit(main.run(sys.argv[1:]))
"""
FILES = 12


@pytest.fixture
def proxy(ceph: CephCluster) -> Iterator[HttpProxy]:
    port = int(ceph.endpoint.rpartition(":")[2])
    with HttpProxy(port) as made:
        yield made


@pytest.fixture
def volume(base: Path, proxy: HttpProxy) -> Iterator[Volume]:
    """A volume on S3 with a backup of its metadata, and files of one block each."""
    made = Volume(base, place=s3_place(base, proxy.endpoint))
    made.format()
    mount = made.mount("--pack-below", "0", "--backup-meta", "1s")
    for number in range(FILES):
        (mount.path / f"file-{number}").write_bytes(os.urandom(100_000))
    wait_until("a backup", 60, lambda: mount.numbers()["meta_backups_total"] > 0)
    mount.umount()
    yield made
    proxy.heal()
    made.clean_up()


def _goes_away(proxy: HttpProxy, about: str, after: int) -> Fault:
    """Nothing is answered any more once `after` requests were about that."""
    seen = 0

    def counted(request: Request) -> bool:
        nonlocal seen
        seen += about in request.target
        return seen > after

    return proxy.add(Fault(Kind.RESET, inf, when=counted))


def _require_named(done: Done, words: str, proxy: HttpProxy) -> None:
    """One line: which store, and what to do."""
    assert done.code == CODES.get(words, {}).get(1, 1), done
    (line,) = done.err.splitlines()
    assert line.startswith("slicefs: "), done
    assert f"{proxy.endpoint}/" in line, done
    assert re.search(r"[:;] run the (same )?command again (when it answers|to go on)$", line), done


# What asks the object store itself; {place} is the volume's, {base} a directory with a `tree`.
# It goes away after so many requests whose address has that in it.
ON_OBJECTS = [
    ("fsck", "{meta}", "list-type", 0),
    ("fsck", "--data {meta}", "chunks", 3),
    ("scrub", "{meta}", "chunks", 3),
    ("gc", "{meta}", "list-type", 0),
    ("restore-meta", "sqlite://{base}/new.db testvol {place}", "meta/", 1),
    ("objbench", "{objbench} --blocks 2 --small-objects 9 --skip-functional-tests", "/p/", 3),
    ("destroy", "--yes {meta} testvol", "delete", 0),
]


def test_the_object_store_goes_away_in_the_middle(volume: Volume, proxy: HttpProxy) -> None:
    """The same command does its work once the store is back."""
    place = " ".join(volume.place)
    other = " ".join(s3_place(volume.base, proxy.endpoint))
    places = {"meta": volume.meta, "base": volume.base, "place": place, "objbench": other}
    for words, text, about, after in ON_OBJECTS:
        typed = [words, *text.format(**places).split()]
        fault = _goes_away(proxy, about, after)
        done = slicefs(*typed, program=(sys.executable, "-c", IMPATIENT))
        proxy.heal()
        assert fault.hits, (words, done)
        _require_named(done, words, proxy)
        again = slicefs(*typed)
        assert (again.code, again.err) == (0, ""), (words, again)
        if words != "destroy":
            volume.fsck("--data")
    assert slicefs("status", volume.meta).code == 1, "it is destroyed"


def _rewritten(path: Path) -> None:
    """A file whose chunk is worth rewriting: most of its bytes are hidden by later ones."""
    for number in range(12):
        with path.open("r+b" if number else "wb", buffering=0) as file:
            file.write(b"%c" % (65 + number) * (64 << 10))
            os.fsync(file)


# Through a mount, whose programs get EIO: a command names the path and goes on with the next one.
ON_MOUNTS = [
    ("warmup", "--memory {mnt}/tree", 0),
    ("compact", "{mnt}/tree", 1),
    ("flush", "{mnt}/tree/written", 0),
    ("sync", "{mnt}/tree/ {base}/copy/", 1),
    ("bench", "{mnt} --big-file-size 1MiB --small-file-count 2", 1),
]


@needs_mounts
def test_the_object_store_of_a_mount_goes_away(volume: Volume, proxy: HttpProxy) -> None:
    """The mount goes on, and the same command does its work once the store is back."""
    options = ("--pack-below", "0", "--object-timeout", "1", "--backup-meta", "0")
    mount = volume.mount(*options)
    (mount.path / "tree").mkdir()
    for number in range(3):
        _rewritten(mount.path / "tree" / f"file-{number}")
    mount.umount()
    for words, text, after in ON_MOUNTS:
        mount = volume.mount(*options)  # nothing is cached
        typed = [words, *text.format(mnt=mount.path, base=volume.base).split()]
        with (mount.path / "tree" / "written").open("wb", buffering=0) as written:
            if words == "flush":  # close(2) tells of an upload that failed in the background
                written.write(b"x" * 200_000)
            fault = _goes_away(proxy, "chunks", after)
            done = slicefs(*typed)
            proxy.heal()
            with suppress(OSError):  # told once
                os.fsync(written)
        assert fault.hits, (words, done)
        assert done.code == 1, (words, done)
        lines = done.err.splitlines()
        assert lines, (words, done)
        assert all(line.startswith("slicefs: ") for line in lines), (words, done)
        assert any("/" in line or "file-" in line or "object store" in line for line in lines), done
        again = slicefs(*typed)
        assert (again.code, again.err) == (0, ""), (words, again)
        assert (mount.path / "tree" / "file-0").read_bytes() == b"L" * (64 << 10)
        mount.umount()
    volume.end(expected="Unreached|the connection was closed")
