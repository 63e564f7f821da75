"""Finding and removing runs without a real checkpoint: none beyond step 0.

A run is a directory or an archive. Of an archive only the index is read. What does not look like a
run is never removed unless the caller says so. With `verify`, a step counts only if it is whole.

A run in a bucket is listed once: what is removed is what was looked at, and files that come
meanwhile stay. Files of many runs go in one request. Threading: runs are looked at, and requests to
remove are made, by several threads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError, Corrupt
from slicefs.checkpoint.layout import is_run, real_steps
from slicefs.checkpoint.step import joined
from slicefs.client.parallel import Readers
from slicefs.lifecycle.shards.layouts import LATEST, kinds_of
from slicefs.lifecycle.tar_index import is_archive, tar_names
from slicefs.lifecycle.transfer import TransferEnd
from slicefs.lifecycle.verify import verify_step
from slicefs.stores.tree import FirstFiles, FlatTree, Info

FILES_A_REQUEST: Final = 500  # of as many runs as that: DELETES of `stores/s3`
ARCHIVE_BYTES_MAX: Final = 5 << 30  # a compressed archive is read whole, so there is a limit


class CleanPolicy(NamedTuple):
    """What `clean` goes by."""

    verify: bool = False
    bypass_run_verification: bool = False
    older_than_ns: int | None = None  # only runs whose newest file is older than this time
    max_archive_bytes: int = ARCHIVE_BYTES_MAX


class RunVerdict(NamedTuple):
    """What became of one run, and why."""

    verdict: str  # remove, keep, skip or non-run
    why: str
    files: int = 0
    size: int = 0
    paths: tuple[str, ...] | None = None  # of its files, where the store has no directories

    def told(self) -> dict[str, object]:
        """What scripts are told."""
        return {"verdict": self.verdict, "why": self.why, "files": self.files, "size": self.size}


class Doomed(NamedTuple):
    """A run that is to go."""

    url: str
    run: TransferEnd
    verdict: RunVerdict


class _Listing(NamedTuple):
    """What is in a run, as far as one request tells."""

    names: list[str]  # directly in it
    folders: list[str]
    first: FirstFiles | None  # of a bucket


def judge(run: TransferEnd, rules: CleanPolicy) -> RunVerdict:
    """Look at one run; nothing is changed. Raises: OSError, ConfigError where it is not there."""
    if is_archive(run.path):
        return _archive(run, rules)
    names, folders, first = _listed(run)
    if not names and not run.tree.exists(run.path):
        raise ConfigError(f"{run.tree.url}/{run.path}: is not there: name a run's directory")
    if not (rules.bypass_run_verification or is_run(names)):
        return RunVerdict("non-run", "does not look like a run: no step, no config.yaml with logs")
    others = other_checkpoint(names)
    if others:
        return RunVerdict("keep", f"has {others}")
    steps = real_steps(folders)
    reasons = []
    for name in reversed(steps):
        if not rules.verify:
            return RunVerdict("keep", f"has {name}")
        problems = verify_step(run.tree, joined(run.path, name)).problems
        if not problems:
            return RunVerdict("keep", f"has {name}, which is whole")
        reasons.append(problems[0])
    files = run.files() if first is None else _all_files(run, first)
    newest = max((info.mtime_ns for info in files), default=0)
    if rules.older_than_ns is not None and newest >= rules.older_than_ns:
        return RunVerdict("skip", "was written to recently")
    why = f"no whole step: {reasons[0]}" if reasons else "no step beyond 0"
    paths = None if first is None else tuple(info.path for info in files)
    return RunVerdict("remove", why, len(files), sum(info.size for info in files), paths)


def _listed(run: TransferEnd) -> _Listing:
    """Raises: OSError."""
    first = None
    if isinstance(run.tree, FlatTree):
        first = run.tree.first_files(run.path)
        if not first.last:
            words = [key.partition("/") for key in first.keys]
            folders = dict.fromkeys(word for word, slash, _ in words if slash)
            names = dict.fromkeys(word for word, _, _ in words)
            return _Listing(list(names), list(folders), first)
    entries = list(run.tree.list_dir(run.path))
    folders_there = [entry.name for entry in entries if entry.is_dir]
    return _Listing([entry.name for entry in entries], folders_there, first)


def _all_files(run: TransferEnd, first: FirstFiles) -> list[Info]:
    """Those that were listed, and what comes behind them; paths as the tree has them."""
    rest = run.tree.list(run.prefix, first.last) if first.last else ()
    return [*first.infos, *rest]


def _archive(run: TransferEnd, rules: CleanPolicy) -> RunVerdict:
    info = run.tree.stat(run.path)
    if info.size > rules.max_archive_bytes and not run.path.endswith(".tar"):
        return RunVerdict("skip", "the compressed archive is larger than --max-archive-size")
    if rules.older_than_ns is not None and info.mtime_ns >= rules.older_than_ns:
        return RunVerdict("skip", "was written to recently")
    names, _ = tar_names(run.tree, run.path, info.size)
    words = [[word for word in name.split("/") if word not in ("", ".")] for name in names]
    tops = {each[0] for each in words if each}
    below = {each[1] for each in words if len(each) > 1} if len(tops) == 1 else set()
    known = tops | below
    if not (rules.bypass_run_verification or is_run(tops) or is_run(below)):
        return RunVerdict("non-run", "the archive does not look like a run")
    steps = real_steps(known)
    kept = steps[-1] if steps else other_checkpoint(known)
    if kept:
        return RunVerdict("keep", f"has {kept}")
    return RunVerdict("remove", "no step beyond 0", 1, info.size)


def other_checkpoint(names: Collection[str]) -> str:
    """What says that there is a checkpoint that is no numbered step: DeepSpeed's file `latest`,
    shards without a directory of their own. Whether it is whole is not looked at.
    """
    return LATEST if LATEST in names else "".join(kinds_of(names)[:1])


def remove_run(run: TransferEnd, verdict: RunVerdict) -> int:
    """Remove a run; how many files. A volume with a trash keeps them there. Raises: OSError."""
    if is_archive(run.path):
        run.tree.remove(run.path)
        return 1
    if verdict.paths is None or not isinstance(run.tree, FlatTree):
        return run.tree.remove_tree(run.path)
    for begin in range(0, len(verdict.paths), FILES_A_REQUEST):
        run.tree.remove_files(verdict.paths[begin : begin + FILES_A_REQUEST])
    return len(verdict.paths)


def remove_runs(doomed: Sequence[Doomed], jobs: int) -> dict[str, Exception]:
    """Remove runs, `jobs` requests at a time; the error of each that could not be removed."""
    flat = dict[FlatTree, list[tuple[str, Doomed]]]()
    alone = list[Doomed]()
    for each in doomed:
        tree = each.run.tree
        if each.verdict.paths is None or not isinstance(tree, FlatTree):
            alone.append(each)
        else:
            flat.setdefault(tree, []).extend((path, each) for path in each.verdict.paths)
    parts = [
        (tree, files[begin : begin + FILES_A_REQUEST])
        for tree, files in flat.items()
        for begin in range(0, len(files), FILES_A_REQUEST)
    ]
    refused = dict[str, Doomed]()

    def remove_part(part: tuple[FlatTree, list[tuple[str, Doomed]]]) -> None:
        tree, files = part
        try:
            tree.remove_files([path for path, _ in files])
        except OSError:  # the store does not say for which of the runs
            refused.update((each.url, each) for _, each in files)

    failed = dict[str, Exception]()

    def remove(each: Doomed) -> None:
        try:
            remove_run(each.run, each.verdict)
        except (OSError, Corrupt) as error:
            failed[each.url] = error

    threads = Readers(jobs)
    threads.run(parts, remove_part)
    threads.run([*alone, *refused.values()], remove)
    return failed


def refuse_non_runs(found: Sequence[tuple[str, RunVerdict]]) -> None:
    """Raises: ConfigError naming the first that is no run."""
    for url, verdict in found:
        if verdict.verdict == "non-run":
            raise ConfigError(
                f"{url}: {verdict.why}; nothing was removed: leave it out, or use "
                "--ignore-non-runs or --bypass-run-verification"
            )
