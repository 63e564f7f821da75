"""read(2) of an open file: from its slices, or from the object that it shows.

Called by `FileIO`, which has looked at locks and told the kernel's leases. Threading: called by the
transport's threads, several for one file at once; it has no state of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from fsclient.files.data_services import DataServices
from fsclient.files.handles.open_files import FileHandle, OpenFile
from fsclient.kernel.contract import Buffer
from fsdata.attached.objects import AttachedObjects, AttachedReader
from fsdata.files.reader import FileReader
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.types import FLAG_ATTACHED, ROOT_CALLER, SliceId


class FileReads:
    """Reads of a mount."""

    def __init__(
        self, meta: Meta, data: DataServices, attached: AttachedObjects, runtime: Runtime
    ) -> None:
        self._meta = meta
        self._data = data
        self._attached = attached
        self._runtime = runtime

    def read(self, handle: FileHandle, offset: int, size: int) -> Sequence[Buffer]:
        """At most `size` bytes at `offset`. Raises: what `FileReader.read` does."""
        file = handle.file
        if file.attached:
            self._look_again(file)
        length = self._length(file, offset + size)  # before: it says whether it is attached
        reader = handle.reader
        if reader is None or (isinstance(reader, AttachedReader) and not file.attached):
            reader = handle.reader = self._new_reader(file)
        generation = self._data.epoch.begin()
        try:
            while True:
                pieces = reader.read(offset, size, length)
                if not _end_in_zero(pieces) or not self._was_cut(file):
                    return pieces
                length = file.known_length
        finally:
            self._data.epoch.end(generation)

    def _look_again(self, file: OpenFile) -> None:
        """Learn whether an attached file still is: any client may have given it its own bytes."""
        commits = file.commits
        attr = self._meta.getattr(ROOT_CALLER, file.ino)
        if not attr.flags & FLAG_ATTACHED and file.learn(attr, commits):
            self.forget_chunks(file)

    def _new_reader(self, file: OpenFile) -> FileReader | AttachedReader:
        if file.attached:
            try:
                return self._attached.reader(file.ino)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
            self._meta.forget_chunks([file.ino])  # another client was quicker
            self._look_again(file)
            if file.attached:
                raise OSError(errno.ESTALE, f"inode {file.ino} shows an object that is not named")

        def peek(sid: SliceId, off: int, length: int) -> list[Buffer] | None:
            writer = file.writer
            return None if writer is None else writer.peek(sid, off, length)

        return FileReader(
            self._runtime, self._data.blocks, file.slices, peek, self._data.prefetcher
        )

    def _length(self, file: OpenFile, end: int) -> int:
        """How long the file is, asked anew where a read may go beyond what we know."""
        while end > file.known_length:
            commits = file.commits
            attr = self._meta.getattr(ROOT_CALLER, file.ino)
            if attr.size == file.length:
                break
            if file.learn(attr, commits):
                self.forget_chunks(file)
                break
        return file.known_length

    def _was_cut(self, file: OpenFile) -> bool:
        """Whether another client has cut the file since its length was asked for: its slices may
        be newer than its length; what was cut off then reads as zeros."""
        if not file.unsure:
            return False
        before = file.known_length
        commits = file.ask_length()
        attr = self._meta.getattr(ROOT_CALLER, file.ino)
        if attr.size == file.length:
            return False
        if file.learn(attr, commits):
            self.forget_chunks(file)
        return file.known_length < before

    def forget_chunks(self, file: OpenFile) -> None:
        """Another client changed the file: its slices are to be as new as its size.

        The row's invalidation may be on its way while another read has brought part of it already.
        """
        file.forget_chunks()
        self._meta.forget_chunks([file.ino])


def _end_in_zero(pieces: Sequence[Buffer]) -> bool:
    return len(pieces) > 0 and len(pieces[-1]) > 0 and pieces[-1][-1] == 0
