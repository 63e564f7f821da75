"""Names in a directory of checkpoints: steps, saves in progress, and what makes a run.

Called by the manager and by `slicefs/lifecycle`. Pure. A step is a directory `step1000`; the names
that other trainers give (`global_step1000`, `checkpoint-1000`, `step1000-unsharded`) are read too.
A save in progress is `.saving-step1000-TOKEN`, a step that is being removed
`.removing-step1000-TOKEN`. The token says which process owns it.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterable
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError

MANIFEST: Final = ".slicefs-checkpoint.json"
DATA: Final = "save-"  # begins the folder of one save where a store can't rename directories
STEP_MAX: Final = 10**15  # digits of a name stay below what any trainer counts to
_STEP: Final = re.compile(r"(?:global_?step|step|checkpoint)[-_]?(\d{1,15})(-unsharded)?")
_PRIVATE: Final = re.compile(r"\.(saving|removing)-step(\d{1,15})-([0-9a-f]+\.\d+\.[0-9a-f]+)")
_TOKEN: Final = re.compile(r"([0-9a-f]{8})\.(\d{1,10})\.([0-9a-f]{16})")


class StepName(NamedTuple):
    """What the name of a step directory says."""

    number: int
    unsharded: bool


class Private(NamedTuple):
    """What the name of a save in progress, or of a removal, says."""

    kind: str  # saving or removing
    number: int
    token: str


def parse_step(name: str) -> StepName | None:
    """The step that a directory's name stands for, or None."""
    found = _STEP.fullmatch(name)
    return None if found is None else StepName(int(found[1]), found[2] is not None)


def step_name(number: int) -> str:
    """The directory of a step. Raises: ConfigError."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < STEP_MAX:
        raise ConfigError(f"step {number!r}: use a whole number from 0")
    return f"step{number}"


def parse_private(name: str) -> Private | None:
    """What a name that begins with a dot stands for, or None."""
    found = _PRIVATE.fullmatch(name)
    return None if found is None else Private(found[1], int(found[2]), found[3])


def real_steps(names: Iterable[str]) -> list[str]:
    """The names that are steps beyond 0, in order of their numbers."""
    steps = ((parse_step(name), name) for name in names)
    return [name for step, name in sorted((s, n) for s, n in steps if s and s.number > 0)]


def is_run(names: Iterable[str]) -> bool:
    """Whether these names of a directory make it the directory of a run.

    As OLMo's storage cleaner has it: `config.yaml` with logs or indices beside it, or a step.
    """
    known = set(names)
    if "config.yaml" in known and known & {"wandb", "train_data"}:
        return True
    return any(parse_step(name) for name in known)


def new_token(random_bits: int) -> str:
    """A token for one save: the process space, this process, and 64 bits of chance."""
    return f"{_space()}.{os.getpid()}.{random_bits & (2**64 - 1):016x}"


def is_abandoned(token: str) -> bool:
    """Whether the process that owns a token has surely ended; False where it can't be known."""
    found = _TOKEN.fullmatch(token)
    if found is None or found[1] != _space():
        return False
    try:
        os.kill(int(found[2]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _space() -> str:
    """Names this boot of this host and its namespace of processes: where a pid has a meaning."""
    words = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            words.append(os.readlink(path) if path.endswith("pid") else _read(path))
        except OSError:
            words.append("?")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()
