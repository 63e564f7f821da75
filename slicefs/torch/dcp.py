"""Distributed checkpoints (DCP) on any tree: `StorageWriter` and `StorageReader`.

They are torch's own file system writer and reader with the files of a tree beneath. `.metadata` is
replaced in one operation; torch removes the old one first. What a file's `close` returns from is
durable, so nothing is synced besides. Reading fetches the ranges that the plan needs, many at a
time; where the step has a manifest, its checksums are compared.

Threading: torch writes with `thread_count` threads, each file in one.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsmeta.errors import ConfigError
from slicefs.checkpoint.manifest import FileEntry
from slicefs.checkpoint.reading import FileRange, read_verified
from slicefs.checkpoint.saving import Saving
from slicefs.checkpoint.step import Step, joined, load_step
from slicefs.lifecycle.shards.dcp_metadata import is_of_checkpoints
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree, Writer
from slicefs.torch.dcp_parts import PartPlan, ends, is_worth_it, part_bytes, plan_part

BATCH_BYTES: Final = 64 << 20  # held in memory at a time while loading
MAX_GAP_BYTES: Final = 64 << 10  # unwanted bytes between two ranges that one request may bring
METADATA: Final = ".metadata"
Opener: TypeAlias = Callable[[str | os.PathLike[str]], Tree]


class _Stream(io.RawIOBase):
    """A `Writer` with `tell`, as torch wants a file."""

    def __init__(self, writer: Any) -> None:
        super().__init__()
        self._writer = writer
        self._at = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Take all of `data`."""
        view = memoryview(data).cast("B")
        self._writer.write(view)
        self._at += len(view)
        return len(view)

    def tell(self) -> int:
        """How much was written."""
        return self._at


class TreeFileSystem(FileSystemBase):
    """Files of one checkpoint, as torch's writer and reader ask for them."""

    def __init__(
        self, tree: Tree, part: Saving | Step | None = None, opener: Opener = open_tree
    ) -> None:
        """`opener`: how another checkpoint is opened, see `init_path`."""
        self.tree = tree
        self._opener = opener
        self.saving = part if isinstance(part, Saving) else None
        self._folder = part.data if isinstance(part, Step) else ""
        self.root = (tree.url if part is None else part.url).rstrip("/")
        self.errors: list[BaseException] = []  # of files that were not written

    def name(self, path: str | os.PathLike[str]) -> str:
        """A path that torch made with `concat_path`, in the tree."""
        return joined(self._folder, os.fspath(path).removeprefix(self.root).lstrip("/"))

    def write(self, name: str) -> Writer:
        """Begin a file."""
        if self.saving is not None:
            return self.saving.open(name)
        return self.tree.writer(name)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file to write, whole or not there, or a file to read."""
        if "r" in mode:
            with self.tree.open_read(self.name(path)) as stream:
                yield stream
        else:
            try:
                with self.write(self.name(path)) as writer:
                    yield _Stream(writer)
            except BaseException as error:
                self.errors.append(error)
                raise

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """A path below another."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Move to another checkpoint."""
        if os.fspath(path).rstrip("/") != self.root:
            self.tree = self._opener(path)
            self.saving = None
            self._folder = ""
            self.root = self.tree.url.rstrip("/")
        return self.root

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Replace a file."""
        self.tree.rename(self.name(path), self.name(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Writers make directories as they need them."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a file is there."""
        return self.saving is None and self.tree.exists(self.name(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        self.tree.remove(self.name(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a URL or path names a tree."""
        try:
            open_tree(checkpoint_id).close()
        except ConfigError:
            return False
        return True


class _Results(list[WriteResult]):
    """What one rank has written, with the digests of its files."""

    def __init__(self, results: Sequence[WriteResult], entries: dict[str, FileEntry]) -> None:
        super().__init__(results)
        self.entries = entries

    def __reduce__(self) -> tuple[Callable[..., _Results], tuple[Any, ...]]:
        return _Results, (list(self), self.entries)


class StorageWriter(FileSystemWriter):
    """For `dcp.save` and `dcp.async_save`: `StorageWriter("s3://bucket/run/step1000")`.

    With a `Saving` of a `CheckpointManager`, the files belong to that save, and the coordinator
    publishes it when all ranks have written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Saving,
        *,
        thread_count: int = 4,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        tree: Tree | None = None,
        opener: Opener = open_tree,
        **of_torch: Any,
    ) -> None:
        """`of_torch`: what else torch's writer takes, such as `single_file_per_rank`."""
        super().__init__(
            "unused",
            sync_files=False,
            thread_count=thread_count,
            cache_staged_state_dict=cache_staged_state_dict,
            overwrite=overwrite,
            **of_torch,
        )
        self.published: Step | None = None
        if isinstance(path, Saving):
            self.fs = TreeFileSystem(path.tree, path)
        else:
            self.fs = TreeFileSystem(tree or opener(path), opener=opener)
        self.path = self.fs.root

    def _metadata_exists(self) -> bool:
        """Whether torch must refuse; without its warning about what is replaced."""
        return not self.overwrite and bool(super()._metadata_exists())

    def write_data(self, plan: Any, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch's. In a save of a manager, the digests go to the coordinator with the results.

        torch loses what a thread of its own raises, and the checkpoint lacks what the thread was
        to write; it is raised here.
        """
        self.fs.errors.clear()
        written = super().write_data(plan, planner)
        if self.fs.errors:
            raise self.fs.errors[0]
        count = len(written.wait())
        if count != len(plan.items):
            raise OSError(errno.EIO, f"{count} of {len(plan.items)} items were written", self.path)
        saving = self.fs.saving
        if saving is None:
            return written
        out: Future[list[WriteResult]] = Future()
        out.set_result(_Results(written.wait(), dict(saving.entries)))
        return out

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata` in one operation; publish the save of a manager."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for each in results for result in each
        }
        metadata.storage_meta = self.storage_meta()
        alone = not self.use_collectives and self.rank is not None
        name = f"__{self.rank}{METADATA}" if alone else METADATA
        with self.fs.write(name) as file:
            file.write(pickle.dumps(metadata))
        saving = self.fs.saving
        if saving is not None:
            for each in results:
                saving.add(getattr(each, "entries", {}))
            self.published = saving.publish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a URL or path names a tree."""
        return TreeFileSystem.validate_checkpoint_id(checkpoint_id)


class _MetadataReader(pickle.Unpickler):
    """Loads `.metadata` without running code that may have been put into it."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises: UnpicklingError for what no checkpoint names."""
        if is_of_checkpoints(module, name):
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
    none: `whole_tensors` reads each tensor whole.
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
        places = self.storage_data
        items = sorted(
            plan.items,
            key=lambda item: (
                places[item.storage_index].relative_path,
                places[item.storage_index].offset,
            ),
        )
        for batch in _batches(self._wanted(items)):
            found = iter(self._fetch([each for wanted in batch for each in wanted.ranges]))
            for wanted in batch:
                data = [next(found) for _ in wanted.ranges]
                if wanted.part is None:
                    self._fill_whole(wanted.item, data[0], planner)
                else:
                    _fill(wanted.item, wanted.part.assemble(data), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _wanted(self, items: Sequence[Any]) -> list[_ItemRead]:
        """What is read for each item: the stored tensor, or the part of it that the item needs."""
        partly = [item for item in items if self._is_partial(item)]
        asked = [each for item in partly for each in self._ends(item)]
        found = iter(self._fetch(asked) if asked else ())
        parts: dict[int, PartPlan | None] = {}
        for item in partly:
            length = self.storage_data[item.storage_index].length
            parts[id(item)] = plan_part(
                *(next(found), next(found), length),
                *(item.storage_offsets, item.lengths, MAX_GAP_BYTES),
            )
        wanted = []
        for item in items:
            place = self.storage_data[item.storage_index]
            part = parts.get(id(item))
            runs = [(0, place.length)] if part is None else part.runs
            ranges = [
                (place.relative_path, place.offset + begin, place.offset + end)
                for begin, end in runs
            ]
            wanted.append(_ItemRead(item, part, ranges))
        return wanted

    def _is_partial(self, item: Any) -> bool:
        """Whether much less than a stored tensor is needed, and it may be read by ranges."""
        place = self.storage_data[item.storage_index]
        dtype = self._types.get(item.storage_index.fqn)
        if self._whole_tensors or place.transform_descriptors or dtype is None:
            return False
        return is_worth_it(part_bytes(item.lengths, dtype), place.length, MAX_GAP_BYTES)

    def _ends(self, item: Any) -> Iterator[_Range]:
        place = self.storage_data[item.storage_index]
        for begin, end in ends(place.offset, place.length):
            yield place.relative_path, begin, end

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
        stored = torch.load(stream, map_location="cpu", weights_only=True)
        _fill(item, narrow_tensor_by_index(stored, item.storage_offsets, item.lengths), planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a URL or path names a tree."""
        return TreeFileSystem.validate_checkpoint_id(checkpoint_id)


def _batches(wanted: Sequence[_ItemRead]) -> Iterator[list[_ItemRead]]:
    """What is held in memory at a time."""
    batch: list[_ItemRead] = []
    size = 0
    for each in wanted:
        length = sum(end - begin for _, begin, end in each.ranges)
        if batch and size + length > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += length
    if batch:
        yield batch


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
