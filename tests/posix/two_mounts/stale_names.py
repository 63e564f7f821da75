"""P3: names that a mount still believes when another one has taken them away.

Without news a kernel believes a name for a second. Until then it may open what the name led to by
its inode, although that is in the trash by now, or held open by somebody: as if nobody had deleted
it. A database on two mounts took such a journal for that of a writer that had crashed, and rolled
back what had been committed.

On Redis the news of it come at once, but not before the call elsewhere returns: each case waits for
them there, and what it asks for is then true of any engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

Case = Callable[[Path, Path, bool], None]  # a directory here and there, and whether there are news


def _ino(path: Path) -> int:
    """What a name leads to; 0 where it leads nowhere."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


def _believed(here: Path, there: Path, name: str) -> tuple[Path, Callable[[bool], None]]:
    """A file that was made here, and that the kernel there has just looked up; and what waits for
    the news, if any, that it has gone."""
    (here / name).write_bytes(b"journal")
    path = there / name
    assert path.read_bytes() == b"journal"
    ino = os.stat(path).st_ino

    def gone(news: bool) -> None:
        if news:
            wait_until(lambda: _ino(path) != ino)

    return path, gone


def _unlinked(here: Path, there: Path, news: bool) -> None:
    path, gone = _believed(here, there, "unlinked")
    (here / "unlinked").unlink()
    gone(news)
    with pytest.raises(FileNotFoundError):
        path.open("rb")
    assert not path.exists()


def _held(here: Path, there: Path, news: bool) -> None:
    """Who has it open may go on; nobody else may begin."""
    path, gone = _believed(here, there, "held")
    with path.open("r+b", buffering=0) as held:
        (here / "held").unlink()
        gone(news)
        for mode in ("rb", "r+b"):
            with pytest.raises(FileNotFoundError):
                path.open(mode)
        assert held.read() == b"journal"
        held.write(b"more")


def _replaced(here: Path, there: Path, news: bool) -> None:
    path, gone = _believed(here, there, "replaced")
    with ExitStack() as stack:
        stack.enter_context(path.open("rb"))
        (here / "new").write_bytes(b"new")
        (here / "new").rename(here / "replaced")
        gone(news)
        assert path.read_bytes() == b"new"
    (here / "replaced").unlink()


def _made_anew(here: Path, there: Path, news: bool) -> None:
    """O_CREAT makes a new file, which the others find, too."""
    path, gone = _believed(here, there, "anew")
    (here / "anew").unlink()
    gone(news)
    with path.open("wb") as file:
        file.write(b"second")
    wait_until((here / "anew").exists)
    assert (here / "anew").read_bytes() == b"second"
    (here / "anew").unlink()


def _reopened(here: Path, there: Path, news: bool) -> None:
    """What lost its name on the mount where it is open is reopened as on any file system."""
    del news
    path, _ = _believed(here, there, "mine")
    fd = os.open(path, os.O_RDWR)
    path.unlink()
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert os.pread(again, 10, 0) == b"journal"
    os.close(again)
    os.close(fd)


CASES: dict[str, Case] = {
    "unlinked": _unlinked,
    "held": _held,
    "replaced": _replaced,
    "made_anew": _made_anew,
    "reopened": _reopened,
}
