"""From a sharded checkpoint to safetensors, in bounded memory.

Writes `model.safetensors` (with the optimizer's tensors in `optim.safetensors`), and of DCP what is
no tensor to `other/NAME.pt`, as torch.save wrote it. Of a DCP step, at most one tensor and one
stored chunk of it are in memory; of the other kinds, a window of some MiB where ranks hold ranges.
The result has a manifest, written last; shards go only after all of it was read back, and only if
they still are what it was made of. Files are shown once the shards were compared with their
checksums; where an unshard fails before, an earlier result stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Final, NamedTuple
from urllib.parse import quote

from fsmeta.errors import ConfigError, Corrupt
from fsmeta.runtime import SystemRuntime
from slicefs.checkpoint.layout import MANIFEST, new_token, parse_step
from slicefs.checkpoint.manifest import Digester, FileEntry, StepManifest
from slicefs.checkpoint.reading import verify_file
from slicefs.checkpoint.safetensors import (
    ITEM_BYTES,
    TensorSpec,
    decode_header,
    encode_header,
    header_length,
)
from slicefs.checkpoint.step import Step, load_step
from slicefs.lifecycle.shards.dcp_metadata import (
    METADATA,
    BytesEntry,
    CheckpointMetadata,
    TensorEntry,
    read_metadata,
    read_tensor,
)
from slicefs.lifecycle.shards.layouts import (
    AUTO,
    DCP,
    LATEST,
    files_of,
    kind_of,
    kinds_of,
    latest_tag,
    plan_shards,
)
from slicefs.lifecycle.shards.pickles import told_of
from slicefs.lifecycle.shards.plan import MODEL, OPTIMIZER, PlannedFile
from slicefs.lifecycle.shards.provenance import (
    ShardOrigin,
    dcp_digests,
    encode_origin,
    left_over,
    origin_now,
    require_same,
    stored_origin,
    zip_digests,
)
from slicefs.lifecycle.shards.reading import ShardReader
from slicefs.lifecycle.shards.strides import are_apart, place
from slicefs.lifecycle.transfer import TransferEnd
from slicefs.stores.tree import Buffer, Tree, Writer

_OPTIMIZER_KEYS: Final = ("optim.", "optimizer.", "optimizers.", "optimizer_state")
Say = Callable[[str], None]


class UnshardReport(NamedTuple):
    """What an unshard has written."""

    tensors: int
    others: int
    written_bytes: int
    deleted: int  # shards
    skipped: bool  # the result was there already
    kind: str = DCP
    lost: tuple[str, ...] = ()  # what the shards have and the result has not


class Output(NamedTuple):
    """A file to write: its name, how many tensors it has, and what gives its bytes."""

    name: str
    tensors: int
    pieces: Callable[[Say], Iterator[Buffer]]


class UnshardWork(NamedTuple):
    """What is to be done for one step, of whatever kind."""

    kind: str
    outputs: Sequence[Output]
    others: int
    shards: Sequence[str]  # removed in this order
    check: Callable[[], None]  # raises where a shard's bytes are not what was saved
    origin: ShardOrigin
    model_only: bool
    lost: tuple[str, ...] = ()


def unshard(
    source: TransferEnd,
    target: TransferEnd,
    *,
    kind: str = AUTO,
    model_only: bool = False,
    delete_sharded: bool = False,
    say: Say = lambda _: None,
) -> UnshardReport:
    """Unshard one step. Raises: ConfigError where there is no such checkpoint, Corrupt, EIO."""
    if delete_sharded and model_only:
        raise ConfigError("--delete-sharded: with --model-only the optimizer's state would be lost")
    source = _tagged(source)
    names = {info.path for info in source.files()}
    done = load_step(target.tree, target.path)
    if delete_sharded and done is not None:
        left = _interrupted(source, target, names)
        if left:
            _require_whole(done, target)
            found = kind_of(source.path, left, kind)
            return UnshardReport(0, 0, 0, _delete(source, left), True, found)
    with told_of(source.path or source.tree.url):
        work = _work(source, names, kind, model_only)
    skipped = _is_done(done, work, target)
    if not skipped:
        _write(source, target, work, say)
        done = load_step(target.tree, target.path)
    deleted = 0
    if delete_sharded:
        _require_whole(done, target)
        _require_unchanged(source, work)
        deleted = _delete(source, work.shards)
    tensors = sum(each.tensors for each in work.outputs)
    size = 0 if skipped or done is None else done.manifest.size
    return UnshardReport(tensors, work.others, size, deleted, skipped, work.kind, work.lost)


def _tagged(source: TransferEnd) -> TransferEnd:
    """The directory that DeepSpeed's `latest` names, where there are no shards beside it."""
    try:
        entries = [each for each in source.tree.list_dir(source.path) if not each.is_dir]
    except (FileNotFoundError, NotADirectoryError):
        return source
    names = {each.name for each in entries}
    if LATEST not in names or kinds_of(names):
        return source
    tag = latest_tag(source.tree, source.path)
    return source if tag is None else TransferEnd(source.tree, source.at(tag))


def _interrupted(source: TransferEnd, target: TransferEnd, names: Collection[str]) -> list[str]:
    """The shards that an interrupted removal has left, where the result is of these shards."""
    try:
        origin = stored_origin(target.tree, target.path)
        return left_over(source.tree, source.path, names, origin)
    except (FileNotFoundError, Corrupt, ConfigError):
        return []


def _is_done(done: Step | None, work: UnshardWork, target: TransferEnd) -> bool:
    """Whether the result is there, whole, and of these shards."""
    if done is None or set(done.names) != {each.name for each in work.outputs}:
        return False
    if _problem(done, target) is not None:
        return False
    return stored_origin(target.tree, target.path, model_only=work.model_only) == work.origin


def _require_whole(done: Step | None, target: TransferEnd) -> None:
    """Read a result before its shards go. Raises: EIO."""
    problem = _problem(done, target)
    if problem is not None:
        raise OSError(5, f"the shards stay: {problem}", target.path)


def _problem(done: Step | None, target: TransferEnd) -> str | None:
    """What is wrong with a result; all of it is read."""
    if done is None:
        return "is missing"
    found = next(done.problems(digest=True), None)
    if found is not None:
        return found
    try:
        for name in done.names:
            _check_tensors(target.tree, target.at(name))
    except Corrupt as error:
        return str(error)
    return None


def _check_tensors(tree: Tree, path: str) -> None:
    """Compare what a safetensors file says of itself with its size. Raises: Corrupt."""
    if path.endswith(".safetensors"):
        length = header_length(tree.read(path, 0, 8), path)
        decode_header(tree.read(path, 0, length), tree.stat(path).size, path)


def _require_unchanged(source: TransferEnd, work: UnshardWork) -> None:
    """Raises: ConfigError where a shard is not what it was before it was read."""
    now = origin_now(source.tree, source.path, list(work.origin.shards), list(work.origin.beside))
    require_same(work.origin, now, source.path)


def _work(source: TransferEnd, names: Collection[str], kind: str, model_only: bool) -> UnshardWork:
    """What the shards of a step become. Raises: ConfigError, Corrupt."""
    found = kind_of(source.path or source.tree.url, names, kind)
    if found == DCP:
        return _dcp(source, model_only)
    before = _digests_of(source, files_of(found, names))
    plan = plan_shards(source.tree, source.path, found, names, model_only=model_only)
    reader = ShardReader(source.tree)
    origin = origin_now(source.tree, source.path, plan.shards, plan.beside)
    require_same(origin, ShardOrigin(before, before), source.path)
    about = encode_origin(origin, model_only=model_only)
    outputs = [_planned(reader, each, about, source.path) for each in plan.files]
    return UnshardWork(found, outputs, 0, plan.shards, reader.finish, origin, model_only, plan.lost)


def _digests_of(source: TransferEnd, names: Sequence[str]) -> dict[str, str]:
    """Digests of archives, before their plan; those that are none are left to the plan."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(FileNotFoundError, ConfigError):
            found |= zip_digests(source.tree, source.path, [name])
    return found


def _planned(
    reader: ShardReader, file: PlannedFile, origin: Mapping[str, str], where: str
) -> Output:
    """A file whose tensors are parts of shards."""
    about = origin if file.name == MODEL else {}
    tensors = [tensor for _, tensor in file.tensors]
    reader.expect(tensors)

    def pieces(say: Say) -> Iterator[Buffer]:
        specs = [(name, tensor.spec) for name, tensor in file.tensors]
        yield encode_header(specs, {**file.metadata, **about})
        say(f"{file.name}: {len(specs)} tensors")
        with told_of(where):
            yield from _counted(reader.tensors(tensors), specs)

    return Output(file.name, len(file.tensors), pieces)


def _counted(pieces: Iterator[Buffer], specs: Sequence[tuple[str, TensorSpec]]) -> Iterator[Buffer]:
    """The bytes of tensors, none of them in parts of two. Raises: Corrupt for another count."""
    rest = iter(specs)
    name, left = "", 0
    for piece in pieces:
        while not left and len(piece):
            name, spec = next(rest, ("the last one", None))
            if spec is None:
                raise Corrupt(name.encode(), b"tensor", "more bytes than all tensors have")
            left = spec.nbytes
        if len(piece) > left:
            raise Corrupt(name.encode(), b"tensor", f"{len(piece) - left} bytes too many")
        left -= len(piece)
        yield piece
    if left or any(spec.nbytes for _, spec in rest):
        raise Corrupt(name.encode(), b"tensor", "bytes are missing")


def _dcp(source: TransferEnd, model_only: bool) -> UnshardWork:
    """A step of DCP."""
    _load(source)  # says what is missing
    origin = ShardOrigin(dcp_digests(source.tree, source.path), {})
    metadata = _load(source)  # behind its digest: compared once all was read
    about = {"format": "pt", **encode_origin(origin, model_only=model_only)}
    outputs = []
    for name, content in _outputs(metadata, model_only):
        count = 0 if isinstance(content, BytesEntry) else len(content)
        header = about if name == MODEL else {"format": "pt"}
        outputs.append(Output(name, count, _pieces_of(source, content, header)))
    shards = (*sorted(metadata.shard_lengths()), METADATA)
    if list(shards) != list(origin.shards):
        raise ConfigError(f"{source.at(METADATA)}: has changed meanwhile: run it again")
    others = len(metadata.others)
    return UnshardWork(DCP, outputs, others, shards, lambda: None, origin, model_only)


def _load(source: TransferEnd) -> CheckpointMetadata:
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


def _write(source: TransferEnd, target: TransferEnd, work: UnshardWork, say: Say) -> None:
    shown: list[str] = []
    try:
        entries = _show(source, target, work, say, shown)
        for name, entry in entries.items():
            verify_file(target.tree, target.at(name), entry)
            _check_tensors(target.tree, target.at(name))
    except BaseException:
        for name in shown:
            with suppress(OSError):
                target.tree.remove(target.at(name))
        raise
    parsed = parse_step(target.path.rpartition("/")[2] or target.tree.url.rpartition("/")[2])
    number = 0 if parsed is None else parsed.number
    token = new_token(SystemRuntime().random_bits(64))
    manifest = StepManifest(number, token, "", "", False, entries)
    target.tree.write_atomic(target.at(MANIFEST), [manifest.encode()])


def _show(
    source: TransferEnd, target: TransferEnd, work: UnshardWork, say: Say, shown: list[str]
) -> dict[str, FileEntry]:
    """Write all files, and show them once all was read and compared; `shown` gets their names."""
    tensors = [each for each in work.outputs if each.name in (MODEL, OPTIMIZER)]
    others = [each for each in work.outputs if each not in tensors]
    entries: dict[str, FileEntry] = {}
    with ExitStack() as stack:  # writers that are still open are aborted where it raises
        writers: dict[str, Writer] = {}
        for output in tensors:
            writer = stack.enter_context(target.tree.writer(target.at(output.name)))
            entries[output.name] = _fill(writer, output.pieces(say))
            writers[output.name] = writer
        for output in others:  # small, and too many to be open at a time: read once before
            for _ in output.pieces(say):
                pass
        work.check()
        _require_unchanged(source, work)
        for name, writer in writers.items():
            writer.close()
            shown.append(name)
        for output in others:
            with target.tree.writer(target.at(output.name)) as writer:
                entries[output.name] = _fill(writer, output.pieces(say))
            shown.append(output.name)
    return entries


def _fill(writer: Writer, pieces: Iterator[Buffer]) -> FileEntry:
    digester = Digester()
    for piece in pieces:
        digester.update(piece)
        writer.write(piece)
    return digester.entry()


def _pieces_of(
    source: TransferEnd, content: Tensors | BytesEntry, header: Mapping[str, str]
) -> Callable[[Say], Iterator[Buffer]]:
    if isinstance(content, BytesEntry):
        return lambda _: _bytes_of(source, content)
    return lambda say: _file_of(source, content, header, say)


def _bytes_of(source: TransferEnd, entry: BytesEntry) -> Iterator[Buffer]:
    """The bytes of what is no tensor. Raises: Corrupt where the shard is cut off."""
    found = source.tree.read(source.at(entry.shard), entry.begin, entry.begin + entry.length)
    if len(found) != entry.length:
        raise Corrupt(entry.shard.encode(), b"shard", "is cut off: copy it again")
    yield found


def _file_of(
    source: TransferEnd, content: Tensors, header: Mapping[str, str], say: Say
) -> Iterator[Buffer]:
    """The bytes of a safetensors file. Raises: Corrupt."""
    specs = [(name, TensorSpec(entry.dtype, entry.shape)) for name, entry in content]
    yield encode_header(specs, header)
    for index, (name, entry) in enumerate(content, 1):
        say(f"{index} of {len(content)} tensors: {name}")
        with told_of(f"{source.path}: {name}"):
            data = assemble(source, name, entry)
        if len(data) != TensorSpec(entry.dtype, entry.shape).nbytes:
            raise Corrupt(name.encode(), b"tensor", f"has {len(data)} bytes")
        yield data


def assemble(source: TransferEnd, name: str, entry: TensorEntry) -> memoryview:
    """The bytes of one tensor. Raises: Corrupt where its chunks do not cover it."""
    item = ITEM_BYTES[entry.dtype]
    spec = TensorSpec(entry.dtype, entry.shape)
    covered = 0
    there = sum(TensorSpec(entry.dtype, chunk.sizes).nbytes for chunk in entry.chunks)
    if there != spec.nbytes:
        raise Corrupt(
            name.encode(), b"chunks", f"{there} of {spec.nbytes} bytes are in the checkpoint"
        )
    if not are_apart(entry.shape, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]):
        raise Corrupt(name.encode(), b"chunks", "are outside of their tensor, or overlap")
    out: bytearray | None = None
    for chunk in entry.chunks:
        where = f"{name} in {chunk.shard}"
        stored = source.tree.read(source.at(chunk.shard), chunk.begin, chunk.begin + chunk.length)
        data = read_tensor(stored, item, where)
        expected = TensorSpec(entry.dtype, chunk.sizes).nbytes
        if len(data) != expected:
            raise Corrupt(where.encode(), b"chunk", f"{len(data)} bytes, not {expected}")
        covered += expected
        if chunk.sizes == entry.shape:
            return data
        if out is None:
            out = bytearray(spec.nbytes)
        try:
            place(out, entry.shape, chunk.offsets, chunk.sizes, data)
        except ValueError as error:
            raise Corrupt(chunk.shard.encode(), b"chunk", str(error)) from error
    if covered != spec.nbytes:
        raise Corrupt(
            name.encode(), b"chunks", f"{covered} of {spec.nbytes} bytes are in the checkpoint"
        )
    return memoryview(out or b"")


def _delete(source: TransferEnd, shards: Sequence[str]) -> int:
    """Remove these shards, in this order, and nothing else; how many.

    The manifest goes first, so that the step is not taken for a whole one. `.metadata` of DCP, and
    the file of rank 0, is the last, so that an interrupted removal can be run again.
    """
    for name in (MANIFEST, *shards):
        with suppress(FileNotFoundError):
            source.tree.remove(source.at(name))
    return len([name for name in shards if name != METADATA])
