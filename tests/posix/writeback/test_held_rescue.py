"""W2: what lost its place is published in a directory that is of root, whatever users have made."""

from __future__ import annotations

from fsmeta.types import ROOT_CALLER, SetAttr
from tests.conftest import LogWatch
from tests.posix.writeback.test_writeback import Pair, pair, read, write

__all__ = ["pair"]


def test_w2_a_name_that_users_have_taken_stops_no_publication(
    pair: Pair, log_watch: LogWatch
) -> None:
    """`/lost+found` as a plain file stopped publication of all domains until it was moved away."""
    log_watch.expect("^WARNING fsclient.writeback.publisher: create name: .*; it is in /lost.found")
    write(pair.them, b"/lost+found", b"a file")
    pair.them.mkdir(b"/lost+found.1")
    theirs = pair.them.stat(b"/lost+found.1").ino
    pair.them.fs.setattr(ROOT_CALLER, theirs, SetAttr(uid=1000, gid=1000), None)
    pair.hold()
    write(pair.me, b"/d/name", b"mine")
    ino = pair.me.stat(b"/d/name").ino
    pair.them.symlink(b"theirs", b"/d/name")
    pair.release()
    assert read(pair.them, b"/lost+found.2/name.%d" % ino) == b"mine"
    assert read(pair.them, b"/lost+found") == b"a file"
    assert pair.them.listdir(b"/lost+found.1") == []
