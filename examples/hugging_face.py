"""Hugging Face `datasets` on a volume without a mount: save, load, filter, stream.

    export SLICEFS_META_VOL=redis://localhost/1
    python examples/hugging_face.py slicefs://vol/texts --rows 10000

`slicefs://NAME` is a volume; its metadata's URL is in the variable SLICEFS_META_NAME or in the file
~/.slicefs/volumes.
"""

from __future__ import annotations

import argparse

import datasets


def main() -> None:
    """Write a data set, and read it whole and as a stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--rows", type=int, default=1000)
    arguments = parser.parse_args()

    texts = [f"text number {number}" for number in range(arguments.rows)]
    made = datasets.Dataset.from_dict({"text": texts, "n": list(range(arguments.rows))})
    made.save_to_disk(arguments.url, num_shards=2)
    loaded = datasets.load_from_disk(arguments.url)
    even = loaded.filter(lambda row: row["n"] % 2 == 0, keep_in_memory=True)
    print(f"loaded {len(loaded)} rows, {len(even)} are even")

    streamed = loaded.to_iterable_dataset(num_shards=2).shuffle(seed=0, buffer_size=100)
    print(f"streamed a sum of {sum(row['n'] for row in streamed)}")


if __name__ == "__main__":
    main()
