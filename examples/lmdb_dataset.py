"""Reads samples by number from an LMDB on a mount, as many data sets are kept.

    python examples/lmdb_dataset.py /mnt/vol/set.lmdb --make 10000
    python examples/lmdb_dataset.py /mnt/vol/set.lmdb --reads 5000

`readahead=False` and `lock=False` are for training: reads are random, and the set does not change.
A data set that is read so gains from `slicefs mount --cache-dir`; `slicefs warmup` fills it before.
"""

from __future__ import annotations

import argparse
import hashlib

import lmdb

SAMPLE_BYTES = 3000
MAP_BYTES = 1 << 40  # no more than addresses: the file grows as it is written


def sample(number: int) -> bytes:
    """Bytes that their number decides."""
    return hashlib.shake_256(b"%d" % number).digest(SAMPLE_BYTES)


def make(path: str, count: int) -> None:
    """Write samples in transactions of a thousand."""
    with lmdb.open(path, map_size=MAP_BYTES, subdir=False) as env:
        for begin in range(0, count, 1000):
            with env.begin(write=True) as txn:
                for number in range(begin, min(begin + 1000, count)):
                    txn.put(b"%08d" % number, sample(number))
            print(f"{min(begin + 1000, count)} samples written", flush=True)


class LmdbDataset:
    """What `torch.utils.data.DataLoader` needs. Each worker opens the file for itself."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._env: lmdb.Environment | None = None
        with self._open() as env:
            self._count = env.stat()["entries"]

    def _open(self) -> lmdb.Environment:
        return lmdb.open(self._path, subdir=False, readonly=True, lock=False, readahead=False)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:
        if self._env is None:
            self._env = self._open()
        with self._env.begin(buffers=False) as txn:
            return txn.get(b"%08d" % index)


def main() -> None:
    """Write, if asked, and read in random order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--make", type=int, default=0, metavar="COUNT")
    parser.add_argument("--reads", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.path, arguments.make)
    dataset = LmdbDataset(arguments.path)
    for turn in range(arguments.reads):
        number = int.from_bytes(sample(turn)[:8], "big") % len(dataset)  # in no order
        if dataset[number] != sample(number):
            raise SystemExit(f"sample {number} has other bytes")
    print(f"{arguments.reads} of {len(dataset)} samples read")


if __name__ == "__main__":
    main()
