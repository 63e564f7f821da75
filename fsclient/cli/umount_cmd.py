"""`slicefs umount`: returns when everything is stored and the client has left."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Collection
from typing import Final

import click

from fsclient.fuse import mount as kernel
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

UMOUNT_WAIT_S: Final = 60.0  # how long umount waits for the serving process to store and leave
SILENT_S: Final = 3.0  # after this umount says for whom it waits, where that can be told
ASK_WAIT_S: Final = 3.0  # how long a client may take to say who it is; a stopped one never does
_CONFIG_BYTES_MAX: Final = 1 << 16


@click.command()
@click.argument("mountpoint")
@click.option("-l", "--lazy", is_flag=True, help="Detach now, end when nobody uses it any more.")
def umount(mountpoint: str, lazy: bool) -> None:
    """Unmount MOUNTPOINT; returns when everything is stored and the client has left."""
    if not mountpoint:  # an unset variable, most likely
        raise ConfigError("the mount point is empty: name a directory")
    info = kernel.find_mount(mountpoint) or kernel.find_mount(_resolved(mountpoint))
    if info is None or info.fstype != kernel.FUSE_TYPE:
        raise ConfigError(f"{mountpoint} is not a SliceFS mount: see `findmnt -t fuse.slicefs`")
    watch = None if lazy else _watch_server(info)
    try:
        before = kernel.find_holders(info)
        kernel.umount(info.mountpoint, lazy)
        if watch is not None:
            _await_end(watch, info, before.keys())
    finally:
        if watch is not None:
            os.close(watch)


def _resolved(mountpoint: str) -> str:
    """What a symbolic link to a mount point names; only asked where nothing is mounted."""
    return os.path.realpath(mountpoint)


def _watch_server(info: kernel.MountInfo) -> int | None:
    """A descriptor of the process that serves the mount; None where that can't be told."""
    try:
        return os.pidfd_open(kernel.find_server(info) or _ask_server(info.mountpoint))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it has died, or lives where we can't see it: there is nobody to wait for


def _ask_server(mountpoint: str) -> int:
    """The process that serves a mount, as it says itself. Raises: OSError, ValueError, KeyError."""
    runtime = SystemRuntime()
    answered = runtime.event()
    found = [b""]

    def ask() -> None:
        try:
            with open(os.path.join(mountpoint, ".config"), "rb", buffering=0) as config:
                found[0] = config.read(_CONFIG_BYTES_MAX) or b""
        except OSError:
            pass  # there is nobody any more
        answered.set()

    runtime.spawn("ask", ask)
    answered.wait(ASK_WAIT_S)
    return int(json.loads(found[0])["mount"]["pid"])


def _await_end(pidfd: int, info: kernel.MountInfo, mounts: Collection[int]) -> None:
    """Wait until the client has left, `mounts` of which there were. Raises: ConfigError."""
    if _has_ended(pidfd, SILENT_S):
        return
    if holder := _holder(info, mounts):
        click.echo(f"slicefs: unmounted; waiting for the client to leave: {holder}", err=True)
    if not _has_ended(pidfd, UMOUNT_WAIT_S - SILENT_S):
        why = _holder(info, mounts) or "see its log"
        raise ConfigError(
            f"unmounted, but the client still runs after {UMOUNT_WAIT_S:.0f} s: {why}"
        )


def _holder(info: kernel.MountInfo, mounts: Collection[int]) -> kernel.Holder | None:
    """Who has one of these mounts still; others may have got the device number since."""
    found = kernel.find_holders(info)
    return next((found[each] for each in found if each in mounts), None)


def _has_ended(pidfd: int, seconds: float) -> bool:
    """Whether a process ends within that time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
