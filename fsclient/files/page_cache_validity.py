"""Which version of a file the kernel's pages show, so that they can be kept or have to be dropped.

They are kept over an open when the file's (mtime, size) are what they were when its pages were
read. What we change ourselves moves that mark along: the kernel has the pages that were written,
and a time that was set makes none of them old.

Called by `FileIO` and `SliceCommitter`. Threading: any method from any thread; one lock, a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fsmeta.runtime import Runtime
from fsmeta.types import Attr, Ino

VERSIONS_MAX: Final = 200_000  # files whose pages may be kept; about 30 MB


class PageCacheValidity:
    """Which (mtime, size) of a file the kernel's pages show."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self._known: OrderedDict[Ino, tuple[int, int]] = OrderedDict()  # guarded by _lock

    def still(self, attr: Attr, kept: bool = True) -> bool | None:
        """Whether pages read earlier show `attr`'s version; None where there are none we know of.

        From now on they do, or the next open of the file must not keep them (`kept`).
        """
        version = (attr.mtime_ns, attr.size)
        with self._lock:
            if not kept:
                before = self._known.pop(attr.ino, None)
                return None if before is None else before == version
            before = self._known.get(attr.ino)
            self._known[attr.ino] = version
            self._known.move_to_end(attr.ino)
            if len(self._known) > VERSIONS_MAX:
                self._known.popitem(last=False)
        return None if before is None else before == version

    def begin(self, attr: Attr) -> None:
        """A file was made: the kernel has no pages but those that come from now on."""
        with self._lock:
            self._known[attr.ino] = (attr.mtime_ns, attr.size)
            if len(self._known) > VERSIONS_MAX:
                self._known.popitem(last=False)

    def moved(self, before: Attr, after: Attr) -> None:
        """We changed the file ourselves: pages that showed `before` show `after`."""
        with self._lock:
            if self._known.get(before.ino) == (before.mtime_ns, before.size):
                self._known[after.ino] = (after.mtime_ns, after.size)
