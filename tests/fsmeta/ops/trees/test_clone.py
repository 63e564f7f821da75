"""T2: clones of trees on every engine: what they hold, and that nothing is left of failed ones."""

from __future__ import annotations

import errno
from functools import partial

import pytest

from fsmeta.admin import clones
from fsmeta.admin.clones import CloneBuilder
from fsmeta.check.check import check
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.ops.trees import clone
from fsmeta.ops.trees.clone import Building
from fsmeta.schema import keys
from fsmeta.types import (
    CHUNK_BYTES,
    ROOT_CALLER,
    ROOT_INO,
    Attr,
    Caller,
    Ino,
    SetAttr,
    Slice,
    SpaceUsage,
)
from tests.fsmeta.engines import Engine
from tests.support.outcome import errno_of

ROOT = ROOT_CALLER
USER = Caller(1000, 1000)
Tree = dict[bytes, tuple[int, int, int, int, int, bytes, object]]


def write(meta: Meta, ino: Ino, indexes: range = range(1)) -> None:
    batch = [(index, Slice(0, meta.new_slice_id(), 100, 0, 100)) for index in indexes]
    meta.write_slices(ino, batch, indexes[-1] * CHUNK_BYTES + 100, 1)


def plant(meta: Meta, files: int = 400) -> Ino:
    """A tree with some of everything."""
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40750).ino
    sub = meta.create(ROOT, top, b"sub", 0o42775).ino
    meta.create(ROOT, sub, b"empty", 0o40700)
    file = meta.create(ROOT, sub, b"file", 0o104755).ino
    write(meta, file, range(3))
    meta.setxattr(ROOT, file, b"user.a", b"value")
    meta.link(ROOT, file, top, b"same")
    meta.link(ROOT, file, sub, b"same too")
    meta.symlink(ROOT, top, b"link", b"sub/file")
    for number in range(files):
        ino = meta.create(ROOT, sub, b"%d" % number, 0o100600).ino
        if number % 10 == 0:
            write(meta, ino)
    meta.setattr(ROOT, file, SetAttr(mtime_ns=5, atime_ns=6))
    meta.setattr(ROOT, sub, SetAttr(mtime_ns=7, atime_ns=8))
    meta.setattr(ROOT, top, SetAttr(mtime_ns=9, atime_ns=10))
    return top


def tree(meta: Meta, ino: Ino, path: bytes = b"") -> Tree:
    """Everything below a directory that a clone keeps."""
    attr = meta.getattr(ROOT, ino)
    out = {path: _shown(meta, attr)}
    if attr.is_dir:
        cursor: bytes | None = b""
        while cursor is not None:
            names, cursor = meta.names(ino, cursor)
            for name, child, _ in names:
                out.update(tree(meta, child, path + b"/" + name))
    return out


def _shown(meta: Meta, attr: Attr) -> tuple[int, int, int, int, int, bytes, object]:
    target = meta.readlink(ROOT, attr.ino) if attr.mode >> 12 == 0o12 else b""
    chunks = (
        [] if attr.is_dir else [meta.read_chunk(attr.ino, n) for n in meta.ranges.chunks(attr.ino)]
    )
    xattrs = meta.listxattr(ROOT, attr.ino)
    numbers = (attr.mode, attr.nlink, attr.size, attr.used, attr.mtime_ns)
    return *numbers, target, (attr.atime_ns, attr.uid, chunks, xattrs)


def _builder(meta: Meta, caller: Caller = ROOT, preserve: bool = True) -> CloneBuilder:
    return CloneBuilder(meta, caller, preserve, lambda: False)


def test_a_clone_is_the_same(engine: Engine) -> None:
    meta = engine.meta()
    top = plant(meta)
    before = meta.statfs()
    made = _builder(meta).build(top, ROOT_INO, b"copy").ino
    shown = tree(meta, top)
    assert tree(meta, made) == shown
    assert len(shown) == 407
    inodes = len(shown) - 2  # one has three names
    assert meta.statfs().inodes_used == before.inodes_used + inodes
    assert check(meta.store).problems == []
    sub = meta.lookup(ROOT, made, b"sub").ino
    assert meta.lookup(ROOT, sub, b"file").ino == meta.lookup(ROOT, made, b"same").ino


def test_who_is_not_root_clones_no_devices(engine: Engine) -> None:
    """Its owner would read what root keeps from him; 0/0 is a whiteout, which anyone makes."""
    meta = engine.meta()
    meta.setattr(ROOT, ROOT_INO, SetAttr(mode=0o777))
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    meta.create(ROOT, top, b"whiteout", 0o20600, rdev=0)
    meta.create(ROOT, top, b"fifo", 0o10600)
    _builder(meta, USER, preserve=False).build(top, ROOT_INO, b"allowed")
    for name, mode in ((b"disk", 0o60600), (b"memory", 0o20600)):
        meta.create(ROOT, top, name, mode, rdev=0x101)
        builder = _builder(meta, USER, preserve=False)
        assert errno_of(partial(builder.build, top, ROOT_INO, name)) == errno.EPERM
        _builder(meta, preserve=False).build(top, ROOT_INO, b"root's " + name)
        meta.unlink(ROOT, top, name)


def test_what_only_root_sets_is_not_cloned_for_others(engine: Engine) -> None:
    """Nor does a file capability pass to another owner, by whomever."""
    meta = engine.meta()
    meta.setattr(ROOT, ROOT_INO, SetAttr(mode=0o777))
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    program = meta.create(ROOT, top, b"program", 0o100744).ino
    given = meta.create(USER, ROOT_INO, b"given", 0o100744).ino
    meta.rename(ROOT, DentryLocation(ROOT_INO, b"given"), DentryLocation(top, b"given"))
    names = [b"security.capability", b"security.other", b"trusted.a", b"user.a"]
    for ino in (program, given):
        for name in names:
            meta.setxattr(ROOT, ino, name, b"value")
    clones = {
        b"root's": (_builder(meta, preserve=False), names, names[1:]),
        b"kept": (_builder(meta), names, names),
        b"user's": (_builder(meta, USER, preserve=False), names[3:], names[3:]),
    }
    for name, (builder, of_root, of_user) in clones.items():
        made = builder.build(top, ROOT_INO, name).ino
        for file, expected in ((b"program", of_root), (b"given", of_user)):
            assert meta.listxattr(ROOT, meta.lookup(ROOT, made, file).ino) == expected


def test_each_goes_its_own_way(engine: Engine) -> None:
    """What is changed in one is not in the other; the data goes with the last."""
    meta = engine.meta()
    top = plant(meta)
    made = _builder(meta).build(top, ROOT_INO, b"copy").ino
    kept = tree(meta, top)
    file = meta.lookup(ROOT, made, b"same").ino
    meta.setattr(ROOT, file, SetAttr(size=10))
    write(meta, file, range(5))
    assert tree(meta, top) == kept
    assert check(meta.store).problems == []


def test_large_files_are_filled_in_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone, "_SLICES_INLINE", 2)
    monkeypatch.setattr(clone, "COMMIT_OPS_ENOUGH", 300)
    meta = engine.meta()
    top = plant(meta)
    made = _builder(meta).build(top, ROOT_INO, b"copy").ino
    assert tree(meta, made) == tree(meta, top)


def test_owners(engine: Engine) -> None:
    """Without --preserve all is the caller's, and nothing runs as somebody else."""
    meta = engine.meta()
    open_to_all = meta.create(ROOT, ROOT_INO, b"open", 0o40777).ino
    top = meta.create(ROOT, open_to_all, b"top", 0o40755).ino
    meta.create(ROOT, top, b"program", 0o106755)
    made = _builder(meta, USER, preserve=False).build(top, open_to_all, b"copy")
    program = meta.lookup(ROOT, made.ino, b"program")
    assert (program.uid, program.gid, program.mode) == (1000, 1000, 0o100755)
    assert (made.uid, made.gid) == (1000, 1000)


@pytest.mark.parametrize("why", ["secret", "taken", "forbidden", "stopped", "full"])
def test_nothing_is_left_of_what_fails(engine: Engine, why: str) -> None:
    meta = engine.meta()
    place = meta.create(ROOT, ROOT_INO, b"place", 0o40777 if why != "forbidden" else 0o40755).ino
    top = meta.create(ROOT, ROOT_INO, b"top", 0o40755).ino
    for number in range(3):
        sub = meta.create(ROOT, top, b"sub%d" % number, 0o40755).ino
        file = meta.create(ROOT, sub, b"file", 0o100644).ino
        write(meta, file)
        meta.link(ROOT, file, sub, b"again")
    code = {"taken": errno.EEXIST, "stopped": errno.ECANCELED, "full": errno.ENOSPC}
    if why == "secret":
        meta.create(ROOT, sub, b"secret", 0o100600)
    if why == "taken":
        meta.create(ROOT, place, b"copy", 0o100644)
    before, builder = meta.statfs(), _builder(meta, USER, preserve=False)
    if why == "full":
        meta._rules = SpaceUsage(0, before.inodes_used + 5), *meta._rules[1:]
    if why == "stopped":
        turns = iter(range(3))
        builder = CloneBuilder(meta, USER, False, lambda: next(turns, None) is None)
    assert errno_of(lambda: builder.build(top, place, b"copy")) == code.get(why, errno.EACCES)
    meta._obey(meta.format)
    assert meta.statfs() == before
    assert meta.store.read_rows([keys.CLONES]) == [{}]
    assert check(meta.store).problems == []


def test_what_a_dead_builder_left_is_removed(engine: Engine) -> None:
    """And a builder that was only taken for dead can't add to it any more."""
    one, two = engine.meta(), engine.meta()
    top = plant(one)
    before = one.statfs()
    builder = _builder(one)
    assert one.session is not None
    pages = iter(range(4))

    def dies() -> bool:
        if next(pages, None) is None:
            raise SystemExit("killed")
        return False

    builder._stopped = dies
    with pytest.raises(SystemExit):
        builder.build(top, ROOT_INO, b"copy")
    assert clones.abandoned(two) == []
    assert check(one.store).problems == []
    two.sessions.end(one.session.id)
    (left,) = clones.abandoned(two)
    clones.discard(two, left)
    assert two.statfs() == before
    assert clones.abandoned(two) == []
    one.sessions.open({"host": "back"})
    building = Building(left.root, left.session, None)
    with pytest.raises(OSError, match="abandoned") as caught:
        one.run(clone.children, ROOT, building, left.root, [])
    assert caught.value.errno == errno.ECANCELED
