"""C5: files of snapshots that the kernel reads from the cache disk by itself."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from fsclient.cli.watch.source import read_numbers
from tests.posix.volumes import Volume, run
from tests.support.waiting import wait_until

Volumes = Callable[[str, str], AbstractContextManager[Volume]]

LINUX: Final = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
DATA: Final = {f"{at}": random.Random(at).randbytes((3 << 20) + at) for at in range(4)}

pytestmark = pytest.mark.skipif(LINUX < (6, 9), reason="needs passthrough, Linux 6.9")


class Shown(NamedTuple):
    """A mount of a volume with a snapshot, and where its cache is."""

    root: Path  # of the volume
    snapshot: Path
    cache: Path

    def number(self, name: str) -> float:
        return read_numbers(str(self.root / ".stats"))[name]

    def reads(self) -> float:
        return self.number('operations_total{op="read"}')

    def whole(self) -> list[Path]:
        """Whole files on the cache disk."""
        return list(self.cache.rglob("whole-*"))


@pytest.fixture(scope="module")
def shown(volumes: Volumes) -> Iterator[Shown]:
    with volumes("sqlite", "passed") as volume:
        cache = volume.folder / "cache"
        root = volume.mount("mnt", "--passthrough", "--cache-dir", str(cache))
        (root / "top").mkdir()
        for name, data in DATA.items():
            (root / "top" / name).write_bytes(data)
        run("snapshot", "create", root / "top", "one")
        yield Shown(root, root / "top" / ".snapshots" / "one", cache)


def _make_whole(shown: Shown, name: str) -> Path:
    """Open a file until it is whole; nothing has it open then."""
    path = shown.snapshot / name
    before = shown.number("passthrough_opens_total")

    def passed() -> bool:
        assert path.read_bytes() == DATA[name]
        return shown.number("passthrough_opens_total") > before

    wait_until(passed)
    return path


def test_c5_a_file_that_was_read_is_read_by_the_kernel(shown: Shown) -> None:
    """read(2), mmap(2), seeks and several descriptors: no READ reaches the client."""
    path = _make_whole(shown, "0")
    before = shown.reads()
    cost = shown.reads() - before  # of looking
    with path.open("rb", buffering=0) as first, path.open("rb", buffering=0) as second:
        assert first.readall() == DATA["0"]
        with mmap.mmap(second.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == DATA["0"]
        assert os.pread(second.fileno(), 100, 1 << 20) == DATA["0"][1 << 20 :][:100]
        assert os.fstat(first.fileno()).st_size == len(DATA["0"])
        assert os.pread(first.fileno(), 10, len(DATA["0"])) == b""
    assert shown.reads() - before == 2 * cost


def test_c5_all_opens_of_a_file_agree(shown: Shown) -> None:
    """Who opens beside a descriptor from before gets what that has: nobody gets EIO."""
    path = shown.snapshot / "1"
    made = shown.number("whole_files_made_total")
    with path.open("rb") as old:
        assert old.read(5) == DATA["1"][:5]

        def is_made() -> bool:
            assert path.read_bytes() == DATA["1"]
            return shown.number("whole_files_made_total") > made

        path.read_bytes()
        old.seek(0)
        passed = shown.number("passthrough_opens_total")
        assert path.read_bytes() == old.read() == DATA["1"]
        assert shown.number("passthrough_opens_total") == passed
    wait_until(is_made)
    _make_whole(shown, "1")


def test_c5_eviction_takes_nothing_from_who_reads(shown: Shown) -> None:
    """What is open stays; the next open comes to the client, and has it made anew."""
    path = _make_whole(shown, "2")
    made = shown.number("whole_files_made_total")
    with path.open("rb") as first:
        assert first.read(10) == DATA["2"][:10]
        for whole in shown.whole():
            whole.unlink()
        with path.open("rb") as second:
            assert second.read() == DATA["2"]
        assert first.read() == DATA["2"][10:]
    _make_whole(shown, "2")
    wait_until(lambda: shown.number("whole_files_made_total") > made)


def test_c5_what_may_change_is_not_passed(shown: Shown) -> None:
    path = shown.root / "top" / "3"
    passed = shown.number("passthrough_opens_total")
    for turn in range(3):
        assert path.read_bytes() == DATA["3"] + b"x" * turn
        with path.open("ab") as file:
            file.write(b"x")
    assert shown.number("passthrough_opens_total") == passed


def test_c5_another_mount_finds_whole_files_and_verifies_them(volumes: Volumes) -> None:
    """What one mount of a host has made the next one need not make."""
    with volumes("sqlite", "passed-again") as volume:
        cache = volume.folder / "cache"
        options = ("--passthrough", "--cache-dir", str(cache))
        writer = volume.mount("writer", *options)
        (writer / "top").mkdir()
        (writer / "top" / "0").write_bytes(DATA["0"])
        run("snapshot", "create", writer / "top", "one")
        first = Shown(writer, writer / "top" / ".snapshots" / "one", cache)
        _make_whole(first, "0")
        reader = volume.mount("reader", "--subdir", "/top", "--snapshot", "one", *options)
        second = Shown(reader, reader, cache)
        _make_whole(second, "0")
        assert second.number("whole_files_made_total") == 0
