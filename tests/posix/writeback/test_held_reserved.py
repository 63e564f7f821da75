"""P4, Q1, W2: space that is reserved by a mount that writes back, and what else uses the volume."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsdata.objects.mem import MemObjects
from fsmeta.meta import sessions
from fsmeta.ops.data.ranges import KEEP_SIZE, ZERO_RANGE
from fsmeta.rules.settings import RESERVED_VERSION
from tests.posix.inproc import RUNTIME, client, memory
from tests.posix.volumes import PATIENCE_S
from tests.posix.writeback.test_writeback import new_pair, write
from tests.sim.world.posix import Posix
from tests.support.outcome import errno_of

MIB = 1 << 20


def test_p4_an_earlier_client_is_not_locked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user may call fallocate(2): while such a client is mounted, it sets sizes as before."""
    connect = memory()
    with client(connect) as mine:
        with monkeypatch.context() as earlier:
            earlier.setattr(sessions, "_KNOWS", "of no client")
            options = ClientOptions(heartbeat_s=0.5, meta_timeout_s=PATIENCE_S)
            theirs = MountClient(connect(), RUNTIME, options, GivenParts(MemObjects(RUNTIME)))
            theirs.start()
        me, before = Posix(mine.vfs), mine.meta.format.version
        file = me.open(b"/file", os.O_RDWR | os.O_CREAT)
        file.reserve(0, 0, MIB)
        found = me.stat(b"/file")
        assert (found.size, found.used) == (MIB, 0)
        assert mine.meta.format.version == before < RESERVED_VERSION
        assert theirs.stop()
        file.reserve(0, 0, MIB)
        file.close()
        assert me.stat(b"/file").used == MIB
        assert mine.meta.format.version == RESERVED_VERSION


@pytest.mark.parametrize("mode", [0, KEEP_SIZE, ZERO_RANGE])
def test_q1_what_is_held_back_is_refused_by_fallocate_alone(tmp_path: Path, mode: int) -> None:
    """The volume is full for all else, before and after it is published."""
    with new_pair(memory(), tmp_path / "staging", capacity=4 * MIB) as pair:
        pair.me.open(b"/d/file", os.O_RDWR | os.O_CREAT).close()
        pair.release()
        pair.hold()
        file = pair.me.open(b"/d/file", os.O_RDWR)
        assert errno_of(lambda: file.reserve(mode, 0, 5 * MIB)) == errno.ENOSPC
        file.reserve(mode, 0, 3 * MIB)
        usage = pair.mine.meta.statfs()
        write(pair.me, b"/d/other", b"o" * (usage.space_limit - usage.space_used))
        assert errno_of(lambda: write(pair.me, b"/d/more", b"m" * 4096)) == errno.ENOSPC
        file.write(0, b"f" * MIB)
        assert errno_of(lambda: file.reserve(mode, 3 * MIB, 4096)) == errno.ENOSPC
        file.fsync()
        pair.release()
        file.write(MIB, b"g" * 2 * MIB)
        file.close()
        pair.release()
        there = pair.them.open(b"/d/file")
        assert there.read(0, 4 * MIB) == b"f" * MIB + b"g" * 2 * MIB
        there.close()
        assert pair.them.stat(b"/d/file").used == 3 * MIB
        assert errno_of(lambda: write(pair.them, b"/d/theirs", b"t" * 4096)) == errno.ENOSPC
