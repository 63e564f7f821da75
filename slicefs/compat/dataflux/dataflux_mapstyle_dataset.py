"""`Config` and `DataFluxMapStyleDataset`: objects of a bucket by number.

Threading: as `slicefs.torch.MapDataset`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

from slicefs.compat.dataflux.places import check_client, open_bucket
from slicefs.data.source import Sample, SampleSource

try:
    from slicefs.torch.data import MapDataset
except ModuleNotFoundError as missing:
    raise ImportError("slicefs.compat.dataflux needs torch: pip install torch") from missing

Format = Callable[[bytes], Any]
COMPOSITE_BYTES: Final = 100_000_000
COMPOSED: Final = "dataflux-composed-objects/"  # what dataflux has made and not removed


@dataclass
class Config:
    """The options of both datasets; `prefix` is the one that matters here.

    Listings are always sorted: all ranks see one order. Small objects are read many at a time, and
    nothing is composed in the bucket.
    """

    sort_listing_results: bool = False
    max_composite_object_size: int = COMPOSITE_BYTES
    num_processes: int | None = os.cpu_count()
    prefix: str | None = None
    max_listing_retries: int = 3
    threads_per_process: int = 1
    disable_compose: bool = False
    list_retry_config: Any = None
    download_retry_config: Any = None

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0

    def without_effect(self) -> dict[str, Any]:
        """The options that were given and do nothing here."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {
            each.name: given[each.name] for each in fields(self) if given[each.name] != each.default
        }
        changed.pop("prefix", None)
        return changed


def data_format_default(data: bytes) -> bytes:
    """As it is."""
    return data


def formatted(data_format_fn: Format, sample: Sample) -> Any:
    """What a program gets for a sample."""
    return data_format_fn(bytes(sample.data))


def listed(bucket_name: str, config: Config) -> SampleSource:
    """The objects whose names begin with the prefix, but for COMPOSED.

    Raises: ConfigError, OSError.
    """
    tree = open_bucket(bucket_name)
    found = tree.list(config.prefix or "")
    objects = [(info.path, info.size) for info in found if not info.path.startswith(COMPOSED)]
    return SampleSource(tree, objects)


class BucketObjects:
    """What both datasets are given, under the connector's names."""

    project_name: str | None
    bucket_name: str
    config: Config
    data_format_fn: Format

    def _listed(self, storage_client: Any) -> dict[str, Any]:
        """The source and the transform. Raises: ConfigError, OSError."""
        more = self.config.without_effect()
        check_client(type(self).__name__, self.project_name, storage_client, **more)
        transform = partial(formatted, self.data_format_fn)
        return {"source": listed(self.bucket_name, self.config), "transform": transform}


class DataFluxMapStyleDataset(BucketObjects, MapDataset):
    """`objects` has names and sizes; a DataLoader's batch is one batch of reads."""

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
        super().__init__(**self._listed(storage_client))
