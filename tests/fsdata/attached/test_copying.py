"""X2: a copy of an object is whole, or an error: whatever a block of it meets."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from fsdata.attached.copying import ObjectCopier
from fsdata.files.upload_pool import Upload
from fsmeta.types import Slice, SliceId
from tests.fsdata.world import BLOCK, World
from tests.support.outcome import errno_of

SIZE = 20 * BLOCK + 5
PIECE = Slice(0, SliceId(1), SIZE, 0, SIZE)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def _submit_to(world: World) -> Callable[[Upload], None]:
    """The upload threads, of which an error that nothing foresees ends one."""

    def submit(job: Upload) -> None:
        def run() -> None:
            try:
                job()
            except LookupError:
                pass  # what the log of the pool would show

        world.pool.submit(run)

    return submit


def _stored(world: World) -> int:
    return sum(1 for _ in world.objects.inner.list(""))


@pytest.mark.parametrize("failing", [0, 1, 20])
def test_an_unforeseen_error_is_no_copy(world: World, failing: int) -> None:
    def get(begin: int, end: int) -> bytes:
        if begin == failing * BLOCK:
            raise LookupError("a library's own")
        return bytes(end - begin)

    copier = ObjectCopier(world.runtime, world.blocks, _submit_to(world), get, lambda: False)
    assert errno_of(lambda: copier.copy([PIECE])) == errno.EIO
    assert _stored(world) == 0, "what is left of it is deleted"


def test_all_blocks_are_there(world: World) -> None:
    copier = ObjectCopier(
        world.runtime, world.blocks, world.pool.submit, lambda b, e: bytes(e - b), lambda: False
    )
    copier.copy([PIECE])
    assert _stored(world) == 21
