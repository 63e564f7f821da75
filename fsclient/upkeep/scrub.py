"""Reads and verifies every block that files refer to: `scrub`, and `fsck --data`.

It walks the inodes, so each problem is reported with its file, and memory is that of one
page of inodes. Several threads read. The volume may be in use: what a file no longer refers to when
it is looked at again was deleted meanwhile, and is no problem.

Without the key of an encrypted volume the checksums of what is stored are verified, which proves
everything but that the block was written with the key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from fsclient.volume.paths import path_of
from fsdata.format.block_v1 import check_object, decode
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import object_key
from fsdata.objects.contract import ObjectStore
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError
from fsmeta.runtime import Runtime
from fsmeta.schema import keys, scan
from fsmeta.schema.scan import Walked
from fsmeta.store.contract import Store
from fsmeta.types import Ino, SliceId

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer

THREADS: Final = 4
GOOD_MAX: Final = 10_000  # 2 MB: slices that share a block are mostly neighbours
AHEAD: Final = 4  # blocks a thread has waiting: none idles while the walk reads its next page


class DamagedBlock(NamedTuple):
    """Something wrong with the data of a file."""

    what: str  # damaged, missing; unreadable where its slices are not known
    object: str
    ino: int
    path: str
    why: str

    def __str__(self) -> str:
        name = f"object {self.object}" if self.object else f"inode {self.ino}"
        if self.what == "missing":
            return f"{name} is missing: {self.path}"
        return f"{name}: {self.why}: {self.path}"


class ScrubTotals(NamedTuple):
    """What was read."""

    inodes: int = 0
    blocks: int = 0
    bytes: int = 0  # as stored


class _Block(NamedTuple):
    ino: Ino
    chunk: int
    slice_id: SliceId
    block: int
    length: int

    @property
    def key(self) -> str:
        return object_key(self.slice_id, self.block, self.length)


class Scrub:
    """Reads and verifies blocks. `close` ends the threads."""

    def __init__(
        self,
        store: Store,
        objects: ObjectStore,
        runtime: Runtime,
        block_bytes: int,
        sealer: Sealer | None = None,
        threads: int = THREADS,
        sample: float = 1.0,
    ) -> None:
        self._store = store
        self._objects = objects
        self._block_bytes = block_bytes
        self._sealer = sealer
        self._chosen: Callable[[], bool] = lambda: sample >= 1 or runtime.random() < sample
        self._pool = WorkerPool(runtime, "scrub", threads)
        self._most = AHEAD * threads
        self._cond = runtime.condition()
        self._waiting = 0  # guarded by _cond, as all below: blocks submitted
        self._reading: dict[str, list[_Block]] = {}  # under way, and the others with the same block
        self._suspects: list[tuple[_Block, str, str]] = []
        self._good: OrderedDict[str, None] = OrderedDict()  # blocks lately found right
        self._error: Exception | None = None  # the store is away: nothing can be said
        self.totals = ScrubTotals()

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def judge(self, inodes: Iterable[Walked]) -> list[DamagedBlock]:
        """What is wrong with these inodes' data. Raises: Unavailable, OSError."""
        found: list[DamagedBlock] = []
        count = 0
        for each in inodes:
            count += 1
            if each.error is not None:
                path = path_of(self._store, each.ino)
                found.append(DamagedBlock("unreadable", "", each.ino, path, str(each.error)))
            for block in self._blocks(each):
                if self._chosen():
                    self._submit(block)
        with self._cond:
            while self._waiting:
                self._cond.wait()
            suspects, self._suspects = self._suspects, []
            error, self._error = self._error, None
            self.totals = self.totals._replace(inodes=self.totals.inodes + count)
        if error is not None:
            raise error
        found += [self._told(*each) for each in sorted(suspects) if self._is_used(each[0])]
        return found

    def _blocks(self, inode: Walked) -> Iterator[_Block]:
        """The blocks of an inode's slices, each once."""
        seen: set[SliceId] = set()
        for chunk, slices in inode.chunks.items():
            for piece in slices:
                if piece.id in seen:
                    continue
                seen.add(piece.id)
                for block in range(block_count(piece.size, self._block_bytes)):
                    length = block_length(piece.size, block, self._block_bytes)
                    yield _Block(inode.ino, chunk, piece.id, block, length)

    def _submit(self, block: _Block) -> None:
        with self._cond:
            while self._waiting >= self._most:
                self._cond.wait()
            if block.key in self._good:  # of a segment, or of a clone
                return
            if block.key in self._reading:
                self._reading[block.key].append(block)
                return
            self._reading[block.key] = [block]
            self._waiting += 1
        self._pool.submit(partial(self._read, block))

    def _read(self, block: _Block) -> None:
        """Read a block; one that is wrong is asked for once more."""
        size, wrong, failed = 0, None, None
        try:
            try:
                size = self._verify(block)
            except ObjectDamaged:
                size = self._verify(block)
        except ObjectMissing:
            wrong = "missing", ""
        except ObjectDamaged as error:
            wrong = "damaged", str(error)
        except (OSError, StoreError) as error:
            failed = error
        with self._cond:
            self._waiting -= 1
            self._cond.notify_all()
            self._error = self._error or failed
            sharing = self._reading.pop(block.key)
            if wrong is not None:
                self._suspects += [(each, *wrong) for each in sharing]
            elif failed is None:
                self._good[block.key] = None
                if len(self._good) > GOOD_MAX:
                    self._good.popitem(last=False)
            inodes, blocks, total = self.totals
            self.totals = ScrubTotals(inodes, blocks + 1, total + size)

    def _verify(self, block: _Block) -> int:
        """How many bytes a block takes in the store. Raises: ObjectDamaged, ObjectMissing."""
        data = self._objects.get(block.key)
        if self._sealer is None:
            length = check_object(data)
        else:
            opener = partial(self._sealer.cipher, block.slice_id, block.block)
            length = len(decode(data, opener))
        if length != block.length:
            raise ObjectDamaged(f"a block of {length} bytes instead of {block.length}")
        return len(data)

    def _is_used(self, block: _Block) -> bool:
        """Whether its file still refers to it."""
        [now] = scan.of_rows(self._store, [keys.inode_row(block.ino)])
        slices = now.chunks.get(block.chunk, ())
        return now.error is not None or any(each.id == block.slice_id for each in slices)

    def _told(self, block: _Block, what: str, why: str) -> DamagedBlock:
        return DamagedBlock(what, block.key, block.ino, path_of(self._store, block.ino), why)
