"""From a bucket's name or a path, as the connector takes them, to a tree.

Called by the other modules here. Threading: functions only.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

from slicefs.compat.options import accepted, refused
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree

_GOOGLE: Final = re.compile(r"gc?s:/+")  # a pathlib.Path has but one slash


def open_bucket(name: str) -> Tree:
    """The bucket with a name; a URL is that of any tree. Raises: ConfigError."""
    return open_tree(name if "://" in name else f"gs://{name}")


def url_of(path: str | os.PathLike[str]) -> str:
    """The URL of a path that begins with gs:// or gcs://; any other as it is."""
    return _GOOGLE.sub("gs://", os.fspath(path), count=1) if _is_google(path) else os.fspath(path)


def _is_google(path: str | os.PathLike[str]) -> bool:
    return _GOOGLE.match(os.fspath(path)) is not None


def check_client(where: str, project_name: Any, storage_client: Any, **more: Any) -> None:
    """What names a project is not needed; a client can't be used. Raises: ConfigError."""
    advice = "leave it out, and set HMAC keys and GS_ENDPOINT_URL in the environment"
    refused(where, "storage_client", storage_client, advice)
    accepted(where, project_name=project_name or None, **more)
