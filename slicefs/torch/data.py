"""`MapDataset` and `IterableDataset`: torch's datasets over any tree.

    MapDataset("s3://bucket/train", glob="**/*.jpg", transform=decode)
    IterableDataset("slicefs://vol/train", shuffle=True, batch_size=32)

What they read and in what order is decided in `slicefs/data`, without torch. Both pickle and work
under fork, spawn and forkserver. Threading: as `slicefs/data`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.utils.data as torch_data
from torch import distributed

from slicefs.client.connection import parse_bytes
from slicefs.client.ranges import Item
from slicefs.data.order import Reader
from slicefs.data.source import EVERYTHING, Sample, Source
from slicefs.data.stream import FETCH_BYTES, Stream

if TYPE_CHECKING:
    from slicefs.client.client import Client

Transform = Callable[[Sample], Any]


def _plain(sample: Sample) -> bytes:
    return bytes(sample.data)


def _source(url: str, glob: str, manifest: str | None, client: Client | None) -> Source:
    if manifest is not None:
        return Source.from_manifest(manifest, url=url, client=client)
    return Source.from_prefix(url, glob=glob, client=client)


class MapDataset(torch_data.Dataset):
    """Samples by number; `DataLoader` reads a batch of them at once (`__getitems__`)."""

    def __init__(
        self,
        url: str = "",
        *,
        transform: Transform | None = None,
        glob: str = EVERYTHING,
        manifest: str | None = None,
        client: Client | None = None,
        source: Source | None = None,
    ) -> None:
        """`transform` gets a `Sample` (path, data); without one a sample is its bytes."""
        self.source = source or _source(url, glob, manifest, client)
        self._transform = transform or _plain

    @classmethod
    def from_prefix(cls, url: str, **more: Any) -> MapDataset:
        """The files below a URL."""
        return cls(url, **more)

    @classmethod
    def from_objects(
        cls, items: Iterable[Item], *, url: str = "", client: Client | None = None, **more: Any
    ) -> MapDataset:
        """These files, or `(file, begin, end)` of them."""
        return cls(source=Source.from_objects(items, url=url, client=client), **more)

    @classmethod
    def from_manifest(cls, manifest: str, *, url: str = "", **more: Any) -> MapDataset:
        """The files that a manifest lists."""
        return cls(url, manifest=manifest, **more)

    @property
    def objects(self) -> Sequence[tuple[str, int]]:
        """Path and size of each sample."""
        return self.source.objects

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._transform(self.source.read([at])[0])

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """A batch of samples, in one batch of reads."""
        return [self._transform(sample) for sample in self.source.read(list(indexes))]


class IterableDataset(torch_data.IterableDataset):
    """Samples in the order of an epoch, shared among ranks and workers, each exactly once."""

    def __init__(
        self,
        url: str = "",
        *,
        transform: Transform | None = None,
        glob: str = EVERYTHING,
        manifest: str | None = None,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window: int | str = "1GiB",
        batch_size: int = 1,
        drop_uneven: bool = False,
        predownload: int | str = FETCH_BYTES,
        client: Client | None = None,
        source: Source | None = None,
    ) -> None:
        """`batch_size`: the DataLoader's, by which workers take turns, so that a state is exact in
        mid-epoch. `drop_uneven`: all ranks give the same number. `predownload`: bytes that are
        read ahead at a time.
        """
        self.source = source or _source(url, glob, manifest, client)
        self._transform = transform or _plain
        self._block = batch_size
        self._stream = Stream(
            self.source,
            shuffle=shuffle,
            seed=seed,
            window_bytes=parse_bytes(shuffle_window, "shuffle_window"),
            drop_uneven=drop_uneven,
            fetch_bytes=parse_bytes(predownload, "predownload"),
        )

    @classmethod
    def from_objects(
        cls, items: Iterable[Item], *, url: str = "", client: Client | None = None, **more: Any
    ) -> IterableDataset:
        """These files, or `(file, begin, end)` of them."""
        return cls(source=Source.from_objects(items, url=url, client=client), **more)

    @classmethod
    def from_manifest(cls, manifest: str, *, url: str = "", **more: Any) -> IterableDataset:
        """The files that a manifest lists."""
        return cls(url, manifest=manifest, **more)

    @property
    def objects(self) -> Sequence[tuple[str, int]]:
        """Path and size of each sample."""
        return self.source.objects

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, before the DataLoader is iterated."""
        self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        rank, world = _rank_and_world()
        info = torch_data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = Reader(rank, world, worker, workers, self._block)
        return map(self._transform, self._stream.read(reader))

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, see `Stream.state_dict`.

        With worker processes the main process says how many samples this rank has `consumed`:
        the batches that it took, times their size.
        """
        return self._stream.state_dict(consumed, _rank_and_world()[1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks and workers."""
        self._stream.load_state_dict(state)


def _rank_and_world() -> tuple[int, int]:
    """This process's place: torch.distributed's, else what torchrun has set."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
