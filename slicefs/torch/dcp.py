"""`StorageWriter`: distributed checkpoints (DCP) are written to any tree.

It is torch's own file system writer with the files of a tree beneath. `.metadata` is replaced in
one operation; torch removes the old one first. What a file's `close` returns from is durable, so
nothing is synced besides. `dcp_reader` reads.

Threading: torch writes with `thread_count` threads, each file in one.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsmeta.errors import ConfigError
from slicefs.checkpoint.manifest import FileEntry
from slicefs.checkpoint.saving import Saving
from slicefs.checkpoint.step import Step, joined
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree, Writer

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
