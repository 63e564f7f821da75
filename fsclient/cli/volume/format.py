"""`slicefs format`: make a volume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
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
from fsmeta.rules.settings import FormatChoices, VolumeFormat
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.store.url import shown_url
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import BLOCK_BYTES_MAX, FRAME_BYTES
from fsmeta.user_namespace import own_gid, own_uid

if TYPE_CHECKING:
    from fsdata.format.key_wrap import Holder

TRASH_DAYS: Final = 1  # as in other systems: a day is enough to notice a mistake
MEM_WARNING: Final = (
    "--storage mem keeps the data in the process that mounts, and nowhere else: "
    "it is lost with that mount; use it for tests only"
)


@dataclass(frozen=True, kw_only=True)
class FormatArguments:
    """The command line of `slicefs format`."""

    meta: str
    name: str
    storage: str
    bucket: str
    store_options: tuple[str, ...]
    block_size: int
    frame_size: int
    compress: str
    capacity: int
    inodes: int
    hash_prefix: bool
    shards: int
    trash_days: int
    dry_run: bool
    encrypt_rsa_key: str | None
    encrypt_passphrase: bool
    as_json: bool


@command(
    FormatArguments,
    "format",
    epilog=examples(
        "slicefs format sqlite:///vol.db vol --bucket /srv/vol",
        "slicefs format redis://localhost/1 train --storage s3 --bucket s3://bucket",
        "slicefs format redis://localhost/1 train --storage rados --bucket pool",
    ),
)
@click.argument("meta")
@click.argument("name")
@click.option(
    "--storage",
    default="file",
    show_default=True,
    metavar="|".join(STORAGES),
    help="Kind of object store; mem ends with its process.",
)
@click.option(
    "--bucket",
    default="",
    metavar="PLACE",
    shell_complete=complete_directories,
    help="Required, except with --storage mem. Where the data will be: a directory; "
    "http(s)://HOST/BUCKET or s3://BUCKET; POOL or POOL/NAMESPACE of Ceph.",
)
@store_option
@click.option(
    "--block-size",
    type=size,
    default=BLOCK_BYTES_MAX,
    show_default="4MiB",
    help="Size of an object.",
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
@click.option("--hash-prefix", is_flag=True, help="Start the keys of objects with a hash.")
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
@click.option(
    "--dry-run", is_flag=True, help="Check everything that can be checked; write nothing."
)
@key_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@no_keys_here
def format_(args: FormatArguments) -> None:
    """Make the volume NAME with its metadata in META.

    NAME has 3 to 63 of a-z, 0-9 and `-`, which is not at either end.
    META is redis://HOST:PORT/DB, tikv://PD:PORT/PREFIX or sqlite:///FILE.db (a path with
    directories is absolute).
    The object store is tested first; if the test fails, nothing is left behind. These settings
    can't be changed later, except the store's options, which each mount may set again.

    With --encrypt-rsa-key or --encrypt-passphrase the data are encrypted (AES-256-GCM); names and
    attributes are not. Without that key or passphrase the data are lost.

    The keys of an S3 store come from the file of --store-option credentials=FILE, else from
    ACCESS_KEY and SECRET_KEY in the environment, else from where AWS programs look. They are not
    kept.
    """
    file = sqlite_file(args.meta)
    place = parse_bucket(args.storage, args.bucket, args.shards)
    options = {**place.options, **parse_options(args.storage, args.store_options)}
    choices = FormatChoices(
        block_bytes=args.block_size,
        compression=args.compress,
        capacity=args.capacity,
        inodes=args.inodes,
        shards=args.shards,
        hash_prefix=args.hash_prefix,
        options=options,
        trash_days=args.trash_days,
        frame_bytes=args.frame_size,
    )
    settings = volume.new_format(args.name, args.storage, place.bucket, choices)
    holder = _holder(args.encrypt_rsa_key, args.encrypt_passphrase)
    if holder is not None:
        settings = new_settings(settings, holder)
    runtime = SystemRuntime()
    notes: tuple[str, ...] = ()
    if args.dry_run:
        _check_only(args.meta, file, settings, runtime)
        said = f"would make volume {args.name} with data in {place_of(settings)}"
    else:
        with _undone_on_failure(file, directories(settings)):
            notes = _create(args.meta, settings, runtime)
        said = f"volume {args.name} is ready: slicefs mount {shown_url(args.meta)} MOUNTPOINT"
        if settings.storage == "mem":
            click.echo(f"slicefs: warning: {MEM_WARNING}", err=True)
    if args.as_json:
        shown = {"meta": shown_url(args.meta), "dry_run": args.dry_run, "volume": settings.shown()}
        said = json.dumps({**shown, "notes": list(notes)}, indent=2)
    _print((said,) if args.as_json else (*(f"note: {note}" for note in notes), said))


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)


def _holder(rsa_path: str | None, ask: bool) -> Holder | None:
    """The key holder that opens the new volume, if it is to be encrypted. Raises: ConfigError."""
    offer = offered_for_new(rsa_path, ask)
    return None if offer is None else offer.holder()


def _create(meta: str, settings: VolumeFormat, runtime: Runtime) -> tuple[str, ...]:
    """Object store first, then the metadata that names it; what to know of the server."""
    owner = (own_uid(), own_gid())
    store = open_store(meta, runtime, create=True)
    try:
        notes = require_sound(meta, store).notes
        transactor = Transactor(store, runtime, RowCache(runtime), META_WAIT_S)
        transactor.view(volume.require_none)
        with claimed(settings, runtime):
            store_epoch, now_ns = store.history.store_epoch(), runtime.now_ns()
            transactor.run(
                lambda txn: volume.create_volume(txn, settings, owner, now_ns, store_epoch)
            )
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
