"""`slicefs export`: files of a volume or a mount as plain objects, which need no SliceFS.

The command line finds it as an entry point, as `slicefs ckpt`.
"""

from __future__ import annotations

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.volume.units import format_size
from fsmeta.runtime import SystemRuntime
from slicefs.lifecycle.move import OpenTrees
from slicefs.lifecycle.transfer import Copier


@click.command(
    epilog=examples(
        "slicefs export /mnt/vol/data s3://public/data",
        "slicefs export --dry-run slicefs://vol/data@v1 /srv/data",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("path")
@click.argument("store_url")
@click.option("-n", "--dry-run", "--plan", is_flag=True, help="Only print what would be sent.")
@click.option("-j", "--jobs", default=4, type=click.IntRange(1, 64), help="Files at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(path: str, store_url: str, dry_run: bool, jobs: int, as_json: bool) -> int:
    """Copy the directory PATH to STORE_URL, a file to an object of the same name.

    PATH is a directory, also on a mount, or the URL of one: slicefs://VOLUME/PATH@SNAPSHOT.
    STORE_URL is s3://BUCKET/PREFIX, r2://…, gs://… or another directory. What is there with the
    same size and SHA-256 is skipped, each copy is read back, and nothing is removed.
    """
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    with OpenTrees() as stores:
        source, target = stores.endpoints(path, store_url)
        copier = Copier(source, target, jobs=jobs, runtime=runtime, say=line.show)
        if dry_run:
            files, size = copier.plan()
            if as_json:
                planned = {"dry_run": True, "files": files, "bytes": size}
                tell(planned, source=path, target=store_url)
            else:
                click.echo(f"{files} files, {format_size(size)} would be sent to {store_url}")
            return 0
        report = copier.copy()
    line.clear()
    if as_json:
        tell({"dry_run": False, **report.told()}, source=path, target=store_url)
        return int(bool(report.failures))
    click.echo(
        f"{report.copied} files copied, {format_size(report.copied_bytes)}; "
        f"{report.skipped} were there"
    )
    for failure in report.failures:
        click.echo(failure, err=True)
    return int(bool(report.failures))
