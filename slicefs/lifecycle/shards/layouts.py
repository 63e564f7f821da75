"""Which kind of sharded checkpoint a directory has, and the plan of its unshard.

Called by `lifecycle/unshard`. The kind is told from names of files, without opening any.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from fsmeta.errors import ConfigError
from slicefs.checkpoint.step import joined
from slicefs.lifecycle.shards.dcp_metadata import METADATA
from slicefs.lifecycle.shards.deepspeed import MODEL_FILE, OPTIM_FILE, plan_deepspeed
from slicefs.lifecycle.shards.olmo_legacy import LEGACY_FILE, plan_olmo_legacy
from slicefs.lifecycle.shards.olmo_local import RANK_FILE, plan_olmo_local
from slicefs.lifecycle.shards.plan import ShardPlan
from slicefs.stores.tree import Tree

DCP: Final = "dcp"
DEEPSPEED: Final = "deepspeed"
OLMO_LOCAL: Final = "olmo-local"
OLMO_LEGACY: Final = "olmo-legacy"
AUTO: Final = "auto"
LATEST: Final = "latest"  # of DeepSpeed, beside its steps
_TAG_BYTES_MAX: Final = 4096
KINDS: Final = (AUTO, DCP, DEEPSPEED, OLMO_LOCAL, OLMO_LEGACY)
_PLANS: Final = {
    DEEPSPEED: plan_deepspeed,
    OLMO_LOCAL: plan_olmo_local,
    OLMO_LEGACY: plan_olmo_legacy,
}
_ARCHIVES: Final = {
    DEEPSPEED: (OPTIM_FILE, MODEL_FILE),
    OLMO_LOCAL: (RANK_FILE,),
    OLMO_LEGACY: (LEGACY_FILE,),
}


def latest_tag(tree: Tree, folder: str) -> str | None:
    """The directory that DeepSpeed's file `latest` names; None where there is none.

    Raises: ConfigError where it names one that is not there.
    """
    path = joined(folder, LATEST)
    try:
        tag = tree.read(path, 0, _TAG_BYTES_MAX).decode("utf-8", "replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return None
    if not tag or "/" in tag or tag in (".", "..") or "\n" in tag:
        raise ConfigError(f"{path}: names no directory: name that of one step")
    if not tree.exists(joined(folder, tag)):
        raise ConfigError(
            f"{path}: names {tag}, which is not there: name the directory of one step"
        )
    return tag


def kinds_of(names: Collection[str]) -> list[str]:
    """The kinds that these names of files belong to."""
    found = set()
    for name in names:
        if name == METADATA or (name.endswith(".distcp") and "/" not in name):
            found.add(DCP)
        elif OPTIM_FILE.fullmatch(name) or MODEL_FILE.fullmatch(name):
            found.add(DEEPSPEED)
        elif RANK_FILE.fullmatch(name):
            found.add(OLMO_LOCAL)
        elif LEGACY_FILE.fullmatch(name):
            found.add(OLMO_LEGACY)
    return sorted(found)


def files_of(kind: str, names: Collection[str]) -> list[str]:
    """The archives among these names that a plan of this kind may read."""
    patterns = _ARCHIVES[kind]
    return sorted(name for name in names if any(each.fullmatch(name) for each in patterns))


def kind_of(where: str, names: Collection[str], wanted: str = AUTO) -> str:
    """The kind of a step. Raises: ConfigError for none, several, and another than `wanted`."""
    found = kinds_of(names)
    if wanted != AUTO:
        if wanted not in found:
            what = f"its files are of {' and '.join(found)}" if found else "it has no such files"
            raise ConfigError(
                f"{where}: is no {wanted} checkpoint, {what}: name the directory of one step, or "
                "leave out --type"
            )
        return wanted
    if not found:
        raise ConfigError(
            f"{where}: has no {METADATA} of DCP, and no shards of {', '.join(KINDS[2:])}: name "
            "the directory of one step"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{where}: has files of {' and '.join(found)}: say which with --type, or keep the "
            "files of one save"
        )
    return found[0]


def plan_shards(
    tree: Tree, folder: str, kind: str, names: Collection[str], *, model_only: bool
) -> ShardPlan:
    """What becomes of the shards of a step of any kind but DCP. Raises: ConfigError."""
    return _PLANS[kind](tree, folder, names, model_only=model_only)
