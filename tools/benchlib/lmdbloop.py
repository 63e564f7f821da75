"""Random gets from an LMDB file: `python -m tools.benchlib.lmdbloop fill|get PATH …`.

    lmdbloop fill PATH BYTES COUNT              a database of COUNT values of BYTES
    lmdbloop get PATH BYTES COUNT SEED AHEAD    COUNT of its values, none twice, in random order

AHEAD is 1 where the kernel may read ahead in the map, as LMDB comes, or 0 (MDB_NORDAHEAD). It is a
process of its own: a page fault of a mapped file keeps the interpreter's lock. It prints what the
programs in C print: `command wall-ns operations bytes`.
"""

from __future__ import annotations

import random
import sys
import time
from struct import Struct
from typing import Final

import lmdb

ROOM: Final = 4  # times the values: pages, and the list of free ones
BATCH: Final = 1000  # values in a transaction
_KEY: Final = Struct(">Q")


def fill(path: str, size: int, count: int) -> None:
    """Values that say which they are, and do not compress."""
    noise = random.Random(size).randbytes(size)
    with lmdb.open(path, subdir=False, map_size=ROOM * size * count + (64 << 20)) as database:
        for first in range(0, count, BATCH):
            with database.begin(write=True) as txn:
                for number in range(first, min(first + BATCH, count)):
                    txn.put(_KEY.pack(number), _KEY.pack(number) + noise[_KEY.size :], append=True)


def get(path: str, size: int, count: int, seed: int, ahead: bool) -> int:
    """Read values; how many there were. Raises: ValueError where one is wrong."""
    options = {"subdir": False, "readonly": True, "lock": False, "readahead": ahead}
    with lmdb.open(path, **options) as database, database.begin(buffers=True) as txn:
        numbers = random.Random(seed).sample(range(database.stat()["entries"]), count)
        for number in numbers:
            value = bytes(txn.get(_KEY.pack(number)) or b"")
            if len(value) != size or value[: _KEY.size] != _KEY.pack(number):
                raise ValueError(f"{path}: value {number} is wrong")
    return len(numbers)


def main(words: list[str]) -> None:
    """Run one phase and print its line."""
    phase, path, *rest = words
    numbers = [int(word) for word in rest]
    size, count = numbers[:2]
    begin = time.monotonic_ns()
    if phase == "fill":
        fill(path, size, count)
    else:
        count = get(path, size, count, numbers[2], bool(numbers[3]))
    print(phase, time.monotonic_ns() - begin, count, size * count)


if __name__ == "__main__":
    main(sys.argv[1:])
