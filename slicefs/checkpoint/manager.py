"""`StepManager`: steps that are whole or not there, and how long they stay.

Used by trainers, and by `slicefs.torch.CheckpointManager`. A step is published by one operation,
after all its files are durable; `latest` gives only steps whose files are all there. What a killed
save leaves is removed by a later one: at once where its process has surely ended, else after
`ABANDONED_S`.

Threading: one save at a time in a manager; reading from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from fsmeta.errors import Corrupt
from fsmeta.runtime import Runtime, SystemRuntime
from slicefs.checkpoint.layout import (
    DATA,
    MANIFEST,
    Private,
    is_abandoned,
    new_token,
    parse_private,
    parse_step,
    step_name,
)
from slicefs.checkpoint.retention import RetainedStep, Retention
from slicefs.checkpoint.saving import Draft, Saving, refuse_taken, renames
from slicefs.checkpoint.step import Step, joined, load_step
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree

log = logging.getLogger(__name__)

ABANDONED_S: Final = 86400  # no save takes a day; a host that is gone leaves its files for so long


class StepManager:
    """The steps of one run in a directory, a bucket or a volume."""

    def __init__(
        self,
        url: str | Tree,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        ephemeral_every: int | None = None,
        run: str = "",
        dedupe: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        """`dedupe`: in a volume, and on file systems that share blocks, a save writes only what
        differs from the newest step.
        """
        self.retention = Retention(keep_last, keep_every, ephemeral_every).checked()
        self._runtime = runtime or SystemRuntime()
        self._run = run
        self._dedupe = dedupe
        self.tree = open_tree(url) if isinstance(url, str) else url

    def __getstate__(self) -> dict[str, Any]:
        """A manager pickles, for a process that writes; its runtime is a new one there."""
        return {name: each for name, each in vars(self).items() if name != "_runtime"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _runtime=SystemRuntime())

    def save(self, step: int, *, ephemeral: bool | None = None) -> Saving:
        """Begin to save a step; leaving the `with` block publishes it, and then old steps go.

        `ephemeral`: whether it goes as soon as there is a newer one; by default the policy says.
        Raises: FileExistsError where the step is there.
        """
        step_name(step)
        refuse_taken(self.tree, step)
        self.remove_abandoned()
        if ephemeral is None:
            ephemeral = self.retention.is_ephemeral(step)
        token = new_token(self._runtime.random_bits(64))
        return _Managed(self, Draft(step, token, self._run, ephemeral), self._dedupe, self._base())

    def join(self, step: int, token: str) -> Saving:
        """The save that another process began with `token`, to write files to; never published."""
        return _Joined(self.tree, Draft(step, token, self._run, False), self._dedupe, self._base())

    def _base(self) -> Step | None:
        """The step that a new one is most like."""
        if not self._dedupe or not renames(self.tree):
            return None
        return next((step for step in self.published() if step.manifest.run == self._run), None)

    def published(self) -> Iterator[Step]:
        """The steps with a manifest that decodes, newest first."""
        for number, name in sorted(self._step_names(), reverse=True):
            try:
                step = load_step(self.tree, name)
            except Corrupt as error:
                log.warning("step %d is skipped: %s", number, error)
                continue
            if step is not None and step.number == number:
                yield step

    def _step_names(self) -> Iterator[tuple[int, str]]:
        for name in self._names():
            parsed = parse_step(name)
            if parsed is not None and step_name(parsed.number) == name:
                yield parsed.number, name

    def _names(self) -> list[str]:
        try:
            return [entry.name for entry in self.tree.list_dir() if entry.is_dir]
        except FileNotFoundError:
            return []

    def latest(self, *, digest: bool = False) -> Step | None:
        """The newest step whose files are all there; with `digest` their bytes are read, too."""
        for step in self.published():
            problem = next(step.problems(digest=digest), None)
            if problem is None:
                return step
            log.warning("step %d is skipped: %s", step.number, problem)
        return None

    def steps(self) -> list[int]:
        """The numbers of the steps whose files are all there, oldest first."""
        return sorted(step.number for step in self.published() if step.is_whole())

    def step(self, number: int) -> Step:
        """A published step. Raises: FileNotFoundError, Corrupt."""
        found = load_step(self.tree, step_name(number))
        if found is None:
            raise FileNotFoundError(2, "there is no such step", step_name(number))
        return found

    def remove(self, number: int) -> None:
        """Remove a published step; it is invisible before its first file goes."""
        step = self.step(number)
        if renames(self.tree):
            token = new_token(self._runtime.random_bits(64))
            aside = f".removing-{step.folder}-{token}"
            self.tree.rename(step.folder, aside)
            self.tree.remove_tree(aside)
        else:
            self.tree.remove(joined(step.folder, MANIFEST))
            self.tree.remove_tree(step.folder)

    def apply_retention(self) -> list[int]:
        """Remove the steps of this run that the policy lets go; their numbers.

        Damaged steps, steps of other runs and directories without a manifest stay.
        """
        whole = [step for step in self.published() if step.is_whole()]
        own = [step for step in whole if step.manifest.run == self._run]
        gone = self.retention.doomed([RetainedStep(s.number, s.manifest.ephemeral) for s in own])
        for number in gone:
            self.remove(number)
        return gone

    def remove_abandoned(self) -> list[str]:
        """Remove what killed saves have left; the folders."""
        gone = []
        for private, folder in self._private_folders():
            if is_abandoned(private.token) or self._is_old(folder):
                self.tree.remove_tree(folder)
                gone.append(folder)
        return gone

    def _private_folders(self) -> Iterator[tuple[Private, str]]:
        if renames(self.tree):
            for name in self._names():
                private = parse_private(name)
                if private is not None:
                    yield private, name
            return
        for number, name in self._step_names():
            entries = [entry.name for entry in self.tree.list_dir(name)]
            saves = [each for each in entries if each.startswith(DATA)]
            if len(saves) > (MANIFEST in entries):
                yield from self._unpublished(number, name, saves)

    def _unpublished(
        self, number: int, name: str, saves: list[str]
    ) -> Iterator[tuple[Private, str]]:
        try:
            step = load_step(self.tree, name)
        except Corrupt:
            return
        for folder in saves:
            if step is None or step.manifest.data != folder:
                private = Private("saving", number, folder.removeprefix(DATA))
                yield private, joined(name, folder)

    def _is_old(self, folder: str) -> bool:
        newest = max((info.mtime_ns for info in self.tree.list(f"{folder}/")), default=None)
        return newest is not None and newest < self._runtime.now_ns() - ABANDONED_S * 10**9

    def close(self) -> None:
        """Let go of connections."""
        self.tree.close()


class _Managed(Saving):
    """A save that applies the retention after it is published."""

    def __init__(self, manager: StepManager, draft: Draft, dedupe: bool, base: Step | None) -> None:
        super().__init__(manager.tree, draft, dedupe, base)
        self._manager = manager

    def publish(self) -> Step:
        """As `Saving.publish`. Old steps go afterwards; where that fails, it is logged."""
        step = super().publish()
        try:
            self._manager.apply_retention()
        except OSError as error:
            log.warning("old steps stay for now: %s", error)
        return step


class _Joined(Saving):
    """The part of a save that another process publishes."""

    def publish(self) -> Step:
        """Raises: RuntimeError."""
        raise RuntimeError("the process that began the save publishes it")

    def abort(self) -> None:
        """The process that began the save removes its files."""

    def __exit__(self, *raised: object) -> None:
        """Files stay: the process that began the save publishes or removes them."""
