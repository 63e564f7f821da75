"""One object that is being written: a single PUT while it is small, else parts of a large one.

Parts are sent while the caller writes the next ones. Nothing is visible before `close`; `abort`
has the store drop the parts. Memory is bounded: PARTS_AT_ONCE + 1 parts.

Called by `S3Tree`. Threading: one thread writes; each part is sent by a thread of its own.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from fsdata.objects.contract import KeysRefused
from fsmeta.errors import StoreError
from slicefs.client.parallel import RUNTIME
from slicefs.stores.seekable import SeekableReader
from slicefs.stores.tree import BaseWriter, Buffer

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from fsdata.objects.contract import ObjectStore

PART_BYTES: Final = 16 << 20  # S3 takes at least 5 MiB; fewer, larger ones cost fewer requests
PARTS_MAX: Final = 10_000  # of one object
PARTS_AT_ONCE: Final = 4


def part_bytes(size: int | None) -> int:
    """How large parts are of an object of about `size` bytes, so that PARTS_MAX suffice."""
    if size is None or size <= PART_BYTES * PARTS_MAX:
        return PART_BYTES
    return -(-size // PARTS_MAX)


class _PartBody(SeekableReader):
    """The bytes of a part, to be read in pieces and not copied as a whole.

    A body of bytes is sent by one call, and on a slow link that meets the timeout of a call.
    """

    def __init__(self, data: bytearray) -> None:
        super().__init__(len(data))
        self._view = memoryview(data)

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill `buffer` as far as the part goes."""
        target = memoryview(buffer).cast("B")
        piece = self._view[self._at : self._at + len(target)]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        """Let go of the bytes: their buffer takes another part."""
        self._view.release()
        super().close()


class S3Writer(BaseWriter):
    """An object of an `S3Tree`."""

    def __init__(
        self, boto: Any, objects: ObjectStore, bucket: str, key: str, size: int | None
    ) -> None:
        super().__init__()
        self._boto = boto
        self._objects = objects
        self._where = {"Bucket": bucket, "Key": key}
        self._part_bytes = part_bytes(size)
        self._buffer = bytearray()  # of it, the first _filled bytes are written
        self._filled = 0
        self._written = 0
        self._upload = ""  # the id, once there is more than one part
        self._cond = RUNTIME.condition()
        self._etags: dict[int, str] = {}  # guarded by _cond, as are the next three
        self._spare: list[bytearray] = []  # of parts that are sent: new memory would add up
        self._under_way = 0
        self._error: BaseException | None = None
        self._next = 1

    def write(self, data: Buffer, /) -> int:
        """See `Writer`. Waits while PARTS_AT_ONCE are under way."""
        if self.closed:
            raise ValueError("write to a closed file")
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            end = min(done + self._part_bytes - self._filled, len(view))
            filled = self._filled + end - done
            self._buffer[self._filled : filled] = view[done:end]
            self._filled, done = filled, end
            if filled == self._part_bytes:
                self._send()
        self._written += len(view)
        return len(view)

    def tell(self) -> int:
        """How much was written."""
        return self._written

    def _send(self) -> None:
        """Send the buffer as the next part. Raises: what an earlier part met."""
        if not self._upload:
            self._upload = self._begin_upload()
        number, self._next = self._next, self._next + 1
        if number > PARTS_MAX:
            raise OSError(
                errno.EFBIG, f"{PARTS_MAX} parts are the limit: pass `size` when the file is opened"
            )
        data = self._take_buffer()
        with self._cond:
            while self._under_way >= PARTS_AT_ONCE and self._error is None:
                self._cond.wait()
            self._raise()
            self._under_way += 1
            self._buffer = self._spare.pop() if self._spare else self._buffer
        try:
            RUNTIME.spawn(f"slicefs-part-{number}", lambda: self._send_part(number, data))
        except BaseException as error:
            self._sent(number, data, "", error)
            raise

    def _begin_upload(self) -> str:
        """The id of a new upload. Raises: OSError, which `close` raises, too."""
        try:
            return str(self._boto.create_multipart_upload(**self._where)["UploadId"])
        except Exception as error:
            with self._cond:
                self._error = error
                self._raise()
            raise

    def _take_buffer(self) -> bytearray:
        """What is written and not sent."""
        data, self._buffer = self._buffer, bytearray()
        del data[self._filled :]
        self._filled = 0
        return data

    def _send_part(self, number: int, data: bytearray) -> None:
        error: BaseException | None = None
        etag = ""
        try:
            with _PartBody(data) as body:
                more = {"UploadId": self._upload, "PartNumber": number, "Body": body}
                etag = str(self._boto.upload_part(**self._where, **more)["ETag"])
        except BaseException as caught:  # noqa: BLE001  (raised by `write` and `close`)
            error = caught
        self._sent(number, data, etag, error)

    def _sent(self, number: int, data: bytearray, etag: str, error: BaseException | None) -> None:
        """A part is stored, or was not."""
        with self._cond:
            self._under_way -= 1
            self._spare.append(data)
            self._etags[number] = etag
            self._error = self._error or error
            self._cond.notify_all()

    def _raise(self) -> None:
        """The caller holds the lock. Raises: OSError EIO."""
        if self._error is not None:
            raise OSError(errno.EIO, f"a part was not stored: {self._error}") from self._error

    def _settle(self) -> None:
        with self._cond:
            while self._under_way:
                self._cond.wait()
            self._spare.clear()

    def _finish(self) -> None:
        with self._cond:
            self._raise()
        if not self._upload:
            try:
                self._objects.put(self._where["Key"], (self._take_buffer(),))
            except KeysRefused as error:
                raise PermissionError(errno.EACCES, str(error)) from error
            except StoreError as error:
                raise OSError(errno.EIO, str(error)) from error
            return
        if self._filled:
            self._send()
        self._settle()
        with self._cond:
            self._raise()
        parts = [
            {"PartNumber": number, "ETag": self._etags[number]} for number in sorted(self._etags)
        ]
        self._boto.complete_multipart_upload(
            **self._where, UploadId=self._upload, MultipartUpload={"Parts": parts}
        )

    def _drop(self) -> None:
        self._take_buffer()
        if not self._upload:
            return
        self._settle()
        with suppress(Exception):  # what stays is for the bucket's rule on incomplete uploads
            self._boto.abort_multipart_upload(**self._where, UploadId=self._upload)
