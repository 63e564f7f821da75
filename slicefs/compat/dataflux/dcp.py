"""`GCSDistributedWriter` and `GCSDistributedReader`: distributed checkpoints in a bucket."""

from __future__ import annotations

import os
from typing import Any

from slicefs.compat.dataflux.places import check_client, url_of
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree

try:
    from slicefs.torch.dcp import StorageWriter
    from slicefs.torch.dcp_reader import StorageReader
except ModuleNotFoundError as missing:
    raise ImportError("slicefs.compat.dataflux needs torch: pip install torch") from missing


def _open(path: str | os.PathLike[str]) -> Tree:
    return open_tree(url_of(path))


class GCSDistributedWriter(StorageWriter):
    """For `dcp.save` and `dcp.async_save`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        project_name: str | None = None,
        storage_client: Any = None,
        debug: bool | None = False,
        **kwargs: Any,
    ) -> None:
        """`kwargs` are those of torch's FileSystemWriter. Raises: ConfigError."""
        more = {"debug": debug or None, "sync_files": kwargs.pop("sync_files", None)}
        check_client(type(self).__name__, project_name, storage_client, **more)
        super().__init__(path, opener=_open, **kwargs)


class GCSDistributedReader(StorageReader):
    """For `dcp.load`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        project_name: str | None = None,
        storage_client: Any = None,
        debug: bool | None = False,
    ) -> None:
        """Raises: ConfigError."""
        check_client(type(self).__name__, project_name, storage_client, debug=debug or None)
        super().__init__(path, opener=_open)
