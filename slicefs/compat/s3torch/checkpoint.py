"""`S3Checkpoint`: file objects for `torch.save` and `torch.load`, by URL.

An object is visible when its writer is closed, and is not there after an exception.
"""

from __future__ import annotations

from slicefs.compat.s3torch.client import S3ClientConfig, checked, place_of
from slicefs.compat.s3torch.s3reader import S3Reader
from slicefs.data.source import split_url
from slicefs.stores.s3_writer import S3Writer
from slicefs.stores.tree import Tree, Writer

__all__ = ["S3Checkpoint", "S3Writer"]


class S3Checkpoint:
    """`writer(url)` and `reader(url)`."""

    def __init__(
        self,
        region: str,
        endpoint: str | None = None,
        s3client_config: S3ClientConfig | None = None,
    ) -> None:
        """Raises: ConfigError."""
        self.region, self.endpoint = region, endpoint
        self._opens = place_of(type(self).__name__, region, endpoint, s3client_config)
        self._trees: dict[str, Tree] = {}  # one for each bucket

    def _place(self, s3_uri: str) -> tuple[Tree, str, str]:
        top, key = split_url(checked(s3_uri))
        if top not in self._trees:
            self._trees[top] = self._opens.tree(top)
        return self._trees[top], bucket_of(top), key

    def reader(self, s3_uri: str) -> S3Reader:
        """A file to read. Raises: ConfigError; FileNotFoundError when it is read."""
        return S3Reader(*self._place(s3_uri))

    def writer(self, s3_uri: str) -> Writer:
        """A file to write. Raises: ConfigError."""
        tree, _, key = self._place(s3_uri)
        return tree.writer(key)

    def close(self) -> None:
        """Let go of connections."""
        for tree in self._trees.values():
            tree.close()


def bucket_of(top: str) -> str:
    """The bucket in the URL of a place; of another tree, its URL without the scheme."""
    return top.rpartition("://")[2]
