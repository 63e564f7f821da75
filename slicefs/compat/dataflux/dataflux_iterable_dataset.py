"""`DataFluxIterableDataset`: objects of a bucket in order, shared among the workers of a rank.

As with the connector, each rank reads all of them: `slicefs.torch.IterableDataset` shares them
among ranks, too. Threading: as that.
"""

from __future__ import annotations

from typing import Any

from slicefs.compat.dataflux.dataflux_mapstyle_dataset import (
    BucketObjects,
    Config,
    Format,
    data_format_default,
)
from slicefs.torch.data import IterableDataset

__all__ = ["Config", "DataFluxIterableDataset", "data_format_default"]


class DataFluxIterableDataset(BucketObjects, IterableDataset):
    """Each worker of a DataLoader gives a part of the objects."""

    def __init__(
        self,
        project_name: str | None,
        bucket_name: str,
        config: Config | None = None,
        data_format_fn: Format = data_format_default,
        storage_client: Any = None,
    ) -> None:
        """Lists the objects. Raises: ConfigError, OSError."""
        self.project_name, self.bucket_name = project_name, bucket_name
        self.config, self.data_format_fn = config or Config(), data_format_fn
        super().__init__(**self._listed(storage_client), shard="worker")
