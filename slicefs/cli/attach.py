"""`slicefs attach`: objects of a bucket or a directory appear as files, and nothing is copied.

The command line finds it as an entry point, as `slicefs ckpt`.
"""

from __future__ import annotations

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsmeta.runtime import SystemRuntime
from slicefs.lifecycle.attach import attach as attach_objects


@click.command(
    epilog=examples(
        "slicefs attach s3://public/imagenet /mnt/vol/imagenet",
        "slicefs attach s3://public/imagenet redis://localhost/1#data/imagenet",
        "slicefs attach file:///nfs/imagenet /mnt/vol/imagenet",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("store_url")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def attach(store_url: str, path: str, as_json: bool) -> int:
    """Let the objects below STORE_URL be files in the directory PATH.

    STORE_URL is s3://BUCKET/PREFIX, or file:///DIR for a directory of the host, as of an NFS. PATH
    is on a mount, or in a volume by its URL: slicefs://VOLUME/PATH or META-URL#PATH. The files take
    no space until they are written, which copies the object and leaves it as it is. A bucket is
    read with the keys of each mount's own environment; a directory, on each mount's own host, if
    SLICEFS_ATTACH_DIRS in its environment names it or one above. A file whose object was changed,
    replaced or removed can't be read (ESTALE) until the same command is run again: it finds what is
    new, changed and gone. Files that were written are kept. Clients that know no attached files
    can't open the volume from the first one on. Only root may. Exit code 1: some objects were
    skipped, and are named.
    """
    line = ProgressLine(SystemRuntime())
    try:
        done = attach_objects(store_url, path, line.show)
    finally:
        line.clear()
    if as_json:
        tell(done._asdict(), source=store_url, path=path)
    else:
        click.echo(
            f"{done.made} files made, {done.replaced} replaced, {done.removed} removed, "
            f"{done.same} as they were"
        )
        for name in done.kept_examples:
            click.echo(f"kept: {name}", err=True)
        if done.kept:
            click.echo(f"{done.kept} kept: files of the volume's own, as those that were written")
        for key in done.examples:
            click.echo(f"skipped: {key}", err=True)
        if done.skipped:
            click.echo(
                f"{done.skipped} skipped: symlinks and devices, names that can't be used, and "
                "names that directories or other attachments have",
                err=True,
            )
    return int(done.skipped > 0)
