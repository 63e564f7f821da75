"""`S3MapDataset` and `S3IterableDataset`: objects of a bucket, handed to a transform as readers.

Objects are listed once, when a dataset is made. Small ones are read with their neighbours, before a
transform asks; large ones when it does. Threading: as the datasets of `slicefs.torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from fsmeta.errors import ConfigError
from slicefs.client.ranges import MAX_GAP_BYTES, Item
from slicefs.compat.s3torch.checkpoint import bucket_of
from slicefs.compat.s3torch.client import S3ClientConfig, S3Place, checked, place_of
from slicefs.compat.s3torch.s3reader import RANGE_BASED, S3Reader, kind_of
from slicefs.data.source import UNKNOWN, Sample, SampleSource, split_url
from slicefs.stores.tree import Tree

try:
    from torch.utils.data import Dataset, IterableDataset as TorchIterable

    from slicefs.torch.data import IterableDataset, MapDataset, Shard
except ModuleNotFoundError as missing:
    raise ImportError("slicefs.compat.s3torch needs torch: pip install torch") from missing

Handed = Callable[[S3Reader], Any]
SMALL_BYTES: Final = 8 << 20  # up to here an object is read before it is asked for
NOTHING: Final = -1  # in place of that: no object is, whatever its size
_LATER: Final = memoryview(b"")  # in place of the bytes of the others


def identity(reader: S3Reader) -> S3Reader:
    """The reader itself."""
    return reader


class _LazySource(SampleSource):
    """Samples of which only the small ones have their bytes."""

    small_bytes = SMALL_BYTES

    def read(self, indexes: Sequence[int], max_gap: int = MAX_GAP_BYTES) -> list[Sample]:
        """See `SampleSource`."""
        small = [index for index in indexes if self._is_small(self.objects[index][1])]
        read = super().read(small, max_gap) if small else []
        found = {
            index: sample
            for index, sample in zip(small, read, strict=True)
            if not self._is_begin(index, len(sample.data))
        }
        later = (Sample(self.objects[index][0], _LATER) for index in indexes)
        return [found.get(index, each) for index, each in zip(indexes, later, strict=True)]

    def _is_small(self, size: int) -> bool:
        """Whether an object is read ahead; of one of no known size, its begin is."""
        return self.small_bytes != NOTHING and size <= self.small_bytes

    def _is_begin(self, index: int, length: int) -> bool:
        """Whether these may not be all bytes of an object, whose size is not known."""
        return self.objects[index][1] == UNKNOWN and length >= self.small_bytes


@dataclass(frozen=True)
class _Transform:
    """From a sample to what a program gets; pickles if the program's function does."""

    tree: Tree
    bucket: str
    handed: Handed

    def __call__(self, sample: Sample) -> Any:
        data = None if sample.data is _LATER else sample.data
        return self.handed(S3Reader(self.tree, self.bucket, sample.path, data))


class _Asked(NamedTuple):
    """What both datasets are asked for, parsed."""

    place: S3Place
    transform: Handed
    small_bytes: int  # or NOTHING

    def prefix(self, s3_uri: str) -> tuple[SampleSource, _Transform]:
        """The objects whose keys begin as the URL. Raises: ConfigError, OSError."""
        top, key = split_url(checked(s3_uri))
        tree = self.place.tree(top)
        return self._made(tree, top, [(info.path, info.size) for info in tree.list(key)])

    def objects(self, object_uris: str | Iterable[str]) -> tuple[SampleSource, _Transform]:
        """These objects, which are in one place. Raises: ConfigError."""
        uris = [object_uris] if isinstance(object_uris, str) else list(object_uris)
        places = [split_url(checked(uri)) for uri in uris]
        tops = sorted({top for top, _ in places})
        if len(tops) != 1:
            named = ", ".join(tops[:3]) or "none"
            raise ConfigError(f"from_objects: {named}: name objects of one bucket, at least one")
        keys = [key for _, key in places]
        begins: list[Item] = [(key, 0, max(0, self.small_bytes)) for key in keys]
        objects = [(key, UNKNOWN) for key in keys]
        return self._made(self.place.tree(tops[0]), tops[0], objects, begins)

    def _made(
        self,
        tree: Tree,
        top: str,
        objects: Sequence[tuple[str, int]],
        items: Sequence[Item] | None = None,
    ) -> tuple[SampleSource, _Transform]:
        source = _LazySource(tree, objects, items)
        source.small_bytes = self.small_bytes
        return source, _Transform(tree, bucket_of(top), self.transform)


class _Placed:
    """A dataset that knows where its objects are."""

    _place: S3Place

    @property
    def region(self) -> str:
        """As it was given."""
        return self._place.region

    @property
    def endpoint(self) -> str | None:
        """As it was given."""
        return self._place.endpoint or None


class S3MapDataset(_Placed, Dataset):
    """Objects by number; a DataLoader's batch is one batch of reads."""

    def __init__(self, source: SampleSource, transform: _Transform, asked: _Asked) -> None:
        """Use `from_prefix` or `from_objects`."""
        self._samples = MapDataset(source=source, transform=transform)
        self._place = asked.place

    @classmethod
    def from_prefix(
        cls,
        s3_uri: str,
        *,
        region: str,
        endpoint: str | None = None,
        transform: Handed = identity,
        s3client_config: S3ClientConfig | None = None,
        reader_constructor: Any = None,
    ) -> Self:
        """The objects whose keys begin as the URL. Raises: ConfigError, OSError."""
        place = place_of(cls.__name__, region, endpoint, s3client_config)
        asked = _Asked(place, transform, _small(cls.__name__, reader_constructor))
        return cls(*asked.prefix(s3_uri), asked)

    @classmethod
    def from_objects(
        cls,
        object_uris: str | Iterable[str],
        *,
        region: str,
        endpoint: str | None = None,
        transform: Handed = identity,
        s3client_config: S3ClientConfig | None = None,
        reader_constructor: Any = None,
    ) -> Self:
        """These objects. Raises: ConfigError."""
        place = place_of(cls.__name__, region, endpoint, s3client_config)
        asked = _Asked(place, transform, _small(cls.__name__, reader_constructor))
        return cls(*asked.objects(object_uris), asked)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """A batch, in one batch of reads."""
        return self._samples.__getitems__(indexes)


class S3IterableDataset(_Placed, TorchIterable):
    """Objects in order: all of them for each worker, or with `enable_sharding` each for one."""

    def __init__(
        self, source: SampleSource, transform: _Transform, asked: _Asked, shard: Shard
    ) -> None:
        """Use `from_prefix` or `from_objects`."""
        self._samples = IterableDataset(source=source, transform=transform, shard=shard)
        self._place = asked.place

    @classmethod
    def from_prefix(
        cls,
        s3_uri: str,
        *,
        region: str,
        endpoint: str | None = None,
        transform: Handed = identity,
        s3client_config: S3ClientConfig | None = None,
        enable_sharding: bool = False,
        reader_constructor: Any = None,
    ) -> Self:
        """The objects whose keys begin as the URL. Raises: ConfigError, OSError."""
        place = place_of(cls.__name__, region, endpoint, s3client_config)
        asked = _Asked(place, transform, _small(cls.__name__, reader_constructor))
        return cls(*asked.prefix(s3_uri), asked, _shard(enable_sharding))

    @classmethod
    def from_objects(
        cls,
        object_uris: str | Iterable[str],
        *,
        region: str,
        endpoint: str | None = None,
        transform: Handed = identity,
        s3client_config: S3ClientConfig | None = None,
        enable_sharding: bool = False,
        reader_constructor: Any = None,
    ) -> Self:
        """These objects. Raises: ConfigError."""
        place = place_of(cls.__name__, region, endpoint, s3client_config)
        asked = _Asked(place, transform, _small(cls.__name__, reader_constructor))
        return cls(*asked.objects(object_uris), asked, _shard(enable_sharding))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def _small(where: str, reader_constructor: Any) -> int:
    """Up to which size an object is read before it is asked for. Raises: ConfigError."""
    return NOTHING if kind_of(where, reader_constructor).name == RANGE_BASED else SMALL_BYTES


def _shard(enable_sharding: bool) -> Shard:
    return "rank_worker" if enable_sharding else "none"
