"""`slicefs ckpt pipeline`: what is done with the runs of a cluster, from one TOML file.

    target = "r2://checkpoints"       # each run goes to TARGET/NAME
    runs = ["runs/a", "runs/b"]
    clean = true                      # remove runs without a checkpoint, do nothing else with them
    unshard = "latest"                # latest, all, or none: written to TARGET/NAME/stepN-unsharded
    upload = true                     # copy the run as it is, too
    delete_source = true              # once all of it is at the target and was read back; without
                                      # upload the shards of what was unsharded, and nothing else
    state = "pipeline.json"           # runs that are done; they are not looked at again

    [names]                           # NAME of a run; without a line it is the run's own
    "runs/a" = "entity/project/ipzq9ab9"

Each stage skips what is there already, so a pipeline that was interrupted is run again. A failure
of one run does not stop the others, and leaves its source. Threading: several runs at a time.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, islice
from typing import Any, Final, NamedTuple

from fsmeta.errors import ConfigError, Corrupt
from fsmeta.runtime import Lock, Runtime
from slicefs.client.parallel import Readers
from slicefs.lifecycle.clean import CleanPolicy, judge, remove_run
from slicefs.lifecycle.move import OpenTrees, move
from slicefs.lifecycle.run_steps import UNSHARDED, is_sharded, steps_of
from slicefs.lifecycle.transfer import Copier, TransferEnd, refuse_overlap
from slicefs.lifecycle.unshard import unshard

_UNSHARD: Final = ("none", "latest", "all")
_WORDS: Final = frozenset(
    {"target", "runs", "clean", "unshard", "upload", "delete_source", "state", "names"}
)


class PipelinePlan(NamedTuple):
    """A pipeline's file."""

    target: str
    runs: tuple[str, ...]
    clean: bool = True
    unshard: str = "latest"
    upload: bool = True
    delete_source: bool = False
    state: str = ""
    names: Mapping[str, str] = {}

    def name_of(self, run: str) -> str:
        """Where a run goes, below the target."""
        return self.names.get(run) or run.rstrip("/").rpartition("/")[2]

    def target_of(self, run: str) -> str:
        """The URL of that."""
        return f"{self.target.rstrip('/')}/{self.name_of(run)}"


class PipelineOutcome(NamedTuple):
    """What became of a run."""

    run: str
    done: tuple[str, ...]  # a line for each stage
    failure: str = ""


def parse_plan(text: str, where: str) -> PipelinePlan:
    """Raises: ConfigError."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: is no TOML: {error}") from error
    unknown = sorted(set(found) - _WORDS)
    if unknown:
        raise ConfigError(f"{where}: knows no {unknown[0]!r}: use {', '.join(sorted(_WORDS))}")
    plan = PipelinePlan(
        _typed(found, "target", str, "", where),
        tuple(_typed(found, "runs", list, [], where)),
        _typed(found, "clean", bool, True, where),
        _typed(found, "unshard", str, "latest", where),
        _typed(found, "upload", bool, True, where),
        _typed(found, "delete_source", bool, False, where),
        _typed(found, "state", str, "", where),
        _typed(found, "names", dict, {}, where),
    )
    if not plan.target or not plan.runs:
        raise ConfigError(f"{where}: set `target` and `runs`")
    if plan.unshard not in _UNSHARD:
        raise ConfigError(f"{where}: unshard = {plan.unshard!r}: use {', '.join(_UNSHARD)}")
    if plan.delete_source and not plan.upload and plan.unshard != "all":
        raise ConfigError(f'{where}: delete_source needs upload = true, or unshard = "all"')
    _require_apart(plan, where)
    return plan


def _require_apart(plan: PipelinePlan, where: str) -> None:
    """Raises: ConfigError where two runs, or what they become, lie in each other."""
    for one, other in combinations(plan.runs, 2):
        for first, second, remedy in (
            (one, other, "leave one of them out"),
            (plan.target_of(one), plan.target_of(other), "name them in [names]"),
        ):
            try:
                refuse_overlap(first, second)
            except ConfigError:
                what = "is" if first == second else "overlaps"
                raise ConfigError(
                    f"{where}: two runs meet: {first!r} {what} {second!r}: {remedy}"
                ) from None


def _typed(found: Mapping[str, Any], name: str, kind: type, default: Any, where: str) -> Any:
    value = found.get(name, default)
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: {name} = {value!r}: is no {kind.__name__}")
    return value


class Pipeline:
    """Runs a plan."""

    def __init__(
        self,
        plan: PipelinePlan,
        stores: OpenTrees,
        runtime: Runtime,
        *,
        jobs: int = 4,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._stores = stores
        self._runtime = runtime
        self._jobs = jobs
        self._say = say
        self._lock: Lock = runtime.lock()
        self._finished = _load(plan.state)  # guarded by _lock

    def dry_run(self) -> Iterable[str]:
        """What would be done, a line for each run. Raises: OSError, ConfigError."""
        for run in self._plan.runs:
            if run in self._finished:
                yield f"{run}: is done"
                continue
            source, target = self._ends(run)
            verdict = judge(source, CleanPolicy())
            if self._plan.clean and verdict.verdict == "remove":
                yield f"{run}: would be removed: {verdict.why}"
                continue
            files, size = Copier(source, target, jobs=1, runtime=self._runtime).plan()
            steps = ", ".join(self._steps(source)) or "no step"
            sent = f"{files} files, {size} bytes would be sent" if self._plan.upload else "stays"
            yield f"{run} → {self._plan.name_of(run)}: {sent}; would be unsharded: {steps}"

    def run(self) -> list[PipelineOutcome]:
        """Do everything; one outcome for each run, in order."""
        found: dict[str, PipelineOutcome] = {}
        ends = {run: self._ends(run) for run in self._plan.runs}  # trees are opened by one thread

        def one(run: str) -> None:
            done: list[str] = []
            try:
                if run in self._finished:
                    done.append("is done")
                else:
                    self._stages(run, *ends[run], done)
                    self._finish(run)
                found[run] = PipelineOutcome(run, tuple(done))
            except (OSError, ConfigError, Corrupt) as error:
                why = getattr(error, "strerror", None) or str(error)
                found[run] = PipelineOutcome(run, tuple(done), str(why))
            self._say(f"{len(found)} of {len(ends)} runs")

        Readers(self._jobs).run(self._plan.runs, one)
        return [found[run] for run in self._plan.runs]

    def _ends(self, run: str) -> tuple[TransferEnd, TransferEnd]:
        target = self._plan.target_of(run)
        refuse_overlap(run, target)
        return self._stores.endpoint(run), self._stores.endpoint(target)

    def _stages(self, run: str, source: TransferEnd, target: TransferEnd, done: list[str]) -> None:
        """Raises: OSError, ConfigError, Corrupt."""
        plan = self._plan
        if plan.clean:
            verdict = judge(source, CleanPolicy())
            if verdict.verdict == "remove":
                count = remove_run(source, verdict)
                done.append(f"removed, {count} files without a checkpoint")
                return
        for name in self._steps(source):
            self._unshard(source, target, name, done)
        if plan.upload:
            copier = Copier(source, target, jobs=self._jobs, runtime=self._runtime)
            report = copier.copy()
            done.append(f"{report.copied} files copied, {report.skipped} were there")
            if report.failures:
                raise OSError(5, "; ".join(report.failures[:3]), run)
            if plan.delete_source:
                self._move(source, target, done)

    def _steps(self, source: TransferEnd) -> list[str]:
        """The steps that are to be unsharded, of whatever kind. Raises: OSError, ConfigError.

        One that has its result beside it, which an upload copies as it is, is left as it is.
        """
        if self._plan.unshard == "none":
            return []
        there = {each.name for each in source.tree.list_dir(source.path)}
        wanted = (name for name in reversed(steps_of(source)) if is_sharded(source, name))
        steps = list(islice(wanted, 1 if self._plan.unshard == "latest" else None))
        return [
            name
            for name in reversed(steps)
            if not (self._plan.upload and f"{name}{UNSHARDED}" in there)
        ]

    def _unshard(
        self, source: TransferEnd, target: TransferEnd, name: str, done: list[str]
    ) -> None:
        first = TransferEnd(source.tree, source.at(name))
        second = TransferEnd(target.tree, target.at(f"{name}{UNSHARDED}"))
        report = unshard(first, second)
        lost = f"; not kept, or not all of it: {', '.join(report.lost)}" if report.lost else ""
        done.append(f"{name}: {'was unsharded' if report.skipped else 'unsharded'}{lost}")
        if self._plan.delete_source and not self._plan.upload:
            if lost:
                raise ConfigError(f"{name}: stays{lost}: set upload = true")
            count = unshard(first, second, delete_sharded=True).deleted
            done.append(f"{name}: {count} shards removed, and nothing else")

    def _move(self, source: TransferEnd, target: TransferEnd, done: list[str]) -> None:
        """Remove what is at the target now. Raises: OSError where there is more."""
        copier = Copier(source, target, jobs=self._jobs, runtime=self._runtime)
        report = move(source, target, copier)
        if report.copy.failures or report.left:
            raise OSError(5, f"changed meanwhile and stays: {', '.join(report.left)}")
        done.append("source removed")

    def _finish(self, run: str) -> None:
        with self._lock:
            self._finished.append(run)
            if self._plan.state:
                _store(self._plan.state, self._finished)


def _load(path: str) -> list[str]:
    """The runs that are done. Raises: ConfigError."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)["done"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no state of a pipeline: {error}") from error
    return [str(each) for each in found]


def _store(path: str, done: Sequence[str]) -> None:
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"done": list(done)}, file)
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
