"""`slicefs rekey`: changes the keys that open an encrypted volume; its data stay as they are."""

from __future__ import annotations

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.key_options import key_options, offered, offered_for_change
from fsclient.cli.options.options import META_WAIT_S, complete_files
from fsclient.cli.options.tell import tell
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.volume_key import rewrapped
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.rules import settings
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import SystemRuntime
from fsmeta.txn.txn import Txn


@click.command(
    epilog=examples(
        "slicefs rekey --encrypt-passphrase --to-passphrase redis://localhost/1",
        "slicefs rekey --encrypt-rsa-key old.pem --to-rsa-key new.pem redis://localhost/1",
    )
)
@click.argument("meta")
@click.option(
    "--to-rsa-key",
    metavar="PATH",
    shell_complete=complete_files,
    help="The new RSA key.",
)
@click.option(
    "--to-passphrase",
    is_flag=True,
    help="Use a new passphrase: SLICEFS_NEW_PASSPHRASE, or asked for.",
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

    The key of the data is unwrapped with the old key and wrapped with the new one: no data are
    rewritten, and mounts continue. From then on the old key opens only copies of the metadata that
    were made before.
    """
    holder = offered_for_change(to_rsa_key, to_passphrase).holder()
    if holder is None:
        raise ConfigError(
            "name the key that opens the volume: --to-rsa-key PATH or --to-passphrase"
        )
    offer = offered(encrypt_rsa_key, encrypt_passphrase)
    store = open_store(meta, SystemRuntime())
    try:
        with naming(meta):
            opened = Meta(store, SystemRuntime(), META_WAIT_S)
        before = opened.format
        after = rewrapped(before, offer, holder)

        def change(current: VolumeFormat) -> VolumeFormat:
            if current.encryption != before.encryption:
                raise ConfigError("another command has changed the key at the same time: try again")
            assert after.encryption is not None, "just wrapped"
            return current.with_encryption(after.encryption)

        def verb(txn: Txn) -> None:
            settings.change_format(txn, change)

        opened.transactor.run(verb)
        store.sync()
    finally:
        store.close()
    if as_json:
        tell({"volume": before.name, **after.shown()["encryption"]}, meta=meta)
        return
    click.echo(f"volume {before.name}: its key is wrapped with the new one")
