"""The options of `slicefs mount` about a supervisor, and what a mount has that names none.

DEFAULT says what that is. AUTO is a supervisor where the kernel, the options and the directory of
its socket allow for one, and else none, with a line at DEBUG. A mount that names `--supervisor` and
can't have one says why.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from fsclient.cli.options.options import SecondsType
from fsclient.client.process_limits import find_limits
from fsclient.fuse.mount.mount_options import is_read_only
from fsclient.fuse.session.transport import NATIVE
from fsclient.mount.serve import OPEN_REQUESTS
from fsclient.survival.channel import runtime_directory
from fsclient.survival.client_starter import ARENA_BYTES, is_lone
from fsclient.survival.launch import HANG_S
from fsclient.volume.metadata_url import on_redis
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError

log = logging.getLogger(__name__)

OFF: Final = "off"
AUTO: Final = "auto"
DEFAULT: Final[str] = AUTO  # of a mount with neither --supervisor nor --no-supervisor
LINUX_LEAST: Final = (6, 16)  # FUSE_NOTIFY_INC_EPOCH; FUSE_NOTIFY_RESEND came with 6.9
_OTHER_ADDRESSES: Final = 1 << 30  # what a client has besides its arena
_Command = TypeVar("_Command", bound=Callable[..., Any])

# by what `-o name` calls them; `no-supervisor` is there, too
SUPERVISOR_WORDS: Final = {"supervisor": "supervisor", "hang-after": "hang_after"}

_OPTIONS: Final = (
    click.option(
        "--supervisor/--no-supervisor",
        default=None,
        show_default=DEFAULT,
        help="Run a small process that keeps the mount and starts a new client when one dies. "
        "auto: where Linux (6.16) and the other options allow for it.",
    ),
    click.option(
        "--take-over",
        is_flag=True,
        help="Take over MOUNTPOINT from its supervisor, also in another container.",
    ),
    click.option(
        "--hang-after",
        type=SecondsType(1, 86400),
        default=HANG_S,
        show_default=True,
        help="With a supervisor: seconds without a heartbeat after which a client is replaced.",
    ),
)


def supervisor_options(command: _Command) -> _Command:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def wants_supervisor(
    ctx: click.Context, settings: Mapping[str, Any], typed: Mapping[str, Any], words: Sequence[str]
) -> bool:
    """Whether the mount is to have a supervisor.

    `typed` came as `-o` words, `words` are the kernel's. Raises: ConfigError, UsageError where
    another option needs one.
    """
    wanted = settings["supervisor"]
    if wanted is None:
        wanted = DEFAULT == AUTO and _is_possible(ctx.params["meta"], settings, words)
    if settings["take_over"] and not wanted:
        raise click.UsageError("--take-over needs --supervisor")
    source = ctx.get_parameter_source("hang_after")
    if not wanted and ("hang_after" in typed or source is ParameterSource.COMMANDLINE):
        raise ConfigError("--hang-after is for a mount with a supervisor: leave it out")
    if wanted and settings["encrypt_passphrase"]:
        raise ConfigError(
            "--supervisor: the next client can't ask at a terminal: leave --encrypt-passphrase out "
            "and put the passphrase in SLICEFS_PASSPHRASE"
        )
    return bool(wanted)


def _is_possible(meta: str, settings: Mapping[str, Any], words: Sequence[str]) -> bool:
    reason = _obstacle(meta, settings, words)
    if reason:
        log.debug("the mount has no supervisor: %s", reason)
    return not reason


def _obstacle(meta: str, settings: Mapping[str, Any], words: Sequence[str]) -> str:
    """Why a mount that asks for nothing has no supervisor; "": it has one."""
    if not can_survive(os.uname().release):
        return "the kernel is older than Linux 6.16"
    if settings["transport"] != NATIVE:
        return f"--transport {settings['transport']}"
    if settings["encrypt_passphrase"]:
        return "the next client can't ask for the passphrase"
    if (
        is_read_only(words)
        and not (settings["snapshot"] or settings["passthrough"])
        and settings["open_requests"] == OPEN_REQUESTS[0]
        and on_redis(meta)
    ):
        return "files of a read-only mount are opened without requests, which is worth more"
    try:
        runtime_directory()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def can_have_arena(is_asked_for: bool) -> bool:
    """Whether this process, whose limits are raised, may fork a client with a file in memory.

    Raises: ConfigError where it may not, and a supervisor is asked for.
    """
    reason = _refused()
    if not reason:
        return True
    if is_asked_for:
        raise ConfigError(f"--supervisor: {reason}")
    log.debug("the mount has no supervisor: %s", reason)
    return False


def _refused() -> str:
    """What this process may not do that a supervisor needs; "": nothing."""
    limits, arena = find_limits(), format_size(ARENA_BYTES)
    if 0 <= limits.file_bytes < ARENA_BYTES:
        return f"a file of {arena} in memory is not allowed: raise `ulimit -Hf`"
    if 0 <= limits.memory_bytes < ARENA_BYTES + _OTHER_ADDRESSES:
        return f"{arena} of addresses more are not allowed: raise `ulimit -v`"
    if not is_lone():
        return "something has started threads in this command: an agent in its environment?"
    try:
        os.close(os.memfd_create("slicefs-trial"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"memfd_create(2) or pidfd_open(2) is refused here: {error.strerror}"
    return ""


def can_survive(release: str) -> bool:
    """Whether mounts of a kernel outlive their clients, as far as its version tells."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= LINUX_LEAST
