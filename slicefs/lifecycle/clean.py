"""Finding and removing runs without a real checkpoint: none beyond step 0.

A run is a directory or an archive. Of an archive only the index is read. What does not look like a
run is never removed unless the caller says so. With `verify`, a step counts only if it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError
from slicefs.checkpoint.layout import is_run, real_steps
from slicefs.checkpoint.step import joined
from slicefs.lifecycle.tar_index import is_archive, tar_names
from slicefs.lifecycle.transfer import Endpoint
from slicefs.lifecycle.verify import verify_step

ARCHIVE_BYTES_MAX: Final = 5 << 30  # a compressed archive is read whole, so there is a limit


class Rules(NamedTuple):
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


def judge(run: Endpoint, rules: Rules) -> RunVerdict:
    """Look at one run; nothing is changed. Raises: OSError, ConfigError where it is not there."""
    if is_archive(run.path):
        return _archive(run, rules)
    names = [entry.name for entry in run.tree.list_dir(run.path) if entry.is_dir]
    everything = [entry.name for entry in run.tree.list_dir(run.path)]
    if not everything and not run.tree.exists(run.path):
        raise ConfigError(f"{run.tree.url}/{run.path}: is not there: name a run's directory")
    if not (rules.bypass_run_verification or is_run(everything)):
        return RunVerdict("non-run", "does not look like a run: no step, no config.yaml with logs")
    steps = real_steps(names)
    reasons = []
    for name in reversed(steps):
        if not rules.verify:
            return RunVerdict("keep", f"has {name}")
        problems = verify_step(run.tree, joined(run.path, name)).problems
        if not problems:
            return RunVerdict("keep", f"has {name}, which is whole")
        reasons.append(problems[0])
    files = run.files()
    newest = max((info.mtime_ns for info in files), default=0)
    if rules.older_than_ns is not None and newest >= rules.older_than_ns:
        return RunVerdict("skip", "was written to recently")
    why = f"no whole step: {reasons[0]}" if reasons else "no step beyond 0"
    return RunVerdict("remove", why, len(files), sum(info.size for info in files))


def _archive(run: Endpoint, rules: Rules) -> RunVerdict:
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
    if steps:
        return RunVerdict("keep", f"has {steps[-1]}")
    return RunVerdict("remove", "no step beyond 0", 1, info.size)


def remove_run(run: Endpoint) -> int:
    """Remove a run; how many files. A volume with a trash keeps them there."""
    if is_archive(run.path):
        run.tree.remove(run.path)
        return 1
    return run.tree.remove_tree(run.path)


def refuse_non_runs(found: Sequence[tuple[str, RunVerdict]]) -> None:
    """Raises: ConfigError naming the first that is no run."""
    for url, verdict in found:
        if verdict.verdict == "non-run":
            raise ConfigError(
                f"{url}: {verdict.why}; nothing was removed: leave it out, or use "
                "--ignore-non-runs or --bypass-run-verification"
            )
