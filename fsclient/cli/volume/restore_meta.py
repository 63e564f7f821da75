"""`slicefs restore-meta`: a volume's metadata from a backup in its own object store."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import click

from fsclient.background.backup import BackupSource, backups, chosen
from fsclient.cli.options.key_options import key_options, offered
from fsclient.cli.options.options import complete_directories, no_keys_here, store_option
from fsclient.cli.volume.dump import shown_progress
from fsclient.volume.metadata_url import nothing_left, open_store
from fsclient.volume.object_options import STORAGES, parse_bucket, parse_options
from fsclient.volume.object_stores import open_objects, stacked
from fsclient.volume.volume_key import sealer_of
from fsmeta.admin import dump
from fsmeta.rules import settings as volume
from fsmeta.runtime import SystemRuntime

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer


@click.command("restore-meta")
@click.argument("meta")
@click.argument("name")
@click.option("--storage", default="file", show_default=True, metavar="|".join(STORAGES))
@click.option(
    "--bucket",
    default="",
    metavar="PLACE",
    shell_complete=complete_directories,
    help="Required. Where the data is, as for format.",
)
@store_option
@click.option("--shards", type=click.IntRange(0, volume.SHARDS_MAX), default=0, help="As there.")
@click.option("--hash-prefix", is_flag=True, help="As there.")
@click.option(
    "--at", default="latest", show_default=True, metavar="TIME", help="The last backup until then."
)
@click.option("--list", "only_list", is_flag=True, help="Show what backups there are.")
@key_options
@click.option("--json", "as_json", is_flag=True, help="With --list: print JSON.")
@no_keys_here
def restore_meta(
    meta: str,
    name: str,
    storage: str,
    bucket: str,
    store_options: tuple[str, ...],
    shards: int,
    hash_prefix: bool,
    at: str,
    only_list: bool,
    as_json: bool,
    encrypt_rsa_key: str | None,
    encrypt_passphrase: bool,
) -> None:
    """Make the volume NAME in META, which must be empty, from a backup in its object store.

    Changes made after the backup are lost. Never mount the volume elsewhere at the same time.
    """
    place = parse_bucket(storage, bucket, shards)
    options = {**place.options, **parse_options(storage, store_options)}
    settings = volume.new_format(
        name, storage, place.bucket, shards=shards, hash_prefix=hash_prefix, options=options
    )._replace(uuid="")
    runtime = SystemRuntime()

    def unseal(uuid: str, wrapped: dict[str, str]) -> Sealer | None:
        offer = offered(encrypt_rsa_key, encrypt_passphrase)
        return sealer_of(settings._replace(uuid=uuid).with_encryption(wrapped), runtime, offer)

    objects = stacked(open_objects(settings, runtime, {}), storage, runtime).store
    try:
        there = backups(objects)
        if only_list:
            shown = [
                {"time": each.name, "parts": len(each.keys) - 1} for each in there if each.complete
            ]
            text = [f"{each['time']}  {each['parts']} parts" for each in shown]
            text = text or ["there is no backup yet"]
            click.echo(json.dumps(shown, indent=2) if as_json else "\n".join(text))
            return
        backup = chosen(there, at)
        with (
            nothing_left(meta),
            closing(open_store(meta, runtime, create=True)) as store,
            shown_progress(runtime, "inodes restored") as progress,
        ):
            dump.load(store, BackupSource(objects, backup, unseal), progress)
    finally:
        objects.close()
    click.echo(f"volume {name} is restored as it was at {backup.name}")
