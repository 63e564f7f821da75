"""Whether a step is whole: against its manifest, or by what its files say of themselves.

A manifest names every file with its digest. Steps of other programs are looked at as far as their
formats allow: a DCP step needs `.metadata` and every shard that it names, as long as it says; a
safetensors file has the length of its header; no file of weights is empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from slicefs.checkpoint.layout import MANIFEST
from slicefs.checkpoint.safetensors import decode_header, header_length
from slicefs.checkpoint.step import joined, load_step
from slicefs.lifecycle.shards.dcp_metadata import METADATA, read_metadata
from slicefs.stores.tree import Tree

_NAME_A_STEP: Final = "name the directory of a step or a run"
_WEIGHTS: Final = (".pt", ".pth", ".bin", ".safetensors", ".distcp", ".ckpt", ".npz")


NO_STEP: Final = "none"


class StepVerdict(NamedTuple):
    """What is known of one step."""

    kind: str  # manifest, dcp, files or NO_STEP
    problems: tuple[str, ...]


def verify_step(tree: Tree, folder: str, *, digest: bool = False) -> StepVerdict:
    """Look at one step; with `digest`, read every byte that a manifest has a digest of."""
    try:
        step = load_step(tree, folder)
    except Corrupt as error:
        return StepVerdict("manifest", (f"{joined(folder, MANIFEST)}: {error}",))
    if step is not None:
        return StepVerdict("manifest", tuple(step.problems(digest=digest)))
    prefix = f"{folder}/" if folder else ""
    sizes = {info.path[len(prefix) :]: info.size for info in tree.list(prefix)}
    if not sizes:
        return StepVerdict(NO_STEP, (f"{folder}: has no files: {_NAME_A_STEP}",))
    if not any(name.endswith((METADATA, *_WEIGHTS)) for name in sizes):
        return StepVerdict(NO_STEP, (f"{folder}: has no file of weights: {_NAME_A_STEP}",))
    problems = list(_files(tree, folder, sizes))
    dcp = [name for name in sizes if name.rpartition("/")[2] == METADATA]
    orphans = any(name.endswith(".distcp") for name in sizes) and not dcp
    if orphans:
        problems.append(f"{joined(folder, METADATA)}: is missing; a save did not end")
    for name in dcp:
        problems += _dcp(tree, folder, name, sizes)
    return StepVerdict("dcp" if dcp or orphans else "files", tuple(problems))


def _files(tree: Tree, folder: str, sizes: dict[str, int]) -> Iterator[str]:
    for name, size in sorted(sizes.items()):
        path = joined(folder, name)
        if name.endswith(_WEIGHTS) and size == 0:
            yield f"{path}: is empty"
        elif name.endswith(".safetensors"):
            try:
                length = header_length(tree.read(path, 0, 8), path)
                decode_header(tree.read(path, 0, min(length, size)), size, path)
            except (Corrupt, OSError) as error:
                yield f"{path}: {error}"
        elif name.endswith((".pt", ".pth", ".bin", ".ckpt")) and _is_cut_zip(tree, path, size):
            yield f"{path}: is cut off"


def _is_cut_zip(tree: Tree, path: str, size: int) -> bool:
    """Whether a file that begins as torch's zip lacks the end of one."""
    if tree.read(path, 0, 4) != b"PK\x03\x04":
        return False
    return b"PK\x05\x06" not in tree.read(path, max(0, size - 65_557), size)


def _dcp(tree: Tree, folder: str, name: str, sizes: dict[str, int]) -> Iterator[str]:
    above = name.rpartition("/")[0]
    try:
        metadata = read_metadata(tree.read(joined(folder, name)), joined(folder, name))
    except Corrupt as error:
        yield str(error)
        return
    for shard, length in sorted(metadata.shard_lengths().items()):
        path = joined(above, shard)
        size = sizes.get(path)
        if size is None:
            yield f"{joined(folder, path)}: is missing"
        elif size < length:
            yield f"{joined(folder, path)}: has {size} bytes, at least {length} belong to it"
