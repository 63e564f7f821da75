"""`StorageReader`: of a distributed checkpoint (DCP) on any tree, what a rank needs.

It is torch's own reader with the files of a tree beneath. What a plan needs is fetched in ranges,
many at a time: a stored tensor whole, or the part of it that `dcp_parts` finds. Where the step has
a manifest, its checksums are compared.

Threading: one thread reads.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from slicefs.checkpoint.reading import FileRange, read_verified
from slicefs.checkpoint.step import Step, load_step
from slicefs.lifecycle.shards.dcp_metadata import is_of_checkpoints
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Info, Tree
from slicefs.torch.dcp import METADATA, Opener, TreeFileSystem
from slicefs.torch.dcp_parts import (
    HEAD_BYTES,
    TAIL_BYTES,
    PartPlan,
    ends,
    part_bytes,
    plan_part,
)

BATCH_BYTES: Final = 64 << 20  # held in memory at a time while loading
MAX_GAP_BYTES: Final = 64 << 10  # unwanted bytes between two tensors that one request may bring
RUN_GAP_BYTES: Final = 1 << 20  # and between two runs of one part, of which there are many


class _MetadataReader(pickle.Unpickler):
    """Loads `.metadata` without running code that may have been put into it."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises: UnpicklingError for what no checkpoint names."""
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or is_of_checkpoints(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"the metadata names {module}.{name}, which no checkpoint has: it is not loaded"
        )


_Range: TypeAlias = tuple[str, int, int]  # bytes `begin..end` of a file of the checkpoint


class _ItemRead(NamedTuple):
    """An item of a plan, and what is read for it."""

    item: Any
    part: PartPlan | None  # None: the stored tensor is read whole
    ranges: Sequence[_Range]


class StorageReader(FileSystemReader):
    """For `dcp.load`: `StorageReader("s3://bucket/run/step1000")`, or a `Step` of a manager.

    Of a stored tensor of which a rank needs a part, the part is read. The bytes of a step with a
    manifest are verified. Without one, torch's own checksum is of the whole tensor, and a part has
    none: `whole_tensors` reads each tensor whole and compares it (`dcp.load` of torch does not).
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Step,
        *,
        tree: Tree | None = None,
        opener: Opener = open_tree,
        whole_tensors: bool = False,
    ) -> None:
        super().__init__("unused")
        self._whole_tensors = whole_tensors
        self._types: dict[str, torch.dtype] = {}
        if isinstance(path, Step):
            self.fs = TreeFileSystem(path.tree, path)
            self._step: Step | None = path
        else:
            self.fs = TreeFileSystem(tree or opener(path), opener=opener)
            self._step = load_step(self.fs.tree, "")
        self.path = self.fs.root

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """As torch's; another checkpoint has another manifest."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._step = load_step(self.fs.tree, "")

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """As torch's; verified where there is a manifest. Raises: EIO, UnpicklingError."""
        rank = kwargs.get("rank")
        name = METADATA if rank is None else f"__{rank}{METADATA}"
        data = (
            self.fs.tree.read(self.fs.name(name)) if self._step is None else self._step.read(name)
        )
        metadata = cast(Metadata, _MetadataReader(io.BytesIO(data)).load())
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """As torch's; keeps the types of the tensors."""
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._types = {
            name: entry.properties.dtype
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what the plan needs and fill its tensors. Raises: EIO."""
        items = sorted(plan.items, key=self._place_of)
        for batch in self._batches(items):
            self._read_batch(batch, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place_of(self, item: Any) -> tuple[str, int, int]:
        """Where the stored tensor of an item is: file, offset and length."""
        place = self.storage_data[item.storage_index]
        return place.relative_path, place.offset, place.length

    def _batches(self, items: Sequence[Any]) -> Iterator[list[Any]]:
        """What is held in memory at a time."""
        batch: list[Any] = []
        size, covered = 0, ("", 0)  # what is read whole so far ends there
        for item in items:
            name, begin, end = self._span(item)
            cost = end - (max(begin, covered[1]) if covered[0] == name else begin)
            covered = name, end
            part = self._cost_of_part(item)
            cost = int(part) if _spares(part, begin, end) else cost
            if batch and size + cost > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += cost
        if batch:
            yield batch

    def _span(self, item: Any) -> tuple[str, int, int]:
        """What is read for an item where its stored tensor is read whole: file, begin and end."""
        name, offset, length = self._place_of(item)
        unit = self._unit(name)
        return name, offset // unit * unit, -(-(offset + length) // unit) * unit

    def _cost_of_part(self, item: Any) -> int | float:
        """Bytes to read for what an item needs of its stored tensor; infinity: it can't be."""
        place = self.storage_data[item.storage_index]
        dtype = self._types.get(item.storage_index.fqn)
        if self._whole_tensors or place.transform_descriptors or dtype is None:
            return math.inf
        size = part_bytes(item.lengths, dtype)
        if not size or place.length < HEAD_BYTES + TAIL_BYTES:
            return math.inf
        unit = self._unit(place.relative_path)
        # Of each end and of the part, what is verified together; the part may begin anywhere.
        chunks = -(-HEAD_BYTES // unit) + -(-TAIL_BYTES // unit) + -(-size // unit) + (unit > 1)
        return chunks * unit

    def _unit(self, name: str) -> int:
        """How many bytes of a file are read together, because they have one checksum."""
        if self._step is None:
            return 1
        return self._step.manifest.files[name].chunk_bytes

    def _read_batch(self, items: Sequence[Any], planner: LoadPlanner) -> None:
        partly = [
            item for item in items if _spares(self._cost_of_part(item), *self._span(item)[1:])
        ]
        # The places come from one read, the items from the next: of one file, or of none.
        before = self._versions(partly)
        parts = self._plan_parts(partly)
        wanted = [self._wanted(item, parts.get(id(item))) for item in items]
        found = iter(self._fetch([each for item_read in wanted for each in item_read.ranges]))
        brought = [[next(found) for _ in item_read.ranges] for item_read in wanted]
        if self._versions(partly) != before:
            raise OSError(errno.EIO, "a file was replaced while it was read", self.path)
        for item_read, data in zip(wanted, brought, strict=True):
            if item_read.part is None:
                self._fill_whole(item_read.item, data[0], planner)
            else:
                _fill(item_read.item, item_read.part.assemble(data), planner)

    def _versions(self, items: Sequence[Any]) -> list[Info]:
        """What tells the files of these items from others of their names; checksums do, too."""
        if self._step is not None:
            return []
        names = dict.fromkeys(self._place_of(item)[0] for item in items)
        return [self.fs.tree.stat(self.fs.name(name)) for name in names]

    def _plan_parts(self, items: Sequence[Any]) -> dict[int, PartPlan | None]:
        """How the part that each item needs is read; None: its stored tensor is read whole."""
        asked = []
        for item in items:
            name, offset, length = self._place_of(item)
            asked += [(name, begin, end) for begin, end in ends(offset, length)]
        found = (bytes(each) for each in (self._fetch(asked) if asked else ()))
        return {
            id(item): plan_part(
                *(next(found), next(found), self._place_of(item)[2]),
                *(item.storage_offsets, item.lengths, RUN_GAP_BYTES),
            )
            for item in items
        }

    def _wanted(self, item: Any, part: PartPlan | None) -> _ItemRead:
        name, offset, length = self._place_of(item)
        runs = [(0, length)] if part is None else part.runs
        ranges = [(name, offset + begin, offset + end) for begin, end in runs]
        return _ItemRead(item, part, ranges)

    def _fetch(self, ranges: Sequence[_Range]) -> list[memoryview]:
        """Bytes of the checkpoint's files. Raises: EIO."""
        paths = {name: self.fs.name(name) for name, _, _ in ranges}
        if self._step is None:
            asked = [(paths[name], begin, end) for name, begin, end in ranges]
            found = self.fs.tree.read_ranges(asked, MAX_GAP_BYTES)
            for (path, begin, end), data in zip(asked, found, strict=True):
                if len(data) != end - begin:
                    raise OSError(errno.EIO, "the file is cut off: copy it again", path)
            return found
        files = self._step.manifest.files
        verified = [FileRange(paths[name], files[name], begin, end) for name, begin, end in ranges]
        return read_verified(self.fs.tree, verified)

    def _fill_whole(self, item: Any, data: memoryview, planner: LoadPlanner) -> None:
        stream = io.BytesIO(data)
        descriptors = self.storage_data[item.storage_index].transform_descriptors or ()
        if descriptors:
            stream = self.transforms.transform_load_stream(item, descriptors, stream)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(stream.read()))
            return
        if not stream.seekable():
            stream = io.BytesIO(stream.read())
        if self._whole_tensors and self._step is None:
            _require_sums(stream, item.storage_index.fqn)
        stored = torch.load(stream, map_location="cpu", weights_only=True)
        _fill(item, narrow_tensor_by_index(stored, item.storage_offsets, item.lengths), planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a URL or path names a tree."""
        return TreeFileSystem.validate_checkpoint_id(checkpoint_id)


def _spares(cost: float, begin: int, end: int) -> bool:
    """Whether reading a part for `cost` bytes spares enough of `begin..end`."""
    return cost < end - begin - MAX_GAP_BYTES


def _require_sums(archive: Any, name: str) -> None:
    """Compare the checksums that `torch.save` has stored. Raises: EIO."""
    try:
        damaged = zipfile.ZipFile(archive).testzip()
    except zipfile.BadZipFile as error:
        damaged = str(error)
    archive.seek(0)
    if damaged is not None:
        raise OSError(errno.EIO, f"its bytes are not what was saved ({damaged})", name)


def _fill(item: Any, part: torch.Tensor, planner: LoadPlanner) -> None:
    """Give a part to the tensor of the model. Raises: ValueError for another shape."""
    target = planner.resolve_tensor(item).detach()
    if target.size() != part.size():
        raise ValueError(
            f"{item.storage_index.fqn}: the checkpoint has {tuple(part.size())}, "
            f"the model {tuple(target.size())}"
        )
    target.copy_(part)
    planner.commit_tensor(item, target)
