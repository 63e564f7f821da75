"""Lightning's checkpoints in a bucket, and the distributed ones that the connector has beside."""

from __future__ import annotations

import os
from typing import Any

from slicefs.checkpoint.files import Checkpoint
from slicefs.compat.dataflux.dcp import GCSDistributedReader, GCSDistributedWriter
from slicefs.compat.dataflux.places import check_client, url_of
from slicefs.lightning import AsyncLightningCheckpoint, LightningCheckpoint

__all__ = [
    "DatafluxLightningAsyncCheckpoint",
    "DatafluxLightningCheckpoint",
    "GCSDistributedReader",
    "GCSDistributedWriter",
]


class DatafluxLightningCheckpoint(LightningCheckpoint):
    """`Trainer(plugins=[…])`; paths are gs://, gcs:// or those of any tree."""

    def __init__(
        self,
        project_name: str | None,
        storage_client: Any = None,
        disable_multipart: bool = False,
    ) -> None:
        """Raises: ConfigError."""
        more = {"disable_multipart": disable_multipart or None}
        check_client(type(self).__name__, project_name, storage_client, **more)
        self.project_name = project_name
        super().__init__()

    def _place(self, path: str | os.PathLike[str]) -> tuple[Checkpoint, str]:
        return super()._place(url_of(path))


class DatafluxLightningAsyncCheckpoint(DatafluxLightningCheckpoint, AsyncLightningCheckpoint):
    """The same, in a thread: a save that failed is raised by the next one, or by teardown."""
