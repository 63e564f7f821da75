"""Where samples come from: a tree and the items of it that are samples.

    Source.from_prefix(url, glob="**/*.jpg")   one listing
    Source.from_objects(urls)                  no listing; ranges of files, too
    Source.from_manifest(url)                  no listing; names and sizes are mapped

Called by the datasets. A source pickles: its tree by its URL, its list as it is, a manifest by its
own URL. Threading: immutable; `read` from any thread.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from fsmeta.errors import ConfigError
from slicefs.client.bulk import KnownFile
from slicefs.client.ranges import MAX_GAP_BYTES, Item
from slicefs.client.volumes import is_volume_url
from slicefs.manifests.manifest import Manifest, open_manifest
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree
from slicefs.stores.volume import VolumeTree

if TYPE_CHECKING:
    from slicefs.client.client import Client

UNKNOWN: Final = -1  # in place of a size
EVERYTHING: Final = "**"


class Sample(NamedTuple):
    """One sample as a transform gets it."""

    path: str
    data: memoryview


class _ManifestFiles(Sequence[tuple[str, int]]):
    """The files of a manifest as (path, size)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._manifest: Manifest = open_manifest(url)
        self.root = self._manifest.root

    def __reduce__(self) -> tuple[Callable[[str], _ManifestFiles], tuple[str]]:
        return _ManifestFiles, (self._url,)

    def __len__(self) -> int:
        return len(self._manifest)

    def is_of(self, tree: Tree) -> bool:
        """Whether the manifest lists this very tree, and not a copy of it."""
        return tree.url == self.root

    def __getitem__(self, index: int | slice) -> tuple[str, int]:  # type: ignore[override]
        assert isinstance(index, int), "one at a time"
        file = self._manifest[index]
        return file.path, file.size

    def known(self, index: int) -> KnownFile | None:
        """Where the bytes of a file are, if the manifest says it."""
        if not self._manifest.has_slices:
            return None
        file = self._manifest[index]
        return KnownFile(file.path, file.size, file.slice)


class SampleSource:
    """Samples by number."""

    def __init__(
        self, tree: Tree, objects: Sequence[tuple[str, int]], items: Sequence[Item] | None = None
    ) -> None:
        """`items`: what is read of each object; None: all of it."""
        self.tree = tree
        self.objects = objects  # path and size, UNKNOWN where nothing was listed
        self._items = items

    @classmethod
    def from_prefix(cls, url: str, *, glob: str = EVERYTHING, client: Client | None = None) -> Self:
        """The files below a URL whose paths match `glob`, in order. Raises: ConfigError, OSError.

        `*` stays within a directory, `**` does not.
        """
        tree = open_tree(url, client=client)
        wanted = matcher(glob)
        found = [(info.path, info.size) for info in tree.list() if wanted(info.path)]
        if not found:
            where = url or tree.url
            if glob == EVERYTHING:
                raise ConfigError(f"{where}: has no files, or is no directory: check the URL")
            raise ConfigError(f"{where}: no file matches {glob!r}: check the URL and the pattern")
        return cls(tree, found)

    @classmethod
    def from_objects(
        cls, items: Iterable[Item], *, url: str = "", client: Client | None = None
    ) -> Self:
        """These files, or `(file, begin, end)` of them: paths below `url`, or URLs of one place.

        Raises: ConfigError.
        """
        listed = list(items)
        top, placed = (url, listed) if url or client else _common(listed)
        objects = [
            (item, UNKNOWN) if isinstance(item, str) else (item[0], item[2] - item[1])
            for item in placed
        ]
        return cls(open_tree(top, client=client), objects, placed)

    @classmethod
    def from_manifest(cls, manifest: str, *, url: str = "", client: Client | None = None) -> Self:
        """The files that a manifest lists; below `url` in place of where it was written.

        Raises: ConfigError, OSError.
        """
        listed = _ManifestFiles(manifest)
        return cls(open_tree(url or listed.root, client=client), listed)

    def __len__(self) -> int:
        return len(self.objects)

    def sizes(self) -> list[int]:
        """The sizes of all samples; 1 for those that are not known."""
        return [max(1, size) for _, size in self.objects]

    def fingerprint(self) -> str:
        """Changes with the names and sizes of the samples: a state is of one list alone."""
        digest = hashlib.blake2b(digest_size=16)
        for path, size in self.objects:
            digest.update(f"{path}\0{size}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def hold_copies(self) -> None:
        """See `Client.hold_copies`."""
        if isinstance(self.tree, VolumeTree):
            self.tree.client.hold_copies()

    def share_copies(self) -> None:
        """See `Client.share_copies`: for one of several worker processes, before it reads."""
        if isinstance(self.tree, VolumeTree):
            self.tree.client.share_copies()

    def read(self, indexes: Sequence[int], max_gap: int = MAX_GAP_BYTES) -> list[Sample]:
        """Samples by their numbers, in one batch of reads.

        Raises: OSError ESTALE where a file has another size than was listed.
        """
        objects = [self.objects[index] for index in indexes]
        items: list[Item] = [path for path, _ in objects]
        if self._items is not None:
            items = [self._items[index] for index in indexes]
        found = self._read_known(indexes) or self.tree.read_ranges(items, max_gap)
        for (path, size), data in zip(objects, found, strict=True):
            if size not in (UNKNOWN, len(data)):
                raise OSError(
                    errno.ESTALE,
                    f"has {len(data)} bytes and was listed with {size}: list the data set again",
                    path,
                )
        return [Sample(path, data) for (path, _), data in zip(objects, found, strict=True)]

    def _read_known(self, indexes: Sequence[int]) -> list[memoryview] | None:
        """Files of a manifest that says where their bytes are, without metadata."""
        listed, tree = self.objects, self.tree
        if not isinstance(listed, _ManifestFiles) or not listed.is_of(tree):
            return None
        files = [file for index in indexes if (file := listed.known(index)) is not None]
        return tree.read_known(files) if isinstance(tree, VolumeTree) and files else None


def _common(items: Sequence[Item]) -> tuple[str, Sequence[Item]]:
    """The place that URLs have in common, and the paths below it. Raises: ConfigError."""
    urls = [item if isinstance(item, str) else item[0] for item in items]
    if not urls:
        raise ConfigError("a data set of no objects: name at least one")
    tops = {split_url(url)[0] for url in urls}
    if len(tops) > 1:
        few = ", ".join(sorted(tops)[:3])
        raise ConfigError(f"objects of several places ({few}): make a data set of each")
    paths = [split_url(url)[1] for url in urls]
    placed: list[Item] = [
        path if isinstance(item, str) else (path, item[1], item[2])
        for path, item in zip(paths, items, strict=True)
    ]
    return tops.pop(), placed


def split_url(url: str) -> tuple[str, str]:
    """The place that a tree is opened at, and the path below it: a bucket and a key."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return ("/", url.lstrip("/")) if url.startswith("/") else (".", url)
    if scheme == "file":
        return "/", rest.lstrip("/")
    if is_volume_url(url) and scheme != "slicefs":
        meta, _, path = url.partition("#")
        return meta, path
    name, _, path = rest.partition("/")
    return f"{scheme}://{name}", path


def matcher(glob: str) -> Callable[[str], bool]:
    """Whether a path matches `glob`: `*` and `?` stay within a name, `**` crosses directories."""
    if glob in (EVERYTHING, "**/*", ""):
        return lambda _path: True
    out, at = "", 0
    while at < len(glob):
        if glob.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
        elif glob.startswith("**", at):
            out, at = out + ".*", at + 2
        elif glob[at] == "*":
            out, at = out + "[^/]*", at + 1
        elif glob[at] == "?":
            out, at = out + "[^/]", at + 1
        elif glob[at] == "[" and "]" in glob[at + 2 :]:
            end = glob.index("]", at + 2)
            inner = glob[at + 1 : end].replace("\\", "\\\\")
            out, at = out + ("[^" + inner[1:] if inner[0] in "!^" else "[" + inner) + "]", end + 1
        else:
            out, at = out + re.escape(glob[at]), at + 1
    pattern = re.compile(out, re.DOTALL)
    return lambda path: pattern.fullmatch(path) is not None
