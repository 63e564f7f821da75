"""The names of `s3torchconnector`: in its imports, write `slicefs.compat.s3torch` in its place.

    from slicefs.compat.s3torch import S3MapDataset, S3Checkpoint
    from slicefs.compat.s3torch.dcp import S3StorageWriter, S3StorageReader
    from slicefs.compat.s3torch.lightning import S3LightningCheckpoint

Each class can also be imported from here. A name loads its module, and with it torch or Lightning,
when it is first used. Errors of a store are `OSError`, which is what `S3Exception` is here.
"""

from __future__ import annotations

from typing import Any, Final

from slicefs.compat.options import loaded

S3Exception = OSError
_HOMES: Final = {
    "S3Checkpoint": "checkpoint",
    "S3ClientConfig": "client",
    "S3IterableDataset": "data",
    "S3LightningCheckpoint": "lightning",
    "S3MapDataset": "data",
    "S3Reader": "s3reader",
    "S3ReaderConstructor": "s3reader",
    "S3ReaderConstructorProtocol": "s3reader",
    "S3StorageReader": "dcp",
    "S3StorageWriter": "dcp",
    "S3Writer": "checkpoint",
}
__all__ = sorted([*_HOMES, "S3Exception"])


def __getattr__(name: str) -> Any:
    """Raises: AttributeError, ImportError where torch or Lightning is not installed."""
    return loaded(__name__, _HOMES, name)
