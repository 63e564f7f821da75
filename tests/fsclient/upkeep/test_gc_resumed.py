"""R1: gc goes on where it was killed, only where that is safe; two at once delete nothing used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsclient.upkeep import gc as collect_module, gc_checkpoint
from fsclient.upkeep.gc import Collected, Job, Progress, collect
from fsclient.upkeep.gc_checkpoint import MARK, SWEEP, GcCheckpoint
from fsdata.format.object_keys import object_key
from fsdata.objects.mem import MemObjects
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import Span
from fsmeta.schema import keys
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, Slice, SliceId
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, change, make_volume

LEAKED = range(40, 70)
Hook = Callable[[], object]


class Killed(BaseException):
    """What a process that is killed does not see."""


def die_if(it_is_time: bool) -> None:
    if it_is_time:
        raise Killed


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "BATCH", 10)
    monkeypatch.setattr(gc_checkpoint, "SAVE_EVERY_S", 0.0)


class World:
    """A volume of two pages of inodes; `early` is on the first and `late` on the second."""

    def __init__(self, directory: Path) -> None:
        self.backend = MemBackend(RUNTIME)
        store = MemStore(self.backend)
        make_volume(store, RUNTIME)
        self.objects = MemObjects(RUNTIME)
        self.file = str(directory / "cursor")
        self.meta = Meta(MemStore(self.backend), RUNTIME)
        self.meta.sessions.open({})
        self.early = self.create(b"early")
        for number in range(1100):
            self.create(b"%d" % number)
        self.late = self.create(b"late")
        self.used = self.write(self.late)
        self.meta.give_up_slices([self.meta.new_slice_id() for _ in range(100)])
        self.meta.sessions.close()
        self.meta.sessions.open({})  # which shows the floor
        for sid in LEAKED:
            self.put(sid)
        self.pages: list[int] = []  # how many inodes each run had read at each page

    def create(self, name: bytes) -> Ino:
        return self.meta.create(ROOT_CALLER, ROOT_INO, name, 0o100644).ino

    def put(self, sid: int) -> None:
        self.objects.put(object_key(SliceId(sid), 0, 100), [bytes(100)])

    def write(self, ino: Ino) -> SliceId:
        piece = Slice(0, self.meta.new_slice_id(), 100, 0, 100)
        self.put(piece.id)
        self.meta.write_slices(ino, [(0, piece)], 100, 1)
        return piece.id

    def move_use(self) -> None:
        """`early` shares what `late` has, which then is gone."""
        self.meta.ranges.copy_file_range(Span(self.late, 0, 100), self.early, 0)
        self.meta.unlink(ROOT_CALLER, ROOT_INO, b"late")
        self.meta.deletion.purge([self.late])

    def ids(self) -> set[int]:
        return {int(info.key.split("/")[-1].split("_")[0]) for info in self.objects.list("chunks/")}

    def gc(
        self, place: GcCheckpoint | None = None, page: Hook = int, batch: Hook = int
    ) -> Collected:
        """`page` is called after each page of inodes, `batch` after some objects."""

        def read(inodes: int) -> None:
            self.pages.append(inodes)
            page()

        def listed(_seen: int, _so_far: Collected) -> None:
            batch()

        progress = Progress(read, listed)
        return collect(self.fresh(), self.objects, RUNTIME, Job(0, True, 2), progress, place)

    def fresh(self) -> Meta:
        return Meta(MemStore(self.backend), RUNTIME)

    def place(self) -> GcCheckpoint:
        return GcCheckpoint(RUNTIME, self.file, "the volume")

    def phase(self) -> str:
        return str(json.loads(Path(self.file).read_text())["phase"])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    assert_clean(made.meta.store)


def test_r1_two_at_once_delete_nothing_that_is_used(world: World) -> None:
    """Regression: the first to end had clients note shares no more, and the other went on."""

    def another() -> None:
        if len(world.pages) == 1:
            world.gc()
            world.move_use()

    with pytest.raises(ConfigError, match="another gc has started"):
        world.gc(page=another)
    assert world.ids() == {world.used}, "the second has deleted what was leaked"
    assert world.gc().in_use.objects == 1


def test_r1_a_share_is_noted_while_one_reads(world: World) -> None:
    def move_once() -> None:
        if len(world.pages) == 1:
            world.move_use()

    world.gc(page=move_once)
    assert world.ids() == {world.used}
    assert not world.meta.store.scan(keys.SHARED).items, "nothing is left to be noted"


def test_r1_killed_while_it_reads_it_goes_on_there(world: World) -> None:
    with pytest.raises(Killed):
        world.gc(world.place(), page=lambda: die_if(len(world.pages) == 2))
    assert world.phase() == MARK
    world.move_use()
    world.pages.clear()
    place = world.place()
    found = world.gc(place)
    assert world.pages[0] < 500, "the first page is not read again"
    assert found.deleted.objects == len(LEAKED)
    assert world.ids() == {world.used}
    place.remove()
    assert list(Path(world.file).parent.iterdir()) == []


def test_r1_killed_while_it_deletes_it_goes_on_there(world: World) -> None:
    with pytest.raises(Killed):
        world.gc(world.place(), batch=lambda: die_if(len(world.ids()) < 20))
    assert world.phase() == SWEEP
    left = len(world.ids())
    assert left > 1
    world.move_use()
    world.pages.clear()
    found = world.gc(world.place())
    assert world.pages == [], "no chunk is read again"
    assert found.deleted.objects == found.leaked.objects == len(LEAKED), "of both runs"
    assert found.in_use.objects == 1
    assert world.ids() == {world.used}


def test_r1_after_another_gc_marks_are_made_anew(world: World) -> None:
    with pytest.raises(Killed):
        world.gc(world.place(), page=lambda: die_if(len(world.pages) == 2))
    world.gc()
    world.move_use()  # nobody notes it: `early` was read without the slice
    world.pages.clear()
    world.gc(world.place())
    assert world.pages[0] == 1000
    assert world.ids() == {world.used}


def test_r1_of_metadata_that_went_back_marks_are_made_anew(world: World) -> None:
    with pytest.raises(Killed):
        world.gc(world.place(), batch=lambda: die_if(True))
    store = world.meta.store
    store.commit(change(Put(keys.BACKGROUND, keys.VOID, b"5")))
    world.pages.clear()
    world.gc(world.place())
    assert world.pages[0] == 1000


def test_r1_what_a_client_may_commit_later_is_left(world: World) -> None:
    """A floor that was lower when the marks were made still is that of the run that goes on."""
    with pytest.raises(Killed):
        world.gc(world.place(), page=lambda: die_if(True))
    sid = world.meta.new_slice_id()
    world.put(sid)
    found = world.gc(world.place())
    assert found.recent.objects == 1
    assert sid in world.ids()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"phase": "later"}'])
def test_a_cursor_that_can_t_be_read(world: World, text: str) -> None:
    Path(world.file).write_text(text)
    with pytest.raises(ConfigError, match="remove it to start again"):
        world.place()


def test_a_cursor_of_another_volume_or_without_its_marks(world: World) -> None:
    with pytest.raises(Killed):
        world.gc(world.place(), batch=lambda: die_if(True))
    with pytest.raises(ConfigError, match="another volume"):
        GcCheckpoint(RUNTIME, world.file, "another")
    Path(world.file + ".used").unlink()
    with pytest.raises(ConfigError, match="remove it to start again"):
        world.place()
