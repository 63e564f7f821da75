"""`slicefs scrub`: every block that files refer to is read and verified."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.key_options import key_options, offered
from fsclient.cli.options.look import tell_problem, tell_verdict
from fsclient.cli.options.options import META_WAIT_S, cursor_option, rate, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.upkeep.scrub import THREADS, DamagedBlock, Scrub, ScrubTotals
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.object_options import parse_options
from fsclient.volume.object_stores import Pacing, open_objects, stacked, stored_key
from fsclient.volume.paths import below, find
from fsclient.volume.units import format_size
from fsclient.volume.volume_key import KeyOffer, sealer_of
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.schema import keys, scan
from fsmeta.schema.scan import WalkPage

FOUND: Final = 3  # the exit code where something is wrong, as of fsck
SHOWN_MAX: Final = 100
_KEPT_MAX: Final = 10_000  # problems that are kept for the report; more are counted
_INODES_A_STEP: Final = 200


class ScrubRequest(NamedTuple):
    """What is to be read, and how."""

    store_options: tuple[str, ...]
    offer: KeyOffer
    rate: int = 0
    threads: int = THREADS
    sample: float = 1.0
    paths: tuple[str, ...] = ()
    cursor_file: str | None = None


class ScrubOutcome(NamedTuple):
    """What was read, and what of it is wrong."""

    totals: ScrubTotals
    problems: list[DamagedBlock]
    problem_count: int  # of problems, also those that were not kept
    keyless: bool  # an encrypted volume, without its key


@dataclass(frozen=True, kw_only=True)
class ScrubArguments:
    """The command line of `slicefs scrub`."""

    meta: str
    paths: tuple[str, ...]
    rate: int
    threads: int
    sample: float
    cursor_file: str | None
    store_options: tuple[str, ...]
    encrypt_rsa_key: str | None
    encrypt_passphrase: bool
    as_json: bool


@command(
    ScrubArguments,
    epilog=examples(
        "slicefs scrub redis://localhost/1",
        "slicefs scrub --cursor scrub.cursor redis://localhost/1",
    ),
)
@click.argument("meta")
@click.argument("paths", nargs=-1, metavar="[PATH]…")
@click.option("--rate", type=rate, default=0, help="Bytes a second, at most.")
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=THREADS,
    show_default=True,
    help="Blocks at once.",
)
@click.option(
    "--sample",
    type=click.FloatRange(0, 100, min_open=True),
    default=100.0,
    metavar="PERCENT",
    help="Read only this percentage of the blocks, chosen at random.",
)
@cursor_option("in FILE")
@store_option
@key_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def scrub(args: ScrubArguments) -> int:
    """Read every block of the volume in META and verify it; or those below PATH in the volume.

    Damaged and missing blocks are reported with the files that use them. Exit code 0: no problem,
    3: there are problems. The volume may be in use. The checksums of an encrypted volume can be
    verified without its key.
    """
    if args.paths and args.cursor_file:
        raise ConfigError("--cursor is for the whole volume: leave out the paths")
    offer = offered(args.encrypt_rsa_key, args.encrypt_passphrase)
    request = ScrubRequest(
        args.store_options,
        offer,
        args.rate,
        args.threads,
        args.sample / 100,
        args.paths,
        args.cursor_file,
    )
    outcome = examine_data(args.meta, request, SystemRuntime())
    if args.as_json:
        tell(_plain(outcome), meta=args.meta, paths=args.paths)
    else:
        _print(outcome)
    return FOUND if outcome.problem_count else 0


def examine_data(meta: str, request: ScrubRequest, runtime: Runtime) -> ScrubOutcome:
    """Read what is asked for. Raises: ConfigError, Unavailable."""
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            opened = Meta(store, runtime, META_WAIT_S)
        settings = opened.format
        keyless = settings.encryption is not None and request.offer.is_empty()
        sealer = None if keyless else sealer_of(settings, runtime, request.offer)
        overrides = parse_options(settings.storage, request.store_options)
        raw = open_objects(settings, runtime, overrides)
        pacing = Pacing(download_bytes_s=request.rate)
        objects = stacked(raw, settings.storage, runtime, pacing).store
        judge = Scrub(
            store, objects, runtime, settings.block_bytes, sealer, request.threads, request.sample
        )
        try:
            found, count = _walk(opened, judge, request, runtime)
        finally:
            judge.close()
            objects.close()
    finally:
        store.close()
    named = [
        each._replace(object=each.object and stored_key(settings, each.object)) for each in found
    ]
    return ScrubOutcome(judge.totals, named, count, keyless)


def _walk(
    meta: Meta, judge: Scrub, request: ScrubRequest, runtime: Runtime
) -> tuple[list[DamagedBlock], int]:
    """Everything, or what is below the paths."""
    line = ProgressLine(runtime)
    place = _Checkpoint(request.cursor_file, meta.format.uuid)
    found = place.problems
    count = len(found)
    told = {(each.ino, each.object) for each in found}  # an inode may be met twice
    judge.totals = place.totals
    pages = _below(meta, request.paths) if request.paths else scan.pages(meta.store, place.cursor)
    for page in pages:
        for each in judge.judge(page.inodes):
            if (each.ino, each.object) in told:
                continue
            count += 1
            if len(found) < _KEPT_MAX:
                found.append(each)
                told.add((each.ino, each.object))
        if page.cursor is not None:
            place.save(page.cursor, judge.totals, found)
        read = format_size(judge.totals.bytes)
        line.show(f"{judge.totals.inodes} inodes, {read} read, {count} problems")
    line.clear()
    place.remove()
    return found, count


def _below(meta: Meta, paths: tuple[str, ...]) -> Iterator[WalkPage]:
    """Pages of the inodes below some paths."""
    for top in [find(meta, path) for path in paths]:
        inodes = below(meta.store, top)
        while rows := [keys.inode_row(ino) for ino in islice(inodes, _INODES_A_STEP)]:
            yield WalkPage(list(scan.of_rows(meta.store, rows)), None)


class _Checkpoint:
    """How far an earlier run has come, kept in a file."""

    def __init__(self, file: str | None, uuid: str) -> None:
        self._file = file
        self._uuid = uuid
        self.cursor = b""
        self.totals = ScrubTotals()
        self.problems: list[DamagedBlock] = []
        if file is not None and not os.access(os.path.dirname(file) or ".", os.W_OK | os.X_OK):
            raise ConfigError(f"--cursor {file}: name a file in a directory that you may write to")
        if file is not None and os.path.exists(file):
            self._load(file)

    def _load(self, file: str) -> None:
        """Raises: ConfigError."""
        try:
            with open(file, encoding="utf-8") as stream:
                kept: dict[str, Any] = json.load(stream)
            self.cursor = bytes.fromhex(kept["cursor"])
            self.totals = ScrubTotals(**kept["read"])
            self.problems = [DamagedBlock(**each) for each in kept["problems"]]
            uuid = kept["volume"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--cursor {file} can't be read: remove it to start again") from error
        if uuid != self._uuid:
            raise ConfigError(f"--cursor {file} is of another volume: name another file")

    def save(self, cursor: bytes, totals: ScrubTotals, problems: list[DamagedBlock]) -> None:
        """From here on a later run goes on."""
        if self._file is None:
            return
        kept = {
            "volume": self._uuid,
            "cursor": cursor.hex(),
            "read": totals._asdict(),
            "problems": [each._asdict() for each in problems],
        }
        with open(f"{self._file}.new", "w", encoding="utf-8") as stream:
            json.dump(kept, stream)
        os.replace(f"{self._file}.new", self._file)

    def remove(self) -> None:
        """All is read; the next run begins anew."""
        if self._file is not None and os.path.exists(self._file):
            os.unlink(self._file)


def _plain(outcome: ScrubOutcome) -> dict[str, Any]:
    return {
        **outcome.totals._asdict(),
        "authenticated": not outcome.keyless,
        "problem_count": outcome.problem_count,
        "problems": [each._asdict() for each in outcome.problems],
    }


def _print(outcome: ScrubOutcome) -> None:
    totals = outcome.totals
    read = format_size(totals.bytes)
    click.echo(f"{totals.inodes} inodes, {totals.blocks} blocks, {read} read")
    if outcome.keyless:
        click.echo("the volume is encrypted: without its key only checksums were verified")
    for each in outcome.problems[:SHOWN_MAX]:
        tell_problem(str(each))
    if outcome.problem_count > SHOWN_MAX:
        click.echo(f"… and {outcome.problem_count - SHOWN_MAX} more: see --json", file=sys.stderr)
    tell_verdict(outcome.problem_count)
