"""Requests about ranges of open files, as `RangeCalls` has them.

Called through `VFS.ranges`; `FileRanges` does the work. Threading: any method from any thread.
"""

from __future__ import annotations

import errno

from fsclient.control.long_seeks import LongSeeks
from fsclient.files.file_ranges import FileRanges
from fsclient.kernel.contract import CopyRange, RangeCalls
from fsclient.kernel.later import Later
from fsclient.kernel.virtual import VirtualFiles
from fsclient.vfs.mount_rules import MountRules
from fsmeta.runtime import Runtime
from fsmeta.types import Caller, Ino


class RangeRequests:
    """See the module."""

    def __init__(
        self, files: FileRanges, rules: MountRules, virtual: VirtualFiles, runtime: Runtime
    ) -> None:
        self._files = files
        self._rules = rules
        self._virtual = virtual
        self._seeks = LongSeeks(files, runtime)

    def fallocate(
        self, caller: Caller, ino: Ino, fh: int, mode: int, offset: int, length: int
    ) -> None:
        del caller, ino
        self._rules.require_writable()
        self._files.fallocate(fh, mode, offset, length)

    def lseek(
        self, caller: Caller, ino: Ino, fh: int, offset: int, whence: int
    ) -> int | Later[int]:
        del caller
        if self._virtual.owns(ino):
            raise OSError(errno.EINVAL, "a virtual file has no holes")
        return self._seeks.lseek(fh, offset, whence)

    def copy_file_range(self, caller: Caller, ino: Ino, copy: CopyRange) -> int:
        del caller, ino
        self._rules.require_writable()
        return self._files.copy_file_range(
            copy.fh, copy.offset, copy.fh_out, copy.offset_out, copy.length
        )


_CONFORMS: type[RangeCalls] = RangeRequests
