"""A3: the datasets under torch's DataLoader: start methods, ranks, states in mid-epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from fsmeta.errors import ConfigError
from slicefs.client import connection, shared_copies
from slicefs.client.client import Client
from slicefs.data.source import Sample
from slicefs.torch import IterableDataset, MapDataset
from tests.posix.volumes import PATIENCE_S
from tests.slicefs.memory_disk import quick_volume

COUNT = 40
METHODS = ("fork", "spawn", "forkserver")
pytestmark = pytest.mark.filterwarnings("default")  # torch has warnings of its own


def number_of(sample: Sample) -> Any:
    """A transform that pickles."""
    return torch.tensor(int(bytes(sample.data).split()[0]))


@pytest.fixture
def fs() -> Iterator[Client]:
    """A volume with COUNT samples."""
    with (
        quick_volume() as volume,
        Client(f"{volume.meta}#train", uid=0, gid=0, meta_timeout=PATIENCE_S) as client,
    ):
        client.mkdir("/train")
        for number in range(COUNT):
            with client.open(f"{number:03}", "wb") as file:
                file.write(b"%d " % number * 100)
        yield client


def loader(dataset: Any, workers: int, method: str | None = None, **more: Any) -> Any:
    context = method if workers else None
    return DataLoader(dataset, 4, num_workers=workers, multiprocessing_context=context, **more)


def taken(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


def misses(sample: Sample) -> Any:
    """A transform: how often this worker's cache had to ask the store until now."""
    info: Any = get_worker_info()
    cache: Any = info.dataset.source.tree.client.connection().client.disk_cache
    counted = cache.numbers()["disk_cache_misses_total"]
    return torch.tensor([os.getpid(), int(counted), int(bytes(sample.data).split()[0])])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [MapDataset, IterableDataset])
def test_workers_fetch_each_block_once(fs: Client, method: str, kind: Any) -> None:
    """Each epoch has workers of its own; those of the second one find what the first have left."""
    dataset = kind("", client=fs, glob="*", transform=misses)
    if kind is IterableDataset:  # each worker reads everything
        dataset = kind("", client=fs, glob="*", transform=misses, shard="none")
    try:
        epochs = []
        for _ in range(2):
            most: dict[int, int] = {}
            seen: set[int] = set()
            for batch in loader(dataset, 3, method):
                for pid, count, number in batch.tolist():
                    most[pid] = max(most.get(pid, 0), count)
                    seen.add(number)
            assert seen == set(range(COUNT))
            epochs.append(sum(most.values()))
        assert COUNT <= epochs[0] < 2 * COUNT  # a worker that is held up may not be waited for
        assert epochs[1] == 0
    finally:
        connection.COPIES.leave()
    assert not os.path.exists(shared_copies.directory())


def test_a_batch_of_a_map_dataset_is_one_read(fs: Client) -> None:
    dataset = MapDataset("", client=fs, glob="*", transform=number_of)
    assert len(dataset) == COUNT
    assert int(dataset[-1]) == COUNT - 1
    asked: list[int] = []
    read = dataset.source.read

    def counted(indexes: Any) -> Any:
        asked.append(len(indexes))
        return read(indexes)

    dataset.source.read = counted
    assert taken(loader(dataset, 0)) == list(range(COUNT))
    assert asked == [4] * (COUNT // 4)


@pytest.mark.parametrize("method", METHODS)
def test_workers_connect_by_themselves(fs: Client, method: str) -> None:
    fs.listdir("/")  # the parent is connected when its workers start
    dataset = MapDataset("", client=fs, glob="*", transform=number_of)
    batches = loader(dataset, 2, method, shuffle=True)
    for _ in range(2):
        assert sorted(taken(batches)) == list(range(COUNT))
    stream = IterableDataset(
        "", client=fs, glob="*", transform=number_of, shuffle=True, batch_size=4
    )
    batches = loader(stream, 2, method, persistent_workers=True)
    epochs = [taken(batches) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(COUNT))
    assert epochs[0] != epochs[1]


def test_an_epoch_goes_on_with_other_workers_and_ranks(
    fs: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dataset() -> Any:
        return IterableDataset(
            "", client=fs, glob="*", transform=number_of, shuffle=True, seed=3, batch_size=4
        )

    whole = taken(loader(dataset(), 0))
    first = dataset()
    reading = iter(loader(first, 2, "fork"))
    begun = [int(number) for _ in range(3) for number in next(reading)]
    del reading
    assert begun == whole[:12]
    state = first.state_dict(consumed=12)
    rest = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        again = dataset()
        again.load_state_dict(state)
        rest += taken(loader(again, 2, "fork"))
    assert sorted(begun + rest) == list(range(COUNT))


@pytest.mark.parametrize(("rank", "world"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "")])
def test_a_rank_that_is_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    (tmp_path / "a").write_text("1")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match=f"RANK={rank} WORLD_SIZE={world}: set a rank below"):
        iter(IterableDataset(str(tmp_path)))


def test_directories_need_no_volume(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}").write_text(f"{number} ")
    assert taken(loader(MapDataset(str(tmp_path), transform=number_of), 0)) == list(range(8))
    some = MapDataset.from_objects([f"{tmp_path}/3", f"{tmp_path}/1"])
    assert [some[0], some[1]] == [b"3 ", b"1 "]
