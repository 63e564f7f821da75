"""Finding the supervisor of a mount: for commands that upgrade it or take it over."""

from __future__ import annotations

import json
import os
from typing import Any

from fsclient.fuse.mount.mount import FUSE_TYPE, find_mount
from fsclient.survival.handover import HandoverRefused, Predecessor
from fsmeta.errors import ConfigError


def mount_config(path: str) -> dict[str, Any]:
    """What the client of a mount says of itself. Raises: ConfigError where it is none."""
    info = find_mount(path)
    if info is None or info.fstype != FUSE_TYPE:
        raise ConfigError(f"{path} is not a SliceFS mount: see `findmnt -t fuse.slicefs`")
    with open(os.path.join(path, ".config"), "rb") as file:
        found: dict[str, Any] = json.load(file)["mount"]
    return found


def supervisor_address(path: str) -> str:
    """Where the supervisor of a mount listens. Raises: ConfigError."""
    found: str | None = mount_config(path).get("supervisor_address")
    if found is None:
        raise ConfigError(f"{path} has no supervisor: unmount, and mount with --supervisor")
    return found


def ask_for_handover(path: str) -> Predecessor:
    """What a mount consists of, which its supervisor is ready to hand over. Raises: ConfigError."""
    address = supervisor_address(path)
    try:
        return Predecessor.ask(address)
    except HandoverRefused as error:
        raise ConfigError(f"{path} can't be taken over: {error}") from error
    except OSError as error:
        raise unreachable(error) from error


def unreachable(error: OSError) -> ConfigError:
    """The supervisor of a mount can't be asked."""
    return ConfigError(
        f"the supervisor of the mount can't be asked: {error.strerror or error}; run the command "
        f"as the user of the mount, and where {error.filename or 'its socket'} is seen"
    )
