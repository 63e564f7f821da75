"""A client that does not answer one write, while it tells the kernel to forget the page of it.

The kernel waits for the answer meanwhile, in a thread of the client that no signal ends. A program
as `fsclient.cli.main` is: the supervisor starts it. It does so once, while the file is there that
SLICEFS_WAIT_ONCE names; the write is that of a page that begins with `wait`.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from fsclient.cli.main import main
from fsclient.vfs.surviving import SurvivingVFS

MARK = b"wait"
ONCE_ENV = "SLICEFS_WAIT_ONCE"

_write = SurvivingVFS.write


def write(
    self: SurvivingVFS, caller: Any, ino: Any, fh: int, at: int, data: Any, *rest: Any
) -> int:
    """Serve WRITE, or wait for ever."""
    if bytes(data[: len(MARK)]) == MARK:
        with suppress(FileNotFoundError):
            os.unlink(os.environ[ONCE_ENV])
            self.coherence.notices.stale_pages(ino)
            threading.Event().wait()
    return _write(self, caller, ino, fh, at, data, *rest)


if __name__ == "__main__":
    SurvivingVFS.write = write  # type: ignore[method-assign, assignment]
    main()
