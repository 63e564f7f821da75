"""Jobs that a mount does for a command: watching one, and why it can't be asked."""

from __future__ import annotations

import errno
import os
import secrets
import sys
from typing import Any, Final

import click

from fsclient.control.clone_jobs import ask_for_clone, progress_of_clone
from fsclient.control.info_xattr import INFO_XATTR
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

_LOOK_S: Final = 0.2
_STOP: Final = {"stop": True, "source": 0, "name": "", "preserve": False}


def run_job(directory: str, wish: dict[str, Any], quiet: bool) -> dict[str, Any]:
    """Ask the mount that has `directory`, and wait; the job's last report.

    Interrupted, it is stopped. Raises: ConfigError.
    """
    word = secrets.token_hex(8)
    try:
        require_mount(directory)  # another file system would keep what we ask for
        ask_for_clone(directory, word, wish)
        return _watch(directory, word, quiet)
    except OSError as error:
        raise ConfigError(f"{directory} {_why_not_asked(error)}") from error


def require_mount(path: str) -> None:
    """Raises: OSError where `path` is not on a mount of ours."""
    os.getxattr(path, INFO_XATTR)


def _watch(directory: str, word: str, quiet: bool) -> dict[str, Any]:
    runtime = SystemRuntime()
    shows = sys.stderr.isatty() and not quiet
    try:
        while True:
            report = progress_of_clone(directory, word)
            if report["done"]:
                return report
            if shows:
                click.echo(f"\r{report['inodes']} inodes", nl=False, err=True)
            runtime.sleep(_LOOK_S)
    except KeyboardInterrupt:
        ask_for_clone(directory, word, _STOP)
        raise
    finally:
        if shows:
            click.echo("\r", nl=False, err=True)


def _why_not_asked(error: OSError) -> str:
    match error.errno:
        case errno.EOPNOTSUPP | errno.ENODATA:
            return "is not on a SliceFS mount, or on one that was just restarted"
        case errno.EACCES:
            return "is not yours to write to"
        case errno.EPERM:
            return "can't be asked: that is root's to do"
        case errno.EROFS:
            return "is on a mount that is read-only"
        case errno.EINVAL | errno.ENAMETOOLONG:
            return "can't have something of that name: choose another"
        case errno.EAGAIN:
            return "is on a mount that has too many clones under way: try again later"
        case _:
            return f"can't be asked: {error.strerror}"
