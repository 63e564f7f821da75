"""`slicefs format`: make a volume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from fsclient.cli.options.key_options import key_options, offered_for_new
from fsclient.cli.options.options import (
    COUNT,
    META_WAIT_S,
    capacity_size,
    complete_directories,
    no_keys_here,
    size,
    store_option,
)
from fsclient.volume.metadata_url import open_store, require_sound, sqlite_file
from fsclient.volume.object_options import STORAGES, parse_bucket, parse_options
from fsclient.volume.object_stores import (
    OWNER_KEY,
    claimed,
    directories,
    place_of,
    quietly,
    require_room,
)
from fsclient.volume.volume_key import new_settings
from fsmeta.errors import Ambiguous, ConfigError
from fsmeta.rules import settings as volume
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.store.url import shown_url
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import BLOCK_BYTES_MAX, FRAME_BYTES

if TYPE_CHECKING:
    from fsdata.format.key_wrap import Holder

TRASH_DAYS: Final = 1  # as others have it: a day is enough to notice a mistake
MEM_WARNING: Final = (
    "--storage mem keeps the data in the process that mounts, and nowhere else: "
    "it is lost with that mount; use it for tests only"
)


@click.command("format")
@click.argument("meta")
@click.argument("name")
@click.option("--storage", default="file", show_default=True, metavar="|".join(STORAGES))
@click.option(
    "--bucket",
    default="",
    metavar="PLACE",
    shell_complete=complete_directories,
    help="Required, but for --storage mem. Where the data will be: a directory; "
    "http(s)://HOST/BUCKET or s3://BUCKET; POOL or POOL/NAMESPACE of Ceph.",
)
@store_option
@click.option(
    "--block-size", type=size, default=BLOCK_BYTES_MAX, show_default="4MiB", help="Object size."
)
@click.option(
    "--frame-size",
    type=size,
    default=FRAME_BYTES,
    show_default="16KiB",
    help="What is fetched and verified by itself: from 4KiB, for small random reads, to 64KiB.",
)
@click.option(
    "--compress",
    type=click.Choice(volume.COMPRESSIONS),
    default="none",
    show_default=True,
    help="Compression of blocks.",
)
@click.option(
    "--capacity",
    type=capacity_size,
    metavar="SIZE",
    default=0,
    help="Limit of the volume's data; 0: none.",
)
@click.option("--inodes", type=COUNT, default=0, help="Limit of files and directories; 0: none.")
@click.option("--hash-prefix", is_flag=True, help="Let keys begin with a hash.")
@click.option(
    "--shards",
    type=click.IntRange(0, volume.SHARDS_MAX),
    default=0,
    help="Spread the data over so many buckets; %d in --bucket is their number.",
)
@click.option(
    "--trash-days",
    type=click.IntRange(0, volume.TRASH_DAYS_MAX),
    default=TRASH_DAYS,
    show_default=True,
    help="How long what is deleted can be restored; 0: not at all.",
)
@click.option("--dry-run", is_flag=True, help="Check what can be and write nothing.")
@key_options
@no_keys_here
def format_(
    meta: str,
    name: str,
    storage: str,
    bucket: str,
    store_options: tuple[str, ...],
    block_size: int,
    frame_size: int,
    compress: str,
    capacity: int,
    inodes: int,
    hash_prefix: bool,
    shards: int,
    trash_days: int,
    dry_run: bool,
    encrypt_rsa_key: str | None,
    encrypt_passphrase: bool,
) -> None:
    """Make the volume NAME with its metadata in META.

    NAME has 3 to 63 of a-z, 0-9 and `-`, which is not at either end.
    META is redis://HOST:PORT/DB, tikv://PD:PORT/PREFIX or sqlite:///FILE.db (a path with
    directories is absolute).
    The object store is tested first; nothing is left behind where that fails. What is said here
    can't be changed later, but for the store's options, which a mount may give anew.

    With --encrypt-rsa-key or --encrypt-passphrase the data are encrypted (AES-256-GCM), names and
    attributes are not. Who loses that key or passphrase has lost the data.

    The keys of an S3 store come from the file of --store-option credentials=FILE, else from
    ACCESS_KEY and SECRET_KEY in the environment, else from where AWS programs look. They are not
    kept.
    """
    file = sqlite_file(meta)
    place = parse_bucket(storage, bucket, shards)
    options = {**place.options, **parse_options(storage, store_options)}
    settings = volume.new_format(
        name,
        storage,
        place.bucket,
        block_size,
        compress,
        capacity,
        inodes,
        shards,
        hash_prefix,
        options,
        trash_days,
        frame_size,
    )
    holder = _holder(encrypt_rsa_key, encrypt_passphrase)
    if holder is not None:
        settings = new_settings(settings, holder)
    runtime = SystemRuntime()
    if dry_run:
        _check_only(meta, file, settings, runtime)
        click.echo(f"would make volume {name} with data in {place_of(settings)}")
        return
    with _undone_on_failure(file, directories(settings)):
        notes = _create(meta, settings, runtime)
    if settings.storage == "mem":
        click.echo(f"slicefs: warning: {MEM_WARNING}", err=True)
    for note in notes:
        click.echo(f"note: {note}")
    click.echo(f"volume {name} is ready: slicefs mount {shown_url(meta)} MOUNTPOINT")


def _holder(rsa_path: str | None, ask: bool) -> Holder | None:
    """Who is to open the new volume, if it is to be encrypted. Raises: ConfigError."""
    offer = offered_for_new(rsa_path, ask)
    return None if offer is None else offer.holder()


def _create(meta: str, settings: VolumeFormat, runtime: Runtime) -> tuple[str, ...]:
    """Object store first, then the metadata that names it; what to know of the server."""
    owner = (os.getuid(), os.getgid())
    store = open_store(meta, runtime, create=True)
    try:
        notes = require_sound(meta, store).notes
        transactor = Transactor(store, runtime, RowCache(runtime), META_WAIT_S)
        transactor.view(volume.require_none)
        with claimed(settings, runtime):
            lineage, now_ns = store.history.lineage(), runtime.now_ns()
            transactor.run(lambda txn: volume.create_volume(txn, settings, owner, now_ns, lineage))
        store.sync()
        return notes
    finally:
        store.close()


def _check_only(meta: str, file: str | None, settings: VolumeFormat, runtime: Runtime) -> None:
    """What can be found out without writing. Raises: ConfigError."""
    for path in (file, *directories(settings)):
        if path is not None:
            above = _nearest(path)
            if not os.access(above, os.W_OK):
                raise ConfigError(f"you may not write to {above}: choose another place for {path}")
    require_room(settings, runtime)
    if file is not None and not os.path.exists(file):
        return
    store = open_store(meta, runtime)
    try:
        require_sound(meta, store)
        Transactor(store, runtime, RowCache(runtime), META_WAIT_S).view(volume.require_none)
    finally:
        store.close()


def _nearest(path: str) -> str:
    """`path`, or the nearest directory above it that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


@contextmanager
def _undone_on_failure(file: str | None, roots: list[str]) -> Iterator[None]:
    """Remove what was not there before: the SQLite file, and directories for data."""
    with ExitStack() as undo:
        if file is not None and not os.path.exists(file):
            for end in ("", "-wal", "-shm"):
                undo.callback(quietly, partial(os.unlink, file + end))
        for data in roots:
            for path in _absent(data):
                undo.callback(quietly, partial(os.rmdir, path))
            if not os.path.exists(data):
                for inside in (".tmp", "check"):
                    undo.callback(quietly, partial(os.rmdir, os.path.join(data, inside)))
                undo.callback(quietly, partial(os.unlink, os.path.join(data, OWNER_KEY)))
        try:
            yield
        except Ambiguous:
            undo.pop_all()  # there may be a volume now
            raise
        undo.pop_all()


def _absent(path: str) -> list[str]:
    """`path` and the directories above it that don't exist, the topmost first."""
    out: list[str] = []
    while not os.path.exists(path):
        out.insert(0, path)
        path = os.path.dirname(path)
    return out
