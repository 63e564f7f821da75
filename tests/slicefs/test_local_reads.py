"""Reads of a directory as a tree."""

from __future__ import annotations

from pathlib import Path

from slicefs.stores.opening import open_tree
from tests.support.traced import traced, tracing

SIZE = 16 << 20


def peak_of_a_read(directory: str) -> int:
    """What reading all but five bytes of the file `tensor` allocates."""
    tree = open_tree(Path(directory))
    with tracing() as peak:
        assert len(tree.read("tensor", 5)) == SIZE - 5
        most = peak()
    tree.close()
    return most


def test_a_large_read_is_in_memory_once(tmp_path: Path) -> None:
    (tmp_path / "tensor").write_bytes(bytes(SIZE))
    assert traced(peak_of_a_read, str(tmp_path)) < 1.5 * SIZE
