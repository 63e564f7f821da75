"""`slicefs gc`: objects that belong to nothing, and files of too many pieces."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import click

from fsclient.background.packer import PACK_BELOW
from fsclient.cli.options.arguments import command
from fsclient.cli.options.examples import examples
from fsclient.cli.options.key_options import key_options, offered
from fsclient.cli.options.options import META_WAIT_S, cursor_option, duration, size, store_option
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.upkeep.gc import AGE_S, THREADS, Collected, Count, Job, Progress, collect
from fsclient.upkeep.gc_checkpoint import COMPACT, PACK, GcCheckpoint
from fsclient.upkeep.orphan_journals import give_up_journals, require_published
from fsclient.upkeep.pack import Gathered, PackWalk, pages
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.object_options import parse_options
from fsclient.volume.object_stores import open_objects, stacked
from fsclient.volume.units import format_size
from fsclient.volume.volume_key import KeyOffer
from fsdata.format.geometry import COMPACT_HIDDEN_MIN
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ConfigError, Corrupt, ObjectDamaged, ObjectMissing
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.schema import scan
from fsmeta.schema.scan import Walked
from fsmeta.types import Ino

_FAILED: Final = 1


@dataclass(frozen=True, kw_only=True)
class GcArguments:
    """The command line of `slicefs gc`."""

    meta: str
    delete: bool
    compact: bool
    pack: bool
    pack_below: int | None
    give_up_journals: bool
    age: float
    threads: int
    cursor_file: str | None
    store_options: tuple[str, ...]
    encrypt_rsa_key: str | None
    encrypt_passphrase: bool
    as_json: bool


@command(
    GcArguments,
    epilog=examples(
        "slicefs gc redis://localhost/1",
        "slicefs gc --delete --cursor gc.cursor redis://localhost/1",
    ),
)
@click.argument("meta")
@click.option(
    "--delete", is_flag=True, help="Delete leaked objects; by default they are only counted."
)
@click.option("--compact", is_flag=True, help="Rewrite chunks of many slices first.")
@click.option("--pack", is_flag=True, help="Pack small files that no mount has packed first.")
@click.option(
    "--pack-below",
    type=size,
    default=None,
    show_default="512KiB",
    help="With --pack: files of at most this size.",
)
@click.option(
    "--give-up-journals",
    is_flag=True,
    help="With --delete: journals of mounts that have ended will never be published; their "
    "disks are lost.",
)
@click.option(
    "--age",
    type=duration,
    default=AGE_S,
    show_default="1h",
    help="Leave what is younger: 30m, 2h, 7d or seconds.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=THREADS,
    show_default=True,
    help="Deletions, and files that are read to be packed, at once.",
)
@cursor_option("in FILE and beside it")
@store_option
@key_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gc(args: GcArguments) -> int:
    """Count the objects of the volume in META that belong to nothing; with --delete, remove them.

    It may run while the volume is used, and be killed and run again: with --cursor it goes on where
    it was. A client that died keeps what
    it was about to commit from being collected until its session is ended, a minute after another
    client has come.
    """
    if args.cursor_file and not args.delete:
        raise ConfigError(
            "--cursor is for a run with --delete: counting alone can't be gone on with"
        )
    if args.give_up_journals and not args.delete:
        raise ConfigError("--give-up-journals is for a run with --delete")
    if args.pack_below is not None and not (args.pack and args.pack_below):
        raise ConfigError("--pack-below is for a run with --pack, and more than 0")
    runtime = SystemRuntime()
    offer = offered(args.encrypt_rsa_key, args.encrypt_passphrase)
    place = _place(args.meta, args.cursor_file, runtime)
    try:
        volume = _OpenedVolume(args.meta, args.store_options, offer, runtime)
        compacted = _compact(volume, place) if args.compact else None
        packed = (
            _pack(volume, place, args.pack_below or PACK_BELOW, args.threads) if args.pack else None
        )
        found = _collect(
            volume, Job(args.age, args.delete, args.threads), args.give_up_journals, place
        )
        place.remove()
    finally:
        place.close()
    if args.as_json:
        report = {name: _plain(value) for name, value in found._asdict().items()}
        done = {"compacted_chunks": None, "uncompacted_chunks": None}
        done |= {} if compacted is None else compacted._asdict()
        done |= dict.fromkeys(PackReport._fields) if packed is None else packed._asdict()
        tell({"dry_run": not args.delete, **report, **done}, meta=args.meta)
    else:
        _print_before(compacted, packed)
        _print(found, args.delete)
    failed = found.failed or (compacted is not None and compacted.uncompacted_chunks)
    failed = failed or (packed is not None and packed.unreadable_files)
    return _FAILED if failed else 0


def _place(meta: str, file: str | None, runtime: Runtime) -> GcCheckpoint:
    """Where an earlier run was. Raises: ConfigError."""
    if file is None:
        return GcCheckpoint(runtime)
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            uuid = Meta(store, runtime, META_WAIT_S).format.uuid
    finally:
        store.close()
    return GcCheckpoint(runtime, file, uuid)


def _collect(volume: _OpenedVolume, job: Job, give_up: bool, place: GcCheckpoint) -> Collected:
    runtime = volume.runtime
    line = ProgressLine(runtime)

    def objects_seen(seen: int, so_far: Collected) -> None:
        line.show(f"{seen} objects listed, {so_far.leaked.objects} leaked")

    progress = Progress(lambda inodes: line.show(f"{inodes} inodes read"), objects_seen)
    store = open_store(volume.meta, runtime)
    try:
        with naming(volume.meta):
            opened = Meta(store, runtime, META_WAIT_S)
        settings = opened.format
        if give_up:
            give_up_journals(opened)
        job = job._replace(may_delete=partial(require_published, opened))
        overrides = parse_options(settings.storage, volume.store_options)
        raw = open_objects(settings, runtime, overrides)
        objects = stacked(raw, settings.storage, runtime).store
        try:
            return collect(opened, objects, runtime, job, progress, place)
        finally:
            objects.close()
            line.clear()
    finally:
        store.close()


class _Compacted(NamedTuple):
    """What became of the chunks that compaction looked at."""

    compacted_chunks: int
    uncompacted_chunks: int  # that can't be read, or written anew


class _OpenedVolume(NamedTuple):
    """How the volume is opened, each time that it is."""

    meta: str
    store_options: tuple[str, ...]
    offer: KeyOffer
    runtime: Runtime

    @contextmanager
    def client(self) -> Iterator[MountClient]:
        """One that joins the volume, reads and writes, and leaves. Raises: ConfigError."""
        store = open_store(self.meta, self.runtime)
        try:
            with naming(self.meta):
                options = ClientOptions(store_options=self.store_options, mountpoint="(gc)")
                client = MountClient(store, self.runtime, options, GivenParts(offer=self.offer))
        except BaseException:
            store.close()
            raise
        client.start()
        try:
            yield client
        finally:
            if not client.stop():
                raise ConfigError("gc could not be ended well: see the messages above")


def _compact(volume: _OpenedVolume, place: GcCheckpoint) -> _Compacted | None:
    """Rewrite every chunk for which it pays.

    None where an earlier run was through with it.
    """
    if place.phase != COMPACT:
        return None
    line = ProgressLine(volume.runtime)
    with volume.client() as client:
        try:
            inodes = failed = 0
            for page in scan.pages(client.meta.store, place.walk_from):
                for each in page.inodes:
                    failed += _compact_file(client, each, line)
                inodes += len(page.inodes)
                line.show(f"{inodes} inodes, {client.background.compacted} chunks compacted")
                if page.cursor is not None:
                    place.step(page.cursor)
            return _Compacted(client.background.compacted, failed)
        finally:
            line.clear()


class PackReport(NamedTuple):
    """What became of files that were small and not packed."""

    packed_files: int
    segments_made: int
    recent_files: int  # that a client may still commit once more
    shared_files: int  # with clones or snapshots
    unreadable_files: int
    packing_held_by: str  # the session because of which so many are recent

    @staticmethod
    def of(found: Gathered, unreadable: int) -> PackReport:
        """As `gc` reports it."""
        return PackReport(
            found.packed_files,
            found.segments_made,
            found.recent_files,
            found.shared_files,
            unreadable,
            found.held_by,
        )


def _pack(
    volume: _OpenedVolume, place: GcCheckpoint, below: int, threads: int
) -> PackReport | None:
    """Pack small files that no client has packed.

    None where an earlier run was through with it.
    """
    if place.phase == COMPACT:
        place.enter(PACK)
    if place.phase != PACK:
        return None
    line = ProgressLine(volume.runtime)
    unreadable: list[Ino] = []

    def told(ino: Ino, error: Exception) -> None:
        unreadable.append(ino)
        line.say(f"slicefs: inode {ino} is not packed: {error}")

    with volume.client() as client:
        pool = WorkerPool(volume.runtime, "pack", threads)
        try:
            packer = client.background.packer_for(below, pool, told)
            work = PackWalk(client.meta, packer, client.blocks.block_bytes)
            inodes = 0
            for count, cursor in pages(client.meta, work, place.walk_from):
                inodes += count
                line.show(f"{inodes} inodes, {packer.packed} files packed")
                if cursor is not None:
                    place.step(cursor)
            return PackReport.of(work.gathered(), len(unreadable))
        finally:
            pool.close()
            line.clear()


def _compact_file(client: MountClient, inode: Walked, line: ProgressLine) -> int:
    """Rewrite the chunks of a file for which it pays; how many could not be. Raises: Unavailable.

    A damaged file must not keep all the others from being rewritten.
    """
    failed = 0
    for index, records in inode.records.items():
        if records < COMPACT_HIDDEN_MIN:
            continue  # else each chunk would be asked for once more
        try:
            client.background.compact(inode.ino, index)
        except (ObjectMissing, ObjectDamaged, Corrupt) as error:
            failed += 1
            line.say(f"slicefs: inode {inode.ino}, chunk {index}: {error}")
        except OSError as error:
            if error.errno != errno.ESTALE:  # the file has gone meanwhile
                raise
    return failed


def _plain(value: object) -> object:
    return value._asdict() if isinstance(value, Count) else value


def _print_before(compacted: _Compacted | None, packed: PackReport | None) -> None:
    """What was rewritten first."""
    if compacted is not None:
        click.echo(f"compacted   {compacted.compacted_chunks} chunks")
        if compacted.uncompacted_chunks:
            click.echo(f"failed      {compacted.uncompacted_chunks} chunks: see the messages above")
    if packed is None:
        return
    click.echo(f"packed      {packed.packed_files} files into {packed.segments_made} blocks")
    if packed.recent_files:
        by = packed.packing_held_by
        held = f", because of {by}" if by else ""
        click.echo(f"unpacked    {packed.recent_files} files: may still be committed again{held}")
    if packed.shared_files:
        click.echo(f"unpacked    {packed.shared_files} files: of clones or snapshots, too")
    if packed.unreadable_files:
        click.echo(f"failed      {packed.unreadable_files} files: see the messages above")


def _print(found: Collected, delete: bool) -> None:
    for name, count, what in (
        ("in use", found.in_use, ""),
        ("dead", found.dead, "wait for deletion by a mount"),
        ("recent", found.recent, _held(found)),
        ("young", found.young, "leaked, and younger than --age"),
        ("strange", found.strange, "keys that are no blocks'"),
        ("leaked", found.leaked, "" if delete else "--delete removes them"),
    ):
        if count.objects or name in ("in use", "leaked"):
            size = format_size(count.bytes)
            click.echo(f"{name:<11} {count.objects} objects, {size}{what and ': ' + what}")
    if delete:
        click.echo(f"deleted     {found.deleted.objects} objects")
    if found.failed:
        click.echo(f"failed      {found.failed} objects could not be deleted: run it again")


def _held(found: Collected) -> str:
    by = f", because of {found.held_by}" if found.held_by else ""
    return f"may still be committed{by}"
