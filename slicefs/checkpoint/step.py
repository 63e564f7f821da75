"""A published step: its files, verified by size or by digest.

Called by the manager and by `slicefs/lifecycle`. A `Step` is a value with a tree: it opens files,
and changes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Final

from slicefs.checkpoint.layout import MANIFEST
from slicefs.checkpoint.manifest import MANIFEST_BYTES_MAX, StepManifest, decode
from slicefs.checkpoint.reading import VerifiedReader, verify_file
from slicefs.stores.tree import Tree

BUFFER_BYTES: Final = 64 << 10


class Step:
    """One published step."""

    def __init__(self, tree: Tree, folder: str, manifest: StepManifest) -> None:
        self.tree = tree
        self.folder = folder  # of the step, in the tree
        self.manifest = manifest

    @property
    def number(self) -> int:
        """The number of the step."""
        return self.manifest.step

    @property
    def data(self) -> str:
        """The folder of the files, in the tree."""
        return joined(self.folder, self.manifest.data)

    @property
    def url(self) -> str:
        """The URL of the folder of the files."""
        return url_below(self.tree.url, self.data)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Step({self.number}, {self.url!r})"

    @property
    def names(self) -> list[str]:
        """The names of its files."""
        return sorted(self.manifest.files)

    def open(self, name: str) -> io.BufferedIOBase:
        """A file to read, seekable; its bytes are verified. Raises: FileNotFoundError."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise FileNotFoundError(2, f"step {self.number} has no such file", name)
        raw = VerifiedReader(self.tree, joined(self.data, name), entry)
        return io.BufferedReader(raw, BUFFER_BYTES)

    def read(self, name: str) -> bytes:
        """A whole file, verified. Raises: FileNotFoundError, EIO."""
        with self.open(name) as file:
            return file.read()

    def problems(self, *, digest: bool = False) -> Iterator[str]:
        """What is wrong with its files, a line each: missing, of a wrong size, or damaged."""
        prefix = f"{self.data}/" if self.data else ""
        sizes = {info.path: info.size for info in self.tree.list(prefix)}
        for name, entry in sorted(self.manifest.files.items()):
            path = prefix + name
            size = sizes.get(path)
            if size is None:
                yield f"{path}: is missing"
            elif size != entry.size:
                yield f"{path}: has {size} bytes, not {entry.size}"
            elif digest:
                try:
                    verify_file(self.tree, path, entry)
                except OSError as error:
                    yield f"{path}: {error.strerror or error}"

    def is_whole(self) -> bool:
        """Whether every file is there with its size."""
        return next(self.problems(), None) is None


def load_step(tree: Tree, folder: str) -> Step | None:
    """The step that is published in a folder, or None. Raises: Corrupt."""
    path = joined(folder, MANIFEST)
    try:
        data = tree.read(path, 0, MANIFEST_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Step(tree, folder, decode(data, joined(tree.url, path)))


def joined(*words: str) -> str:
    """A path of words, empty ones left out."""
    return "/".join(word.rstrip("/") if word != "/" else "" for word in words if word)


def url_below(url: str, path: str) -> str:
    """The URL of a path in the tree of a URL; in a volume, the path stands behind `#`."""
    if url.startswith("file://"):
        return f"file:///{joined(url.removeprefix('file://').strip('/'), path)}"
    if url.startswith(("s3://", "r2://", "gs://")) or "#" in url:
        return joined(url, path)
    return f"{url}#{path}" if path else url
