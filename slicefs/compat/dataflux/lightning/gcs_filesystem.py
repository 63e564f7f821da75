"""`GCSDistributedWriter` and `GCSDistributedReader` where demos of dataflux import them."""

from __future__ import annotations

from slicefs.compat.dataflux.dcp import GCSDistributedReader, GCSDistributedWriter

__all__ = ["GCSDistributedReader", "GCSDistributedWriter"]
