"""`slicefs mount`: a volume becomes a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import click
from click.core import ParameterSource

from fsclient.cli.mount.rate_options import RATE_WORDS, parse_rates, rate_options
from fsclient.cli.mount.supervisor_options import (
    SUPERVISOR_WORDS,
    can_have_arena,
    supervisor_options,
    wants_supervisor,
)
from fsclient.cli.options.cache_flags import CACHE_WORDS, cache_options, cache_request
from fsclient.cli.options.examples import examples
from fsclient.cli.options.key_options import key_options, offered
from fsclient.cli.options.look import look_of, words_of
from fsclient.cli.options.observe_options import OBSERVE_WORDS, observe_options, parse_observe
from fsclient.cli.options.options import (
    SecondsType,
    WaitType,
    complete_directories,
    complete_files,
    duration,
    no_keys_here,
    rate,
    size,
    store_option,
)
from fsclient.cli.options.squash_options import SQUASH_WORDS, parse_squash, squash_options
from fsclient.cli.options.tell import tell
from fsclient.cli.options.transport_options import require_native, transport_option
from fsclient.cli.options.writeback_options import (
    WORDS as WRITEBACK_WORDS,
    parse_writeback,
    writeback_options,
)
from fsclient.client.process_limits import raise_silently
from fsclient.fuse.mount.mount import real_path
from fsclient.fuse.mount.mount_options import ATIME_MODES, is_known, with_atime
from fsclient.fuse.session.idle_poll import MODES
from fsclient.mount.daemon import (
    PipeTeller,
    Teller,
    Untold,
    daemonize,
    default_log,
    run_told,
)
from fsclient.mount.fstab import FSTAB, fstab_line, update_fstab
from fsclient.mount.serve import OPEN_REQUESTS, MountRequest, serve
from fsclient.mount.supervised_mount import ask_for_handover
from fsclient.survival.channel import CLIENT_NAME, Inherited, inherited, show_as
from fsclient.survival.launch import Duty, supervise, take_over
from fsclient.volume.metadata_url import sqlite_file
from fsclient.volume.object_stores import TIMEOUT_S, Pacing
from fsclient.volume.units import format_size
from fsdata.files.upload_pool import FAR_UPLOADS, UPLOAD_THREADS
from fsdata.resources.memory_budget import BUFFER_BYTES, BUFFER_BYTES_MIN
from fsmeta.errors import ConfigError
from fsmeta.store.url import shown_url
from fsmeta.txn.retry import DEADLINE_S

# options of this command that `-o name=value` can give as well, by parameter
_WORDS: Final = {
    "buffer-size": "buffer_size",
    "threads": "threads",
    "max-uploads": "max_uploads",
    "meta-timeout": "meta_timeout",
    "redis-wait": "redis_wait",
    "tikv-gc": "tikv_gc",
    "heartbeat": "heartbeat",
    "store-option": "store_options",
    "object-timeout": "object_timeout",
    "upload-limit": "upload_limit",
    "download-limit": "download_limit",
    "log": "log",
    "debug": "debug",
    "idle-poll": "idle_poll",
    "encrypt-rsa-key": "encrypt_rsa_key",
    "backup-meta": "backup_meta",
    "subdir": "subdir",
    "snapshot": "snapshot",
    "pack-below": "pack_below",
    "atime-mode": "atime_mode",
    "open-requests": "open_requests",
    "passthrough": "passthrough",
    "transport": "transport",
    "confine-root": "confine_root",
    **CACHE_WORDS,
    **WRITEBACK_WORDS,
    **OBSERVE_WORDS,
    **SQUASH_WORDS,
    **SUPERVISOR_WORDS,
    **RATE_WORDS,
}
_OPPOSITES: Final = {"no-supervisor": "supervisor"}  # words that have a flag off
_SEVERAL: Final = ("store_options", "cache_dir")  # each time adds to the times before


@click.command(
    epilog=examples(
        "slicefs mount -d redis://localhost/1 /mnt/vol",
        "slicefs mount -d --writeback --cache-dir /nvme/cache redis://localhost/1 /mnt/vol",
        "slicefs mount -d --squash root --read-only redis://localhost/1 /mnt/vol",
    )
)
@click.argument("meta")
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option("-d", "--background", is_flag=True, help="Continue in the background once mounted.")
@click.option("-o", "words", multiple=True, metavar="OPT,…", help="Options of mount(8).")
@click.option("--read-only", is_flag=True, help="The same as -o ro.")
@click.option(
    "--subdir", default="", metavar="DIR", help="Mount this directory of the volume, not its root."
)
@click.option(
    "--snapshot",
    default="",
    metavar="NAME",
    help="Mount this snapshot of the directory, read-only.",
)
@click.option(
    "--atime-mode",
    type=click.Choice(ATIME_MODES),
    default=None,
    show_default="noatime",
    help="When a read updates the access time: -o noatime, -o relatime, -o strictatime.",
)
@click.option(
    "--open-requests",
    type=click.Choice(OPEN_REQUESTS),
    default=OPEN_REQUESTS[0],
    show_default=True,
    help="Whether open(2) sends a request. auto: not on read-only mounts with Redis, nor on mounts "
    "of a snapshot; file locks are then local to the host.",
)
@click.option(
    "--passthrough",
    is_flag=True,
    help="Let the kernel read files of snapshots from the cache disks by itself (root, Linux 6.9).",
)
@transport_option
@click.option(
    "--buffer-size", type=size, default=BUFFER_BYTES, show_default="300MiB", help="Memory limit."
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
    default=None,
    show_default=f"{UPLOAD_THREADS}, up to {FAR_UPLOADS} while an S3 store is far",
    help="Number of uploads at a time.",
)
@click.option(
    "--object-timeout",
    type=SecondsType(1, 86400),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds for which a request is repeated while the object store does not answer.",
)
@rate_options
@click.option("--upload-limit", type=rate, default=0, help="Bytes a second to the object store.")
@click.option(
    "--download-limit", type=rate, default=0, help="Bytes a second from the object store."
)
@store_option
@key_options
@no_keys_here
@cache_options
@writeback_options
@observe_options
@squash_options
@click.option(
    "--meta-timeout",
    type=SecondsType(1, 3600),
    default=DEADLINE_S,
    show_default=True,
    help="Seconds that an operation waits while the metadata store does not answer.",
)
@click.option(
    "--redis-wait",
    type=WaitType(),
    default=None,
    metavar="N[:MS]",
    help="Answer a change when N replicas of Redis have it, too; ask again after MS milliseconds.",
)
@click.option(
    "--tikv-gc",
    type=click.Choice(["auto", "off"]),
    default="auto",
    show_default=True,
    help="auto: let TiKV drop old values, unless a TiDB does so; off: never.",
)
@click.option(
    "--heartbeat",
    type=SecondsType(0.1, 20),
    default=5.0,
    show_default=True,
    help="Seconds between heartbeats; a client that sends none for 60 s counts as dead.",
)
@click.option(
    "--backup-meta",
    type=duration,
    default="1h",
    show_default=True,
    help="Time between backups of the metadata into the object store; 0: none.",
)
@click.option(
    "--pack-below",
    type=size,
    default=None,
    show_default="512KiB on S3, else 0",
    help="Files of at most this size are packed into common objects some seconds after they were "
    "written; 0: none.",
)
@click.option(
    "--idle-poll",
    type=click.Choice(MODES),
    default="auto",
    show_default=True,
    help="Let idle processors poll instead of halt while requests arrive (root only). auto: in "
    "virtual machines where a test shows that a wake-up is slow.",
)
@click.option(
    "--log",
    default=None,
    metavar="FILE",
    shell_complete=complete_files,
    help="Log to FILE; by default standard error or, in the background, "
    "/var/log/slicefs.log (users: ~/.slicefs/slicefs.log).",
)
@click.option("--debug", is_flag=True, help="Log every request.")
@click.option("--json", "as_json", is_flag=True, help="With -d: print JSON once it is mounted.")
@click.option("--update-fstab", is_flag=True, help="With -d: mount at each boot, too (/etc/fstab).")
@supervisor_options
@click.option(
    "--confine-root",
    is_flag=True,
    help="Root on this mount has fewer rights in the volume: it may not take or delete snapshots, "
    "or attach objects.",
)
@click.option("--fstab", default=FSTAB, hidden=True)
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
    for name in _SEVERAL:
        own[name] = (*settings[name], *own.get(name, ()))
    settings.update(own)
    _check(ctx, settings, own)
    place = real_path(mountpoint)
    cache = cache_request(settings, place)
    read_only = read_only or bool(settings["snapshot"])
    request = MountRequest(
        meta,
        os.path.abspath(mountpoint),
        with_atime((*kernel_words, *(("ro",) if read_only else ())), settings["atime_mode"]),
        settings["buffer_size"],
        settings["threads"],
        settings["max_uploads"],
        settings["meta_timeout"],
        settings["heartbeat"],
        settings["log"],
        settings["debug"],
        settings["idle_poll"],
        Pacing(settings["object_timeout"], settings["upload_limit"], settings["download_limit"]),
        tuple(settings["store_options"]),
        offered(settings["encrypt_rsa_key"], settings["encrypt_passphrase"]),
        settings["redis_wait"],
        settings["backup_meta"],
        cache,
        parse_writeback(settings, cache, place),
        settings["subdir"],
        settings["snapshot"],
        settings["pack_below"],
        settings["tikv_gc"] == "auto",
        parse_observe(settings, look_of(ctx)),
        parse_squash(settings, kernel_words),
        settings["open_requests"],
        settings["passthrough"],
        settings["confine_root"],
        settings["transport"],
        parse_rates(settings),
    )
    if (settings["update_fstab"] or settings["as_json"]) and not background:
        raise click.UsageError("--update-fstab and --json are for mounts in the background: add -d")
    line = ""
    if settings["update_fstab"]:
        line = fstab_line(_source(meta), request.mountpoint, _fstab_words(ctx, words, read_only))
    if (given := inherited()) is not None:
        return _serve_supervised(request, given, background)
    begin = _beginning(ctx, settings, own, request.options)
    if not background:
        return begin(request, Untold())
    log_file = os.path.abspath(request.log_file or default_log())
    code = daemonize(lambda teller: begin(request._replace(log_file=None), teller), log_file)
    if line and not code:
        update_fstab(line, settings["fstab"])
    if settings["as_json"] and not code:
        tell(_described(request, log_file))
    return code


def _source(meta: str) -> str:
    """The metadata URL, with a path that any process understands."""
    file = sqlite_file(meta)
    return meta if file is None else f"sqlite://{file}"


def _described(request: MountRequest, log_file: str) -> dict[str, Any]:
    """What scripts are told of a mount that was just made."""
    with open(os.path.join(request.mountpoint, ".config"), encoding="utf-8") as file:
        config = json.load(file)
    processes = {
        key: config["mount"][key] for key in ("pid", "supervisor") if config["mount"].get(key)
    }
    return {
        "meta": shown_url(request.meta),
        "mountpoint": request.mountpoint,
        "volume": config["volume"]["name"],
        **processes,
        "log": log_file,
    }


def _serve_supervised(request: MountRequest, given: Inherited, background: bool) -> int:
    """Serve as the client that a supervisor has started; the exit code."""
    show_as(CLIENT_NAME)
    if background:
        request = request._replace(log_file=None)  # standard error is the log
    if given.tell < 0:
        return serve(request, Untold(), given)
    return run_told(lambda teller: serve(request, teller, given), PipeTeller(given.tell))


def _beginning(
    ctx: click.Context, settings: Mapping[str, Any], own: Mapping[str, Any], words: Sequence[str]
) -> Callable[[MountRequest, Teller], int]:
    """`serve`, or what makes the process the supervisor of a client that serves.

    The first client is forked from this process; later ones are told the words of this command.
    Raises: ConfigError, UsageError.
    """
    if not wants_supervisor(ctx, settings, own, words):
        return serve
    meta, mountpoint = ctx.params["meta"], ctx.params["mountpoint"]
    file = sqlite_file(meta)
    absolute = {mountpoint: real_path(mountpoint)}
    if file is not None:
        absolute[meta] = f"sqlite://{file}"
    typed = [absolute.get(word, word) for word in words_of(ctx)]

    def begin(request: MountRequest, teller: Teller) -> int:
        raise_silently()
        form = "json" if request.observe.log_json else "text"
        duty = Duty(request.mountpoint, teller.descriptor(), settings["hang_after"], form)
        if settings["take_over"]:
            take_over(typed, duty, ask_for_handover(real_path(mountpoint)))
        if not can_have_arena(bool(settings["supervisor"])):
            return serve(request, teller)
        given = supervise(typed, duty)
        show_as(CLIENT_NAME)
        return serve(request, teller, given)

    return begin


def _fstab_words(ctx: click.Context, words: Sequence[str], read_only: bool) -> list[str]:
    """The options of this command line as mount(8) takes them. Raises: ConfigError."""
    out = [word for group in words for word in group.split(",") if word]
    out += ["ro"] if read_only and "ro" not in out else []
    for word, name in _WORDS.items():
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = ctx.params[name]
        for each in value if isinstance(value, tuple) and name in _SEVERAL else (value,):
            text = _fstab_value(name, each)
            if "," in text:
                raise ConfigError(f"--update-fstab: --{word} {text}: fstab takes no comma")
            if isinstance(each, bool):
                out.append(word if each else f"no-{word}")
            else:
                out.append(f"{word}={text}")
    return out


def _fstab_value(name: str, value: object) -> str:
    """A value as it is typed; paths are absolute, for mount(8) works in /. Raises: ConfigError."""
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value)
    if name in ("log", "staging_dir", "encrypt_rsa_key"):
        return os.path.abspath(text)
    if name == "cache_dir" and not text.startswith("/") and text != "none":
        raise ConfigError(f"--update-fstab: --cache-dir {text}: write an absolute path")
    return text


def _check(ctx: click.Context, settings: Mapping[str, Any], typed: Collection[str]) -> None:
    """`typed` are the parameters that came as `-o` words. Raises: ConfigError."""
    if not ctx.params["mountpoint"]:  # an unset variable, most likely; "" is the working directory
        raise ConfigError("the mount point is empty: name a directory")
    _check_buffer(settings["buffer_size"])
    require_native(ctx, settings, typed)


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
        name = name.replace("_", "-")
        known = _WORDS.get(name) or _OPPOSITES.get(name)
        if is_known(word):
            kernel_words.append(word)
        elif known is None:
            raise ConfigError(f"unknown mount option {word!r}: see `slicefs mount --help`")
        elif known in _SEVERAL:
            own[known] = (*own.get(known, ()), value)
        elif isinstance(flag := parameters[known], click.Option) and flag.is_flag:
            if equals:
                raise ConfigError(f"-o {word}: {name} has no value, leave it out to switch it off")
            own[known] = name not in _OPPOSITES
        else:
            parameter = parameters[known]
            try:
                own[known] = parameter.type_cast_value(ctx, value)
            except click.BadParameter as error:
                error.ctx, error.param_hint = ctx, f"'-o {word}'"
                raise
    return kernel_words, own
