"""`slicefs format`: make a volume."""

from __future__ import annotations

import os

import click

from fsclient.cli.options import SIZE
from fsclient.config import STORAGES, normal_bucket, open_objects, open_store
from fsdata.objects import check_usable
from fsmeta import volume
from fsmeta.cache import RowCache
from fsmeta.runtime import SystemRuntime
from fsmeta.transact import Transactor
from fsmeta.types import BLOCK_BYTES_MAX


@click.command("format")
@click.argument("meta")
@click.argument("name")
@click.option("--storage", default="file", show_default=True, metavar="|".join(STORAGES))
@click.option("--bucket", default="", help="Directory that will hold the data.")
@click.option(
    "--block-size", type=SIZE, default=BLOCK_BYTES_MAX, show_default="4MiB", help="Object size."
)
@click.option(
    "--compress",
    type=click.Choice(volume.COMPRESSIONS),
    default="none",
    show_default=True,
    help="Compression of blocks.",
)
@click.option("--capacity", type=SIZE, default=0, help="Limit of the volume's data; 0: none.")
@click.option("--inodes", type=int, default=0, help="Limit of files and directories; 0: none.")
@click.option("--trash-days", type=click.IntRange(0, 0), default=0, help="Not available yet: 0.")
@click.option("--dry-run", is_flag=True, help="Check everything and write nothing.")
def format_(
    meta: str,
    name: str,
    storage: str,
    bucket: str,
    block_size: int,
    compress: str,
    capacity: int,
    inodes: int,
    trash_days: int,
    dry_run: bool,
) -> None:
    """Make the volume NAME with its metadata in META.

    META is redis://HOST:PORT/DB, or sqlite:///FILE.db (a path with directories is absolute).
    The object store is tested first; nothing is written where that fails. Name, block size and
    compression can't be changed later.
    """
    del trash_days
    runtime = SystemRuntime()
    settings = volume.new_format(
        name, storage, normal_bucket(storage, bucket), block_size, compress, capacity, inodes
    )
    if dry_run:
        click.echo(f"would make volume {name} with data in {settings.bucket}")
        return
    store = open_store(meta, runtime, create=True)
    try:
        transactor = Transactor(store, runtime, RowCache(runtime))
        transactor.view(volume.require_none)
        objects = open_objects(settings, runtime, create=True)
        check_usable(objects)
        owner = (os.getuid(), os.getgid())
        transactor.run(lambda txn: volume.create_volume(txn, settings, owner, runtime.now_ns()))
        store.sync()
        objects.close()
    finally:
        store.close()
    click.echo(f"volume {name} is ready: slicefs mount {meta} MOUNTPOINT")
