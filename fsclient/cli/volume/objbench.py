"""`slicefs objbench`: what an object store can do, and how fast."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress

import click

from fsclient.cli.options.options import no_keys_here, size, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.upkeep.objbench import BenchOutcome, Sizes, Speed, functional, measure, tidied
from fsclient.volume.object_options import STORAGES, parse_bucket, parse_options
from fsclient.volume.object_stores import claimed, directories, open_objects, place_of, stacked
from fsmeta.rules import settings as volume
from fsmeta.runtime import SystemRuntime

_NAME = "slicefs-objbench"
_FAILED = 3  # the exit code where the store does not do what a volume needs


class _Finished(Exception):
    """Ends the claim of the place, so that nothing of it stays."""


@click.command()
@click.option("--storage", default="file", show_default=True, metavar="|".join(STORAGES))
@click.option("--bucket", default="", metavar="PLACE", help="Where, as for format.")
@store_option
@click.option("--block-size", type=size, default=4 << 20, show_default="4MiB", help="Of a block.")
@click.option("--blocks", type=click.IntRange(1), default=64, show_default=True)
@click.option("--small-object-size", type=size, default=128 << 10, show_default="128KiB")
@click.option("--small-objects", type=click.IntRange(1), default=100, show_default=True)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Requests at once.",
)
@click.option("--skip-functional-tests", is_flag=True, help="Measure only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@no_keys_here
def objbench(
    storage: str,
    bucket: str,
    store_options: tuple[str, ...],
    block_size: int,
    blocks: int,
    small_object_size: int,
    small_objects: int,
    threads: int,
    skip_functional_tests: bool,
    as_json: bool,
) -> int:
    """Try all that a volume asks of its object store, and measure it.

    This happens in a place of its own in the bucket, which is removed at the end. Exit code 3: the
    store does something wrong.
    """
    place = parse_bucket(storage, bucket, 0)
    options = {**place.options, **parse_options(storage, store_options)}
    settings = volume.new_format(_NAME, storage, place.bucket, options=options)
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    sizes = Sizes(block_size, blocks, small_object_size, small_objects, threads)
    outcomes: list[BenchOutcome] = []
    speeds: list[Speed] = []
    absent = _absent(directories(settings))
    with suppress(_Finished), claimed(settings, runtime):
        objects = stacked(open_objects(settings, runtime), storage, runtime).store
        try:
            with tidied(objects):
                if not skip_functional_tests:
                    for outcome in functional(objects):
                        outcomes.append(outcome)
                        line.show(outcome.what)
                for speed in measure(objects, runtime, sizes):
                    speeds.append(speed)
                    line.show(speed.what)
        finally:
            objects.close()
            line.clear()
        raise _Finished
    for root in directories(settings):
        _remove_empty(root)
    for made in absent:
        with suppress(OSError):
            os.rmdir(made)
    if as_json:
        rows = [{**each._asdict(), "mib_s": each.mib_s, "per_s": each.per_s} for each in speeds]
        shown = {"functional": [each._asdict() for each in outcomes], "speed": rows}
        click.echo(json.dumps(shown, indent=2))
    else:
        click.echo(f"{place_of(settings)}, {threads} requests at once")
        _print(outcomes, speeds)
    return 0 if all(each.right for each in outcomes) else _FAILED


def _absent(roots: Iterable[str]) -> list[str]:
    """What is not there yet of the directories above `roots`, from below."""
    found: list[str] = []
    for root in roots:
        above = os.path.dirname(os.path.abspath(root))
        while not os.path.lexists(above):
            found.append(above)
            above = os.path.dirname(above)
    return found


def _remove_empty(root: str) -> None:
    """The directories that a place made of files leaves."""
    for path, _, _ in os.walk(root, topdown=False):
        with suppress(OSError):
            os.rmdir(path)


def _print(outcomes: list[BenchOutcome], speeds: list[Speed]) -> None:
    for outcome in outcomes:
        click.echo(
            f"{'ok  ' if outcome.right else 'FAIL'}  {outcome.what}"
            + (f": {outcome.why}" if outcome.why else "")
        )
    if outcomes:
        click.echo("")
    click.echo(f"{'':<12}{'MiB/s':>10}{'objects/s':>12}{'ms each':>10}")
    for speed in speeds:
        rate = f"{speed.mib_s:.1f}" if speed.bytes else "-"
        click.echo(f"{speed.what:<12}{rate:>10}{speed.per_s:>12.1f}{speed.latency_ms:>10.2f}")
