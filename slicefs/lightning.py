"""Checkpoints for PyTorch Lightning: `Trainer(plugins=[LightningCheckpoint()])`.

Paths are what `slicefs.open_tree` takes: directories, s3://, gs://, r2://, volumes. A checkpoint is
whole or not there. `AsyncLightningCheckpoint` copies the tensors and writes in a thread; a save
that failed is raised by the next save or by teardown, and only once.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from typing import Any

from fsmeta.runtime import Runtime, SystemRuntime, Thread
from slicefs.checkpoint.files import Checkpoint

try:
    import torch
    from torch.utils._pytree import tree_map_only
except ModuleNotFoundError as missing:
    raise ImportError("slicefs.lightning needs torch: pip install torch lightning") from missing
try:
    from lightning.fabric.plugins import CheckpointIO
except ImportError:
    try:
        from lightning_fabric.plugins import CheckpointIO
    except ModuleNotFoundError as missing:
        raise ImportError("slicefs.lightning needs Lightning: pip install lightning") from missing

Opener = Callable[[str], Checkpoint]


class LightningCheckpoint(CheckpointIO):
    """Saves and loads on any tree."""

    def __init__(self, opener: Opener = Checkpoint) -> None:
        self._opener = opener
        self._places: dict[str, Checkpoint] = {}  # by folder, until `teardown`

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write one file, whole or not at all. Raises: TypeError for `storage_options`."""
        if storage_options is not None:
            raise TypeError("storage_options: leave them out; the URL says where to save")
        place, name = self._place(path)
        with place.writer(name) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read one file. Raises: FileNotFoundError."""
        place, name = self._place(path)
        with place.reader(name) as file:
            loaded: dict[str, Any] = torch.load(
                file, map_location=map_location or "cpu", weights_only=bool(weights_only)
            )
            return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or a directory of a sharded checkpoint; fine where there is none."""
        place, name = self._place(path)
        try:
            place.tree.remove(name)
        except FileNotFoundError:
            place.tree.remove_tree(name)
        except IsADirectoryError:
            place.tree.remove_tree(name)

    def _place(self, path: str | os.PathLike[str]) -> tuple[Checkpoint, str]:
        folder, name = posixpath.split(os.fspath(path).rstrip("/"))
        place = self._places.get(folder)
        if place is None:
            place = self._places.setdefault(folder, self._opener(folder or "."))
        return place, name

    def teardown(self) -> None:
        """Let go of connections; the trainer calls it at its end."""
        while self._places:
            self._places.popitem()[1].close()


class AsyncLightningCheckpoint(LightningCheckpoint):
    """Saves in a thread, one checkpoint at a time.

    A save waits for the one before it. `last_durable` is the path that was saved last.
    """

    def __init__(self, opener: Opener = Checkpoint, runtime: Runtime | None = None) -> None:
        super().__init__(opener)
        self._runtime = runtime
        self._thread: Thread | None = None
        self._error: BaseException | None = None  # written by the thread, read after its end
        self.last_durable: str | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy the tensors and begin to write. Raises: what the save before it failed with."""
        self.wait()
        copied = tree_map_only(torch.Tensor, lambda each: each.detach().clone(), checkpoint)

        def write() -> None:
            try:
                super(AsyncLightningCheckpoint, self).save_checkpoint(copied, path, storage_options)
                self.last_durable = os.fspath(path)
            except BaseException as error:  # noqa: BLE001  (raised by `wait`, in the trainer)
                self._error = error

        self._runtime = self._runtime or SystemRuntime()
        self._thread = self._runtime.spawn("slicefs-save", write)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read one file, after a save that is in progress."""
        self.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def wait(self) -> None:
        """Wait for the save that is in progress. Raises: what it failed with, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def teardown(self) -> None:
        """As `wait`, and let go of connections; the trainer calls it at its end."""
        try:
            self.wait()
        finally:
            super().teardown()
