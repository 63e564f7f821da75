"""Q1: with quotas of a directory, a user and a group, a change is still one round trip on Redis."""

from __future__ import annotations

import itertools

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules import quota
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, SetAttr, Slice, SpaceUsage
from tests.fsmeta.engines import Engine

KERNEL = Caller(1000, 1000, checked=True)  # it has judged permissions: default_permissions
DEPTH = 10
pytestmark = pytest.mark.parametrize("engine", ["redis"], indirect=True)


class Counted:
    """A client deep below quotas, whose cache is as warm as the kernel's look-ups make it."""

    def __init__(self, engine: Engine) -> None:
        other = engine.meta()
        dirs = [ROOT_INO]
        for _ in range(DEPTH):
            dirs.append(other.create(ROOT_CALLER, dirs[-1], b"d", 0o40777).ino)
            quota_admin.set_quota(other, quota.dir_node(dirs[-1]), QuotaLimits(1 << 40, 1000))
        for node in quota.owners(1000, 1000):
            quota_admin.set_quota(other, node, QuotaLimits(1 << 40, 1000))
        self.meta: Meta = engine.meta()
        self.dir = ROOT_INO
        for _ in range(DEPTH):
            self.dir = self.meta.lookup(KERNEL, self.dir, b"d").ino
        self.above = dirs[-2]
        self.write(self.create(b"warm"))

    def create(self, name: bytes, mode: int = 0o100666) -> Ino:
        return self.meta.create(KERNEL, self.dir, name, mode).ino

    def write(self, ino: Ino) -> None:
        piece = Slice(0, self.meta.new_slice_id(), 4096, 0, 4096)
        self.meta.write_slices(ino, [(0, piece)], 4096, 1)

    def used(self) -> SpaceUsage:
        return quota_admin.get_quota(self.meta, quota.user_node(1000)).used


@pytest.fixture
def client(engine: Engine) -> Counted:
    return Counted(engine)


def _absent(client: Counted, name: bytes) -> None:
    with pytest.raises(FileNotFoundError):  # as the kernel asks first
        client.meta.lookup(KERNEL, client.dir, name)


def test_every_change_is_one(client: Counted) -> None:
    meta = client.meta
    before = client.used()
    for name in (b"f", b"g", b"moved", b"sub"):
        _absent(client, name)
    with pytest.raises(FileNotFoundError):
        meta.lookup(KERNEL, client.above, b"up")
    made: list[Ino] = []
    trips = [meta.store.round_trips]

    def note() -> None:
        trips.append(meta.store.round_trips)

    made.append(client.create(b"f"))
    note()
    client.write(made[0])
    note()
    meta.setattr(KERNEL, made[0], SetAttr(size=5))
    note()
    meta.setattr(KERNEL, made[0], SetAttr(gid=1001))
    note()
    meta.rename(KERNEL, DentryLocation(client.dir, b"f"), DentryLocation(client.dir, b"moved"))
    note()
    meta.rename(KERNEL, DentryLocation(client.dir, b"moved"), DentryLocation(client.above, b"up"))
    note()
    meta.unlink(KERNEL, client.above, b"up")
    note()
    client.create(b"sub", 0o40777)
    note()
    meta.rmdir(KERNEL, client.dir, b"sub")
    note()
    steps = [after - earlier for earlier, after in itertools.pairwise(trips)]
    assert steps == [1] * 9
    assert client.used() == before


def test_a_directory_moves_with_all_below_in_one(client: Counted) -> None:
    meta = client.meta
    sub = client.create(b"sub", 0o40777)
    for n in range(20):
        meta.create(KERNEL, sub, b"%d" % n, 0o100666)
    with pytest.raises(FileNotFoundError):
        meta.lookup(KERNEL, client.above, b"sub")
    before = meta.store.round_trips
    meta.rename(KERNEL, DentryLocation(client.dir, b"sub"), DentryLocation(client.above, b"sub"))
    assert meta.store.round_trips - before == 1
    assert quota_admin.get_quota(meta, quota.dir_node(client.dir)).used.inodes == 1
    assert quota_admin.get_quota(meta, quota.dir_node(client.above)).used.inodes == 1 + 1 + 1 + 20
