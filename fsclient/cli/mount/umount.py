"""`slicefs umount`: returns when everything is stored and the client has left."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_directories
from fsclient.cli.options.progress import ProgressLine
from fsclient.fuse.mount import mount as kernel
from fsclient.kernel.xattr_names import STREAMS_XATTR
from fsclient.mount.exit_status import LEFT, ExitRecord, left_by, open_exit_record, read_exit_record
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

UMOUNT_WAIT_S: Final = 60.0  # how long umount waits for a client that stores nothing meanwhile
STREAMS_WAIT_S: Final = 5.0  # how long readers of the access log may take to close it
STREAMS_LOOK_S: Final = 0.05
LOOK_S: Final = 1.0  # between looks at what is left
SILENT_S: Final = 3.0  # after this umount names the process that it waits for, if known
ASK_WAIT_S: Final = 10.0  # how long a client may take to identify itself; a stopped one never does
_CONFIG_BYTES_MAX: Final = 1 << 16


@click.command(epilog=examples("slicefs umount /mnt/vol", "slicefs umount --lazy /mnt/vol"))
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option(
    "-l", "--lazy", is_flag=True, help="Detach now; the client ends when no program uses the mount."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def umount(mountpoint: str, lazy: bool, as_json: bool) -> int:
    """Unmount MOUNTPOINT; returns when everything is stored and the client has left.

    Exit code 3: the volume is unmounted, but a part is not in the store yet: a journal on this
    host has it.
    """
    if not mountpoint:  # an unset variable, most likely
        raise ConfigError("the mount point is empty: name a directory")
    info = kernel.find_mount(mountpoint) or kernel.find_mount(_resolved(mountpoint))
    if info is None or info.fstype != kernel.FUSE_TYPE:
        raise ConfigError(f"{mountpoint} is not a SliceFS mount: see `findmnt -t fuse.slicefs`")
    config = {} if lazy else _ask_config(info.mountpoint)
    serving = None if lazy else _serving(info, config)
    watch = None if serving is None else _watch(serving.last)
    said = None if watch is None or serving is None else open_exit_record(serving.last)
    staging = config.get("staging")
    try:
        others = kernel.find_holders(info).keys() - {info.id}  # which is given away at once, too
        _unmount(info.mountpoint, lazy)
        if watch is not None and serving is not None:
            _await_end(watch, serving.client, info, others)
        parting = None if said is None else read_exit_record(said)
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


def _unmount(mountpoint: str, lazy: bool) -> None:
    """Unmount; readers of the access log do not keep it. Raises: ConfigError."""
    try:
        kernel.umount(mountpoint, lazy)
        return
    except ConfigError:
        if lazy or not _end_streams(mountpoint):
            raise
    runtime = SystemRuntime()
    deadline = runtime.monotonic() + STREAMS_WAIT_S
    while True:
        runtime.sleep(STREAMS_LOOK_S)
        try:
            kernel.umount(mountpoint)
            return
        except ConfigError:
            if runtime.monotonic() > deadline:
                raise


def _end_streams(mountpoint: str) -> bool:
    """Have readers of the access log find its end; False where there are none."""
    try:
        return int(os.getxattr(mountpoint, STREAMS_XATTR)) > 0
    except (OSError, ValueError):  # it is of another version, or not ours to ask
        return False


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


class ServingProcesses(NamedTuple):
    """The processes of a mount: the client, and the one that ends last, which may be another."""

    last: int
    client: int


def _serving(info: kernel.MountInfo, config: dict[str, Any]) -> ServingProcesses | None:
    """Those of a mount that says `config`; None where that can't be told."""
    found = kernel.find_servers(info)
    supervisor, pid = config.get("supervisor"), config.get("pid")
    if pid not in found:  # its ids are a container's, or it did not answer
        pairs = [(_parent(each), each) for each in found if _parent(each) in found]
        if len(pairs) == 1:  # else some are of a mount that has gone, see `find_servers`
            return ServingProcesses(*pairs[0])
    if isinstance(supervisor, int) and isinstance(pid, int):  # both have the descriptor
        return ServingProcesses(supervisor, pid)
    if len(found) == 1:
        return ServingProcesses(found[0], pid if isinstance(pid, int) else found[0])
    return ServingProcesses(pid, pid) if isinstance(pid, int) else None


def _parent(pid: int) -> int:
    """The parent of a process; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _watch(pid: int) -> int | None:
    """A descriptor of a process."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # it has died, or is out of sight: there is no process to wait for


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
            pass  # the client is gone
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
    """A process that still has one of these mounts; the device number may be another's by now."""
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
