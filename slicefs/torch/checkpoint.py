"""Checkpoints for PyTorch under the names that users import."""

from __future__ import annotations

from slicefs.checkpoint.files import Checkpoint
from slicefs.torch.checkpoint_manager import CheckpointManager
from slicefs.torch.dcp import StorageWriter
from slicefs.torch.dcp_reader import StorageReader

__all__ = ["Checkpoint", "CheckpointManager", "StorageReader", "StorageWriter"]
