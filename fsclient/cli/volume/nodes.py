"""What `quota` and `qos` have in common: of what a limit is, and the volume that it is in."""

from __future__ import annotations

import functools
import grp
import os
import pwd
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import click

from fsclient.cli.options.options import META_WAIT_S
from fsclient.volume.metadata_url import naming, open_store
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.rules import quota
from fsmeta.runtime import SystemRuntime
from fsmeta.types import ROOT_CALLER, ROOT_INO, FileType

ID_MAX: Final = (1 << 32) - 2  # chown(2) takes (uid_t) -1 for "leave it"
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Target(NamedTuple):
    """A directory, a user or a group."""

    path: str | None
    uid: str | None
    gid: str | None


def target_options(command: _Command) -> Callable[..., Any]:
    """META, and exactly one of --path, --uid, --gid."""

    @click.argument("meta")
    @click.option("--path", metavar="DIR", help="A directory, by its path in the volume.")
    @click.option("--uid", metavar="USER", help="A user, by name or number.")
    @click.option("--gid", metavar="GROUP", help="A group, by name or number.")
    @click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def wrapped(path: str | None, uid: str | None, gid: str | None, **rest: Any) -> Any:
        if [path, uid, gid].count(None) != 2:
            raise click.UsageError("name one of --path DIR, --uid USER and --gid GROUP")
        return command(target=Target(path, uid, gid), **rest)

    return wrapped


@contextmanager
def opened(url: str) -> Iterator[Meta]:
    """The metadata of a volume, without a session."""
    runtime = SystemRuntime()
    store = open_store(url, runtime)
    try:
        with naming(url):
            meta = Meta(store, runtime, META_WAIT_S)
        yield meta
    finally:
        store.close()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of cells, the first one at the left and the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        click.echo("  ".join((first.ljust(widths[0]), *cells)))


def node_of(meta: Meta, target: Target, root: bytes | None = None) -> bytes:
    """What a quota or a rate limit is of, as the metadata call it; `root` is what they call the
    root, where it may be named. Raises: ConfigError.
    """
    if target.path is not None:
        return _dir_node(meta, target.path, root)
    if target.uid is not None:
        return quota.user_node(_id(target.uid, "--uid", lambda name: pwd.getpwnam(name).pw_uid))
    assert target.gid is not None
    return quota.group_node(_id(target.gid, "--gid", lambda name: grp.getgrnam(name).gr_gid))


def _id(text: str, option: str, by_name: Callable[[str], int]) -> int:
    if text.isascii() and text.isdigit():
        number = int(text)
        if number > ID_MAX:
            raise ConfigError(f"{option} {text}: at most {ID_MAX}")
        return number
    try:
        return by_name(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{option} {text}: no such name on this host; use a number") from error


def _dir_node(meta: Meta, path: str, root: bytes | None) -> bytes:
    if not path.startswith("/"):
        raise ConfigError(f"--path {path}: start with /, which is the volume's root")
    ino = ROOT_INO
    for name in filter(None, os.fsencode(path).split(b"/")):
        try:
            attr = meta.lookup(ROOT_CALLER, ino, name)
        except OSError as error:
            said = error.strerror or error
            raise ConfigError(
                f"--path {path}: {said} in the volume (its root is /, wherever it is mounted)"
            ) from error
        if attr.type is not FileType.DIR:
            raise ConfigError(
                f"--path {path}: {os.fsdecode(name)} is no directory; limit one, a user or a group"
            )
        ino = attr.ino
    if ino == ROOT_INO and root is not None:
        return root
    if ino == ROOT_INO:
        raise ConfigError(
            f"--path {path}: the whole volume has its limits by `slicefs config META --capacity "
            "SIZE --inodes N`, and `slicefs status META` shows what it takes up"
        )
    return quota.dir_node(ino)
