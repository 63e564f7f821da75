"""`slicefs ckpt unshard`: safetensors of a sharded step, or of the steps of a run.

The group `ckpt` adds it; the work is in `slicefs/lifecycle/unshard`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from slicefs.checkpoint.layout import parse_step
from slicefs.checkpoint.step import joined, url_below
from slicefs.lifecycle.move import OpenTrees
from slicefs.lifecycle.run_steps import UNSHARDED, numbered_steps, steps_of
from slicefs.lifecycle.shards.layouts import AUTO, KINDS, LATEST, kinds_of
from slicefs.lifecycle.transfer import TransferEnd
from slicefs.lifecycle.unshard import unshard as unshard_step

_RUNTIME: Final = SystemRuntime()


@dataclass(frozen=True, kw_only=True)
class UnshardArguments:
    """The command line of `slicefs ckpt unshard`."""

    src: str
    dst: str
    latest_checkpoint_only: bool
    checkpoint_num: int | None
    kind: str
    model_only: bool
    delete_sharded: bool
    as_json: bool


@command(
    UnshardArguments,
    short_help="Write safetensors of sharded steps.",
    epilog=examples(
        "slicefs ckpt unshard /mnt/vol/run/step-1000 /mnt/vol/model",
        "slicefs ckpt unshard --latest-checkpoint-only --model-only s3://runs/a /data/model",
        "slicefs ckpt unshard --type deepspeed /mnt/vol/run/global_step500 /data/model",
    ),
)
@click.argument("src")
@click.argument("dst")
@click.option("--latest-checkpoint-only", is_flag=True, help="For a run: only its newest step.")
@click.option("--checkpoint-num", type=click.IntRange(0), help="For a run: only this step.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(KINDS),
    default=AUTO,
    show_default=True,
    help="Layout of the shards; auto tells it by the names of the files.",
)
@click.option(
    "--model-only",
    is_flag=True,
    help="Leave out the optimizer and everything that is not a tensor.",
)
@click.option("--delete-sharded", is_flag=True, help="Remove the shards after the result is read.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def unshard(stores: OpenTrees, args: UnshardArguments) -> int:
    """Write safetensors of the sharded step, or of each step of the run, SRC to DST.

    A step is one of torch DCP, DeepSpeed ZeRO, or OLMo (local, torch_legacy). One tensor is in
    memory at a time. Of a run, DST gets a directory stepN-unsharded for each step.
    """
    if args.latest_checkpoint_only and args.checkpoint_num is not None:
        raise ConfigError("--checkpoint-num: leave out --latest-checkpoint-only")
    line = ProgressLine(_RUNTIME)
    reports = []
    for step, target in _pairs(
        stores, args.src, args.dst, args.latest_checkpoint_only, args.checkpoint_num
    ):
        first, second = stores.endpoints(step, target)
        report = unshard_step(
            first,
            second,
            kind=args.kind,
            model_only=args.model_only,
            delete_sharded=args.delete_sharded,
            say=line.show,
        )
        line.clear()
        reports.append({"path": target, **report._asdict()})
        if not args.as_json:
            done = "is there already" if report.skipped else format_size(report.written_bytes)
            click.echo(f"{target}: {report.tensors} tensors, {done}")
            if report.lost:
                click.echo(f"{target}: not kept, or not all of it: {', '.join(report.lost)}")
    if args.as_json:
        tell({"steps": reports}, source=args.src, target=args.dst)
    return 0


def _pairs(
    stores: OpenTrees, src: str, dst: str, latest: bool, number: int | None
) -> list[tuple[str, str]]:
    at = stores.endpoint(src)
    if parse_step(at.path.rpartition("/")[2]) and not latest and number is None:
        return [(src, dst)]
    steps = steps_of(at) if number is None else numbered_steps(at)
    numbered = [name for name in steps if parse_step(name)]  # others only where `latest` says so
    if number is not None:
        wanted = [name for name in numbered if (p := parse_step(name)) and p.number == number]
    else:
        wanted = steps[-1:] if latest else numbered
    if not wanted and number is None and not latest:
        files = {each.name for each in at.tree.list_dir(at.path) if not each.is_dir}
        if LATEST in files or kinds_of(files):
            return [(src, dst)]
    if not wanted:
        raise ConfigError(f"{src}: has no such step: see `slicefs ckpt verify {src}`")
    target = stores.endpoint(dst)
    return [(_below(at, name), _below(target, f"{name}{UNSHARDED}")) for name in wanted]


def _below(at: TransferEnd, name: str) -> str:
    return url_below(at.tree.url, joined(at.path, name))
