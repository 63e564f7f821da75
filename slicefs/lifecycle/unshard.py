"""From a DCP checkpoint to safetensors, one tensor at a time.

Writes `model.safetensors` (with the optimizer's tensors in `optim.safetensors`), and what is no
tensor to `other/NAME.pt`, as torch.save wrote it. At most one tensor and one stored chunk of it are
in memory. The result has a manifest, written last; shards go only after all of it was read back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import quote

from fsmeta.errors import ConfigError, Corrupt
from fsmeta.runtime import SystemRuntime
from slicefs.checkpoint.layout import MANIFEST, new_token, parse_step
from slicefs.checkpoint.manifest import Digester, FileEntry, Manifest
from slicefs.checkpoint.reading import verify_file
from slicefs.checkpoint.safetensors import ITEM_BYTES, TensorSpec, encode_header
from slicefs.checkpoint.step import load_step
from slicefs.lifecycle.dcp_metadata import (
    METADATA,
    BytesEntry,
    CheckpointMetadata,
    Chunk,
    TensorEntry,
    read_metadata,
    read_tensor,
)
from slicefs.lifecycle.transfer import Endpoint
from slicefs.stores.tree import Tree

MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optim.safetensors"
_OPTIMIZER_KEYS: Final = ("optim.", "optimizer.", "optimizers.", "optimizer_state")


class UnshardReport(NamedTuple):
    """What an unshard has written."""

    tensors: int
    others: int
    written_bytes: int
    deleted: int  # shards
    skipped: bool  # the result was there already


def unshard(
    source: Endpoint,
    target: Endpoint,
    *,
    model_only: bool = False,
    delete_sharded: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> UnshardReport:
    """Unshard one step. Raises: ConfigError where there is no DCP checkpoint, Corrupt, EIO."""
    metadata = _load(source)
    if delete_sharded and model_only:
        raise ConfigError("--delete-sharded: with --model-only the optimizer's state would be lost")
    done = load_step(target.tree, target.path)
    wanted = _outputs(metadata, model_only)
    skipped = done is not None and set(done.names) == {name for name, _ in wanted}
    if skipped and done is not None:
        problem = next(done.problems(digest=True), None)
        skipped = problem is None
    if not skipped:
        _write(source, target, wanted, say)
        done = load_step(target.tree, target.path)
    deleted = 0
    if delete_sharded:
        problem = "is missing" if done is None else next(done.problems(digest=True), None)
        if problem is not None:
            raise OSError(5, f"the shards stay: {problem}", target.path)
        deleted = _delete(source, metadata)
    tensors = sum(len(each) for _, each in wanted if isinstance(each, list))
    size = 0 if skipped or done is None else done.manifest.size
    return UnshardReport(tensors, len(metadata.others), size, deleted, skipped)


def _load(source: Endpoint) -> CheckpointMetadata:
    try:
        data = source.tree.read(source.at(METADATA))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{source.path or source.tree.url}: has no {METADATA}, so it is no DCP checkpoint: "
            "name the directory of one step"
        ) from error
    return read_metadata(data, source.at(METADATA))


Tensors = list[tuple[str, TensorEntry]]


def _outputs(
    metadata: CheckpointMetadata, model_only: bool
) -> list[tuple[str, Tensors | BytesEntry]]:
    """The files to write, each with what it holds."""
    optimizer = sorted(i for i in metadata.tensors.items() if i[0].startswith(_OPTIMIZER_KEYS))
    model = sorted(i for i in metadata.tensors.items() if not i[0].startswith(_OPTIMIZER_KEYS))
    out: list[tuple[str, Tensors | BytesEntry]] = [(MODEL, model)]
    if model_only:
        return out
    if optimizer:
        out.append((OPTIMIZER, optimizer))
    for name, entry in sorted(metadata.others.items()):
        out.append((f"other/{quote(name, safe=' ()[]=,')}.pt", entry))
    return out


def _write(
    source: Endpoint,
    target: Endpoint,
    wanted: Sequence[tuple[str, Tensors | BytesEntry]],
    say: Callable[[str], None],
) -> None:
    entries: dict[str, FileEntry] = {}
    for name, content in wanted:
        pieces = _bytes_of(source, content) if isinstance(content, BytesEntry) else None
        entries[name] = _write_file(
            target.tree, target.at(name), pieces or _file_of(source, content, say)
        )
    for name, entry in entries.items():
        verify_file(target.tree, target.at(name), entry)
    parsed = parse_step(target.path.rpartition("/")[2] or target.tree.url.rpartition("/")[2])
    number = 0 if parsed is None else parsed.number
    token = new_token(SystemRuntime().random_bits(64))
    manifest = Manifest(number, token, "", "", False, entries)
    target.tree.write_atomic(target.at(MANIFEST), [manifest.encode()])


def _write_file(tree: Tree, path: str, pieces: Iterator[bytes | memoryview]) -> FileEntry:
    digester = Digester()
    with tree.writer(path) as writer:
        for piece in pieces:
            digester.update(piece)
            writer.write(piece)
    return digester.entry()


def _bytes_of(source: Endpoint, entry: BytesEntry) -> Iterator[bytes | memoryview]:
    yield source.tree.read(source.at(entry.shard), entry.begin, entry.begin + entry.length)


def _file_of(
    source: Endpoint, content: Tensors | BytesEntry, say: Callable[[str], None]
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file."""
    assert isinstance(content, list)
    specs = [(name, TensorSpec(entry.dtype, entry.shape)) for name, entry in content]
    yield encode_header(specs, {"format": "pt"})
    for index, (name, entry) in enumerate(content, 1):
        say(f"{index} of {len(content)} tensors: {name}")
        yield assemble(source, name, entry)


def assemble(source: Endpoint, name: str, entry: TensorEntry) -> memoryview:
    """The bytes of one tensor. Raises: Corrupt where its chunks do not cover it."""
    item = ITEM_BYTES[entry.dtype]
    spec = TensorSpec(entry.dtype, entry.shape)
    covered = 0
    out: bytearray | None = None
    for chunk in entry.chunks:
        where = f"{name} in {chunk.shard}"
        stored = source.tree.read(source.at(chunk.shard), chunk.begin, chunk.begin + chunk.length)
        data = read_tensor(memoryview(stored), item, where)
        expected = TensorSpec(entry.dtype, chunk.sizes).nbytes
        if len(data) != expected:
            raise Corrupt(where.encode(), b"chunk", f"{len(data)} bytes, not {expected}")
        covered += expected
        if chunk.sizes == entry.shape:
            return data
        if out is None:
            out = bytearray(spec.nbytes)
        _place(out, entry.shape, chunk, data, item)
    if covered != spec.nbytes:
        raise Corrupt(
            name.encode(), b"chunks", f"{covered} of {spec.nbytes} bytes are in the checkpoint"
        )
    return memoryview(out or b"")


def _place(out: bytearray, shape: Sequence[int], chunk: Chunk, data: memoryview, item: int) -> None:
    """Copy a chunk to its place in a tensor, run by run."""
    ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
    if any(end > size for end, size in zip(ends, shape, strict=True)):
        raise Corrupt(chunk.shard.encode(), b"chunk", "it lies outside of its tensor")
    axis = len(shape) - 1  # the last axis that is not whole: a run goes over it and all behind
    while axis > 0 and chunk.sizes[axis] == shape[axis]:
        axis -= 1
    strides = [item] * len(shape)
    for each in range(len(shape) - 2, -1, -1):
        strides[each] = strides[each + 1] * shape[each + 1]
    run = chunk.sizes[axis] * strides[axis]
    view, at = memoryview(out), 0
    base = sum(o * s for o, s in zip(chunk.offsets, strides, strict=True))
    for index in itertools.product(*(range(size) for size in chunk.sizes[:axis])):
        begin = base + sum(i * s for i, s in zip(index, strides, strict=False))
        view[begin : begin + run] = data[at : at + run]
        at += run


def _delete(source: Endpoint, metadata: CheckpointMetadata) -> int:
    """Remove the shards that `.metadata` names, and nothing else; how many.

    The manifest goes first, so that the step is not taken for a whole one; `.metadata` goes last,
    so that an interrupted removal can be run again.
    """
    shards = sorted(metadata.shard_lengths())
    for name in (MANIFEST, *shards, METADATA):
        with suppress(FileNotFoundError):
            source.tree.remove(source.at(name))
    return len(shards)
