"""`slicefs.torch`: datasets and checkpoints for PyTorch.

A name imports its module, and with it torch, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

_HOMES: Final = {
    "MapDataset": "data",
    "IterableDataset": "data",
    "Checkpoint": "checkpoint",
    "StorageWriter": "checkpoint",
    "StorageReader": "checkpoint",
    "CheckpointManager": "checkpoint",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Raises: AttributeError, ImportError where torch is not installed."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"slicefs.torch.{name} needs torch: pip install torch") from error
