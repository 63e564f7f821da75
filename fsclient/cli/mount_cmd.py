"""`slicefs mount` and `slicefs umount`, and mount(8)'s way to call the first."""

from __future__ import annotations

import json
import os
import select
from typing import Final

import click

from fsclient.cli.options import SIZE
from fsclient.config import parse_size
from fsclient.daemon import daemonize, default_log
from fsclient.fuse import mount as kernel
from fsclient.fuse.mount_options import is_known
from fsclient.serve import MountRequest, serve
from fsdata.budget import BUFFER_BYTES, BUFFER_BYTES_MIN
from fsmeta.errors import ConfigError
from fsmeta.transact import DEADLINE_S

UMOUNT_WAIT_S: Final = 60.0  # how long umount waits for the serving process to store and leave
_CONFIG_BYTES_MAX: Final = 1 << 16


@click.command()
@click.argument("meta")
@click.argument("mountpoint")
@click.option("-d", "--background", is_flag=True, help="Go to the background once mounted.")
@click.option("-o", "options", multiple=True, metavar="OPT,…", help="Options of mount(8).")
@click.option("--read-only", is_flag=True, help="As -o ro.")
@click.option(
    "--buffer-size", type=SIZE, default=BUFFER_BYTES, show_default="300MiB", help="Memory cap."
)
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--max-uploads", type=click.IntRange(1, 256), default=4, show_default=True)
@click.option(
    "--meta-timeout",
    type=click.FloatRange(1, 3600),
    default=DEADLINE_S,
    show_default=True,
    help="Seconds an operation waits for a metadata store that is away.",
)
@click.option("--heartbeat", type=click.FloatRange(0.1, 20), default=5.0, show_default=True)
@click.option("--log", "log_file", default=None, help="Log file of a mount in the background.")
@click.option("--debug", is_flag=True, help="Log every request.")
def mount(
    meta: str,
    mountpoint: str,
    background: bool,
    options: tuple[str, ...],
    read_only: bool,
    buffer_size: int,
    threads: int,
    max_uploads: int,
    meta_timeout: float,
    heartbeat: float,
    log_file: str | None,
    debug: bool,
) -> int:
    """Mount the volume in META on the directory MOUNTPOINT.

    The options of this command can be given as `-o name=value`, too, for fstab.
    """
    words = [word for group in options for word in group.split(",") if word]
    request = MountRequest(
        meta, os.path.abspath(mountpoint), (), buffer_size, threads, max_uploads
    )._replace(meta_timeout_s=meta_timeout, heartbeat_s=heartbeat, log_file=log_file, debug=debug)
    request = _apply_words(request, [*words, *(["ro"] if read_only else [])])
    if request.buffer_bytes < BUFFER_BYTES_MIN:
        raise ConfigError(f"--buffer-size: at least {BUFFER_BYTES_MIN >> 20}MiB")
    if not background:
        return serve(request, ready=lambda: None)
    request = request._replace(log_file=request.log_file or default_log())
    return daemonize(lambda ready: serve(request, ready))


def _apply_words(request: MountRequest, words: list[str]) -> MountRequest:
    """Our own options out of `-o`; the others are the kernel's. Raises: ConfigError."""
    kernel_words = []
    for word in words:
        name, _, value = word.partition("=")
        name = name.replace("_", "-")
        if is_known(word):
            kernel_words.append(word)
        elif name == "buffer-size":
            request = request._replace(buffer_bytes=parse_size(value))
        elif name == "threads":
            request = request._replace(threads=int(_number(word, value)))
        elif name == "max-uploads":
            request = request._replace(max_uploads=int(_number(word, value)))
        elif name == "meta-timeout":
            request = request._replace(meta_timeout_s=_number(word, value))
        elif name == "heartbeat":
            request = request._replace(heartbeat_s=_number(word, value))
        elif name == "log":
            request = request._replace(log_file=value)
        elif name == "debug":
            request = request._replace(debug=True)
        else:
            raise ConfigError(f"unknown mount option {word!r}: see `slicefs mount --help`")
    return request._replace(options=tuple(kernel_words))


def _number(word: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"-o {word}: give a number") from None
    if number <= 0:
        raise ConfigError(f"-o {word}: give a number above 0")
    return number


def helper_arguments(arguments: list[str]) -> list[str]:
    """mount(8) calls `mount.slicefs SOURCE DIR [-sfnv] [-o OPTIONS]`; ours in its words."""
    plain = [word for word in arguments if word not in ("-s", "-f", "-n", "-v")]
    return ["mount", "-d", *plain]


@click.command()
@click.argument("mountpoint")
@click.option("-l", "--lazy", is_flag=True, help="Detach now, end when nobody uses it any more.")
def umount(mountpoint: str, lazy: bool) -> None:
    """Unmount MOUNTPOINT; returns when everything is stored and the client has left."""
    info = kernel.find_mount(os.path.realpath(mountpoint))
    if info is None or info.fstype != kernel.FUSE_TYPE:
        raise ConfigError(f"{mountpoint} is not a SliceFS mount: see `findmnt -t fuse.slicefs`")
    watch = None if lazy else _watch_server(info.mountpoint)
    kernel.umount(info.mountpoint, lazy)
    if watch is not None:
        _await_end(watch)


def _watch_server(mountpoint: str) -> int | None:
    """A descriptor of the process that serves the mount; None where that can't be told."""
    try:
        fd = os.open(os.path.join(mountpoint, ".config"), os.O_RDONLY)
        try:
            config = json.loads(os.read(fd, _CONFIG_BYTES_MAX))
        finally:
            os.close(fd)
        return os.pidfd_open(config["mount"]["pid"])
    except (OSError, ValueError, KeyError):
        return None


def _await_end(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = poll.poll(UMOUNT_WAIT_S * 1000)
    os.close(pidfd)
    if not ended:
        raise ConfigError(
            f"unmounted, but the client still runs after {UMOUNT_WAIT_S:.0f} s: see its log"
        )
