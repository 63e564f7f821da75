"""`S3LightningCheckpoint`: Lightning's checkpoints in a bucket."""

from __future__ import annotations

from slicefs.compat.s3torch.client import S3ClientConfig, place_of
from slicefs.lightning import LightningCheckpoint


class S3LightningCheckpoint(LightningCheckpoint):
    """`Trainer(plugins=[…])`; paths are s3:// or those of any tree."""

    def __init__(
        self,
        region: str,
        s3client_config: S3ClientConfig | None = None,
        endpoint: str | None = None,
    ) -> None:
        """Raises: ConfigError."""
        self.region = region
        super().__init__(place_of(type(self).__name__, region, endpoint, s3client_config).files)
