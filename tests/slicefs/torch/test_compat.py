"""Programs of two other libraries with their imports changed, on real buckets of radosgw."""

from __future__ import annotations

import gc
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset

from slicefs.compat import dataflux, s3torch
from slicefs.compat.dataflux import dataflux_iterable_dataset, dataflux_mapstyle_dataset
from slicefs.compat.dataflux.lightning import (
    GCSDistributedReader,
    GCSDistributedWriter,
    gcs_filesystem,
    path_utils,
)
from slicefs.compat.s3torch import S3IterableDataset, S3MapDataset, S3ReaderConstructor
from slicefs.compat.s3torch.data import SMALL_BYTES
from slicefs.compat.s3torch.dcp import (
    RoundRobinPrefixStrategy,
    S3StorageReader,
    S3StorageWriter,
)
from slicefs.compat.s3torch.lightning import S3LightningCheckpoint
from slicefs.data.source import Sample
from slicefs.stores.opening import open_tree
from slicefs.stores.s3 import S3Tree
from slicefs.stores.tree import Tree
from slicefs.torch import data
from slicefs.torch.data import IterableDataset
from tests.support.ceph_cluster import CephCluster

pytestmark = pytest.mark.filterwarnings("default")  # torch has warnings of its own
PAGE = Path(__file__).parents[3] / "docs/train/switching.md"
REGION = "us-east-1"
COUNT = 12
BIG = os.urandom(9_000_000)  # above what is read before a transform asks


@pytest.fixture(autouse=True)
def gs_keys(ceph: CephCluster, s3_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """gs:// leads to the same server."""
    del s3_keys
    monkeypatch.setenv("GS_ENDPOINT_URL", ceph.endpoint)


@pytest.fixture(autouse=True)
def connections() -> Iterator[None]:
    """What datasets and plugins have open is closed."""
    yield
    for each in gc.get_objects():
        if type(each) is S3Tree:
            each.close()
    gc.collect()


@pytest.fixture
def tree(bucket: str, tmp_path: Path) -> Iterator[Tree]:
    """A prefix with COUNT small objects below `train`, and some that are not theirs."""
    made = open_tree(f"s3://{bucket}/{tmp_path.name}")
    for number in range(COUNT):
        made.write_atomic(f"train/{number:02}", (b"%d " % number,))
    made.write_atomic("train-not", (b"99 ",))
    made.write_atomic("big/0", (BIG,))
    yield made
    made.remove_tree("")
    made.close()


def number_of(reader: Any) -> int:
    """A transform that pickles."""
    return int(reader.read().split()[0])


def number_in(sample: Sample) -> int:
    """A transform that pickles, of `slicefs.torch`."""
    return int(bytes(sample.data))


def formatted(found: bytes) -> int:
    """A `data_format_fn` that pickles."""
    return int(found.split()[0])


def given(dataset: Any, workers: int = 0, method: str | None = None) -> list[int]:
    """What a DataLoader gives, in its order."""
    batches = DataLoader(dataset, 4, num_workers=workers, multiprocessing_context=method)
    return [int(number) for batch in batches for number in batch]


def test_objects_of_a_prefix(tree: Tree) -> None:
    dataset = S3MapDataset.from_prefix(f"{tree.url}/train/", region=REGION, endpoint=None)
    assert (dataset.region, dataset.endpoint, len(dataset)) == (REGION, None, COUNT)
    bucket, _, prefix = tree.url.removeprefix("s3://").partition("/")
    item = dataset[3]
    assert (item.bucket, item.key, item.read()) == (bucket, f"{prefix}/train/03", b"3 ")
    assert item.seek(0) == 0
    assert [reader.key for reader in dataset] == [f"{prefix}/train/{n:02}" for n in range(COUNT)]
    assert len(S3MapDataset.from_prefix(f"{tree.url}/train", region=REGION)) == COUNT + 1
    assert len(S3MapDataset.from_prefix(f"{tree.url}/none", region=REGION)) == 0
    assert list(S3IterableDataset.from_prefix(f"{tree.url}/none", region=REGION)) == []


def test_large_objects_are_read_when_they_are_asked_for(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    read_ranges = type(tree).read_ranges

    def counted(self: Any, items: Any, max_gap: int = 0) -> list[memoryview]:
        asked.extend(item if isinstance(item, str) else item[0] for item in items)
        return read_ranges(self, items, max_gap)

    monkeypatch.setattr(type(tree), "read_ranges", counted)
    [reader] = S3IterableDataset.from_prefix(f"{tree.url}/big/", region=REGION)
    assert not asked
    reader.seek(-5, os.SEEK_END)
    assert reader.read() == BIG[-5:]
    reader.seek(0)
    assert reader.read() == BIG
    ranged = S3ReaderConstructor.range_based()
    small = S3MapDataset.from_prefix(f"{tree.url}/train/", region=REGION, reader_constructor=ranged)
    asked.clear()
    readers = small.__getitems__(range(COUNT))
    assert not asked
    assert [number_of(reader) for reader in readers] == list(range(COUNT))
    eager = S3MapDataset.from_prefix(f"{tree.url}/train/", region=REGION)
    asked.clear()
    readers = eager.__getitems__(range(COUNT))
    assert len(asked) == COUNT
    assert [number_of(reader) for reader in readers] == list(range(COUNT))
    assert len(asked) == COUNT


def test_objects_that_were_not_listed_are_read_up_to_a_size(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    read_ranges = type(tree).read_ranges

    def counted(self: Any, items: Any, max_gap: int = 0) -> list[memoryview]:
        asked.extend(items)
        return read_ranges(self, items, max_gap)

    monkeypatch.setattr(type(tree), "read_ranges", counted)
    tree.write_atomic("empty", (b"",))
    uris = [f"{tree.url}/{name}" for name in ("empty", "big/0", "train/03")]
    whole = [b"", BIG, b"3 "]
    for kind in (S3MapDataset, S3IterableDataset):
        ranged = kind.from_objects(
            uris, region=REGION, reader_constructor=S3ReaderConstructor.range_based()
        )
        readers = list(ranged)
        assert not asked
        assert [reader.read() for reader in readers] == whole
        asked.clear()
        readers = list(kind.from_objects(uris, region=REGION))
        assert {item[1:] for item in asked} == {(0, SMALL_BYTES)}
        assert len(asked) == 3
        assert [reader.read() for reader in readers] == whole
        assert len(asked) > 3  # the large one, in ranges
        asked.clear()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_s3(tree: Tree, method: str) -> None:
    url = f"{tree.url}/train/"
    uris = [f"{url}{number:02}" for number in range(COUNT)]
    whole = list(range(COUNT))
    for dataset in (
        S3MapDataset.from_prefix(url, region=REGION, transform=number_of),
        S3MapDataset.from_objects(uris, region=REGION, transform=number_of),
    ):
        assert given(dataset, 2, method) == whole
    shared = S3IterableDataset.from_prefix(
        url, region=REGION, transform=number_of, enable_sharding=True
    )
    assert sorted(given(shared, 2, method)) == whole
    each = S3IterableDataset.from_objects(uris, region=REGION, transform=number_of)
    assert sorted(given(each, 2, method)) == sorted(2 * whole)
    assert given(S3MapDataset.from_objects(uris[5], region=REGION, transform=number_of)) == [5]


def test_ranks_share_where_sharding_is_enabled(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        dataset = S3IterableDataset.from_prefix(
            f"{tree.url}/train/", region=REGION, transform=number_of, enable_sharding=True
        )
        found.append(given(dataset, 2, "fork"))
    assert sorted(found[0]) == list(range(0, COUNT, 2))
    assert sorted(found[1]) == list(range(1, COUNT, 2))


def test_a_place_in_a_group_is_known() -> None:
    assert data._place_in_group() is None
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    try:
        assert data._place_in_group() == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_spawned_worker_knows_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle in a file has no rank: each rank that loads it has its own."""
    for number in range(8):
        (tmp_path / f"{number}").write_text(f"{number} ")
    halves = [[0, 2, 4, 6], [1, 3, 5, 7]]
    dataset = IterableDataset(str(tmp_path), transform=number_in)
    monkeypatch.setattr(data, "_place_in_group", lambda: (1, 2))
    monkeypatch.setenv("RANK", "0")  # of the host, as some launchers set it
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert sorted(given(dataset, 2, "spawn")) == halves[1]
    kept = pickle.dumps(dataset)
    monkeypatch.setattr(data, "_place_in_group", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, half in enumerate(halves):
        monkeypatch.setenv("RANK", str(rank))
        loaded = pickle.loads(kept)
        assert list(loaded) == half
        assert sorted(given(loaded, 2, "fork")) == half
        assert sorted(given(loaded, 2, "spawn")) == half
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert sorted(given(pickle.loads(kept), 2, "fork")) == sorted(halves[0] + halves[1])


@pytest.mark.parametrize("method", [None, "spawn"])
def test_dataflux_datasets(tree: Tree, method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, _, prefix = tree.url.removeprefix("s3://").partition("/")
    config = dataflux_mapstyle_dataset.Config(prefix=f"{prefix}/train/", disable_compose=True)
    assert config.max_composite_object_size == 0
    mapped = dataflux_mapstyle_dataset.DataFluxMapStyleDataset(
        project_name="project", bucket_name=bucket, config=config, data_format_fn=formatted
    )
    assert list(mapped.objects)[:2] == [(f"{prefix}/train/00", 2), (f"{prefix}/train/01", 2)]
    assert list(mapped) == list(range(COUNT)) == given(mapped, 2 if method else 0, method)
    monkeypatch.setenv("RANK", "1")  # each rank reads everything, as with dataflux
    monkeypatch.setenv("WORLD_SIZE", "2")
    streamed = dataflux_iterable_dataset.DataFluxIterableDataset(
        project_name="project", bucket_name=bucket, config=config, data_format_fn=formatted
    )
    assert sorted(given(streamed, 2 if method else 0, method)) == list(range(COUNT))
    raw = dataflux.DataFluxMapStyleDataset("project", f"gs://{bucket}", config)
    assert raw[-1] == b"11 "
    assert type(raw[0]) is bytes


def test_what_dataflux_has_composed_is_no_sample(ceph: CephCluster) -> None:
    ceph.make_bucket("composed")
    made = open_tree("s3://composed")
    for name in ("a", "dataflux-composed-objects/1", "train/dataflux-composed-objects/2"):
        made.write_atomic(name, (b"x",))
    for kind in (dataflux.DataFluxMapStyleDataset, dataflux.DataFluxIterableDataset):
        names = [name for name, _ in kind("project", "composed").objects]
        assert names == ["a", "train/dataflux-composed-objects/2"]
    made.close()


def state(step: int) -> dict[str, Any]:
    return {"w": torch.arange(100_000, dtype=torch.float32) + step, "step": step}


def test_distributed_checkpoints_of_s3(tree: Tree) -> None:
    url = f"{tree.url}/dcp/"
    strategy = RoundRobinPrefixStrategy(["shard1", "shard2"], epoch_num=5)
    writer = S3StorageWriter(
        region=REGION, path=url, thread_count=2, prefix_strategy=strategy, sync_files=True
    )
    dcp.save(state(3), storage_writer=writer, no_dist=True)
    names = [info.path for info in tree.list("dcp/")]
    assert names[0] == "dcp/.metadata"
    assert all(name.startswith("dcp/shard1/epoch_5/__0_") for name in names[1:])
    loaded = state(0)
    reader = S3StorageReader(REGION, url, reader_constructor=S3ReaderConstructor.dcp_optimized())
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert torch.equal(loaded["w"], state(3)["w"])
    assert loaded["step"] == 3
    other = f"{tree.url}/other"
    dcp.save(state(4), storage_writer=writer, checkpoint_id=other, no_dist=True)
    dcp.load(loaded, storage_reader=reader, checkpoint_id=other, no_dist=True)
    assert loaded["step"] == 4


def test_distributed_checkpoints_of_google(tree: Tree) -> None:
    path = Path(tree.url.replace("s3://", "gs://")) / "dcp"  # one slash is lost
    writer = GCSDistributedWriter(path, project_name="project", thread_count=2)
    dcp.save(state(3), storage_writer=writer, no_dist=True)
    loaded = state(0)
    reader = GCSDistributedReader(path, project_name="project")
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert torch.equal(loaded["w"], state(3)["w"])
    assert tree.exists("dcp/.metadata")


class Line(pl.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, _index: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("kind", ["s3", "gcs", "async"])
def test_lightning(tree: Tree, kind: str, tmp_path: Path) -> None:
    url = f"{tree.url}/run/a.ckpt"
    plugin: Any = S3LightningCheckpoint(REGION)
    if kind != "s3":
        url = url.replace("s3://", "gcs://")
        plugin = dataflux.DatafluxLightningCheckpoint(project_name="project")
    if kind == "async":
        plugin = dataflux.DatafluxLightningAsyncCheckpoint(project_name="project")
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        max_epochs=1,
        plugins=[plugin],
    )
    model = Line()
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
    trainer.save_checkpoint(url)
    saved = plugin.load_checkpoint(url, weights_only=False)
    assert torch.equal(saved["state_dict"]["layer.weight"], model.layer.weight)
    assert tree.exists("run/a.ckpt")
    plugin.remove_checkpoint(url)
    plugin.teardown()
    assert not tree.exists("run/a.ckpt")


def test_each_name_loads() -> None:
    for package in (dataflux, s3torch):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            package.nothing  # noqa: B018
    assert gcs_filesystem.GCSDistributedWriter is GCSDistributedWriter
    assert gcs_filesystem.GCSDistributedReader is GCSDistributedReader


def test_paths_of_google() -> None:
    for path in ("gs://bucket/a/b", "gcs://bucket/a/b", Path("gs://bucket/a/b")):
        assert path_utils.parse_gcs_path(path) == ("bucket", "a/b")
    assert path_utils.parse_gcs_path("gs://bucket") == ("bucket", "")
    for wrong in ("", "/bucket/a", "s3://bucket/a", "gs:///a"):
        with pytest.raises(ValueError, match="gs://BUCKET/NAME"):
            path_utils.parse_gcs_path(wrong)
    not_a_path: Any = 5
    with pytest.raises(TypeError, match=r"pathlib\.Path"):
        path_utils.process_input_path(not_a_path)


def test_the_page(ceph: CephCluster) -> None:
    ceph.make_bucket("switching")
    made = open_tree("s3://switching")
    for number in range(5):
        made.write_atomic(f"train/{number}", (b"x" * number,))
    scope = {
        "BUCKET": "switching",
        "PROJECT": "project",
        "REGION": REGION,
        "model": torch.nn.Linear(3, 3),
        "torch": torch,
    }
    text = PAGE.read_text()
    blocks = re.findall(r"^```python notest\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, scope)
    made.close()
