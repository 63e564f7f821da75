"""Mount a volume, and format it first where there is none and the secret says how."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Final

from csi.clients.backend import Backend
from csi.clients.client import VolumeClient, VolumeNotFormatted
from csi.clients.program import Program, require
from csi.errors import invalid

log = logging.getLogger(__name__)

_OWN: Final = (
    *("log", "access-log", "subdir", "snapshot", "debug", "store-option", "encrypt-rsa-key"),
)
_FLAGS: Final = ("rw", "ro")
_SUPERVISOR: Final = "supervisor"  # of `slicefs mount`; `no-supervisor` is the driver's own word
_LINUX_LEAST: Final = (6, 16)  # a kernel before that lets a mount end with its client


async def ensure_mounted(
    client: VolumeClient, program: Program, backend: Backend, words: Sequence[str]
) -> bool:
    """Whether a client was started for it. Raises: CsiError."""
    wanted = (words, backend.environment, backend.name, backend.allow_local)
    try:
        return await client.ensure(*wanted)
    except VolumeNotFormatted:
        if not backend.can_format:
            raise
    done = await program.format(backend)
    if done.code == 0:
        log.info("volume %r is formatted", backend.name)
    try:
        return await client.ensure(*wanted)
    except VolumeNotFormatted:  # else another node was faster
        require(done, f"volume {backend.name} can't be formatted")
        raise


def can_survive() -> bool:
    """Whether mounts of this kernel outlive their clients."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= _LINUX_LEAST


def for_pods(words: Sequence[str]) -> tuple[str, ...]:
    """The options of a mount for pods, whose root is not root of the volume.

    It survives its client, unless the options exclude that, or the kernel.
    """
    has_one = can_survive() and "passthrough" not in words
    # of two words that exclude each other the later counts
    return ("--confine-root", f"--{_SUPERVISOR}" if has_one else f"--no-{_SUPERVISOR}", *words)


def survives(words: Sequence[str]) -> bool:
    """Whether a mount with the options of `for_pods` has a supervisor."""
    found = [word for word in words if word in (f"--{_SUPERVISOR}", f"--no-{_SUPERVISOR}")]
    return found[-1:] == [f"--{_SUPERVISOR}"]


def mount_words(options: Sequence[str], readonly: bool, subdir: str) -> tuple[str, ...]:
    """The options of `slicefs mount` for mount options as Kubernetes has them. Raises: CsiError."""
    words: list[str] = []
    for option in (part.strip() for text in options for part in text.split(",")):
        name = option.partition("=")[0].replace("_", "-")
        if name in _OWN:
            raise invalid(f"mountOptions: {name!r} is for the driver to choose: leave it out")
        if option.startswith("-") or not option.isprintable():
            raise invalid(f"mountOptions: write {option[:40]!r} as in `-o`: name=value")
        if option in (_SUPERVISOR, f"no-{_SUPERVISOR}"):
            words.append(f"--{option}")
        elif option and option not in _FLAGS:
            words += ["-o", option]
    if readonly or any("ro" in text.split(",") for text in options):
        words.append("--read-only")
    if subdir:
        words += ["--subdir", f"/{subdir}"]
    return tuple(words)
