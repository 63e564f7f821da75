"""Reads of many small files without opening each: two requests for metadata, one for each block.

Names, attributes and slices of a batch come together; each file is judged for the caller; then the
blocks that hold the files are fetched, each once however many files lie in it. Of attached files
one request more brings the objects that they show. What is not that
simple is left to the caller: files that are open or written here, of several slices or blocks,
links, and names that are not there.

Called by `BatchReader`. Threading: any thread; a batch marks itself as a read in flight, so that
no slice of it is deleted meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsdata.attached.object_blocks import PART_BYTES, ShownObject
from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import Access, BlockRead
from fsdata.resources.block_cache import BlockKey
from fsmeta.errors import ConfigError, ObjectMissing, StoreError
from fsmeta.ops.data.whole_files import WholeFile
from fsmeta.rules.access import EXECUTE, READ
from fsmeta.schema.snapshot_inos import is_snapshot_ino
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import FLAG_ATTACHED, Attr, Ino, Slice, SliceKind
from slicefs.client.parallel import Readers
from slicefs.client.paths import CallerView
from slicefs.client.ranges import WHOLE, MergedRead, cut

_NO_NAMES: Final = (b"", b".", b"..")


class KnownFile(NamedTuple):
    """A file of which it is known where its bytes are."""

    path: str
    size: int
    slice: Slice | None  # that has all of them; None: they have to be looked for
    shown: ShownObject | None = None  # or the object that has them


class _WantedFile(NamedTuple):
    """Bytes of a block that are bytes of a span."""

    span: MergedRead
    begin: int
    end: int


class _WantedBlock(NamedTuple):
    """A block and what is wanted of it."""

    blocks: BlockStore
    key: BlockKey
    length: int
    packed: bool
    wanted: list[_WantedFile]
    shown: ShownObject | None  # which is known while this is held


Found = list[tuple[int, memoryview]]


def read(
    view: CallerView,
    spans: Sequence[MergedRead],
    readers: Readers,
    known: Sequence[KnownFile] | None = None,
) -> tuple[Found, list[MergedRead]]:
    """What could be read of `spans`, as (place in the batch, bytes); and the spans that are left.

    `known`: their files, if they need not be asked for.

    Raises: OSError, where the store can't be asked.
    """
    done: Found = []
    with view.connection.client.data.epoch.reading():
        try:
            files = _files(view, spans) if known is None else known
            blocks, left = _plan(view, spans, files, done)
        except StoreError as error:
            raise view.as_oserror(error) from error
        _fetch(view, blocks, readers, done, left)
    return done, left


def _plan(
    view: CallerView, spans: Sequence[MergedRead], files: Sequence[KnownFile | None], done: Found
) -> tuple[list[_WantedBlock], list[MergedRead]]:
    """Which blocks have the spans; those that take none are done."""
    store = view.connection.client.blocks
    blocks: dict[BlockKey, _WantedBlock] = {}
    left: list[MergedRead] = []
    for span, file in zip(spans, files, strict=True):
        if file is None:
            left.append(span)
            continue
        end = file.size if span.end == WHOLE else min(span.end, file.size)
        if end <= span.begin:
            done += cut(span, memoryview(b""))
            continue
        piece = file.slice
        if piece is not None and (span.begin < piece.pos or piece.end < end):
            piece = None
        found = _in_slice(store, span, end, piece) if piece else _in_object(span, end, file.shown)
        if found is None:
            left.append(span)
            continue
        block, at = found
        block = blocks.setdefault(block.key, block)
        block.wanted.append(_WantedFile(span, at, at + end - span.begin))
    return list(blocks.values()), left


def _in_slice(
    store: BlockStore, span: MergedRead, end: int, piece: Slice
) -> tuple[_WantedBlock, int] | None:
    """The block of a slice that has a span, and where; None where there are several."""
    index, at = divmod(piece.off + span.begin - piece.pos, store.block_bytes)
    if at + end - span.begin > store.block_bytes:
        return None
    length = store.length_of(piece.size, index)
    packed = piece.kind is SliceKind.SEGMENT
    return _WantedBlock(store, (piece.id, index), length, packed, [], None), at


def _in_object(
    span: MergedRead, end: int, shown: ShownObject | None
) -> tuple[_WantedBlock, int] | None:
    """The same of an attached file; None, too, where little is wanted of a block."""
    if shown is None:
        return None
    read = shown.block_read(span.begin, end, Access.RANDOM)
    size = end - span.begin
    if read.end - read.begin < size or (read.length > PART_BYTES and 2 * size < read.length):
        return None
    return _WantedBlock(shown.blocks, read.key, read.length, False, [], shown), read.begin


def _only(file: WholeFile) -> Slice | None:
    """The slice of a file that has no other."""
    if len(file.slices) != 1 or not file.slices[0].stored:
        return None
    return file.slices[0]


def slices(view: CallerView, paths: Sequence[str]) -> list[Slice | None]:
    """Of files of snapshots, the one slice that has all of each; None where there is no such.

    Raises: ConfigError where one is of no snapshot, OSError.
    """
    spans = [MergedRead(path, 0, WHOLE, ()) for path in paths]
    for folder in {os.path.dirname(path) or "." for path in paths}:
        if not is_snapshot_ino(view.run(folder, partial(view.find, folder)).ino):
            raise ConfigError(f"{folder}: is no snapshot: slices are kept for those alone")
    try:
        found = _files(view, spans)
    except StoreError as error:
        raise view.as_oserror(error) from error
    return [
        piece
        if file is not None
        and (piece := file.slice) is not None
        and (piece.pos, piece.length) == (0, file.size)
        else None
        for file in found
    ]


def _files(view: CallerView, spans: Sequence[MergedRead]) -> list[KnownFile | None]:
    """The files that can be read here, in order. Raises: StoreError."""
    folders: dict[str, Attr | None] = {}
    places: list[tuple[Ino, bytes]] = []
    at: list[int] = []
    for number, span in enumerate(spans):
        folder, name = os.path.split(os.fsencode(span.path))
        key = os.fsdecode(folder)
        if key not in folders:
            folders[key] = _folder(view, folder or b".")
        attr = folders[key]
        if attr is not None and name not in _NO_NAMES and b"\0" not in name:
            places.append((attr.ino, name))
            at.append(number)
    found: list[KnownFile | None] = [None] * len(spans)
    for number, file in zip(at, view.connection.meta.whole_files(places), strict=True):
        if file is not None and _may_read(view, file.attr):
            path, size = spans[number].path, file.attr.size
            found[number] = KnownFile(path, size, _only(file), _shown(view, file))
    return found


def _shown(view: CallerView, file: WholeFile) -> ShownObject | None:
    """What an attached file shows."""
    if file.shown is None or not file.attr.flags & FLAG_ATTACHED:
        return None
    try:
        return view.vfs.io.attached.blocks(file.shown, file.attr.size).whole
    except OSError:
        return None  # the ordinary way says why


def _folder(view: CallerView, path: bytes) -> Attr | None:
    """A directory that the caller may search."""
    try:
        attr = view.find(path)
        if not attr.is_dir or attr.ino >= TRASH_INO:
            return None
        view.connection.meta.require(view.caller, attr, EXECUTE)
    except (OSError, StoreError):
        return None  # the ordinary way says why
    return attr


def _may_read(view: CallerView, attr: Attr) -> bool:
    """Whether the caller may, and nothing is open that the metadata don't know of."""
    if attr.nlink == 0 or attr.parent >= TRASH_INO:
        return False
    if view.vfs.files.get(attr.ino) is not None:
        return False
    try:
        view.connection.meta.require(view.caller, attr, READ)
    except OSError:
        return False
    return True


def _fetch(
    view: CallerView,
    blocks: Sequence[_WantedBlock],
    readers: Readers,
    done: Found,
    left: list[MergedRead],
) -> None:
    """Read blocks; those in memory first, the others several at a time. Raises: OSError."""
    far: list[_WantedBlock] = []

    def work(block: _WantedBlock) -> None:
        try:
            done.extend(_cut(block))
        except ObjectMissing:  # the files were written anew meanwhile
            left.extend(wanted.span for wanted in block.wanted)
        except (OSError, StoreError) as error:
            raise view.as_oserror(error, block.wanted[0].span.path) from error

    for block in blocks:
        if block.blocks.is_in_memory(block.key):
            work(block)
        else:
            far.append(block)
    readers.run(far, work)


def _cut(block: _WantedBlock) -> Iterator[tuple[int, memoryview]]:
    """What is wanted of a block, copied: a view would keep all of it in memory."""
    begin = min(each.begin for each in block.wanted)
    end = max(each.end for each in block.wanted)
    # kept whole: there is no page cache of a kernel that has it for the next epoch
    kept = block.packed or 2 * (end - begin) >= block.length
    access = Access.SEGMENT if kept else Access.RANDOM
    data = block.blocks.read(BlockRead(block.key, block.length, begin, end, access))
    alone = len(block.wanted) == 1 and end - begin == block.length
    for wanted in block.wanted:
        part = data[wanted.begin - begin : wanted.end - begin]
        yield from cut(wanted.span, part if alone else memoryview(bytes(part)))
