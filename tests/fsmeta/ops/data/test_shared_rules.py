"""P2, P4, T2: what ACLs, +i and +a say to ranges, clones and files without names; and dumps of all.

On every engine; each test ends with `check`.
"""

from __future__ import annotations

import errno
import io
from functools import partial

from fsmeta.admin import clones, dump
from fsmeta.admin.clones import CloneBuilder
from fsmeta.admin.trash_expiry import hours
from fsmeta.check.check import check
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, Span
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.trees import clone
from fsmeta.ops.trees.clone import Building, Child
from fsmeta.schema import keys
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import FLAG_APPEND, FLAG_IMMUTABLE, FLAG_NODUMP, ROOT_INO, SetAttr, Slice
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.rules.test_acl import ALICE, ALICES, BOB, _dir, _set
from tests.fsmeta.rules.test_quota import PAGE, ROOT, mkdir, mkfile
from tests.support.outcome import errno_of


def test_flags_forbid_what_they_forbid_on_ext4(engine: Engine) -> None:
    """P4: through descriptors that were open before."""
    meta = engine.meta()
    source, file = mkfile(meta, ROOT_INO, b"source", 2), mkfile(meta, ROOT_INO, b"file", 2)

    def tried() -> list[int]:
        modes = (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE)
        codes = [errno_of(partial(meta.ranges.fallocate, file, mode, 0, PAGE)) for mode in modes]
        copied = errno_of(lambda: meta.ranges.copy_file_range(Span(source, 0, PAGE), file, 0))
        return [*codes, copied]

    assert tried() == [0] * 5
    meta.setflags(ROOT, file, FLAG_APPEND)
    assert tried() == [0, 0, errno.EPERM, errno.EPERM, 0]
    meta.setflags(ROOT, file, FLAG_IMMUTABLE)
    assert tried() == [errno.EPERM] * 5
    meta.setflags(ROOT, file, 0)
    meta.setflags(ROOT, source, FLAG_IMMUTABLE)
    assert tried() == [0] * 5, "a source may be"


def test_a_file_without_a_name_inherits(engine: Engine) -> None:
    """P4: the default ACL of its directory, and its flags; +i forbids it."""
    meta = engine.meta()
    directory = _dir(meta)
    meta.setflags(ROOT, directory, FLAG_NODUMP)
    ino = meta.new_ino()
    made = meta.ranges.tmpfile(ROOT, directory, NewNode(ino, 0o100666, umask=0o077), True)
    named = meta.create(ROOT, directory, b"named", 0o100666, umask=0o077)
    assert (made.mode, made.acl, made.flags) == (named.mode, named.acl, named.flags)
    assert made.acl
    assert meta.link(ROOT, ino, directory, b"f").acl == made.acl
    meta.setflags(ROOT, directory, FLAG_IMMUTABLE)
    node = NewNode(meta.new_ino(), 0o100666)
    assert errno_of(lambda: meta.ranges.tmpfile(ROOT, directory, node, True)) == errno.EPERM


def test_clones_keep_acls_and_lose_what_fixes_them(engine: Engine) -> None:
    """T2: and who may read by an ACL may clone."""
    meta = engine.meta()
    top = _dir(meta, b"top")
    meta.setattr(ROOT, top, SetAttr(mode=0o700))
    _set(meta, top, ALICES)
    file = mkfile(meta, top, b"file", 2)
    _set(meta, file, ALICES)
    meta.setflags(ROOT, file, FLAG_IMMUTABLE | FLAG_NODUMP)
    meta.setattr(ROOT, ROOT_INO, SetAttr(mode=0o777))
    for caller, name, code in ((BOB, b"bob's", errno.EACCES), (ALICE, b"alice's", 0)):
        builder = CloneBuilder(meta, caller, False, lambda: False)
        assert errno_of(partial(builder.build, top, ROOT_INO, name)) == code
    copy = meta.lookup(ROOT, ROOT_INO, b"alice's")
    cloned, source = meta.lookup(ROOT, copy.ino, b"file"), meta.getattr(ROOT, file)
    assert copy.default_acl == meta.getattr(ROOT, top).default_acl != 0
    assert (cloned.acl, cloned.uid, cloned.flags) == (source.acl, ALICE.uid, FLAG_NODUMP)
    closed = meta.create(ROOT, ROOT_INO, b"closed", 0o40777).ino
    meta.setflags(ROOT, closed, FLAG_IMMUTABLE)
    builder = CloneBuilder(meta, ALICE, False, lambda: False)
    assert errno_of(lambda: builder.build(top, closed, b"copy")) == errno.EPERM


def test_a_dump_has_trash_shares_and_clones_to_be_removed(engine: Engine) -> None:
    """M4: who builds a clone does not come along, so the first leader removes it."""
    meta = engine.meta()
    assert meta.session is not None
    top = mkdir(meta, ROOT_INO, b"top")
    file = mkfile(meta, top, b"f", 2)
    copy = mkfile(meta, top, b"g")
    meta.ranges.copy_file_range(Span(file, 0, 2 * PAGE), copy, 0)
    meta.format = meta.format._replace(trash_days=1)
    meta.unlink(ROOT, top, b"g")
    building = Building(meta.new_ino(), meta.session.id, None)
    meta.run(clone.begin, ROOT, building, top)
    child = Child(b"f", file, meta.new_ino())
    meta.run(clone.children, ROOT, building, building.root, [child])
    sink = io.BytesIO()
    dump.dump(engine.first, sink)
    store = MemStore(MemBackend(RUNTIME))
    dump.load(store, io.BytesIO(sink.getvalue()))
    loaded = Meta(store, RUNTIME)
    loaded.sessions.open({"host": "test"})
    assert check(store).problems == []
    assert hours(loaded) == hours(meta)
    assert clones.abandoned(loaded) == [building]
    clones.discard(loaded, building)
    assert check(store).problems == []
    assert store.read_rows([keys.CLONES]) == [{}]
    clones.discard(meta, building)


def test_a_file_cut_to_a_hole_lists_nothing(engine: Engine) -> None:
    """Cut to nothing later it kept a slice beyond its end (found by `test_shared`)."""
    meta = engine.meta()
    ino = meta.create(ROOT, ROOT_INO, b"f", 0o100644).ino
    meta.write_slices(ino, [(0, Slice(100, meta.new_slice_id(), 1, 0, 1))], 101, 1)
    for size in (100, 0):
        meta.setattr(ROOT, ino, SetAttr(size=size))
    assert meta.read_chunk(ino, 0) == []
