"""A2: pandas, pyarrow, zarr and Hugging Face `datasets` on `slicefs://` URLs, there and back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import fsspec
import numpy
import pandas
import pyarrow
import pyarrow.dataset
import pytest
import zarr

from slicefs.client.client import Client
from slicefs.fsspec import SliceFSFileSystem
from tests.posix.volumes import PATIENCE_S
from tests.slicefs.memory_disk import quick_volume
from tests.support.examples import ROOT, example_environment, run_example

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own
ROWS = 10_000


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A volume by its name; clean in the end."""
    fsspec.register_implementation("slicefs", SliceFSFileSystem, clobber=True)
    with quick_volume() as volume:
        monkeypatch.setenv("SLICEFS_META_VOL", volume.meta)
        with Client(volume.meta, uid=0, gid=0, meta_timeout=PATIENCE_S):
            yield "slicefs://vol"
        for each in list(SliceFSFileSystem._cache.values()):
            each.client.close()
        SliceFSFileSystem.clear_instance_cache()


@pytest.fixture
def frame() -> pandas.DataFrame:
    """Numbers and words."""
    numbers = numpy.arange(ROWS)
    return pandas.DataFrame({"n": numbers, "word": [f"w{n % 7}" for n in numbers]})


def test_pandas(url: str, frame: pandas.DataFrame) -> None:
    frame.to_parquet(f"{url}/tables/a.parquet")
    assert pandas.read_parquet(f"{url}/tables/a.parquet").equals(frame)
    assert list(pandas.read_parquet(f"{url}/tables/a.parquet", columns=["n"])) == ["n"]
    frame.to_csv(f"{url}/tables/a.csv", index=False)
    assert pandas.read_csv(f"{url}/tables/a.csv").equals(frame)


def test_pyarrow_writes_a_partitioned_data_set(url: str, frame: pandas.DataFrame) -> None:
    fs = fsspec.filesystem("slicefs", volume=url.rpartition("/")[2])
    table = pyarrow.Table.from_pandas(frame)
    where = {"format": "parquet", "filesystem": fs}
    pyarrow.dataset.write_dataset(table, "/parts", partitioning=["word"], **where)
    found = pyarrow.dataset.dataset("/parts", partitioning=["word"], **where)
    some = found.to_table(filter=pyarrow.dataset.field("word") == "w3")
    assert some.num_rows == (frame["word"] == "w3").sum()
    assert sorted(found.to_table()["n"].to_pylist()) == list(range(ROWS))


def test_zarr(url: str) -> None:
    data = numpy.arange(200 * 300, dtype="f4").reshape(200, 300)
    array = zarr.create_array(f"{url}/z.zarr", data=data, chunks=(50, 50))
    array[10:20, :] = 7
    data[10:20, :] = 7
    again = zarr.open_array(f"{url}/z.zarr", mode="r")
    assert numpy.array_equal(again[:], data)
    assert numpy.array_equal(again[45:55, 290:], data[45:55, 290:])


def test_hugging_face_datasets(url: str, frame: pandas.DataFrame, tmp_path: Path) -> None:
    made = datasets.Dataset.from_pandas(frame)
    made.save_to_disk(f"{url}/saved")
    assert datasets.load_from_disk(f"{url}/saved").to_pandas().equals(frame)
    names = [f"{url}/shards/{number}.parquet" for number in range(2)]
    for name in names:
        frame.to_parquet(name)
    for files in (f"{url}/shards/*.parquet", names, {"train": names}):
        for options in (None, {"volume": "vol"}):  # beside the URL, as earlier versions wanted it
            streamed = datasets.load_dataset(
                "parquet",
                data_files=files,
                storage_options=options,
                split="train",
                streaming=True,
                cache_dir=str(tmp_path),
            )
            assert sum(row["n"] for row in streamed) == 2 * sum(range(ROWS))
    whole = datasets.load_dataset("parquet", data_files=names, cache_dir=str(tmp_path))["train"]
    assert len(whole) == 2 * ROWS


_STREAM = """
import sys
import datasets
found = datasets.load_dataset(
    "parquet", data_files=sys.argv[2:], split="train", streaming=True, cache_dir=sys.argv[1]
)
print(sum(row["n"] for row in found))
"""


def test_hugging_face_in_a_process_of_its_own(
    url: str, frame: pandas.DataFrame, tmp_path: Path
) -> None:
    names = [f"{url}/shards/{number}.parquet" for number in range(2)]
    for name in names:
        frame.to_parquet(name)
    for wanted in (names, [f"{url}/shards/*"]):
        printed = subprocess.run(
            [sys.executable, "-c", _STREAM, str(tmp_path), *wanted],
            check=True, capture_output=True, text=True, cwd=ROOT, env=example_environment(),
        ).stdout  # fmt: skip
        assert int(printed) == 2 * sum(range(ROWS))


def test_the_example_of_hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with quick_volume() as volume:
        monkeypatch.setenv("SLICEFS_META_VOL", volume.meta)
        printed = run_example("hugging_face.py", "slicefs://vol/texts", "--rows", 1000)
    assert printed == "loaded 1000 rows, 500 are even\nstreamed a sum of 499500\n"
