"""Which version of a file the kernel's pages show, so that they can be kept or have to be dropped.

They are kept over an open when the file's (mtime, size) are what they were when its pages were
read: the mark. What we change ourselves moves the mark along: the kernel has the pages that were
written, and a time that was set makes none of them old.

Where an open or a lock finds another version, the kernel drops its pages a moment later. The new
mark waits until then (`expect`, `dropped`): set earlier it would let another open or lock keep the
old pages.

Called by `FileIO`, `FileOpening` and `SliceCommitter`. Threading: any method from any thread; one
lock, a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from fsmeta.runtime import Runtime
from fsmeta.types import Attr, Ino

VERSIONS_MAX: Final = 200_000  # files whose pages may be kept; about 30 MB

Version = tuple[int, int]  # mtime in ns, and size


def version_of(attr: Attr) -> Version:
    """What a change by another client changes."""
    return attr.mtime_ns, attr.size


class ExpectedVersion:
    """What the pages of a file show when the kernel has dropped the older ones."""

    __slots__ = ("version",)

    def __init__(self, version: Version) -> None:
        self.version = version


class PageCacheValidity:
    """Which (mtime, size) of a file the kernel's pages show."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self._known: OrderedDict[Ino, Version] = OrderedDict()  # guarded by _lock
        self._expected: OrderedDict[Ino, ExpectedVersion] = OrderedDict()  # guarded by _lock

    def still(self, attr: Attr, kept: bool = True) -> bool | None:
        """Whether pages read earlier show `attr`'s version; None where there are none we know of.

        Unless they do, the caller has them dropped: see `expect`. Without `kept` the next open of
        the file must not keep them.
        """
        with self._lock:
            if kept:
                before = self._known.get(attr.ino)
                if before is not None:
                    self._known.move_to_end(attr.ino)
            else:
                before = self._known.pop(attr.ino, None)
                self._expected.pop(attr.ino, None)
        return None if before is None else before == version_of(attr)

    def expect(self, attr: Attr) -> ExpectedVersion:
        """The kernel is about to drop pages that are older than `attr`."""
        version = version_of(attr)
        with self._lock:
            expected = self._expected.get(attr.ino)
            if expected is None or expected.version != version:
                expected = self._expected[attr.ino] = ExpectedVersion(version)
                if len(self._expected) > VERSIONS_MAX:
                    self._expected.popitem(last=False)
        return expected

    def dropped(self, ino: Ino, expected: ExpectedVersion) -> None:
        """It has dropped them. What was expected before something newer counts no more."""
        with self._lock:
            if self._expected.get(ino) is expected:
                del self._expected[ino]
                self._show(ino, expected.version)

    def begin(self, attr: Attr) -> None:
        """A file was made: the kernel has no pages but those that come from now on."""
        with self._lock:
            self._show(attr.ino, version_of(attr))

    def _show(self, ino: Ino, version: Version) -> None:
        self._known[ino] = version
        self._known.move_to_end(ino)
        if len(self._known) > VERSIONS_MAX:
            self._known.popitem(last=False)

    def moved(self, before: Attr, after: Attr) -> None:
        """We changed the file ourselves: pages that showed `before` show `after`."""
        version = version_of(before)
        with self._lock:
            if self._known.get(before.ino) == version:
                self._known[after.ino] = version_of(after)
            expected = self._expected.get(before.ino)
            if expected is not None and expected.version == version:
                expected.version = version_of(after)
