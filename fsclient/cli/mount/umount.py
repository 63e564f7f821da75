"""`slicefs umount`: returns when everything is stored and the client has left."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Collection
from typing import Any, Final

import click

from fsclient.cli.options.options import complete_directories
from fsclient.cli.options.progress import ProgressLine
from fsclient.fuse.mount import mount as kernel
from fsclient.mount.exit_status import LEFT, ExitRecord, left_by, open_testament, read_testament
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

UMOUNT_WAIT_S: Final = 60.0  # how long umount waits for a client that stores nothing meanwhile
LOOK_S: Final = 1.0  # between looks at what is left
SILENT_S: Final = 3.0  # after this umount says for whom it waits, where that can be told
ASK_WAIT_S: Final = 10.0  # how long a client may take to say who it is; a stopped one never does
_CONFIG_BYTES_MAX: Final = 1 << 16


@click.command()
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option("-l", "--lazy", is_flag=True, help="Detach now, end when nobody uses it any more.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def umount(mountpoint: str, lazy: bool, as_json: bool) -> int:
    """Unmount MOUNTPOINT; returns when everything is stored and the client has left.

    Exit code 3: it is unmounted, and not all is stored: a journal on this host has the rest.
    """
    if not mountpoint:  # an unset variable, most likely
        raise ConfigError("the mount point is empty: name a directory")
    info = kernel.find_mount(mountpoint) or kernel.find_mount(_resolved(mountpoint))
    if info is None or info.fstype != kernel.FUSE_TYPE:
        raise ConfigError(f"{mountpoint} is not a SliceFS mount: see `findmnt -t fuse.slicefs`")
    config = {} if lazy else _ask_config(info.mountpoint)
    pid = None if lazy else _server(info, config)
    watch = None if pid is None else _watch(pid)
    said = None if watch is None or pid is None else open_testament(pid)
    staging = config.get("staging")
    try:
        others = kernel.find_holders(info).keys() - {info.id}  # which is given away at once, too
        kernel.umount(info.mountpoint, lazy)
        if watch is not None and pid is not None:
            _await_end(watch, pid, info, others)
        parting = None if said is None else read_testament(said)
        left = staging if isinstance(staging, str) and _has_log(staging) else None
        if as_json:
            shown = {"mountpoint": info.mountpoint, "volume": info.source, "unstored": left}
            lost = None if parting is None else parting.lost
            click.echo(json.dumps({**shown, "lost": lost}, indent=2))
        elif left:
            click.echo(f"slicefs: unmounted; what is in {left} is not in the store yet: "
                       "mount the volume here again", err=True)  # fmt: skip
        if parting is not None:
            _require_all_stored(parting)
        return LEFT if left else 0
    finally:
        for fd in (watch, said):
            if fd is not None:
                os.close(fd)


def _require_all_stored(parting: ExitRecord) -> None:
    """Raises: ConfigError where data are lost, or may be."""
    if parting.lost is not None:
        raise ConfigError(f"unmounted, but {parting.lost['text']}; see the log: {parting.log}")
    if not parting.ended:
        raise ConfigError(
            "unmounted, but the client has ended before everything was stored; "
            f"see the log: {parting.log}"
        )


def _resolved(mountpoint: str) -> str:
    """What a symbolic link to a mount point names; only asked where nothing is mounted."""
    return os.path.realpath(mountpoint)


def _server(info: kernel.MountInfo, config: dict[str, Any]) -> int | None:
    """The process that serves the mount, which says `config`; None where that can't be told."""
    found = kernel.find_servers(info)
    pid = found[0] if len(found) == 1 else config.get("pid")
    return pid if isinstance(pid, int) else None


def _watch(pid: int) -> int | None:
    """A descriptor of a process."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # it has died, or lives where we can't see it: there is nobody to wait for


def _ask_config(mountpoint: str) -> dict[str, Any]:
    """What the process that serves a mount says of itself; nothing where it says nothing."""
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
    try:
        mount: dict[str, Any] = json.loads(found[0])["mount"]
    except (ValueError, KeyError, TypeError):
        return {}
    return mount


def _await_end(pidfd: int, pid: int, info: kernel.MountInfo, mounts: Collection[int]) -> None:
    """Wait until the client has left, `mounts` of which there were. Raises: ConfigError."""
    if _has_ended(pidfd, SILENT_S):
        return
    if kept := _kept(info, mounts, pid):
        click.echo(f"slicefs: unmounted; waiting for the client to leave: {kept}", err=True)
    left = await_stored(pidfd, pid)
    if left is not None:
        why = _kept(info, mounts, pid) or "see its log"
        unstored = f", with {format_size(left)} to store" if left else ""
        raise ConfigError(
            f"unmounted, but the client still runs{unstored} and has stored nothing for "
            f"{UMOUNT_WAIT_S:.0f} s: {why}"
        )


def await_stored(pidfd: int, pid: int) -> int | None:
    """Wait for a client's end as long as it stores something; else what it has left, in bytes."""
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    least, since = left_by(pid), runtime.monotonic() - SILENT_S
    while not _has_ended(pidfd, LOOK_S):
        left = left_by(pid)
        if left is not None and (least is None or left < least):
            least, since = left, runtime.monotonic()
            line.show(f"unmounted; {format_size(left)} to store")
        if runtime.monotonic() - since >= UMOUNT_WAIT_S:
            line.clear()
            return left or 0
    line.clear()
    return None


def _holder(info: kernel.MountInfo, mounts: Collection[int]) -> kernel.MountHolder | None:
    """Who has one of these mounts still; others may have got the device number since."""
    found = kernel.find_holders(info)
    return next((found[each] for each in found if each in mounts), None)


def _kept(info: kernel.MountInfo, mounts: Collection[int], pid: int) -> str:
    """What keeps the mount, as far as we may look; "" where nothing is known to."""
    if holder := _holder(info, mounts):
        return str(holder)
    pins = "; ".join(kernel.find_pins())
    return f"{pins}; `kill {pid}` ends the client" if pins else ""


def _has_ended(pidfd: int, seconds: float) -> bool:
    """Whether a process ends within that time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _has_log(path: str) -> bool:
    """Whether a journal was left there, as far as its disk can be read.

    Few mounts have one, and only they load what reads it.
    """
    from fsclient.writeback.journal_dir import has_log

    try:
        return has_log(path)
    except OSError:
        return True
