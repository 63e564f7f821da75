"""`slicefs clone`: a copy of a directory, or of a file, that shares all data."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from typing import Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.jobs import require_mount, run_job
from fsclient.cli.options.tell import tell
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

_LOOK_S: Final = 0.01
_COPIED_AT_ONCE: Final = 1 << 40  # the kernel and the mount take as much of it as they like
_OF_ROOT: Final = ("trusted.", "security.")
_TOLD_S: Final = 3.0  # the own kernel learns it in a millisecond
_WHY: Final = {
    errno.EEXIST: "exists already: choose another name",
    errno.ENOSPC: "the volume is full",
    errno.EDQUOT: "a quota is full",
    errno.EACCES: "there is something in it that you may not read",
    errno.ECANCELED: "was stopped",
    errno.EIO: "can't be cloned: the log of the mount says why",
}


@click.command(
    epilog=examples(
        "slicefs clone /mnt/vol/dataset /mnt/vol/experiment",
        "sudo slicefs clone --preserve /mnt/vol/home /mnt/vol/home-copy",
    )
)
@click.argument("source", type=click.Path(exists=True))
@click.argument("target", type=click.Path())
@click.option("--preserve", is_flag=True, help="Keep owners and groups (root only).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def clone(source: str, target: str, preserve: bool, as_json: bool) -> None:
    """Make TARGET a copy of the directory or file SOURCE, both on one SliceFS mount.

    No data is copied: both use the same objects until one of them is changed. TARGET appears when
    all of it is there. Modes, times, extended attributes and hard links within SOURCE are kept.
    Changes in SOURCE during the copy may be in TARGET or not.
    """
    above, name = os.path.split(os.path.abspath(target))
    if not os.path.isdir(above):
        raise ConfigError(f"{above} is no directory: make it first")
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already: choose another name")
    if os.stat(source).st_dev != os.stat(above).st_dev:
        raise ConfigError(f"{source} and {above} are not on the same mount: use `cp -r`")
    if os.path.realpath(above).startswith(os.path.realpath(source) + os.sep) or os.path.samefile(
        above, source
    ):
        raise ConfigError(f"{target} is in {source}: choose a place outside of it")
    if not os.path.isdir(source):
        inodes = _clone_file(source, target, preserve)
    else:
        inodes = _clone_tree(source, target, above, name, preserve, as_json)
    if as_json:
        tell({"inodes": inodes}, source=source, target=target)
    else:
        click.echo(f"{target}: {inodes} inode{'' if inodes == 1 else 's'}")


def _clone_tree(
    source: str, target: str, above: str, name: str, preserve: bool, as_json: bool
) -> int:
    """How many inodes it has. Raises: ConfigError."""
    wish = {"source": os.stat(source).st_ino, "name": name, "preserve": preserve}
    report = run_job(above, wish, as_json)
    code = report["errno"]
    if code:
        what = target if code in (errno.EEXIST, errno.ECANCELED) else source
        raise ConfigError(f"{what} {_WHY.get(code, os.strerror(code))}")
    _wait_for(target)
    return int(report["inodes"])


def _clone_file(source: str, target: str, preserve: bool) -> int:
    """A file that is made without a name, filled, and then given one. Raises: ConfigError."""
    if not os.path.isfile(source):
        raise ConfigError(f"{source} is neither a directory nor a file: use `cp -a`")
    if preserve and os.geteuid() != 0:
        raise ConfigError("--preserve: only root gives files to other users")
    try:
        require_mount(source)
        with ExitStack() as opened:
            theirs = os.open(source, os.O_RDONLY)
            opened.callback(os.close, theirs)
            ours = os.open(
                os.path.dirname(os.path.abspath(target)), os.O_TMPFILE | os.O_RDWR, 0o600
            )
            opened.callback(os.close, ours)
            while os.copy_file_range(theirs, ours, _COPIED_AT_ONCE):
                pass
            _dress(theirs, ours, preserve)
            # with a descriptor, which is not used, Python follows the symlink
            os.link(f"/proc/self/fd/{ours}", target, src_dir_fd=ours)
    except OSError as error:
        what = target if error.errno == errno.EEXIST else source
        why = _WHY.get(error.errno or 0) or f"can't be cloned: {error.strerror}"
        raise ConfigError(f"{what} {why}") from error
    return 1


def _dress(theirs: int, ours: int, preserve: bool) -> None:
    """Give a copy the attributes that a clone in a directory has, too."""
    like, own = os.fstat(theirs), os.fstat(ours)
    if preserve:
        os.fchown(ours, like.st_uid, like.st_gid)
    given = not preserve and (like.st_uid, like.st_gid) != (own.st_uid, own.st_gid)
    for name in os.listxattr(theirs):
        if (os.geteuid() == 0 or not name.startswith(_OF_ROOT)) and not (
            given and name == "security.capability"
        ):
            os.setxattr(ours, name, os.getxattr(theirs, name))
    os.fchmod(ours, like.st_mode & (0o1777 if given else 0o7777))
    os.utime(ours, ns=(like.st_atime_ns, like.st_mtime_ns))


def _wait_for(target: str) -> None:
    """Until the kernel has been told that the name exists."""
    runtime = SystemRuntime()
    give_up = runtime.monotonic() + _TOLD_S
    while not os.path.lexists(target) and runtime.monotonic() < give_up:
        runtime.sleep(_LOOK_S)
