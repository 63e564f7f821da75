"""`slicefs`: the command line. One file per command; this one names them and ends them.

Exit codes: 0 done, 1 it failed, 2 the command line is wrong (either is said in one line), 3 a check
found something (scrub, quota check), 130 interrupted. Those of `fsck` are fsck(8)'s.

A command is imported when it is called, so that `slicefs umount` need not load what `slicefs mount`
needs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

import click

from fsclient.cli.options.hide import hide_passwords, read_environment, without_passwords
from fsclient.cli.options.look import Invocation, Look, add_options, look_of
from fsclient.survival.channel import WARM_ENV
from fsmeta.errors import ConfigError, StoreError
from fsmeta.store.url import shown_url

_PLAIN: Final = Look()
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it
_FSCK_CODES: Final = {1: 8, 2: 16, INTERRUPTED: 32}  # ours, and what fsck(8) has for them
_EPILOG: Final = """\b
Completion for bash, in ~/.bashrc (zsh and fish: the same with their names):
  eval "$(_SLICEFS_COMPLETE=bash_source slicefs)"
\b
Exit codes: 0 done, 1 failed, 2 wrong command line, 3 a check found problems;
  fsck has those of fsck(8)."""


def _format() -> click.Command:
    from fsclient.cli.volume.format import format_

    return format_


def _mount() -> click.Command:
    from fsclient.cli.mount.mount import mount

    return mount


def _umount() -> click.Command:
    from fsclient.cli.mount.umount import umount

    return umount


def _upgrade() -> click.Command:
    from fsclient.cli.mount.upgrade import upgrade

    return upgrade


def _status() -> click.Command:
    from fsclient.cli.volume.status import status

    return status


def _fsck() -> click.Command:
    from fsclient.cli.upkeep.fsck import fsck

    return fsck


def _flush() -> click.Command:
    from fsclient.cli.mount.flush import flush

    return flush


def _info() -> click.Command:
    from fsclient.cli.mount.info import info

    return info


def _restore() -> click.Command:
    from fsclient.cli.upkeep.restore import restore

    return restore


def _scrub() -> click.Command:
    from fsclient.cli.upkeep.scrub import scrub

    return scrub


def _gc() -> click.Command:
    from fsclient.cli.upkeep.gc import gc

    return gc


def _rekey() -> click.Command:
    from fsclient.cli.volume.rekey import rekey

    return rekey


def _qos() -> click.Command:
    from fsclient.cli.volume.qos import qos

    return qos


def _quota() -> click.Command:
    from fsclient.cli.volume.quota import quota_

    return quota_


def _config() -> click.Command:
    from fsclient.cli.volume.config import config

    return config


def _dump() -> click.Command:
    from fsclient.cli.volume.dump import dump

    return dump


def _load() -> click.Command:
    from fsclient.cli.volume.dump import load

    return load


def _restore_meta() -> click.Command:
    from fsclient.cli.volume.restore_meta import restore_meta

    return restore_meta


def _clone() -> click.Command:
    from fsclient.cli.mount.clone import clone

    return clone


def _snapshot() -> click.Command:
    from fsclient.cli.mount.snapshot import snapshot

    return snapshot


def _objbench() -> click.Command:
    from fsclient.cli.volume.objbench import objbench

    return objbench


def _warmup() -> click.Command:
    from fsclient.cli.mount.warmup import warmup

    return warmup


def _destroy() -> click.Command:
    from fsclient.cli.upkeep.destroy import destroy

    return destroy


def _rmr() -> click.Command:
    from fsclient.cli.tree.rmr import rmr

    return rmr


def _summary() -> click.Command:
    from fsclient.cli.tree.summary import summary

    return summary


def _sync() -> click.Command:
    from fsclient.cli.tree.sync import sync

    return sync


def _bench() -> click.Command:
    from fsclient.cli.tree.bench import bench

    return bench


def _mdtest() -> click.Command:
    from fsclient.cli.tree.bench import mdtest

    return mdtest


def _doctor() -> click.Command:
    from fsclient.cli.upkeep.doctor import doctor

    return doctor


def _version() -> click.Command:
    from fsclient.cli.upkeep.version import version

    return version


def _compact() -> click.Command:
    from fsclient.cli.tree.compact import compact

    return compact


def _stats() -> click.Command:
    from fsclient.cli.watch.stats import stats

    return stats


def _top() -> click.Command:
    from fsclient.cli.watch.top import top

    return top


def _profile() -> click.Command:
    from fsclient.cli.watch.profile import profile

    return profile


def _ckpt() -> click.Command:
    return _extension("ckpt")


def _attach() -> click.Command:
    return _extension("attach")


def _export() -> click.Command:
    return _extension("export")


def _extension(name: str) -> click.Command:
    """A group of commands that the library brings: an entry point, so that nothing is imported."""
    from importlib.metadata import entry_points

    for found in entry_points(group="slicefs.commands", name=name):
        group: click.Command = found.load()
        return group
    raise ConfigError(f"{name}: its entry point is not installed: run `pip install slicefs` again")


_TRACEBACK: Final = "SLICEFS_TRACEBACK"
_AGAIN: Final = "run the command again when it answers"

# name → how to import it, and its line in `slicefs --help`
_COMMANDS: Final[Mapping[str, tuple[Callable[[], click.Command], str]]] = {
    "format": (_format, "Make a volume."),
    "mount": (_mount, "Mount a volume on a directory."),
    "umount": (_umount, "Unmount; returns when everything is stored."),
    "upgrade": (_upgrade, "Serve a mount by the installed version."),
    "status": (_status, "Show a volume's settings, usage and clients."),
    "config": (_config, "Show a volume's settings, or change its limits."),
    "quota": (_quota, "Limit directories, users and groups."),
    "qos": (_qos, "Limit bytes and operations a second."),
    "fsck": (_fsck, "Check a volume's metadata and its data."),
    "scrub": (_scrub, "Read and verify every block of a volume."),
    "gc": (_gc, "Find and delete objects that belong to nothing."),
    "rekey": (_rekey, "Change which keys open an encrypted volume."),
    "restore": (_restore, "Show what is in the trash, and restore it."),
    "clone": (_clone, "Copy a directory; the copy shares all data."),
    "snapshot": (_snapshot, "Keep the present state of a directory, read-only."),
    "flush": (_flush, "Store what was written; wait until other clients see it."),
    "warmup": (_warmup, "Fill caches, or see what is in them."),
    "stats": (_stats, "Show what a mount does, a line each interval."),
    "top": (_top, "Show for which users, processes or files a mount works."),
    "profile": (_profile, "Show which verbs of a mount take the time."),
    "info": (_info, "Show where the data of a file is."),
    "dump": (_dump, "Write a volume's metadata to a file."),
    "load": (_load, "Make a volume from dumped metadata."),
    "ckpt": (_ckpt, "Clean, verify, unshard, move and map checkpoints."),
    "attach": (_attach, "Show a bucket's objects as files, without a copy."),
    "export": (_export, "Copy a directory to a bucket as plain objects."),
    "objbench": (_objbench, "Test and measure an object store."),
    "restore-meta": (_restore_meta, "Make a volume from a backup in its object store."),
    "rmr": (_rmr, "Remove whole trees, in parallel."),
    "summary": (_summary, "Count a tree, and show what is large in it."),
    "sync": (_sync, "Make a tree like another: directories, mounts, S3."),
    "compact": (_compact, "Rewrite the scattered chunks of files."),
    "bench": (_bench, "Measure reading and writing on a mount."),
    "mdtest": (_mdtest, "Measure metadata operations on a mount."),
    "doctor": (_doctor, "Write a bundle for a report of a problem."),
    "version": (_version, "Show versions."),
    "destroy": (_destroy, "Remove a volume with its objects."),
}


def _with_options(command: click.Command) -> click.Command:
    """The command, or all those of a group, with the options of all commands."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _with_options(each)
    return add_options(command, hidden=True)


def _imported(load: Callable[[], click.Command]) -> click.Command:
    """A command. The garbage collector leaves out what is imported, as none of it is garbage.

    Walking through it again and again was a fifth of the time that it takes to import `mount`.
    """
    gc.disable()
    try:
        return _with_options(load())
    finally:
        gc.freeze()
        gc.enable()


class _Commands(click.Group):
    """The commands by name, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, as the help shows them."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        del ctx
        known = _COMMANDS.get(cmd_name)
        return None if known is None else _imported(known[0])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help's list, without importing anything."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(
    cls=_Commands,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="slicefs", prog_name="slicefs")
@click.pass_context
def commands(context: click.Context) -> None:
    """A POSIX file system with metadata in Redis, TiKV or SQLite and data in an object store.

    The options below can also follow the name of each command.
    """
    context.color = look_of(context).click_color()


add_options(commands, hidden=False)


def run(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    look = Look()
    try:
        code, failed = _run(arguments, look)
    finally:
        look.end()
    named = next((word for word in arguments if word in _COMMANDS), "")
    return _FSCK_CODES.get(code, code) if failed and named == "fsck" else code


def _run(arguments: Sequence[str], look: Look) -> tuple[int, bool]:
    """The exit code, and whether that is of a failure and not of what was found."""
    try:
        result = commands.main(
            args=list(arguments) or ["--help"],
            prog_name="slicefs",
            standalone_mode=False,
            obj=Invocation(list(arguments), look),
        )
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:  # `slicefs quota`, as `slicefs` alone
        print(error.format_message())
        return 0, False
    except click.ClickException as error:
        return _failed(_usage(error, arguments), 2, look), True
    except (click.exceptions.Abort, KeyboardInterrupt) as error:  # click's is of Python's
        why = str(error.__cause__ or error) or "interrupted"
        return _failed(why, INTERRUPTED, look), True
    except BrokenPipeError:  # `slicefs fsck … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1, False
    except ConfigError as error:
        return _failed(str(error), look=look), True
    except StoreError as error:
        return _failed(_named(error, arguments), look=look), True
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _failed(f"{name}{error.strerror or error}", look=look), True
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            raise
        why = (
            f"unforeseen, {type(error).__name__}: {error}: a bug, please report it with what "
            f"{_TRACEBACK}=1 in the environment shows"
        )
        return _failed(why, look=look), True
    return (result if isinstance(result, int) else 0), False


def _named(error: StoreError, arguments: Sequence[str]) -> str:
    """Of a store that went away after it was opened: its place, and what to do."""
    from fsdata.objects.contract import NeverReached, Unreached

    if isinstance(error, Unreached):
        return str(error) if isinstance(error, NeverReached) else f"{error}: {_AGAIN}"
    kind, separator, why = str(error).partition(": ")
    for word in arguments if separator else ():
        scheme, found, _ = word.partition("://")
        if found and scheme.startswith((kind, "unix") if kind == "redis" else kind):
            shown = shown_url(word.partition("#")[0])
            return f"{shown}: {why}: {_AGAIN}"
    return str(error)


def _usage(error: click.ClickException, arguments: Sequence[str]) -> str:
    """click's message, and where to read on; it does not always name the command."""
    where = "slicefs"
    if arguments and arguments[0] in _COMMANDS:
        where = f"slicefs {arguments[0]}"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        where = max(where, error.ctx.command_path, key=len)
    return f"{error.format_message().rstrip('.')}: see `{where} --help`"


def _failed(why: str, code: int = 1, look: Look = _PLAIN) -> int:
    """Say why in one line."""
    look.failed(" ".join(without_passwords(why, sys.argv).split()))
    return code


def main() -> None:
    """The `slicefs` program. `slicefs META DIR …` mounts, too: that is how mount.fuse calls."""
    try:
        arguments = read_environment(sys.argv[1:])
    except ConfigError as error:
        sys.exit(_failed(str(error)))
    sys.argv[1:] = arguments  # messages leave out the passwords that are in them
    if arguments and ("://" in arguments[0] or _asks_to_remount(arguments)):
        mount_helper()
    hide_passwords(arguments)
    if WARM_ENV in os.environ:
        from fsclient.survival.warm import await_turn

        await_turn()
    _exit(run(arguments))


def _exit(code: int) -> NoReturn:
    """End; a last collection of garbage was a fifth of the time of a short command."""
    gc.freeze()
    sys.exit(code)


def _asks_to_remount(arguments: Sequence[str]) -> bool:
    """`slicefs NAME DIR -o remount,…`, with a volume's name."""
    return arguments[0] not in _COMMANDS and any("remount" in word for word in arguments[2:])


def _remount(mountpoint: str, options: Sequence[str]) -> int:
    from fsclient.fuse.mount.mount import remount

    try:
        remount(mountpoint, options)
    except ConfigError as error:
        return _failed(str(error))
    return 0


def mount_helper() -> None:
    """`mount.slicefs META DIR [-o OPTIONS]`, which mount(8) runs for type slicefs."""
    from fsclient.cli.mount.helper import helper_arguments, remount_words

    hide_passwords(sys.argv)
    again = remount_words(sys.argv[1:])
    if again is not None:
        sys.exit(_remount(*again))
    arguments = helper_arguments(sys.argv[1:])
    _exit(0 if arguments is None else run(arguments))


if __name__ == "__main__":
    main()
