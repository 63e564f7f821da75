"""`CheckpointManager` for state dicts: steps that are whole or not there, on one rank or many.

A step is a DCP checkpoint with a manifest. Rank 0 begins the save and tells the others its token;
each rank writes its files; DCP brings their digests to rank 0, which publishes. All ranks call the
same methods.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from fsmeta.errors import ConfigError
from slicefs.checkpoint.manager import StepManager as FileManager
from slicefs.checkpoint.saving import Saving
from slicefs.checkpoint.step import Step
from slicefs.torch.dcp import StorageWriter
from slicefs.torch.dcp_reader import StorageReader

THREADS = 4  # files of one rank that are written at a time


class CheckpointManager:
    """Saves and loads state dicts below a URL; `files` is the manager without torch."""

    def __init__(
        self,
        url: str,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        ephemeral_every: int | None = None,
        run: str = "",
        dedupe: bool = True,
        thread_count: int = THREADS,
    ) -> None:
        self.files = FileManager(
            url,
            keep_last=keep_last,
            keep_every=keep_every,
            ephemeral_every=ephemeral_every,
            run=run,
            dedupe=dedupe,
        )
        self._threads = thread_count
        self._pending: concurrent.futures.Future[Any] | None = None
        self._group: Any = None  # of saves in a thread, made by the first
        self.last_durable: int | None = None  # the newest step that this manager has published

    def save(
        self,
        step: int,
        state_dict: dict[str, Any],
        *,
        async_: bool | Literal["process"] = False,
        process_group: Any = None,
    ) -> concurrent.futures.Future[Any] | None:
        """Save a step; with `async_`, return when the state is copied, and a future.

        `async_="process"` writes in a process of torch's, which takes no turns from training; it
        needs a process group. A thread uses a gloo group of the manager's own unless one is named:
        on the group of training, ranks could wait for each other for ever. One save is in progress
        at a time: an earlier one is waited for, and its failure is raised here.
        Raises: FileExistsError on all ranks where the step is there.
        """
        self.wait()
        saving = self._begin(step, process_group)
        writer = StorageWriter(saving, thread_count=self._threads)
        no_dist = not dist.is_initialized()
        if not async_:
            try:
                dcp.save(
                    state_dict, storage_writer=writer, process_group=process_group, no_dist=no_dist
                )
            except BaseException:
                saving.abort()
                raise
            self.last_durable = step
            return None
        future: concurrent.futures.Future[Any] = dcp.async_save(
            state_dict,
            storage_writer=writer,
            process_group=process_group if async_ == "process" else self._own(process_group),
            no_dist=no_dist,
            async_checkpointer_type=(
                AsyncCheckpointerType.PROCESS
                if async_ == "process"
                else AsyncCheckpointerType.THREAD
            ),
        )

        def ended(done: concurrent.futures.Future[Any]) -> None:
            if done.cancelled() or done.exception() is not None:
                saving.abort()
            else:
                self.last_durable = step

        future.add_done_callback(ended)
        self._pending = future
        return future

    def wait(self) -> None:
        """Wait for a save that is in progress. Raises: what it failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for a save that is in progress, and leave the volume. Raises: as `wait`."""
        try:
            self.wait()
        finally:
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
            self.files.close()

    def latest(self) -> Step | None:
        """The newest step whose files are all there."""
        return self.files.latest()

    def steps(self) -> list[int]:
        """The numbers of such steps, oldest first."""
        return self.files.steps()

    def load(
        self, state_dict: dict[str, Any], step: int | None = None, *, process_group: Any = None
    ) -> int:
        """Fill `state_dict` from a step, by default the newest; its number. Bytes are verified.

        Raises: FileNotFoundError where there is none, EIO for damaged bytes.
        """
        found = self.files.latest() if step is None else self.files.step(step)
        if found is None:
            raise FileNotFoundError(2, "there is no whole step", self.files.tree.url)
        no_dist = not dist.is_initialized()
        reader = StorageReader(found)
        dcp.load(state_dict, storage_reader=reader, process_group=process_group, no_dist=no_dist)
        return found.number

    def _own(self, group: Any) -> Any:
        """The group of a save in a thread: `group`, or one of our own. All ranks call it."""
        if group is not None or not dist.is_initialized():
            return group
        self._group = self._group or dist.new_group(backend="gloo")
        return self._group

    def _begin(self, step: int, group: Any) -> Saving:
        """The save on rank 0, and its part on the others. Raises the same on all ranks."""
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return self.files.save(step)
        saving: Saving | None = None
        told: list[Any] = [None, None]
        if dist.get_rank(group) == 0:
            try:
                saving = self.files.save(step)
                told = [saving.token, None]
            except (OSError, ConfigError) as error:
                told = [None, error]
        first = dist.get_global_rank(group, 0) if group is not None else 0
        dist.broadcast_object_list(told, src=first, group=group)
        if told[1] is not None:
            raise told[1]
        return saving or self.files.join(step, told[0])
