"""`slicefs mount`: a volume becomes a directory."""

from __future__ import annotations

import os
from typing import Any, Final

import click

from fsclient.cli.options import SecondsType, size
from fsclient.daemon import daemonize, default_log
from fsclient.fuse.idle import MODES
from fsclient.fuse.mount_options import is_known
from fsclient.serve import MountRequest, serve
from fsclient.sizes import format_size
from fsdata.budget import BUFFER_BYTES, BUFFER_BYTES_MIN
from fsdata.uploads import UPLOAD_THREADS
from fsmeta.errors import ConfigError
from fsmeta.transact import DEADLINE_S

# options of this command that `-o name=value` can give as well, by parameter
_WORDS: Final = {
    "buffer-size": "buffer_size",
    "threads": "threads",
    "max-uploads": "max_uploads",
    "meta-timeout": "meta_timeout",
    "heartbeat": "heartbeat",
    "log": "log",
    "debug": "debug",
    "idle-poll": "idle_poll",
}


@click.command()
@click.argument("meta")
@click.argument("mountpoint")
@click.option("-d", "--background", is_flag=True, help="Go to the background once mounted.")
@click.option("-o", "words", multiple=True, metavar="OPT,…", help="Options of mount(8).")
@click.option("--read-only", is_flag=True, help="As -o ro.")
@click.option(
    "--buffer-size", type=size, default=BUFFER_BYTES, show_default="300MiB", help="Memory cap."
)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Threads that always serve; more come while these are blocked.",
)
@click.option(
    "--max-uploads",
    type=click.IntRange(1, 256),
    default=UPLOAD_THREADS,
    show_default=True,
    help="Uploads at once.",
)
@click.option(
    "--meta-timeout",
    type=SecondsType(1, 3600),
    default=DEADLINE_S,
    show_default=True,
    help="Seconds an operation waits for a metadata store that is away.",
)
@click.option(
    "--heartbeat",
    type=SecondsType(0.1, 20),
    default=5.0,
    show_default=True,
    help="Seconds between signs of life; a client without for 60 s is taken for dead.",
)
@click.option(
    "--idle-poll",
    type=click.Choice(MODES),
    default="auto",
    show_default=True,
    help="While requests flow let idle processors poll instead of halting (root only); auto: in "
    "virtual machines where a trial shows that waking one is slow.",
)
@click.option(
    "--log",
    default=None,
    metavar="FILE",
    help="Log to FILE; by default standard error or, in the background, "
    "/var/log/slicefs.log (users: ~/.slicefs/slicefs.log).",
)
@click.option("--debug", is_flag=True, help="Log every request.")
@click.pass_context
def mount(
    ctx: click.Context,
    /,
    meta: str,
    mountpoint: str,
    background: bool,
    words: tuple[str, ...],
    read_only: bool,
    **settings: Any,
) -> int:
    """Mount the volume in META on the directory MOUNTPOINT.

    The options of this command can be given as `-o name=value`, too, for fstab.
    """
    kernel_words, own = _sorted_words(ctx, [w for group in words for w in group.split(",") if w])
    settings.update(own)
    if not mountpoint:  # an unset variable, most likely; it would stand for the working directory
        raise ConfigError("the mount point is empty: name a directory")
    _check_buffer(settings["buffer_size"])
    request = MountRequest(
        meta,
        os.path.abspath(mountpoint),
        (*kernel_words, "ro") if read_only else tuple(kernel_words),
        settings["buffer_size"],
        settings["threads"],
        settings["max_uploads"],
        settings["meta_timeout"],
        settings["heartbeat"],
        settings["log"],
        settings["debug"],
        settings["idle_poll"],
    )
    if not background:
        return serve(request, ready=lambda: None)
    log_file = os.path.abspath(request.log_file or default_log())
    return daemonize(lambda ready: serve(request._replace(log_file=None), ready), log_file)


def _check_buffer(size_bytes: int) -> None:
    """Raises: ConfigError where the cap is too small to work, or would not be one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes < BUFFER_BYTES_MIN:
        raise ConfigError(f"--buffer-size: at least {BUFFER_BYTES_MIN >> 20}MiB")
    if size_bytes > memory:
        raise ConfigError(f"--buffer-size: this host has {format_size(memory)} of memory")


def _sorted_words(ctx: click.Context, words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The kernel's words among those of `-o`, and this command's own options.

    Raises: ConfigError for a word that is neither, UsageError for a bad value.
    """
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    kernel_words: list[str] = []
    own: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        known = _WORDS.get(name.replace("_", "-"))
        if is_known(word):
            kernel_words.append(word)
        elif known is None:
            raise ConfigError(f"unknown mount option {word!r}: see `slicefs mount --help`")
        elif known == "debug":
            if equals:
                raise ConfigError(f"-o {word}: debug has no value, leave it out to have it off")
            own[known] = True
        else:
            parameter = parameters[known]
            try:
                own[known] = parameter.type_cast_value(ctx, value)
            except click.BadParameter as error:
                error.ctx, error.param_hint = ctx, f"'-o {word}'"
                raise
    return kernel_words, own
