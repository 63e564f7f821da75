"""P1: what is told of a file that is being closed here is no older than what was told before.

One client in the test's own process; what happens at the same time is done between a question to
the metadata and the use of its answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from fsclient.client.client import MountClient
from fsclient.files.handles import open_files
from fsmeta.types import ROOT_CALLER, ROOT_INO, SetAttr
from tests.posix import inproc
from tests.posix.inproc import meanwhile
from tests.sim.world.posix import Posix

LONG = 394_127


@pytest.fixture
def one() -> Iterator[MountClient]:
    with inproc.client(inproc.memory()) as made:
        yield made


def _written(posix: Posix) -> Callable[[], None]:
    """A file of which nothing is committed but that it is there; what stores and closes it."""
    file = posix.open(b"/f", os.O_RDWR | os.O_CREAT)
    file.write(0, b"x" * LONG)
    return file.close


def test_a_stat_is_not_older_than_what_was_seen_before_a_close(one: MountClient) -> None:
    """Its answer was from before the commit, and the overlay was gone: no bytes, for an hour."""
    posix = Posix(one.vfs)
    close = _written(posix)
    ino = posix.stat(b"/f").ino
    with meanwhile(one.meta, "getattr", close):
        assert one.vfs.getattr(ROOT_CALLER, ino, None).attr.size == LONG


def test_nor_is_a_lookup(one: MountClient) -> None:
    posix = Posix(one.vfs)
    with meanwhile(one.meta, "lookup", _written(posix)):
        assert posix.stat(b"/f").size == LONG


def test_nor_is_what_a_link_is_told(one: MountClient) -> None:
    posix = Posix(one.vfs)
    close = _written(posix)
    ino = posix.stat(b"/f").ino
    with meanwhile(one.meta, "link", close):
        entry = one.vfs.link(ROOT_CALLER, ino, ROOT_INO, b"g")
    assert entry.attr is not None
    assert entry.attr.size == LONG


def test_nor_is_what_a_change_of_its_mode_is_told(one: MountClient) -> None:
    posix = Posix(one.vfs)
    close = _written(posix)
    ino = posix.stat(b"/f").ino
    with meanwhile(one.meta, "setattr", close):
        told = one.vfs.setattr(ROOT_CALLER, ino, SetAttr(mode=0o600), None).attr
    assert (told.size, told.mode & 0o777) == (LONG, 0o600)


def test_nor_is_a_listing(one: MountClient) -> None:
    posix = Posix(one.vfs)
    close = _written(posix)
    ino = posix.stat(b"/f").ino
    fh = one.vfs.directories.opendir(ROOT_CALLER, ROOT_INO).fh
    with meanwhile(one.meta, "attr_records", close):
        names, _, entries = one.vfs.directories.readdirplus(ROOT_CALLER, ROOT_INO, fh, 0, len)
    one.vfs.directories.releasedir(ROOT_INO, fh)
    (entry,) = (e for name, e in zip(names, entries.each(names), strict=True) if name.ino == ino)
    assert entry is not None
    assert entry.attr is not None
    assert entry.attr.size == LONG


def test_of_files_closed_long_ago_only_is_remembered_when(
    one: MountClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks while very many are closed asks once more."""
    monkeypatch.setattr(open_files, "CLOSED_MAX", 2)
    posix = Posix(one.vfs)
    close = _written(posix)

    def close_many() -> None:
        close()
        for number in range(3):
            other = posix.open(b"/%d" % number, os.O_RDWR | os.O_CREAT)
            other.write(0, b"y")
            other.close()

    ino = posix.stat(b"/f").ino
    with meanwhile(one.meta, "getattr", close_many):
        assert one.vfs.getattr(ROOT_CALLER, ino, None).attr.size == LONG
