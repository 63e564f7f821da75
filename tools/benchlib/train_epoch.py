"""Epochs of one system in one process: `python -m tools.benchlib.train_epoch JSON`.

Run by `train` with the Python that has the system's packages. The first epoch is cold: the process
is new and what it lists belongs to it. It prints one JSON line for each epoch.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

BATCH = 64
BUFFER_BYTES = 512 << 20


class _Files:
    """Plain files of a directory, as most data sets read them."""

    def __init__(self, folder: str) -> None:
        self._paths = sorted(entry.path for entry in os.scandir(folder))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        return Path(self._paths[index]).read_bytes()


def _read(each: Any) -> bytes:
    data: bytes = each.read()
    return data


def _loader(dataset: Any, workers: int, shuffle: bool = True) -> Iterable[list[bytes]]:
    from torch.utils.data import DataLoader

    more = {"shuffle": True} if shuffle else {}
    loader: Iterable[list[bytes]] = DataLoader(
        dataset, batch_size=BATCH, num_workers=workers, collate_fn=list, **more
    )
    return loader


def _files(url: str, workers: int) -> Iterable[list[bytes]]:
    return _loader(_Files(url), workers)


def _client(url: str) -> Any:
    """A client whose memory has room for all samples; None for a bucket."""
    from slicefs.client.client import Client

    return None if url.startswith("s3://") else Client(url, buffer_size=BUFFER_BYTES)


def _slicefs_map(url: str, workers: int) -> Iterable[list[bytes]]:
    from slicefs.torch import MapDataset

    return _loader(MapDataset(url, client=_client(url)), workers)


def _slicefs_iterable(url: str, workers: int) -> Iterable[list[bytes]]:
    from slicefs.torch import IterableDataset

    dataset = IterableDataset(url, client=_client(url), shuffle=True, batch_size=BATCH)
    return _loader(dataset, workers, shuffle=False)


def _s3torch(url: str, workers: int) -> Iterable[list[bytes]]:
    from s3torchconnector import S3ClientConfig, S3MapDataset

    dataset = S3MapDataset.from_prefix(
        url,
        region="us-east-1",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        transform=_read,
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return _loader(dataset, workers)


class _S3fs:
    """s3fs, which reads a batch by as many requests at once."""

    def __init__(self, url: str) -> None:
        import s3fs

        self._fs = s3fs.S3FileSystem(
            endpoint_url=os.environ["AWS_ENDPOINT_URL"], default_cache_type="none"
        )
        self._paths = sorted(self._fs.find(url.removeprefix("s3://")))

    def __iter__(self) -> Iterator[list[bytes]]:
        order = random.sample(self._paths, len(self._paths))
        for begin in range(0, len(order), BATCH):
            yield list(self._fs.cat(order[begin : begin + BATCH]).values())


def _s3fs(url: str, workers: int) -> Iterable[list[bytes]]:
    del workers
    return _S3fs(url)


def _open_shard(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    del mode, bufsize
    import boto3

    bucket, _, key = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    return client.get_object(Bucket=bucket, Key=key)["Body"]


def _payload(sample: dict[str, bytes]) -> bytes:
    return sample["bin"]


def _webdataset(url: str, workers: int) -> Iterable[list[bytes]]:
    import boto3
    import webdataset

    webdataset.gopen_schemes["s3"] = _open_shard
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    shards = [f"s3://{bucket}/{each['Key']}" for each in found]
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
    return _loader(dataset.shuffle(1000).map(_payload), workers, shuffle=False)


SYSTEMS: dict[str, Callable[[str, int], Iterable[list[bytes]]]] = {
    "files": _files,
    "slicefs-map": _slicefs_map,
    "slicefs-iterable": _slicefs_iterable,
    "s3torchconnector": _s3torch,
    "s3fs": _s3fs,
    "webdataset": _webdataset,
}

IMPORTS: dict[str, Sequence[str]] = {
    "files": ("torch.utils.data",),
    "slicefs-map": ("slicefs.torch.data",),
    "slicefs-iterable": ("slicefs.torch.data",),
    "s3torchconnector": ("torch.utils.data", "s3torchconnector"),
    "s3fs": ("s3fs",),
    "webdataset": ("torch.utils.data", "webdataset", "boto3"),
}


def _cpu_s() -> float:
    own, children = (
        resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _requests(count: str) -> int:
    return int.from_bytes(Path(count).read_bytes()[:8], "little") if count else 0


def main(words: list[str]) -> None:
    """Run the epochs; each is all samples, whatever their order."""
    asked = json.loads(words[0])
    for module in IMPORTS[asked["system"]]:  # that this takes seconds is no system's epoch
        import_module(module)
    batches: Iterable[list[bytes]] | None = None
    for _ in range(asked["epochs"]):
        begin, cpu, before = time.monotonic(), _cpu_s(), _requests(asked["count_file"])
        if batches is None:
            batches = SYSTEMS[asked["system"]](asked["url"], asked["workers"])
        samples = size = 0
        for batch in batches:
            samples += len(batch)
            size += sum(map(len, batch))
        if (samples, size) != (asked["samples"], asked["samples"] * asked["sample_bytes"]):
            raise SystemExit(f"{samples} samples of {size} bytes, not what was written")
        line = {
            "seconds": time.monotonic() - begin,
            "cpu_s": _cpu_s() - cpu,
            "requests": _requests(asked["count_file"]) - before,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
