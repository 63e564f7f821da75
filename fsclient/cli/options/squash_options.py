"""The options of `slicefs mount` that map users to another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click

from fsclient.fuse.dispatch.squash import NOBODY, WHOM, Squash
from fsclient.fuse.mount.mount_options import parse_options
from fsmeta.errors import ConfigError

ID_MAX: Final = (1 << 32) - 2  # -1 means "leave it alone" to chown(2)
_Command = TypeVar("_Command", bound=Callable[..., Any])

# by what `-o name=value` calls them
SQUASH_WORDS: Final = {"squash": "squash", "anon-uid": "anon_uid", "anon-gid": "anon_gid"}

_OPTIONS: Final = (
    click.option(
        "--squash",
        type=click.Choice(WHOM),
        default=None,
        show_default="no user is squashed",
        help="Judge root, or all users, as the anonymous user, as NFS servers do.",
    ),
    click.option(
        "--anon-uid",
        type=click.IntRange(0, ID_MAX),
        default=None,
        show_default=str(NOBODY),
        help="With --squash: the anonymous user.",
    ),
    click.option(
        "--anon-gid",
        type=click.IntRange(0, ID_MAX),
        default=None,
        show_default=str(NOBODY),
        help="With --squash: the anonymous user's group.",
    ),
)


def squash_options(command: _Command) -> _Command:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_squash(settings: Mapping[str, Any], words: Sequence[str]) -> Squash | None:
    """What the options say; `words` are the kernel's. Raises: ConfigError."""
    whom, uid, gid = settings["squash"], settings["anon_uid"], settings["anon_gid"]
    if whom is None:
        if uid is not None or gid is not None:
            raise ConfigError("--anon-uid, --anon-gid: name the users with --squash root|all")
        return None
    if parse_options(words).acl:
        raise ConfigError(
            "--squash: with -o acl the kernel checks permissions and lets root through: "
            "leave one of them out"
        )
    return Squash(
        everyone=whom == "all",
        uid=NOBODY if uid is None else uid,
        gid=NOBODY if gid is None else gid,
    )
