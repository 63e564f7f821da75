"""The names of `dataflux_pytorch`: in its imports, write `slicefs.compat.dataflux` in its place.

    from slicefs.compat.dataflux import dataflux_mapstyle_dataset
    from slicefs.compat.dataflux.lightning import DatafluxLightningCheckpoint

Each class can also be imported from here. A name loads its module, and with it torch or Lightning,
when it is first used. Buckets are `gs://` trees, with HMAC keys; nothing is composed or deleted in
a bucket that is read.
"""

from __future__ import annotations

from typing import Any, Final

from slicefs.compat.options import loaded

_HOMES: Final = {
    "Config": "dataflux_mapstyle_dataset",
    "DataFluxMapStyleDataset": "dataflux_mapstyle_dataset",
    "DataFluxIterableDataset": "dataflux_iterable_dataset",
    "DatafluxCheckpoint": "dataflux_checkpoint",
    "DatafluxLightningCheckpoint": "lightning",
    "DatafluxLightningAsyncCheckpoint": "lightning",
    "GCSDistributedWriter": "dcp",
    "GCSDistributedReader": "dcp",
    "dataflux_checkpoint": "dataflux_checkpoint",
    "dataflux_iterable_dataset": "dataflux_iterable_dataset",
    "dataflux_mapstyle_dataset": "dataflux_mapstyle_dataset",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Raises: AttributeError, ImportError where torch or Lightning is not installed."""
    return loaded(__name__, _HOMES, name)
