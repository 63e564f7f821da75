"""The examples of docs/train run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.posix.volumes import Volume

DOCS = Path(__file__).parents[2] / "docs" / "train"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["client.md", "datasets.md"])
def test_examples(name: str, volume: Volume, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(str(number))
    blocks = _BLOCK.findall((DOCS / name).read_text())
    assert blocks
    for block in blocks:
        exec(block, {"META": volume.meta, "FOLDER": str(tmp_path)})
