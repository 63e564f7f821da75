"""`DatafluxCheckpoint`: file objects for `torch.save` and `torch.load`, streamed both ways."""

from __future__ import annotations

from typing import Any

from slicefs.checkpoint.files import Checkpoint
from slicefs.compat.dataflux.places import check_client, open_bucket


class DatafluxCheckpoint(Checkpoint):
    """`writer(name)` and `reader(name)` of a bucket's objects."""

    def __init__(
        self, project_name: str | None, bucket_name: str, storage_client: Any = None
    ) -> None:
        """Raises: ConfigError."""
        check_client(type(self).__name__, project_name, storage_client)
        self.project_name, self.bucket_name = project_name, bucket_name
        super().__init__(open_bucket(bucket_name))
