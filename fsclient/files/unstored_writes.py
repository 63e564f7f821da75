"""What programs have written and the store does not have yet: by file, and of the whole mount.

`FileIO` has one. What a close could not store has one more chance at the last close of the file,
and is lost then. Threading: any method from any thread.
"""

from __future__ import annotations

from fsclient.files.handles.open_files import OpenFile, OpenFiles
from fsclient.files.write_errors import Failed, WriteErrors, flush_together
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.types import Ino


class UnstoredWrites:
    """See the module."""

    def __init__(self, meta: Meta, files: OpenFiles, losses: WriteErrors, runtime: Runtime) -> None:
        self._meta = meta
        self._files = files
        self._unsynced = files.unsynced
        self._losses = losses
        self._runtime = runtime

    def flush_file(self, file: OpenFile) -> None:
        """Store and commit what has been written to `file`. Raises: what failed."""
        if file.writer is not None and file.writer.dirty:
            file.writer.flush()

    def last_flush(self, file: OpenFile) -> None:
        """What close(2) could not store has one more chance; then it is lost, and we say so."""
        assert file.writer is not None
        try:
            file.writer.flush()
        except (OSError, StoreError) as error:
            self._losses.closed(file.ino, error)

    def store_or_void(self, file: OpenFile) -> None:
        """A lock goes, and what was written under it must not be stored after that."""
        if file.dirty:
            self.last_flush(file)
        if file.dirty:
            self._files.set_lost(file, file.lost, void=True)

    def fsync(self, file: OpenFile) -> None:
        """fsync(2): as `flush_file`, and it survives a loss of power."""
        self._sync(file)
        self._meta.sync()

    def syncfs(self) -> None:
        """syncfs(2): as fsync(2) of each file that this mount has written."""
        for file in self._files.all():
            self._sync(file)
        self._unsynced.sync_all()
        self._meta.sync()

    def _sync(self, file: OpenFile) -> None:
        if file.writer is not None:
            file.writer.flush(durable=True)
        self._unsynced.sync(file.ino)

    def flush_all(self) -> list[Failed]:
        """Store everything there is, many files at a time; what could not be."""
        return flush_together(self._runtime, self.flush_file, self._files.all())

    def flush_open(self, ino: Ino | None) -> None:
        """Store what is written to a file that is open, or to any. Raises: what failed first."""
        for file in self._files.all():
            if ino is None or file.ino == ino:
                self.flush_file(file)

    def has_any(self, ino: Ino | None) -> bool:
        """Whether anything is written and not stored: to a file, or to any."""
        return any(file.dirty for file in self._files.all() if ino is None or file.ino == ino)
