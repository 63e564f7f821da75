"""`slicefs restore-meta`: a volume's metadata from a backup in its own object store."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from fsclient.background.backup import BackupSource, backups, chosen
from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.key_options import key_options, offered
from fsclient.cli.options.options import complete_directories, no_keys_here, store_option
from fsclient.cli.options.tell import tell
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


@dataclass(frozen=True, kw_only=True)
class RestoreMetaArguments:
    """The command line of `slicefs restore-meta`."""

    meta: str
    name: str
    storage: str
    bucket: str
    store_options: tuple[str, ...]
    shards: int
    hash_prefix: bool
    at: str
    only_list: bool
    as_json: bool
    encrypt_rsa_key: str | None
    encrypt_passphrase: bool


@command(
    RestoreMetaArguments,
    "restore-meta",
    epilog=examples(
        "slicefs restore-meta --list redis://localhost/1 vol --bucket /srv/vol",
        "slicefs restore-meta redis://localhost/1 train --storage s3 --bucket s3://bucket",
    ),
)
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
@click.option(
    "--shards", type=click.IntRange(0, volume.SHARDS_MAX), default=0, help="As for format."
)
@click.option("--hash-prefix", is_flag=True, help="As for format.")
@click.option(
    "--at",
    default="latest",
    show_default=True,
    metavar="TIME",
    help="Use the last backup before this time.",
)
@click.option("--list", "only_list", is_flag=True, help="List the backups.")
@key_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@no_keys_here
def restore_meta(args: RestoreMetaArguments) -> None:
    """Make the volume NAME in META, which must be empty, from a backup in its object store.

    Changes made after the backup are lost. Never mount the volume elsewhere at the same time.
    """
    place = parse_bucket(args.storage, args.bucket, args.shards)
    options = {**place.options, **parse_options(args.storage, args.store_options)}
    choices = volume.FormatChoices(
        shards=args.shards, hash_prefix=args.hash_prefix, options=options
    )
    settings = volume.new_format(args.name, args.storage, place.bucket, choices)._replace(uuid="")
    runtime = SystemRuntime()

    def unseal(uuid: str, wrapped: dict[str, str]) -> Sealer | None:
        offer = offered(args.encrypt_rsa_key, args.encrypt_passphrase)
        return sealer_of(settings._replace(uuid=uuid).with_encryption(wrapped), runtime, offer)

    objects = stacked(open_objects(settings, runtime, {}), args.storage, runtime).store
    try:
        there = backups(objects)
        if args.only_list:
            shown = [
                {"name": each.name, "parts": len(each.keys) - 1} for each in there if each.complete
            ]
            text = [f"{each['name']}  {each['parts']} parts" for each in shown]
            if args.as_json:
                tell({"backups": shown}, meta=args.meta, volume=args.name)
            else:
                click.echo("\n".join(text) or "there is no backup yet")
            return
        backup = chosen(there, args.at)
        with (
            nothing_left(args.meta),
            closing(open_store(args.meta, runtime, create=True)) as store,
            shown_progress(runtime, "inodes restored") as progress,
        ):
            dump.load(store, BackupSource(objects, backup, unseal), progress)
    finally:
        objects.close()
    if args.as_json:
        tell({"backup": backup.name}, meta=args.meta, volume=args.name)
    else:
        click.echo(f"volume {args.name} is restored as it was at {backup.name}")
