"""A directory in memory, where there is one: these tests sync thousands of small files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.posix.volumes import Volume, new_volume

_MEMORY = "/dev/shm"


@contextmanager
def quick_volume(meta: str = "") -> Iterator[Volume]:
    """A volume for a while, on SQLite unless `meta` names another one; clean in the end."""
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="slicefs-train-", dir=place))
    try:
        with new_volume(folder / "vol", meta or f"sqlite://{folder}/meta.db") as volume:
            yield volume
    finally:
        shutil.rmtree(folder, ignore_errors=True)
