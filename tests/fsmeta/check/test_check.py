"""`check` finds each thing that can't be, and finds nothing where all is well."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fsmeta.check.check import Examination, check
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.schema import inode, keys, slices
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Append, Delete, DeleteRow, Merge, Put, Write
from fsmeta.types import FLAG_BEYOND, ROOT_CALLER, ROOT_INO, Attr, FileType, Ino, SetAttr, Slice
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, Engine, add, change, make_volume
from tests.fsmeta.work import random_work

ROOT = ROOT_CALLER
NOBODY = Ino(77)


class Tree:
    """A small volume with everything in it: `d/{f,l1,l2,s,sub/}`, an orphan file and directory."""

    def __init__(self) -> None:
        backend = MemBackend(RUNTIME)
        self.store = MemStore(backend)
        make_volume(self.store, RUNTIME)
        self.meta = Meta(MemStore(backend), RUNTIME)
        self.meta.sessions.open({})
        self.d = self.create(ROOT_INO, b"d", 0o40755)
        self.sub = self.create(self.d, b"sub", 0o40755)
        self.f = self.create(self.d, b"f")
        self.linked = self.create(self.d, b"l1")
        self.meta.link(ROOT, self.linked, self.d, b"l2")
        self.meta.link(ROOT, self.linked, self.sub, b"l3")
        self.s = self.meta.symlink(ROOT, self.d, b"s", b"target").ino
        self.orphan = self.create(self.d, b"gone")
        self.orphan_dir = self.create(self.d, b"gone.d", 0o40755)
        self.write(self.f, 0, 5000)
        self.write(self.f, 100, 10)
        self.write(self.orphan, 0, 5000)
        self.meta.unlink(ROOT, self.d, b"gone")
        self.meta.rmdir(ROOT, self.d, b"gone.d")
        cut = self.create(self.d, b"cut")
        self.write(cut, 0, 5000)
        self.meta.setattr(ROOT, cut, SetAttr(size=0))  # its slice waits for deletion

    def create(self, parent: Ino, name: bytes, mode: int = 0o100644) -> Ino:
        return self.meta.create(ROOT, parent, name, mode).ino

    def write(self, ino: Ino, pos: int, length: int) -> None:
        piece = Slice(pos, self.meta.new_slice_id(), length, 0, length)
        self.meta.write_slices(ino, [(0, piece)], pos + length, 1)

    def attr(self, ino: Ino) -> Attr:
        return self.meta.getattr(ROOT, ino)

    def plant(self, *writes: Write) -> None:
        """Change the store behind everybody's back."""
        self.store.commit(change(*writes))

    def put_attr(self, ino: Ino, **changes: int) -> None:
        """Other attributes for an inode, whatever they break."""
        attr = self.attr(ino)._replace(**changes)  # type: ignore[arg-type]
        row = keys.inode_row(ino)
        a, v = inode.pack_attr(attr), inode.pack_volatile(attr)
        self.plant(Put(row, b"a", a), Put(row, b"v", v))

    def put_name(self, parent: Ino, name: bytes, ino: Ino, kind: FileType = FileType.REG) -> None:
        self.plant(Put(keys.dir_row(parent), name, keys.pack_dentry(kind, ino)))

    def found(self) -> list[str]:
        return [str(problem) for problem in check(self.store).problems]

    def demand(self, *texts: str) -> None:
        """Each text is in a problem of its own, and there are no more problems."""
        found = self.found()
        assert len(found) == len(texts), found
        for text in texts:
            assert sum(text in problem for problem in found) == 1, (text, found)


@pytest.fixture
def tree() -> Iterator[Tree]:
    made = Tree()
    assert_clean(made.store)
    yield made
    assert made.found(), "the planted fault was not found"


def test_a_volume_with_everything_is_clean() -> None:
    tree = Tree()
    outcome = check(tree.store)
    assert outcome.problems == []
    assert outcome.inodes == 9
    assert (outcome.slices, outcome.dead) == (3, 1)
    with Examination(tree.store) as examination:
        examination.run()
        assert sorted(size for _, size in examination.slices()) == [10, 5000, 5000]
        assert [size for _, size in examination.dead()] == [5000]
    tree.meta.deletion.purge(tree.meta.deletion.orphans(10))
    assert check(tree.store).problems == []
    assert check(tree.store).dead == 2
    tree.meta.deletion.forget_dead(tree.meta.deletion.dead_slices(10))
    assert_clean(tree.store)
    assert check(tree.store).dead == 0


def test_no_volume_is_no_clean_volume() -> None:
    with pytest.raises(ConfigError):
        check(MemStore(MemBackend(RUNTIME)))


# --- links and names -----------------------------------------------------------------------------


@pytest.mark.parametrize("nlink", [0, 2])
def test_a_file_with_a_wrong_link_count(tree: Tree, nlink: int) -> None:
    tree.put_attr(tree.f, nlink=nlink)
    texts = [f"has {nlink} links and 1 names"]
    if nlink == 0:
        texts += ["is not an orphan", "usage says", "usage says"]
        assert len(tree.found()) == len(texts)
    else:
        tree.demand(*texts)


def test_a_hard_link_less(tree: Tree) -> None:
    tree.plant(Delete(keys.dir_row(tree.sub), b"l3"))
    tree.demand("has 3 links and 2 names", "counts names")


def test_a_wrong_count_of_names_in_a_parent(tree: Tree) -> None:
    row = keys.inode_row(tree.linked)
    tree.plant(Put(row, keys.parent_field(tree.d), b"1"))
    tree.demand("counts names")


def test_a_parent_that_no_longer_names_it(tree: Tree) -> None:
    row = keys.inode_row(tree.linked)
    tree.plant(Put(row, keys.parent_field(ROOT_INO), b"1"))
    tree.demand("counts names")


def test_a_directory_with_a_wrong_link_count(tree: Tree) -> None:
    tree.put_attr(tree.d, nlink=7)
    tree.demand("is a directory with 7 links instead of 3")


def test_the_root_with_a_wrong_link_count(tree: Tree) -> None:
    tree.put_attr(ROOT_INO, nlink=2)
    tree.demand("is a directory with 2 links instead of 3")


def test_a_name_of_nothing(tree: Tree) -> None:
    tree.put_name(tree.d, b"dangling", NOBODY)
    tree.demand("inode 77: is named b'dangling'")


def test_a_missing_inode(tree: Tree) -> None:
    tree.plant(DeleteRow(keys.inode_row(tree.f)))
    tree.demand("is named b'f'", "usage says 8192 space", "inodes")


@pytest.mark.parametrize("field", [b"a", b"v"])
def test_half_an_inode(tree: Tree, field: bytes) -> None:
    tree.plant(Delete(keys.inode_row(tree.s), field))
    tree.demand(f"lacks its {field.decode()} record", "is named b's'", "inodes")


def test_a_file_without_a_name(tree: Tree) -> None:
    tree.plant(Delete(keys.dir_row(tree.d), b"f"))
    tree.demand("has 1 links and 0 names", "says its parent is")


def test_a_name_of_the_wrong_type(tree: Tree) -> None:
    tree.put_name(tree.d, b"f", tree.f, FileType.FIFO)
    tree.demand("with the wrong type")


def test_a_wrong_parent(tree: Tree) -> None:
    tree.put_attr(tree.f, parent=tree.sub)
    tree.demand(f"says its parent is {tree.sub}")


def test_a_directory_with_a_wrong_parent(tree: Tree) -> None:
    tree.put_attr(tree.sub, parent=ROOT_INO)
    tree.demand("is a directory under 1 whose names are in")


def test_a_directory_with_two_names(tree: Tree) -> None:
    tree.put_name(ROOT_INO, b"again", tree.sub, FileType.DIR)
    tree.demand("whose names are in", "inode 1: is a directory with 3 links instead of 4")


def test_names_in_a_directory_that_is_gone(tree: Tree) -> None:
    tree.put_name(NOBODY, b"lost", tree.f)
    assert "inode 77: has names and does not exist" in tree.found()


def test_names_in_a_file(tree: Tree) -> None:
    tree.put_name(tree.f, b"x", tree.s, FileType.LNK)
    assert f"inode {tree.f}: has names and is no directory" in tree.found()


def test_directories_in_a_ring(tree: Tree) -> None:
    """Regression: each has its one name and the right counts, but no path leads there."""
    one, two = tree.create(tree.d, b"1", 0o40755), tree.create(tree.d, b"2", 0o40755)
    assert_clean(tree.store)
    tree.plant(Delete(keys.dir_row(tree.d), b"1"), Delete(keys.dir_row(tree.d), b"2"))
    tree.plant(Merge(keys.inode_row(tree.d), b"v", inode.touch_parts(1, -2)))
    for lower, upper in ((one, two), (two, one)):
        tree.put_attr(lower, parent=upper, nlink=3)
        tree.put_name(upper, b"x", lower, FileType.DIR)
    tree.demand(f"inode {one}: is not under the root", f"inode {two}: is not under the root")


# --- contents ------------------------------------------------------------------------------------


def test_wrong_used_bytes(tree: Tree) -> None:
    tree.put_attr(tree.f, used=5001)
    tree.demand("says 5001 bytes are used, its slices cover 5000")


def test_a_symlink_that_is_not_as_long_as_its_target(tree: Tree) -> None:
    tree.plant(Put(keys.inode_row(tree.s), b"l", b"elsewhere"))
    tree.demand("is a symlink whose size is not its target's")


@pytest.mark.parametrize("field", ["a", "v", "chunk", "names"])
def test_records_that_do_not_decode(tree: Tree, field: str) -> None:
    row = keys.inode_row(tree.linked)
    names = {
        "a": b"a", "v": b"v", "chunk": keys.chunk_field(0), "names": keys.parent_field(tree.d)
    }  # fmt: skip
    tree.plant(Put(row, names[field], b"garbage"))
    assert any("corrupt metadata at row" in problem for problem in tree.found())


def test_a_dentry_that_does_not_decode(tree: Tree) -> None:
    tree.plant(Put(keys.dir_row(tree.d), b"f", b"\x08short"))
    assert any("dentry b'\\x08short'" in problem for problem in tree.found())


def test_fields_nobody_knows(tree: Tree) -> None:
    row = keys.inode_row(tree.f)
    tree.plant(Put(row, b"q", b"1"), Put(row, b"c12", b"1"), Put(row, b"p12", b"1"))
    tree.demand("a field b'q'", "a field b'c12'", "a field b'p12'")


def test_rows_nobody_knows(tree: Tree) -> None:
    tree.plant(Put(b"i123", b"a", b"1"), Put(b"d123", b"a", b"1"))
    tree.demand("row b'i123'", "row b'd123'")


def test_a_slice_with_two_sizes(tree: Tree) -> None:
    sid = tree.meta.read_chunk(tree.f, 0)[0].id
    piece = Slice(0, sid, 6000, 0, 5000)
    tree.plant(Put(keys.inode_row(tree.orphan), keys.chunk_field(0), slices.pack_slices([piece])))
    tree.demand(f"slice {sid} has two sizes", f"slice {sid} has 2 uses")


# --- the end of things ---------------------------------------------------------------------------


def test_an_orphan_that_is_not_listed(tree: Tree) -> None:
    tree.plant(Delete(keys.ORPHANS, keys.pack_u64(tree.orphan)))
    tree.demand("has 0 links and is not an orphan")


def test_an_orphan_directory_that_is_not_listed(tree: Tree) -> None:
    tree.plant(Delete(keys.ORPHANS, keys.pack_u64(tree.orphan_dir)))
    found = tree.found()
    assert f"inode {tree.orphan_dir}: is a directory with 0 links instead of 2" in found


def test_a_listed_orphan_with_a_name(tree: Tree) -> None:
    tree.plant(Put(keys.ORPHANS, keys.pack_u64(tree.f), keys.pack_u64(1)))
    tree.demand("has 1 links and is an orphan")


def test_a_listed_orphan_that_is_gone(tree: Tree) -> None:
    tree.plant(Put(keys.ORPHANS, keys.pack_u64(NOBODY), keys.pack_u64(1)))
    tree.demand("is listed as an orphan and does not exist")


def test_an_orphan_directory_in_use(tree: Tree) -> None:
    """Regression: only directories in it were noticed, not files."""
    name = keys.pack_dentry(FileType.REG, tree.f)
    tree.plant(
        Put(keys.dir_row(tree.orphan_dir), b"f", name),
        Delete(keys.dir_row(tree.d), b"f"),
    )
    tree.put_attr(tree.f, parent=tree.orphan_dir)
    tree.demand("is an orphan directory that is still in use")


@pytest.mark.parametrize("entry", [(b"short", keys.pack_u64(1)), (keys.pack_u64(1), b"short")])
def test_an_orphan_that_does_not_decode(tree: Tree, entry: tuple[bytes, bytes]) -> None:
    tree.plant(Put(keys.ORPHANS, *entry))
    tree.demand("can't be read")


def test_a_dead_slice_in_use(tree: Tree) -> None:
    piece = tree.meta.read_chunk(tree.f, 0)[0]
    entry = slices.pack_dead([(piece.id, piece.size)])
    tree.plant(Put(keys.DEAD_SLICES, keys.pack_u64(piece.id), entry))
    tree.demand(f"slice {piece.id} has 2 uses and drops, 1 are counted")


def test_a_count_of_uses_that_is_wrong(tree: Tree) -> None:
    tree.plant(Put(keys.SHARED_SLICES, keys.pack_u64(1), b"1"))
    tree.demand("slice 1 has 1 uses and drops, 2 are counted")


def test_a_count_of_uses_that_does_not_decode(tree: Tree) -> None:
    tree.plant(Put(keys.SHARED_SLICES, b"odd", b"1"))
    tree.demand("shared slice b'odd'")


def test_a_chunk_beyond_the_end(tree: Tree) -> None:
    tree.put_attr(tree.f, size=0)
    tree.demand("has 0 bytes and something in chunk 0")


def _reserve(tree: Tree, begin: int) -> None:
    """A record of 100 bytes in the first chunk of a file, which is charged."""
    used = tree.attr(tree.f).used
    record = slices.pack_slices([slices.reserved(begin, 100)])
    tree.plant(Append(keys.inode_row(tree.f), keys.chunk_field(0), record))
    tree.put_attr(tree.f, used=used + 100)


def test_p4_what_is_reserved_counts(tree: Tree) -> None:
    """Beyond the end only where the inode says so: appends cover nothing else."""
    size = tree.attr(tree.f).size
    _reserve(tree, size + 10)
    tree.demand(f"has {size} bytes and reserves more in chunk 0")
    tree.put_attr(tree.f, flags=FLAG_BEYOND)
    assert tree.found() == []
    tree.put_attr(tree.f, used=size)
    tree.demand("bytes are used, its slices cover")
    tree.put_attr(tree.f, used=size + 100, size=0)
    tree.demand("has 0 bytes and something in chunk 0")


def test_dead_slices_that_do_not_decode(tree: Tree) -> None:
    tree.plant(Put(keys.DEAD_SLICES, keys.pack_u64(99), b"short"))
    tree.demand("corrupt metadata at row b'X'")


# --- the volume ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "text"), [(b"space", "space"), (b"inodes", "inodes")])
@pytest.mark.parametrize("delta", [-1, 1, 4096])
def test_usage_drift(tree: Tree, field: bytes, text: str, delta: int) -> None:
    tree.plant(add(keys.USAGE, field, delta))
    tree.demand(f" {text}, there are ")


def test_usage_that_is_gone(tree: Tree) -> None:
    tree.plant(DeleteRow(keys.USAGE))
    tree.demand("usage says 0 space", "usage says 0 inodes")


@pytest.mark.parametrize("row", [keys.USAGE, keys.COUNTERS])
def test_counters_that_do_not_decode(tree: Tree, row: bytes) -> None:
    field = keys.SPACE if row == keys.USAGE else keys.NEXT_INO
    tree.plant(Put(row, field, b"many"))
    tree.demand("counter b'many'")


@pytest.mark.parametrize("field", [keys.NEXT_INO, keys.NEXT_SLICE])
def test_ids_that_would_be_given_twice(tree: Tree, field: bytes) -> None:
    tree.plant(Put(keys.COUNTERS, field, b"3"))
    tree.demand(f"the next {field.decode()} is 3, there is one")


def test_a_format_that_does_not_decode(tree: Tree) -> None:
    tree.plant(Put(keys.FORMAT, keys.FORMAT_FIELD, b"\x80"))
    tree.demand("corrupt metadata at row b'F'")


# --- no false alarms -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_random_work_leaves_it_clean(engine: Engine, seed: int) -> None:
    meta = engine.meta()
    random_work(meta, random.Random(seed), 150)
    assert_clean(engine.first)
    while orphans := meta.deletion.orphans(100):
        meta.deletion.purge(orphans)
    meta.deletion.forget_dead(meta.deletion.dead_slices(1000))
