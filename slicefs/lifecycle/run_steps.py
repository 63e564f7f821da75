"""The sharded steps of a run, the newest last.

Called by `ckpt unshard` and `ckpt pipeline`. A run of DeepSpeed has a file `latest` beside its
steps, which may have any name.
"""

from __future__ import annotations

from slicefs.checkpoint.layout import real_steps
from slicefs.lifecycle.shards.layouts import LATEST, kinds_of, latest_tag
from slicefs.lifecycle.transfer import TransferEnd

UNSHARDED = "-unsharded"  # ends the name of the result


def numbered_steps(run: TransferEnd) -> list[str]:
    """The steps of a run but results of unshards, by number. Raises: OSError."""
    names = real_steps(each.name for each in run.tree.list_dir(run.path) if each.is_dir)
    return [name for name in names if not name.endswith(UNSHARDED)]


def steps_of(run: TransferEnd) -> list[str]:
    """`numbered_steps`; the one that `latest` names is the last, whatever its name is.

    Raises: OSError, ConfigError where `latest` names a step that is not there.
    """
    steps, tag = numbered_steps(run), latest_tag(run.tree, run.path)
    return steps if tag is None else [*(name for name in steps if name != tag), tag]


def is_sharded(run: TransferEnd, step: str) -> bool:
    """Whether a step has files of a kind that unshard reads. Raises: OSError."""
    names = {info.path for info in TransferEnd(run.tree, run.at(step)).files()}
    return LATEST in names or bool(kinds_of(names))
