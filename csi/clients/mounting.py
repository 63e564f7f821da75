"""Mount a volume, and format it first where there is none and the secret says how."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from csi.clients.backend import Backend
from csi.clients.client import Client, NoVolume
from csi.clients.program import Program, require
from csi.errors import invalid

log = logging.getLogger(__name__)

_OWN: Final = ("log", "subdir", "snapshot", "debug", "store-option", "encrypt-rsa-key")
_FLAGS: Final = ("rw", "ro")


async def ensure_mounted(
    client: Client, program: Program, backend: Backend, words: Sequence[str]
) -> bool:
    """Whether a client was started for it. Raises: CsiError."""
    try:
        return await client.ensure(words, backend.environment, backend.name)
    except NoVolume:
        if not backend.can_format:
            raise
    done = await program.format(backend)
    if done.code == 0:
        log.info("volume %r is formatted", backend.name)
    try:
        return await client.ensure(words, backend.environment, backend.name)
    except NoVolume:  # else another node was faster
        require(done, f"volume {backend.name} can't be formatted")
        raise


def mount_words(options: Sequence[str], readonly: bool, subdir: str) -> tuple[str, ...]:
    """The options of `slicefs mount` for mount options as Kubernetes has them. Raises: CsiError."""
    words: list[str] = []
    for option in (part.strip() for text in options for part in text.split(",")):
        name = option.partition("=")[0]
        if name in _OWN:
            raise invalid(f"mountOptions: {name!r} is for the driver to choose: leave it out")
        if option.startswith("-") or not option.isprintable():
            raise invalid(f"mountOptions: write {option[:40]!r} as in `-o`: name=value")
        if option and option not in _FLAGS:
            words += ["-o", option]
    if readonly or any("ro" in text.split(",") for text in options):
        words.append("--read-only")
    if subdir:
        words += ["--subdir", f"/{subdir}"]
    return tuple(words)
