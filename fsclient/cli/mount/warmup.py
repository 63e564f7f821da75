"""`slicefs warmup`: fill the caches of a mount, see what is in them, or empty them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_files
from fsclient.cli.options.progress import ProgressLine, bar
from fsclient.cli.options.tell import tell_line
from fsclient.control.warmup_client import (
    CachedShare,
    Gone,
    WarmedFile,
    WarmupRun,
    caches,
    pattern,
    share,
    walk,
    where,
)
from fsclient.control.warmup_server import AT_ONCE
from fsclient.mount.daemon import default_log, open_log
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime, SystemRuntime

log = logging.getLogger(__name__)

THREADS: Final = 16  # hides 30 ms for objects of 100 KiB at 50 MiB/s, and of 4 MiB at any rate
NAMED: Final = 20  # failures that are told one by one
LINES_MAX: Final = 100  # files that `--check` lists, unless --all
INCOMPLETE: Final = 3  # exit code of `--check`


class WarmupOptions(NamedTuple):
    """What the command line asks for."""

    verb: str
    memory: bool
    pages: bool
    as_json: bool
    every: bool


class WarmupTotals:
    """What became of all files. Threading: `done` and `failed` from any thread."""

    def __init__(self, wish: WarmupOptions) -> None:
        self.wish = wish
        self.files = self.bytes = 0
        self.counts: dict[str, int] = {}
        self.disks: dict[str, int] = {}
        self.made_files = self.whole_files = self.failed_files = 0
        self.failures: list[tuple[str, str]] = []
        self._listed = 0
        self._lock = SystemRuntime().lock()

    def failed(self, path: str, why: str) -> None:
        """A path could not be dealt with."""
        with self._lock:
            self._failed(path, why)

    def _failed(self, path: str, why: str) -> None:
        self.failed_files += 1
        if len(self.failures) < NAMED:
            self.failures.append((path, why))

    def done(self, done: WarmedFile) -> None:
        """A file is through. Raises: OSError where no process reads what is printed."""
        with self._lock:
            self._count(done)
            if self.wish.verb == "check":
                self._list(done)

    def _count(self, done: WarmedFile) -> None:
        self.files += 1
        self.bytes += done.found.size
        for name, count in done.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for root, count in done.disks.items():
            self.disks[root] = self.disks.get(root, 0) + count
        if done.why:
            self._failed(done.found.path, done.why)
        elif done.counts.get("fetched"):
            self.made_files += 1
        else:
            self.whole_files += 1

    def _list(self, done: WarmedFile) -> None:
        """A line for a file that was looked at."""
        data, cached = done.counts.get("data", 0), done.counts.get("cached", 0)
        if self.wish.as_json:
            shown = {"path": done.found.path, "size": done.found.size, **where(done.counts)}
            tell_line({**shown, "disks": done.disks})
            return
        self._listed += 1
        if self._listed <= LINES_MAX or self.wish.every:
            name = os.fsencode(done.found.path).decode(errors="backslashreplace")
            click.echo(f"{share(cached, data):>5}  {format_size(data):>10}  {name}")
        elif self._listed == LINES_MAX + 1:
            click.echo("… more: --all lists them")


@dataclass(frozen=True, kw_only=True)
class WarmupArguments:
    """The command line of `slicefs warmup`."""

    paths: tuple[str, ...]
    list_file: str | None
    globs: tuple[str, ...]
    threads: int
    metadata_only: bool
    memory: bool
    page_cache: bool
    check: bool
    evict: bool
    background: bool
    log_file: str | None
    every: bool
    as_json: bool

    @property
    def verb(self) -> str:
        """What a mount does with each file."""
        if self.metadata_only:
            return "meta"
        if self.check:
            return "check"
        return "evict" if self.evict else "disk"


@command(
    WarmupArguments,
    epilog=examples(
        "slicefs warmup /mnt/vol/dataset", "slicefs warmup --check --json /mnt/vol/dataset"
    ),
)
@click.argument("paths", nargs=-1, metavar="[PATH]…", shell_complete=complete_files)
@click.option(
    "--file",
    "-f",
    "list_file",
    metavar="LIST",
    shell_complete=complete_files,
    help="A file of paths, or - for stdin.",
)
@click.option(
    "--glob", "globs", multiple=True, metavar="PATTERN", help="Only files that match this pattern."
)
@click.option(
    "--threads",
    "-p",
    type=click.IntRange(1, AT_ONCE),
    default=THREADS,
    show_default=True,
    help="Requests at a time.",
)
@click.option("--metadata-only", is_flag=True, help="Fetch names, attributes and slices; no data.")
@click.option("--memory", is_flag=True, help="Also the mount's memory cache.")
@click.option("--page-cache", is_flag=True, help="Also the kernel's page cache.")
@click.option("--check", is_flag=True, help="Show what is cached where; fetch nothing.")
@click.option("--evict", is_flag=True, help="Remove the files from the caches.")
@click.option("--background", "-b", is_flag=True, help="Return at once; the summary goes to --log.")
@click.option(
    "--log", "log_file", metavar="FILE", shell_complete=complete_files, help="File for the summary."
)
@click.option("--all", "every", is_flag=True, help=f"With --check: more than {LINES_MAX} files.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def warmup(args: WarmupArguments) -> int:
    """Fill the disk caches of a mount with files, or with all files below directories.

    Files that are cached are not fetched again, so an interrupted warmup continues where it was.
    It may run while the mount is used. Exit code 1: some files could not be cached; the output
    names them. Exit code 3, with --check: not all files are cached.
    """
    if args.metadata_only + args.check + args.evict > 1:
        raise click.UsageError("choose one of --metadata-only, --check and --evict")
    if (args.memory or args.page_cache) and (args.metadata_only or args.check):
        raise click.UsageError("--memory and --page-cache are for filling caches and for --evict")
    if args.log_file and not args.background:
        raise click.UsageError("--log is for --background")
    wish = WarmupOptions(args.verb, args.memory, args.page_cache, args.as_json, args.every)
    tops, patterns = _places(args.paths, args.list_file, args.globs)
    mounts = _Mounts(wish)
    for top in tops:
        mounts.require(top)
    job = _WarmupJob(wish, mounts, args.threads, args.list_file, tops, patterns)
    if args.background:
        return _in_background(job, args.log_file or default_log())
    return job.run()


def _places(
    paths: Sequence[str], list_file: str | None, globs: Sequence[str]
) -> tuple[list[str], list[Any]]:
    """Where to look, and for what. Raises: ConfigError."""
    if paths or list_file is not None:
        return list(paths), [pattern(glob) for glob in globs]
    if len(globs) == 1:  # `--glob '/data/train/*.tar'` alone says both
        parts = globs[0].split("/")
        plain = next((n for n, part in enumerate(parts[:-1]) if set(part) & set("*?[")), None)
        plain = len(parts) - 1 if plain is None else plain
        top = "/".join(parts[:plain]) or ("/" if globs[0].startswith("/") else ".")
        return [top], [pattern("/" + "/".join(parts[plain:]))]
    raise click.UsageError("name a PATH, --file or --glob")


class _Mounts:
    """What is known of the mounts that paths are on."""

    def __init__(self, wish: WarmupOptions) -> None:
        self._wish = wish
        self._known: dict[int, dict[str, Any]] = {}
        self._paths: dict[int, str] = {}

    def require(self, path: str) -> None:
        """Raises: ConfigError where a path is not on a mount that can do what is asked; OSError."""
        device = os.stat(path).st_dev
        if device in self._known:
            return
        found = caches(path)
        wish = self._wish
        if wish.verb == "disk" and not found["disks"] and not (wish.memory or wish.pages):
            raise ConfigError(
                f"{path}: this mount has no disk cache: mount with --cache-dir, "
                "or add --memory or --page-cache"
            )
        self._known[device], self._paths[device] = found, path

    def roots(self, device: int) -> Sequence[str]:
        found: list[str] = self._known[device]["disks"]
        return found

    def limit(self) -> int:
        return sum(found.get("limit", 0) for found in self._known.values())

    def evictions(self) -> int:
        """How many copies have made room for others since the command began."""
        count = 0
        for device, before in self._known.items():
            try:
                now = caches(self._paths[device])
            except (ConfigError, OSError):
                continue
            count += now.get("evictions", 0) - before.get("evictions", 0)
        return count


class _Ahead:
    """Adds up what there is to do while it is being done, in a thread of its own: a bar needs it.

    The kernel keeps what either has looked up, so the other does not wait for it again.
    """

    def __init__(self, runtime: Runtime, files: Iterator[CachedShare]) -> None:
        self.total: int | None = None  # bytes, once all are counted
        self._files = files
        self._ended = runtime.event()
        runtime.spawn("warmup-ahead", self._count)

    def _count(self) -> None:
        total = 0
        try:
            for found in self._files:
                total += found.size
                if self._ended.is_set():
                    return
        except (ConfigError, OSError):
            return  # the warmup itself meets the error, too, and reports it
        self.total = total

    def end(self) -> None:
        """Stop counting."""
        self._ended.set()


class _WarmupJob(NamedTuple):
    """All that is to be done."""

    wish: WarmupOptions
    mounts: _Mounts
    threads: int
    list_file: str | None
    tops: Sequence[str]
    patterns: Sequence[Any]

    def run(self) -> int:
        """Do it, and say what became of it; the exit code. Raises: ConfigError, OSError."""
        runtime = SystemRuntime()
        totals = WarmupTotals(self.wish)
        run = WarmupRun(
            runtime, self._verb, self.threads, self.mounts.roots, totals.done, self.wish.pages
        )
        progress = ProgressLine(runtime)
        ahead = self._ahead(runtime) if progress.on else None
        begun = runtime.monotonic()

        def show() -> None:
            files, so_far = totals.files, format_size(run.bytes)
            total = None if ahead is None else ahead.total
            part = "" if total is None else f"{bar(min(run.passed, total), total)}  "
            progress.show(f"{part}{files} files, {so_far} in {runtime.monotonic() - begun:.0f} s")

        stopped = ""
        interrupted = False
        try:
            run.run(self._files(totals.failed), show)
        except Gone as error:
            stopped = str(error)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            progress.clear()
            if ahead is not None:
                ahead.end()
        self._tell(totals, runtime.monotonic() - begun)
        if interrupted:
            click.echo("slicefs: interrupted: run it again to go on", err=True)
            return 130
        if stopped:
            raise ConfigError(stopped)
        if self.patterns and not totals.files:
            raise ConfigError("--glob: no file matches")
        if totals.failed_files:
            return 1
        whole = totals.counts.get("data", 0) == totals.counts.get("cached", 0)
        return 0 if self.wish.verb != "check" or whole else INCOMPLETE

    def _verb(self, device: int) -> str:
        """What a mount is asked; "" is nothing."""
        if self.wish.verb != "disk":
            return self.wish.verb
        if not self.mounts.roots(device):
            return "memory" if self.wish.memory else ""
        return "both" if self.wish.memory else "disk"

    def _ahead(self, runtime: Runtime) -> _Ahead | None:
        """The count for the bar; None where a list comes through a pipe and can't be read twice."""
        if self.list_file == "-":
            return None
        return _Ahead(runtime, self._files(lambda _path, _why: None))

    def _files(self, failed: Callable[[str, str], None]) -> Iterator[CachedShare]:
        """Every file, of what is named and of the list. Raises: OSError."""
        for top in self.tops:
            yield from walk(top, self.patterns, failed)
        if self.list_file is None:
            return
        with click.open_file(self.list_file, "rb") as lines:
            for line in lines:
                path = os.fsdecode(line.rstrip(b"\r\n"))
                if path:
                    yield from self._listed(path, failed)

    def _listed(self, path: str, failed: Callable[[str, str], None]) -> Iterator[CachedShare]:
        """A line of the list: what is wrong with it does not keep the others from being done."""
        try:
            self.mounts.require(path)
            yield from walk(path, self.patterns, failed)
        except ConfigError as error:
            failed(path, str(error).removeprefix(f"{path} "))
        except OSError as error:
            failed(path, error.strerror or str(error))

    def _tell(self, totals: WarmupTotals, seconds: float) -> None:
        evictions = self.mounts.evictions() if self.wish.verb == "disk" else 0
        for path, why in totals.failures:
            click.echo(f"slicefs: {path}: {why}", err=True)
        if totals.failed_files > len(totals.failures):
            more = totals.failed_files - len(totals.failures)
            click.echo(f"slicefs: … and {more} more", err=True)
        if self.wish.as_json:
            tell_line(_summary(totals, seconds, evictions), paths=self.tops)
            return
        for name, text in _lines(totals, seconds):
            click.echo(f"{name:<11} {text}")
        wanted = totals.counts.get("fetched", 0) + totals.counts.get("there", 0)
        if evictions and wanted > self.mounts.limit():
            click.echo(
                f"slicefs: more than the cache holds ({format_size(self.mounts.limit())}): "
                "the first files were evicted; raise --cache-size",
                err=True,
            )
        elif evictions:
            click.echo(f"slicefs: {evictions} copies of other blocks were evicted", err=True)


def _lines(totals: WarmupTotals, seconds: float) -> Iterator[tuple[str, str]]:
    """The summary."""
    counts, verb = totals.counts, totals.wish.verb
    yield "files", f"{totals.files} of {format_size(totals.bytes)}"
    if verb == "check":
        data = counts.get("data", 0)
        for name, count in (
            ("cached", counts.get("cached", 0)),
            ("memory", counts.get("memory", 0)),
            *sorted(totals.disks.items()),
        ):
            yield name, f"{format_size(count)} of {format_size(data)}, {share(count, data)}"
    elif verb == "evict":
        yield "evicted", format_size(counts.get("evicted", 0))
    elif verb == "disk":
        fetched = counts.get("fetched", 0)
        rate = format_size(int(fetched / max(seconds, 0.001)))
        yield "fetched", f"{format_size(fetched)} of {totals.made_files} files, {rate}/s"
        yield "there", f"{format_size(counts.get('there', 0))}, all of {totals.whole_files} files"
        if totals.wish.pages:
            yield "page cache", format_size(counts.get("pages", 0))
    yield "failed", f"{totals.failed_files}"
    yield "seconds", f"{seconds:.1f}"


def _summary(totals: WarmupTotals, seconds: float, evictions: int) -> dict[str, Any]:
    """The same, for programs."""
    shown: dict[str, Any] = {
        "files": totals.files,
        "bytes": totals.bytes,
        "failed": totals.failed_files,
        "seconds": round(seconds, 3),
        "failures": [{"path": path, "why": why} for path, why in totals.failures],
    }
    counts = totals.counts
    match totals.wish.verb:
        case "check":
            shown |= {**where(counts), "disks": totals.disks}
        case "evict":
            shown["evicted"] = counts.get("evicted", 0)
        case "disk":
            shown |= {"fetched": counts.get("fetched", 0), "there": counts.get("there", 0)}
            shown |= {"fetched_files": totals.made_files, "there_files": totals.whole_files}
            shown |= {"pages": counts.get("pages", 0), "evictions": evictions}
    return shown


def _in_background(job: _WarmupJob, log_file: str) -> int:
    """Have a process of its own do it; what it would print goes to the log."""
    log_fd = open_log(log_file)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        click.echo(f"in the background, process {pid}: see {log_file} and `warmup_*` in .stats")
        return 0
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        code = job.run()
    except (ConfigError, OSError) as error:
        click.echo(f"slicefs: warmup: {error}", err=True)
    finally:
        sys.stdout.flush()
        os._exit(code)
