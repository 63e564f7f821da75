"""T2, W2: snapshots of a mount that writes back, and what another mount sees of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsmeta.admin.clones import CloneTree
from fsmeta.schema.snapshot_inos import SHELF_NAME, snapshot_dir_of
from fsmeta.types import ROOT_CALLER, Ino, SetAttr
from tests.posix.inproc import RUNTIME, memory, sqlite
from tests.posix.writeback.test_writeback import Clone, Pair, new_pair, read, write
from tests.sim.world.posix import Posix


@pytest.fixture(params=["mem", "sqlite"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    connect = memory() if request.param == "mem" else sqlite(tmp_path / "meta.db")
    with new_pair(connect, tmp_path / "staging") as made:
        yield made


def _snap(pair: Pair, name: bytes) -> Clone:
    return Clone(pair, b"/d", b"/d", name, snapshot=True)


def _chmod(posix: Posix, mode: int) -> None:
    posix.fs.setattr(ROOT_CALLER, posix.stat(b"/d").ino, SetAttr(mode=mode), None)


def _shown(posix: Posix, name: bytes) -> dict[bytes, bytes]:
    """The files in a snapshot of /d."""
    snapshot_dir = b"/d/" + SHELF_NAME + b"/" + name
    return {each: read(posix, snapshot_dir + b"/" + each) for each in posix.listdir(snapshot_dir)}


def test_t2_w2_a_snapshot_holds_what_was_done_before(pair: Pair) -> None:
    """It waits until others see that, and has nothing of what is held back since."""
    pair.hold()
    write(pair.me, b"/d/file", b"f" * 5000)
    pair.me.rename(b"/d/file", b"/d/moved")
    job = _snap(pair, b"one")
    RUNTIME.sleep(0.3)
    assert not job.report()["done"]
    write(pair.me, b"/d/later", b"later")
    pair.me.unlink(b"/d/first")
    pair.gate.open.set()
    job.wait()
    pair.release()
    for posix in (pair.me, pair.them):
        kept = _shown(posix, b"one")
        assert kept[b"moved"] == b"f" * 5000
        assert kept.keys() - {b"later", b"first"} == {b"moved"}
    pair.hold()
    job = _snap(pair, b"two")
    pair.gate.open.set()
    assert job.wait()["changed"] == 0
    pair.hold()
    write(pair.me, b"/d/moved", b"other")
    _chmod(pair.me, 0o700)  # the record that counts snapshots is held back, too
    expected = {b"first": b"first", b"moved": b"f" * 5000, b"later": b"later"}
    for posix in (pair.me, pair.them):
        assert _shown(posix, b"two") == expected
    pair.release()
    assert pair.me.stat(b"/d").mode == pair.them.stat(b"/d").mode == 0o40700
    snapshot_dir = snapshot_dir_of(pair.me.stat(b"/d").ino)
    pair.hold()
    pair.me.fs.rmdir(ROOT_CALLER, snapshot_dir, b"one")  # is no matter of order
    with pytest.raises(FileNotFoundError):
        pair.them.fs.lookup(ROOT_CALLER, snapshot_dir, b"one")
    pair.release()
    _snap(pair, b"two").wait(errno.EEXIST)


def test_t2_w2_a_snapshot_has_nothing_that_is_held_back(pair: Pair) -> None:
    """What is done when it begins to be taken is none of it, and no change for it."""
    write(pair.me, b"/d/file", b"f" * 5000)
    pair.release()
    cloner = pair.mine.vfs.questions.cloner
    settled = cloner.tree

    def then_go_on(source: Ino, stopped: Callable[[], bool]) -> CloneTree:
        found = settled(source, stopped)
        pair.hold()
        write(pair.me, b"/d/file", b"other" * 1000)
        write(pair.me, b"/d/later", b"later")
        return found

    cloner.tree = then_go_on
    report = _snap(pair, b"one").wait()
    first = {b"first": b""}  # its name was made while nothing waited
    for posix in (pair.me, pair.them):
        assert _shown(posix, b"one") == {b"file": b"f" * 5000, **first}
    assert report["changed"] == 0
    assert read(pair.me, b"/d/file") == b"other" * 1000
    pair.release()
    assert read(pair.them, b"/d/file") == b"other" * 1000


def test_t2_w2_a_snapshot_while_its_source_changes(pair: Pair) -> None:
    """What it says is of one moment is so, whoever publishes what meanwhile.

    Each step is made in `a` before `b` is, so no moment has it in `b` alone. The writer rests
    longer after each that is of several moments: on any machine one fits between its steps then.
    """
    for number in range(10):
        write(pair.me, b"/d/%d-b" % number, b"old")
    stop, rest_s = RUNTIME.event(), [0.03]

    def go_on() -> None:
        number = 0
        while not stop.wait(rest_s[0]):
            number += 1
            for half in (b"a", b"b"):
                write(pair.me, b"/d/%d-%s" % (number % 10, half), b"%09d" % number)
            _chmod(pair.me, 0o700 + number % 8)

    thread = RUNTIME.spawn("writer", go_on)
    moments = 0
    for number in range(12):
        name = b"s%d" % number
        report = _snap(pair, name).wait()
        kept = _shown(pair.them, name)
        if report["changed"]:
            rest_s[0] *= 2
        else:
            moments += 1
            for each, data in kept.items():
                if each.endswith(b"b") and data != b"old":
                    assert kept[each[:-1] + b"a"] >= data, (name, each)
    stop.set()
    thread.join()
    assert moments, "none was of one moment"
    pair.release()
