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
from typing import Any, Final, TypeAlias, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsmeta.errors import ConfigError
from slicefs.checkpoint.manifest import FileEntry
from slicefs.checkpoint.reading import read_verified
from slicefs.checkpoint.saving import Saving
from slicefs.checkpoint.step import Step, joined, load_step
from slicefs.lifecycle.shards.dcp_metadata import is_of_checkpoints
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree, Writer

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


class StorageReader(FileSystemReader):
    """For `dcp.load`: `StorageReader("s3://bucket/run/step1000")`, or a `Step` of a manager."""

    def __init__(
        self,
        path: str | os.PathLike[str] | Step,
        *,
        tree: Tree | None = None,
        opener: Opener = open_tree,
    ) -> None:
        super().__init__("unused")
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what the plan needs, file by file, and fill its tensors. Raises: EIO."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            for batch in self._batches(items):
                for item, data in zip(batch, self._read(name, batch), strict=True):
                    self._fill(item, data, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _batches(self, items: Sequence[Any]) -> Iterator[list[Any]]:
        batch: list[Any] = []
        size = 0
        for item in items:
            length = self.storage_data[item.storage_index].length
            if batch and size + length > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += length
        yield batch

    def _read(self, name: str, items: Sequence[Any]) -> list[memoryview]:
        places = [self.storage_data[item.storage_index] for item in items]
        ranges = [(place.offset, place.offset + place.length) for place in places]
        path = self.fs.name(name)
        if self._step is not None:
            return read_verified(self.fs.tree, path, self._step.manifest.files[name], ranges)
        return self.fs.tree.read_ranges([(path, *each) for each in ranges], MAX_GAP_BYTES)

    def _fill(self, item: Any, data: memoryview, planner: LoadPlanner) -> None:
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
        part = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            raise ValueError(
                f"{item.storage_index.fqn}: the checkpoint has {tuple(part.size())}, "
                f"the model {tuple(target.size())}"
            )
        target.copy_(part)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a URL or path names a tree."""
        return TreeFileSystem.validate_checkpoint_id(checkpoint_id)
