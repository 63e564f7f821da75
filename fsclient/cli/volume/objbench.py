"""`slicefs objbench`: what an object store can do, and how fast."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import no_keys_here, size, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.upkeep.objbench import BenchOutcome, Sizes, Speed, functional, measure, tidied
from fsclient.volume.object_options import STORAGES, parse_bucket, parse_options
from fsclient.volume.object_stores import claimed, directories, open_objects, place_of, stacked
from fsmeta.rules import settings as volume
from fsmeta.runtime import SystemRuntime

_NAME = "slicefs-objbench"
_FAILED = 3  # the exit code where the store does not do what a volume needs


class _Finished(Exception):
    """Ends the claim of the place, so that nothing of it stays."""


@dataclass(frozen=True, kw_only=True)
class ObjbenchArguments:
    """The command line of `slicefs objbench`."""

    storage: str
    bucket: str
    store_options: tuple[str, ...]
    block_size: int
    blocks: int
    small_object_size: int
    small_objects: int
    threads: int
    skip_functional_tests: bool
    as_json: bool


@command(
    ObjbenchArguments,
    epilog=examples(
        "slicefs objbench --storage s3 --bucket https://s3.example.com/bucket",
        "slicefs objbench --bucket /srv/vol -p 16 --json",
    ),
)
@click.option("--storage", default="file", show_default=True, metavar="|".join(STORAGES))
@click.option("--bucket", default="", metavar="PLACE", help="Where, as for format.")
@store_option
@click.option(
    "--block-size", type=size, default=4 << 20, show_default="4MiB", help="Size of a block."
)
@click.option(
    "--blocks", type=click.IntRange(1), default=64, show_default=True, help="Number of blocks."
)
@click.option(
    "--small-object-size",
    type=size,
    default=128 << 10,
    show_default="128KiB",
    help="Size of a small object.",
)
@click.option(
    "--small-objects",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Number of them.",
)
@click.option(
    "-p",
    "--threads",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Requests at once.",
)
@click.option("--skip-functional-tests", is_flag=True, help="Only measure; test nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@no_keys_here
def objbench(args: ObjbenchArguments) -> int:
    """Test everything that a volume needs from its object store, and measure it.

    The test uses its own prefix in the bucket and removes it at the end. Exit code 3: the store
    does something wrong.
    """
    place = parse_bucket(args.storage, args.bucket, 0)
    options = {**place.options, **parse_options(args.storage, args.store_options)}
    runtime = SystemRuntime()
    name = f"{_NAME}-{runtime.random_bits(32):08x}"  # what an earlier run left is not in the way
    choices = volume.FormatChoices(options=options)
    settings = volume.new_format(name, args.storage, place.bucket, choices)
    line = ProgressLine(runtime)
    sizes = Sizes(
        args.block_size, args.blocks, args.small_object_size, args.small_objects, args.threads
    )
    outcomes: list[BenchOutcome] = []
    speeds: list[Speed] = []
    absent = _absent(directories(settings))
    with suppress(_Finished), claimed(settings, runtime):
        objects = stacked(open_objects(settings, runtime), args.storage, runtime).store
        try:
            with tidied(objects):
                if not args.skip_functional_tests:
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
    if args.as_json:
        found = {"functional": [each._asdict() for each in outcomes]}
        found["speed"] = [each.plain() for each in speeds]
        tell(found, storage=args.storage, bucket=args.bucket)
    else:
        click.echo(f"{place_of(settings)}, {args.threads} requests at once")
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
        rate = f"{speed.bytes_s / (1 << 20):.1f}" if speed.bytes else "-"
        click.echo(
            f"{speed.what:<12}{rate:>10}{speed.per_s:>12.1f}{1000 * speed.latency_seconds:>10.2f}"
        )
