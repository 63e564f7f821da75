"""`slicefs doctor`: a bundle of what a report of a problem needs."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from typing import Any

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import META_WAIT_S, complete_directories, complete_files
from fsclient.cli.options.tell import tell
from fsclient.cli.volume.status import report
from fsclient.mount.daemon import default_log
from fsclient.upkeep.doctor import bundle, collect
from fsclient.volume.metadata_url import naming, open_store
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, SystemRuntime


@click.command(
    epilog=examples(
        "slicefs doctor /mnt/vol",
        "slicefs doctor --meta redis://10.0.0.1/1 --out /tmp/report.tar.gz /mnt/vol",
    )
)
@click.argument("mountpoint", shell_complete=complete_directories)
@click.option("--out", default="", metavar="FILE", help="The bundle; slicefs-doctor-TIME.tar.gz.")
@click.option("--meta", default="", metavar="META", help="Add the status of the volume there.")
@click.option(
    "--log",
    "log_file",
    default="",
    metavar="FILE",
    shell_complete=complete_files,
    help="The log of the mount, if it is not in the usual place.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(mountpoint: str, out: str, meta: str, log_file: str, as_json: bool) -> None:
    """Write a bundle for a report of a problem with MOUNTPOINT.

    It has versions, settings, numbers, limits of host and process, and the end of the log. Secrets
    are replaced by ***; look through it all the same before you publish it. A mount that hangs is
    not waited for.
    """
    runtime = SystemRuntime()
    now_s = runtime.now_ns() // 10**9
    target = out or f"slicefs-doctor-{now_s}.tar.gz"
    status = partial(_status, meta, runtime) if meta else None
    files = collect(mountpoint, log_file or default_log(), runtime, status)
    bundle(files, target, now_s)
    if as_json:
        found = {"file": os.path.abspath(target), "entries": sorted(files)}
        tell(found, mountpoint=mountpoint)
    else:
        click.echo(f"{target}: {len(files)} entries; secrets are replaced by ***")


def _status(meta: str, runtime: Runtime) -> dict[str, Any]:
    with closing(open_store(meta, runtime)) as store, naming(meta):
        return report(Meta(store, runtime, META_WAIT_S), runtime.now_ns())
