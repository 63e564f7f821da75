"""Whatever data a volume has, no commit is longer than an engine takes: more is done in steps."""

from __future__ import annotations

import errno

import pytest

from fsclient.background.leader import FORGET_BATCH, first_of
from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.errors import ConfigError
from fsmeta.meta.deletion import HOLD_BATCH
from fsmeta.meta.meta import Meta
from fsmeta.ops.data import extent
from fsmeta.ops.data.deletion import Drops
from fsmeta.ops.data.ranges import KEEP_SIZE, PUNCH_HOLE
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules import quota
from fsmeta.rules.context import put_attr, put_dentry
from fsmeta.rules.settings import OFF, load_format
from fsmeta.schema import inode, keys, slices as schema_slices
from fsmeta.schema.locks import Kind
from fsmeta.store.contract import COMMIT_OPS_MAX
from fsmeta.txn import retry
from fsmeta.txn.txn import Txn
from fsmeta.types import CHUNK_BYTES, ROOT_CALLER, ROOT_INO, FileType, Ino, SetAttr, Slice, SliceId
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.ops.names.test_many_names import plant
from tests.support.outcome import errno_of

ROOT = ROOT_CALLER
DEEP = 1400  # directories above one another: a check and two counters each are too many for a step
OPEN = COMMIT_OPS_MAX + 100


@pytest.fixture
def longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are refused beyond what a step may have, and what a last thing adds to it."""
    monkeypatch.setattr(retry, "COMMIT_OPS_LIMIT", COMMIT_OPS_MAX)


@pytest.mark.usefixtures("longest")
@pytest.mark.parametrize("unlinked", [1, OPEN])
def test_p5_more_files_are_open_than_a_commit_takes(engine: Engine, unlinked: int) -> None:
    """Some, or all, have no name any more: they are held, and let go of."""
    meta = engine.meta()
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    if unlinked == 1:
        gone = meta.create(ROOT, top, b"gone", 0o100644).ino
        meta.unlink(ROOT, top, b"gone")
        opened = [Ino(1_000_000 + number) for number in range(OPEN)]
        opened[OPEN // 2] = gone
        orphans = {gone}
    else:
        plant(meta, top, unlinked)
        cursor: bytes | None = b""
        opened = []
        while cursor is not None:
            names, cursor = meta.names(top, cursor)
            opened += [ino for _, ino, _ in names]
        orphans = set(opened)

        def lose(txn: Txn, part: list[Ino]) -> None:
            for ino in part:
                txn.put(keys.ORPHANS, keys.pack_u64(ino), b"1")

        for begin in range(0, len(opened), 1000):
            part = opened[begin : begin + 1000]
            meta.transactor.run(lambda txn, part=part: lose(txn, part))  # type: ignore[misc]
    assert len(opened) >= OPEN > HOLD_BATCH
    assert set(meta.deletion.hold_orphans(opened)) == orphans
    assert meta.session is not None
    assert meta.deletion.held_orphans([meta.session.id]) == orphans
    meta.deletion.release_orphans(opened)
    assert meta.deletion.held_orphans([meta.session.id]) == set()
    for begin in range(0, len(opened), 1000):
        part = opened[begin : begin + 1000] if unlinked > 1 else []

        def find(txn: Txn, part: list[Ino] = part) -> None:
            for ino in part:
                txn.delete(keys.ORPHANS, keys.pack_u64(ino))

        meta.transactor.run(find)


def _scattered(meta: Meta, chunks: int, slices: int) -> Ino:
    """A file whose chunks have so many slices of 10 bytes each."""
    ino = meta.create(ROOT, ROOT_INO, b"scattered", 0o100644).ino
    for index in range(chunks):
        listed = [(index, Slice(10 * n, meta.new_slice_id(), 10, 0, 10)) for n in range(slices)]
        meta.write_slices(ino, listed, index * CHUNK_BYTES + 10 * slices, 1)
    return ino


@pytest.mark.usefixtures("longest")
@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis"], indirect=True)
@pytest.mark.parametrize("how", ["purge", "truncate", "punch"])
def test_a_file_of_very_many_slices_goes_in_steps(
    engine: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk takes several fields of what was dropped."""
    meta = engine.meta()
    chunks, slices = 700, 10
    monkeypatch.setattr(extent, "DROPS_A_FIELD", 2)
    ino = _scattered(meta, chunks, slices)
    if how == "truncate":
        assert meta.setattr(ROOT, ino, SetAttr(size=0)).after.used == 0
    elif how == "punch":
        size = meta.getattr(ROOT, ino).size
        meta.ranges.fallocate(ino, PUNCH_HOLE | KEEP_SIZE, 0, size)
        assert meta.getattr(ROOT, ino).used == 0
    else:
        meta.unlink(ROOT, ROOT_INO, b"scattered")
        meta.deletion.purge([ino])
        assert meta.deletion.orphans(10) == []
    dead = meta.deletion.dead_slices(10 * chunks)
    assert sum(map(len, dead.values())) == chunks * slices


def test_drops_of_one_field_are_forgotten_in_parts() -> None:
    """Clones that go together drop the same slices: all that is in one field."""
    many = [(SliceId(n % 700), 10) for n in range(5 * FORGET_BATCH + 1)]
    left: Drops = {b"a": [(SliceId(1), 1)], b"b": many}
    parts: list[Drops] = []
    while left:
        part, left = first_of(left)
        parts.append(part)
    assert parts[0][b"a"] == [(SliceId(1), 1)]
    assert all(sum(map(len, part.values())) <= FORGET_BATCH for part in parts)
    assert [dead for part in parts for dead in part.get(b"b", [])] == many


def test_drops_that_are_forgotten_in_parts_go_once(engine: Engine) -> None:
    """A slice that several used goes with the last of them."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    number = meta.deletion.next_round()
    assert number is not None
    sids = [meta.new_slice_id() for _ in range(3)]
    drops = [(sid, 10) for sid in sids] * 2
    field = keys.pack_u64(sids[0])

    def drop(txn: Txn) -> None:
        txn.put(keys.DEAD_SLICES, field, schema_slices.pack_dead(drops))
        for sid in sids:
            txn.put(keys.SHARED_SLICES, keys.pack_u64(sid), b"1")

    meta.transactor.run(drop)
    gone: list[SliceId] = []
    for part in (drops[:2], drops[2:5], drops[5:]):
        uses = meta.deletion.last_uses(number, {field: part})
        assert uses is not None
        gone += [sid for sid, _ in uses.gone]
        meta.deletion.forget_dead({field: part}, uses.shared)
    assert gone == sids
    assert meta.deletion.dead_slices(10) == {}


def _deep(meta: Meta, depth: int) -> list[Ino]:
    """Directories, each in the one before; the first is in the root."""
    inos = [meta.new_ino() for _ in range(depth)]
    parents = [ROOT_INO, *inos]
    for begin in range(0, depth, 500):

        def verb(txn: Txn, begin: int = begin) -> None:
            end = min(begin + 500, depth)
            for at in range(begin, end):
                ino, above = inos[at], parents[at]
                attr = inode.new_attr(ino, 0o40777, (0, 0), above, RUNTIME.now_ns())
                put_attr(txn, attr._replace(nlink=3 if at + 1 < depth else 2))
                put_dentry(txn, above, b"d", FileType.DIR, ino)
            txn.add(keys.USAGE, keys.INODES, end - begin)
            if not begin:
                row = keys.inode_row(ROOT_INO)
                txn.merge(row, keys.VOLATILE_FIELD, inode.nlink_parts(1))

        meta.transactor.run(verb)
    return inos


@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis"], indirect=True)
def test_q1_quotas_above_very_deep_directories(engine: Engine) -> None:
    meta = engine.meta()
    inos = _deep(meta, DEEP)
    top, last = inos[0], inos[-1]
    node = quota.dir_node(top)
    assert quota_admin.set_quota(meta, node, QuotaLimits(None, DEEP + 1)).used.inodes == DEEP - 1
    folder = meta.create(ROOT, last, b"folder", 0o40777).ino
    meta.create(ROOT, folder, b"file", 0o100644)
    assert errno_of(lambda: meta.create(ROOT, folder, b"more", 0o100644)) == errno.EDQUOT
    meta.rename(ROOT, DentryLocation(last, b"folder"), DentryLocation(ROOT_INO, b"folder"))
    assert quota_admin.get_quota(meta, node).used.inodes == DEEP - 1
    meta.rename(ROOT, DentryLocation(ROOT_INO, b"folder"), DentryLocation(inos[-2], b"folder"))
    meta.unlink(ROOT, folder, b"file")
    assert meta.statfs(last).inodes_used == DEEP
    assert quota_admin.delete_quota(meta, node)


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
def test_q1_what_lies_too_deep_to_be_counted_leaves_no_half_accounting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = engine.meta()
    top = _deep(meta, 100)[0]
    monkeypatch.setattr(retry, "COMMIT_OPS_LIMIT", 150)
    with pytest.raises(ConfigError, match="too deep"):
        quota_admin.set_quota(meta, quota.dir_node(top), QuotaLimits(None, 1000))
    assert meta.transactor.view(load_format).accounting == OFF
    assert not meta.store.scan(keys.ACCOUNTS).items
    monkeypatch.undo()
    assert (
        quota_admin.set_quota(meta, quota.dir_node(top), QuotaLimits(None, 1000)).used.inodes == 99
    )
    monkeypatch.setattr(retry, "COMMIT_OPS_LIMIT", 150)
    with pytest.raises(OSError, match="too deep") as caught:
        meta.create(ROOT, _last(meta, top), b"f", 0o100644)
    assert caught.value.errno == errno.ENAMETOOLONG
    monkeypatch.undo()


def _last(meta: Meta, directory: Ino) -> Ino:
    """The innermost of `_deep`."""
    while True:
        names, _ = meta.names(directory, b"")
        if not names:
            return directory
        directory = names[0].ino


def test_a_directory_moves_below_very_many(engine: Engine) -> None:
    """Each on the way is checked, so that it does not come to lie under itself."""
    meta = engine.meta()
    inos = _deep(meta, 300 if engine.name == "tikv" else COMMIT_OPS_MAX + 100)
    folder = meta.create(ROOT, ROOT_INO, b"folder", 0o40777).ino
    meta.rename(ROOT, DentryLocation(ROOT_INO, b"folder"), DentryLocation(inos[-1], b"folder"))
    assert meta.getattr(ROOT, folder).parent == inos[-1]
    loop = DentryLocation(ROOT_INO, b"d"), DentryLocation(folder, b"loop")
    assert errno_of(lambda: meta.rename(ROOT, *loop)) == errno.EINVAL


@pytest.mark.usefixtures("longest")
def test_very_many_waits_for_locks_are_forgotten(engine: Engine) -> None:
    meta = engine.meta()
    ino = meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino
    tickets, owners = list(range(1, OPEN + 1)), list(range(1, OPEN + 1))
    meta.locks.tidy(tickets, owners, lambda _owner: False)
    assert meta.locks.locks_of(ino, Kind.FLOCK) == ([], [])
