"""`slicefs rekey`: who can open an encrypted volume; its data stay as they are."""

from __future__ import annotations

import json

import click

from fsclient.cli.options.key_options import key_options, offered, offered_for_change
from fsclient.cli.options.options import META_WAIT_S, complete_files
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.volume_key import rewrapped
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.rules import settings
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import SystemRuntime
from fsmeta.txn.txn import Txn


@click.command()
@click.argument("meta")
@click.option(
    "--to-rsa-key",
    metavar="PATH",
    shell_complete=complete_files,
    help="RSA key that is to open it.",
)
@click.option(
    "--to-passphrase",
    is_flag=True,
    help="A passphrase is to open it: SLICEFS_NEW_PASSPHRASE, or asked for.",
)
@key_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rekey(
    meta: str,
    to_rsa_key: str | None,
    to_passphrase: bool,
    encrypt_rsa_key: str | None,
    encrypt_passphrase: bool,
    as_json: bool,
) -> None:
    """Change the passphrase or RSA key that opens the encrypted volume in META.

    The key of the data is unwrapped with the old one and wrapped for the new one: no data are
    rewritten, mounts go on. From then on the old one opens nothing, except in copies of the
    metadata that were made before.
    """
    holder = offered_for_change(to_rsa_key, to_passphrase).holder()
    if holder is None:
        raise ConfigError("say who is to open the volume: --to-rsa-key PATH or --to-passphrase")
    offer = offered(encrypt_rsa_key, encrypt_passphrase)
    store = open_store(meta, SystemRuntime())
    try:
        with naming(meta):
            opened = Meta(store, SystemRuntime(), META_WAIT_S)
        before = opened.format
        after = rewrapped(before, offer, holder)

        def change(current: VolumeFormat) -> VolumeFormat:
            if current.encryption != before.encryption:
                raise ConfigError("somebody else has changed the key meanwhile: try again")
            assert after.encryption is not None, "just wrapped"
            return current.with_encryption(after.encryption)

        def verb(txn: Txn) -> None:
            settings.change_format(txn, change)

        opened.transactor.run(verb)
        store.sync()
    finally:
        store.close()
    if as_json:
        click.echo(json.dumps({"volume": before.name, **after.shown()["encryption"]}, indent=2))
        return
    click.echo(f"volume {before.name}: its key is wrapped anew")
