"""`slicefs dump` and `slicefs load`: a volume's metadata to a file, and a volume from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import BinaryIO, Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.look import tell_problem
from fsclient.cli.options.options import META_WAIT_S, complete_files
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.volume.metadata_url import naming, nothing_left, open_store
from fsmeta.admin import dump as dumps
from fsmeta.admin.dump import Counted, Progress
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, SystemRuntime

STANDARD: Final = "-"  # the name of standard input and output
DIFFERENT: Final = 3  # the exit code where what was loaded is not what was dumped


@click.command(
    epilog=examples(
        "slicefs dump redis://localhost/1 volume.dump",
        "slicefs dump redis://localhost/1 | ssh backup 'cat > volume.dump'",
    )
)
@click.argument("meta")
@click.argument("file", default=STANDARD, shell_complete=complete_files)
@click.option("--json", "as_json", is_flag=True, help="Print what was dumped as JSON.")
def dump(meta: str, file: str, as_json: bool) -> None:
    """Write the metadata of the volume in META to FILE, as it is at this moment.

    FILE is `-` or left out for standard output. Clients may continue to work. Data is not dumped:
    it stays in the object store.
    """
    if file == STANDARD and as_json:
        raise ConfigError("--json and the dump would both go to standard output: name a file")
    if file == STANDARD and sys.stdout.isatty():
        raise ConfigError("a dump is not for a terminal: name a file, or pipe it somewhere")
    runtime = SystemRuntime()
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            inodes = Meta(store, runtime, META_WAIT_S).statfs().inodes_used
        with (
            _output(file) as sink,
            shown_progress(runtime, f"of {inodes:,} inodes dumped") as progress,
        ):
            counted = dumps.dump(store, sink, progress)
    finally:
        store.close()
    if as_json:
        tell({"file": file, **counted._asdict()}, meta=meta)
    elif file != STANDARD:
        click.echo(f"{counted.inodes} inodes, {counted.records} records")


@click.command(
    epilog=examples(
        "slicefs load --verify sqlite:///copy.db volume.dump",
        "ssh backup cat volume.dump | slicefs load redis://localhost/2",
    )
)
@click.argument("meta")
@click.argument("file", default=STANDARD, shell_complete=complete_files)
@click.option("--verify", is_flag=True, help="Compare what was loaded with FILE, by reading both.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def load(meta: str, file: str, verify: bool, as_json: bool) -> int:
    """Make a volume in META, which must be empty, from a FILE of `slicefs dump`.

    It uses the object store of the dumped volume: never mount both. A load that was interrupted
    can be started again. Exit code 3: --verify found differences.
    """
    if verify and file == STANDARD:
        raise ConfigError("--verify reads the dump twice: name a file")
    runtime = SystemRuntime()
    problems = []
    with nothing_left(meta), closing(open_store(meta, runtime, create=True)) as store:
        with _input(file) as source, shown_progress(runtime, "inodes loaded") as progress:
            settings = dumps.load(store, source, progress)
        if verify:
            with _input(file) as source, shown_progress(runtime, "inodes compared") as progress:
                problems = dumps.verify(store, source, progress)
    if as_json:
        found = {"volume": settings.name, "verified": verify, "problems": problems}
        tell(found, meta=meta, file=file)
        return DIFFERENT if problems else 0
    for problem in problems:
        tell_problem(problem)
    verified = ", and verified" if verify and not problems else ""
    click.echo(f"volume {settings.name} is loaded{verified}")
    return DIFFERENT if problems else 0


@contextmanager
def _output(file: str) -> Iterator[BinaryIO]:
    """Where a dump goes: a file appears when it is complete, and on disk."""
    if file == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    partial = f"{file}.partial"
    try:
        with _opened(partial, file) as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(partial, file)
    except OSError as error:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        if error.filename is not None:
            raise
        raise ConfigError(f"can't write {file}: {error.strerror}: name a file elsewhere") from error
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


def _opened(partial: str, file: str) -> BinaryIO:
    """Raises: ConfigError, which names the file that was asked for."""
    try:
        return open(partial, "wb")
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error.strerror}") from error


@contextmanager
def _input(file: str) -> Iterator[BinaryIO]:
    if file == STANDARD:
        yield sys.stdin.buffer
        return
    with open(file, "rb") as source:
        try:
            yield source
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error


@contextmanager
def shown_progress(runtime: Runtime, what: str) -> Iterator[Progress]:
    """Say how many inodes are done, on a terminal."""
    line = ProgressLine(runtime)

    def progress(counted: Counted) -> None:
        line.show(f"{counted.inodes:,} {what}")

    try:
        yield progress
    finally:
        line.clear()
