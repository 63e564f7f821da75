"""`S3StorageWriter` and `S3StorageReader`: distributed checkpoints in a bucket.

What is read is what the plan needs, in merged ranges: the kind of reader makes no difference.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from slicefs.compat.options import accepted
from slicefs.compat.s3torch.client import S3ClientConfig, place_of
from slicefs.compat.s3torch.prefixes import (
    BinaryPrefixStrategy,
    DefaultPrefixStrategy,
    HexPrefixStrategy,
    NumericPrefixStrategy,
    RoundRobinPrefixStrategy,
    S3PrefixStrategyBase,
)
from slicefs.compat.s3torch.s3reader import kind_of

try:
    from slicefs.torch.dcp import StorageWriter
    from slicefs.torch.dcp_reader import StorageReader
except ModuleNotFoundError as missing:
    raise ImportError("slicefs.compat.s3torch needs torch: pip install torch") from missing

__all__ = [
    "BinaryPrefixStrategy",
    "DefaultPrefixStrategy",
    "HexPrefixStrategy",
    "NumericPrefixStrategy",
    "RoundRobinPrefixStrategy",
    "S3PrefixStrategyBase",
    "S3StorageReader",
    "S3StorageWriter",
]


class StorageMetadata(NamedTuple):
    """What torch's writer finds in the plan of a rank."""

    prefix: str


class S3StorageWriter(StorageWriter):
    """For `dcp.save` and `dcp.async_save`."""

    def __init__(
        self,
        region: str,
        path: str | os.PathLike[str],
        s3client_config: S3ClientConfig | None = None,
        prefix_strategy: S3PrefixStrategyBase | None = None,
        thread_count: int = 1,
        **kwargs: Any,
    ) -> None:
        """`kwargs` are those of torch's FileSystemWriter. Raises: ConfigError."""
        where = type(self).__name__
        accepted(where, sync_files=kwargs.pop("sync_files", None))
        place = place_of(where, region, config=s3client_config)
        self.prefix_strategy = prefix_strategy or DefaultPrefixStrategy()
        super().__init__(path, thread_count=thread_count, opener=place.tree, **kwargs)

    def prepare_global_plan(self, plans: Sequence[Any]) -> list[Any]:
        """Give each rank its prefix."""
        return [
            dataclasses.replace(plan, storage_data=StorageMetadata(self.prefix_strategy(rank)))
            for rank, plan in enumerate(plans)
        ]


class S3StorageReader(StorageReader):
    """For `dcp.load`."""

    def __init__(
        self,
        region: str,
        path: str | os.PathLike[str],
        s3client_config: S3ClientConfig | None = None,
        reader_constructor: Any = None,
    ) -> None:
        """Raises: ConfigError."""
        where = type(self).__name__
        kind_of(where, reader_constructor)
        super().__init__(path, opener=place_of(where, region, config=s3client_config).tree)
