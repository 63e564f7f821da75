"""`Checkpoint`: file objects for `torch.save` and `torch.load`, on any tree.

A file is streamed to its store while it is written, is visible whole after `close`, and is not
there after an exception. Reading is by ranges; nothing is staged whole, in memory or on disk.
"""

from __future__ import annotations

import io
import os

from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree, Writer


class Checkpoint:
    """Files of checkpoints below a URL."""

    def __init__(self, url: str | os.PathLike[str] | Tree) -> None:
        self.tree = open_tree(url) if isinstance(url, str | os.PathLike) else url

    def writer(self, path: str) -> Writer:
        """A file to write in a `with` block: `torch.save(state, file)`.

        A file with this path stays as it is until the new one is whole; after an exception, too.
        """
        return self.tree.writer(path)

    def reader(self, path: str) -> io.BufferedIOBase:
        """A file to read, seekable, with `readinto`. Raises: FileNotFoundError."""
        return self.tree.open_read(path)

    def close(self) -> None:
        """Let go of connections."""
        self.tree.close()
