"""Of which shards a result was made: a digest of each, in the header of `model.safetensors`.

Called by `lifecycle/unshard`. So a result is not taken for that of other shards, and a removal of
shards that was interrupted can go on: what is left must be what the result was made of. The digest
of a file of torch.save is of the directory of its archive, which has the length and the CRC-32 of
each member. A shard of DCP is many such archives: its digest is of the end of each, where such a
directory is, and of its size; that of `.metadata` is of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import header_length, header_metadata
from slicefs.checkpoint.step import joined
from slicefs.lifecycle.shards.dcp_metadata import METADATA, read_metadata
from slicefs.lifecycle.shards.plan import MODEL
from slicefs.lifecycle.shards.torch_file import no_archive
from slicefs.stores.tree import Tree

KEY: Final = "slicefs.shards"
MODEL_KEY: Final = "slicefs.shards-model-only"  # of a result that must not cost the shards
BESIDE_KEY: Final = "slicefs.beside-shards"
_DIGEST_BYTES: Final = 12
_TAIL_BYTES: Final = 2 << 10  # of an archive of one tensor: its directory has some 700 bytes
_BATCH: Final = 1024  # tails that are read at a time
_GAP_BYTES: Final = 16 << 10


class ShardOrigin(NamedTuple):
    """Digests of the shards in the order of their removal, and of the files that stay."""

    shards: Mapping[str, str]
    beside: Mapping[str, str]


def zip_digests(tree: Tree, folder: str, names: Iterable[str]) -> dict[str, str]:
    """A digest of each file of torch.save, in order. Raises: OSError, ConfigError."""
    found = {}
    for name in names:
        path = joined(folder, name)
        try:
            with tree.open_read(path) as file, zipfile.ZipFile(file) as archive:
                members = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise no_archive(tree, path, error) from error
        found[name] = _digest(json.dumps(members).encode())
    return found


def dcp_digests(tree: Tree, folder: str, names: Collection[str] | None = None) -> dict[str, str]:
    """Digests of the shards, or of `names`; `.metadata` is last. Raises: OSError, Corrupt."""
    data = tree.read(joined(folder, METADATA))
    metadata = read_metadata(data, joined(folder, METADATA))
    places: dict[str, set[tuple[int, int]]] = {}
    for tensor in metadata.tensors.values():
        for chunk in tensor.chunks:
            places.setdefault(chunk.shard, set()).add((chunk.begin, chunk.length))
    for other in metadata.others.values():
        places.setdefault(other.shard, set()).add((other.begin, other.length))
    found = {}
    for shard in sorted(places):
        if names is None or shard in names:
            path = joined(folder, shard)
            found[shard] = _shard_digest(tree, path, sorted(places[shard]))
    return {**found, METADATA: _digest(data)}


def _shard_digest(tree: Tree, path: str, places: list[tuple[int, int]]) -> str:
    made = hashlib.blake2b(str(tree.stat(path).size).encode(), digest_size=_DIGEST_BYTES)
    for at in range(0, len(places), _BATCH):
        batch = places[at : at + _BATCH]
        made.update(json.dumps(batch).encode())
        ends = [(path, b + max(0, n - _TAIL_BYTES), b + n) for b, n in batch]
        for tail in tree.read_ranges(ends, _GAP_BYTES):
            made.update(tail)
    return made.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def require_same(before: ShardOrigin, now: ShardOrigin, folder: str) -> None:
    """Raises: ConfigError where a shard is another one than before."""
    for old, new in zip(before, now, strict=True):
        for name in old:
            if old[name] != new.get(name):
                raise ConfigError(
                    f"{joined(folder, name)}: has changed meanwhile, so the shards stay: "
                    "run it again when nothing writes there"
                )


def encode_origin(origin: ShardOrigin, *, model_only: bool) -> dict[str, str]:
    """The metadata of a safetensors file that names these shards."""
    words = {_key(model_only): origin.shards, BESIDE_KEY: origin.beside}
    return {key: json.dumps(each, separators=(",", ":")) for key, each in words.items() if each}


def stored_origin(tree: Tree, folder: str, *, model_only: bool = False) -> ShardOrigin:
    """The shards that such a result was made of; empty where it does not say. Raises: Corrupt."""
    path = joined(folder, MODEL)
    length = header_length(tree.read(path, 0, 8), path)
    metadata = header_metadata(tree.read(path, 0, length), path)
    try:
        found = [json.loads(metadata.get(key, "{}")) for key in (_key(model_only), BESIDE_KEY)]
    except (ValueError, RecursionError):
        return ShardOrigin({}, {})
    return ShardOrigin(*(each if isinstance(each, dict) else {} for each in found))


def _key(model_only: bool) -> str:
    return MODEL_KEY if model_only else KEY


def left_over(tree: Tree, folder: str, names: Collection[str], origin: ShardOrigin) -> list[str]:
    """The shards that an interrupted removal has left; empty where it was none.

    Raises: OSError, ConfigError, Corrupt.
    """
    left = [name for name in origin.shards if name in names]
    if not left or len(left) == len(origin.shards) or list(origin.shards)[-1] not in left:
        return []
    return left if origin_now(tree, folder, left, origin.beside) == _only(origin, left) else []


def _only(origin: ShardOrigin, names: Collection[str]) -> ShardOrigin:
    return origin._replace(shards={n: each for n, each in origin.shards.items() if n in names})


def origin_now(
    tree: Tree, folder: str, shards: Collection[str], beside: Collection[str]
) -> ShardOrigin:
    """The digests of files as they are. Raises: OSError, ConfigError, Corrupt."""
    if METADATA in shards:
        return ShardOrigin(dcp_digests(tree, folder, shards), {})
    return ShardOrigin(zip_digests(tree, folder, shards), zip_digests(tree, folder, beside))
