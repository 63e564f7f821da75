"""From the directory of a run to its path in a tracker, such as `entity/project/ipzq9ab9`.

The id of a run is in its logs: `wandb/run-TIMESTAMP-ID`. A resolver says which paths an id has; one
that reads a JSON file is here, others are plugged in. No path, or several, is reported, never
guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Final, NamedTuple, TypeAlias

from fsmeta.errors import ConfigError
from slicefs.checkpoint.step import joined
from slicefs.lifecycle.transfer import TransferEnd

Resolver: TypeAlias = Callable[[str], Iterable[str]]
"""The tracker's paths for the id of a run."""
_RUN: Final = re.compile(r"(?:offline-)?run-[0-9]{8}_[0-9]{6}-([A-Za-z0-9_-]+)")


class Mapped(NamedTuple):
    """What a run was mapped to; `problem` is empty where there is one path."""

    ids: tuple[str, ...]
    path: str
    problem: str


def run_ids(run: TransferEnd) -> list[str]:
    """The tracker's ids in the logs of a run, each once."""
    try:
        names = [entry.name for entry in run.tree.list_dir(joined(run.path, "wandb"))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (_RUN.fullmatch(name) for name in names)
    return sorted({each[1] for each in found if each is not None})


def map_run(run: TransferEnd, resolve: Resolver) -> Mapped:
    """The path of one run. A run that was resumed has several ids, often of one path."""
    ids = run_ids(run)
    if not ids:
        return Mapped((), "", "has no wandb/run-TIMESTAMP-ID")
    paths = sorted({path for each in ids for path in resolve(each)})
    if len(paths) == 1:
        return Mapped(tuple(ids), paths[0], "")
    why = f"is ambiguous: {', '.join(paths)}" if paths else f"the tracker knows no {ids[0]}"
    return Mapped(tuple(ids), "", why)


def table_resolver(text: str, where: str) -> Resolver:
    """A resolver from JSON: `{"ID": "PATH"}` or `{"ID": ["PATH", …]}`. Raises: ConfigError."""
    try:
        table = json.loads(text)
        known: Mapping[str, list[str]] = {
            str(key): [value] if isinstance(value, str) else [str(each) for each in value]
            for key, value in table.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f'{where}: is no JSON object like {{"ID": "PATH"}}: {error}') from error
    return lambda run_id: known.get(run_id, [])


def wandb_resolver(place: str) -> Resolver:
    """A resolver that asks Weights & Biases for runs of ENTITY/PROJECT. Raises: ConfigError.

    The id of a directory is the run's id, or the name that it was given. Answers are remembered.
    """
    if place.count("/") != 1:
        raise ConfigError(f"--wandb {place}: write ENTITY/PROJECT")
    try:
        wandb = import_module("wandb")
    except ImportError as error:
        raise ConfigError("--wandb needs the package wandb: pip install wandb") from error
    api = wandb.Api()
    known: dict[str, list[str]] = {}

    def resolve(run_id: str) -> list[str]:
        if run_id not in known:
            wanted = {"$or": [{"name": run_id}, {"display_name": run_id}]}
            known[run_id] = ["/".join(run.path) for run in api.runs(place, filters=wanted)]
        return known[run_id]

    return resolve


def plugged_resolver(name: str) -> Resolver:
    """The resolver `MODULE:FUNCTION`. Raises: ConfigError."""
    module, separator, function = name.partition(":")
    try:
        found = getattr(import_module(module), function) if separator else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--resolver {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"--resolver {name}: write MODULE:FUNCTION, a function of a run's id")
    resolver: Resolver = found
    return resolver
