"""`MapDataset` and `IterableDataset`: torch's datasets over any tree.

    MapDataset("s3://bucket/train", glob="**/*.jpg", transform=decode)
    IterableDataset("slicefs://vol/train", shuffle=True, batch_size=32)

What they read and in what order is decided in `slicefs/data`, without torch. Both pickle and work
under fork, spawn and forkserver. Threading: as `slicefs/data`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch.utils.data as torch_data
from torch import distributed

from fsmeta.errors import ConfigError
from slicefs.client.connection import parse_bytes
from slicefs.client.ranges import Item
from slicefs.data.order import Reader
from slicefs.data.source import EVERYTHING, Sample, SampleSource
from slicefs.data.stream import FETCH_BYTES, WINDOW_BYTES, SampleStream

if TYPE_CHECKING:
    from slicefs.client.client import Client

Transform = Callable[[Sample], Any]
Shard: TypeAlias = Literal["rank_worker", "worker", "none"]


def _plain(sample: Sample) -> bytes:
    data, held = sample.data, sample.data.obj
    if isinstance(held, bytes) and len(held) == len(data):
        return held  # what was cut out of a block is no one else's
    return bytes(data)


def _source(
    given: SampleSource | None, url: str, glob: str, manifest: str | None, client: Client | None
) -> SampleSource:
    if given is not None:
        found = given
    elif manifest is not None:
        found = SampleSource.from_manifest(manifest, url=url, client=client)
    else:
        found = SampleSource.from_prefix(url, glob=glob, client=client)
    found.hold_copies()  # the workers of one epoch end before those of the next one begin
    return found


def _share_among_workers(source: SampleSource) -> None:
    """Each of several worker processes would fetch each block of small files."""
    info = torch_data.get_worker_info()
    if info is not None and info.num_workers > 1:
        source.share_copies()


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
        source: SampleSource | None = None,
    ) -> None:
        """`transform` gets a `Sample` (path, data); without one a sample is its bytes."""
        self.source = _source(source, url, glob, manifest, client)
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
        return cls(source=SampleSource.from_objects(items, url=url, client=client), **more)

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
        _share_among_workers(self.source)
        return self._transform(self.source.read([at])[0])

    def __getitems__(self, indexes: Sequence[int]) -> list[Any]:
        """A batch of samples, in one batch of reads."""
        _share_among_workers(self.source)
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
        shuffle_window: int | str = WINDOW_BYTES,
        batch_size: int = 1,
        drop_uneven: bool = False,
        predownload: int | str = FETCH_BYTES,
        client: Client | None = None,
        source: SampleSource | None = None,
        shard: Shard = "rank_worker",
    ) -> None:
        """`batch_size`: the DataLoader's, by which workers take turns, so that a state is exact in
        mid-epoch. `drop_uneven`: all ranks give the same number. `predownload`: bytes that are
        read ahead at a time. `shard`: what shares the samples; with "worker" each rank gives all
        of them, with "none" each worker does.
        """
        if shard not in ("rank_worker", "worker", "none"):
            raise ValueError(f"shard {shard!r}: use rank_worker, worker or none")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: use the DataLoader's, 1 or more")
        self.source = _source(source, url, glob, manifest, client)
        self._transform = transform or _plain
        self._block = batch_size
        self._shard = shard
        self._place: tuple[int, int] | None = None  # of the process that has started this worker
        self._stream = SampleStream(
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
        return cls(source=SampleSource.from_objects(items, url=url, client=client), **more)

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

    def __getstate__(self) -> dict[str, Any]:
        """A worker process that is spawned does not know its rank by itself.

        What is pickled for anything else, a file for instance, has no rank: any rank may load it.
        """
        spawning = get_spawning_popen() is not None
        return {**self.__dict__, "_place": _place_in_group() if spawning else None}

    def __iter__(self) -> Iterator[Any]:
        _share_among_workers(self.source)
        rank, world = self._rank_and_world()
        info = None if self._shard == "none" else torch_data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = Reader(rank, world, worker, workers, self._block)
        return map(self._transform, self._stream.read(reader))

    def _rank_and_world(self) -> tuple[int, int]:
        """This process's place: torch.distributed's, else what torchrun has set.

        A worker's is the one of the process that has started it. That comes before the variables:
        launchers set them for a host, whose processes have other ranks in their group.
        """
        if self._shard != "rank_worker":
            return 0, 1
        started = self._place if torch_data.get_worker_info() is not None else None
        known = _place_in_group() or started
        return known or _place_of_launcher()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, see `SampleStream.state_dict`.

        With worker processes the main process says how many samples this rank has `consumed`:
        the batches that it took, times their size.
        """
        return self._stream.state_dict(consumed, self._rank_and_world()[1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks and workers."""
        self._stream.load_state_dict(state)


def _place_of_launcher() -> tuple[int, int]:
    """Rank and world as torchrun says them. Raises: ConfigError."""
    words = [os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")]
    if not all(word.isdecimal() for word in words) or int(words[0]) >= int(words[1]):
        raise ConfigError(
            f"RANK={words[0]} WORLD_SIZE={words[1]}: set a rank below the number of ranks, "
            "or unset both"
        )
    return int(words[0]), int(words[1])


def _place_in_group() -> tuple[int, int] | None:
    """Rank and world of this process; None where torch.distributed was not initialized."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None
