"""Google's paths as URLs, and as a bucket and a name. Threading: functions only."""

from __future__ import annotations

import os
from pathlib import Path

from slicefs.compat.dataflux.places import url_of


def process_input_path(path: str | Path) -> str:
    """A path as text; a pathlib.Path of Google's gets its second slash back. Raises: TypeError."""
    if not isinstance(path, str | Path):
        raise TypeError(f"path of type {type(path).__name__}: pass a str or a pathlib.Path")
    return path if isinstance(path, str) else url_of(path)


def parse_gcs_path(path: str | Path) -> tuple[str, str]:
    """The bucket and what stands behind it. Raises: ValueError for what is no gs:// or gcs://."""
    text = process_input_path(path)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("gs", "gcs"):
        raise ValueError(f"path {os.fspath(path)!r}: write gs://BUCKET/NAME or gcs://BUCKET/NAME")
    bucket, _, name = rest.partition("/")
    if not bucket:
        raise ValueError(f"path {os.fspath(path)!r} names no bucket: write gs://BUCKET/NAME")
    return bucket, name
