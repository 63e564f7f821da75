"""Objects that are sent in parts (multipart uploads): what one PUT or memory has no room for.

`send_in_parts` has PARTS_AT_ONCE parts under way while the next one is gathered, so that memory is
bounded. Nothing is visible before the last request. Where a store or the process fails, the parts
stay: the next upload of that key takes over each part that is still the same by its size and MD5,
and sends the rest. Where the source fails, the store drops them.

Called by `sync`. Threading: one thread sends; parts go in threads of a pool.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import md5
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from fsdata.objects.contract import Buffer
from fsdata.objects.s3.errors import parse_refusal, translate
from fsdata.objects.s3.s3 import S3Objects
from fsdata.objects.s3.sigv4 import query_string
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import StoreError, Unavailable
from fsmeta.runtime import Runtime

PART_BYTES: Final = 16 << 20  # S3 takes at least 5 MiB; fewer, larger ones cost fewer requests
PARTS_MAX: Final = 10_000  # of one object
PARTS_AT_ONCE: Final = 4
OBJECT_MAX: Final = 5 << 40  # of S3
_BEGUN_MAX: Final = 4  # earlier uploads of one key that are looked at
_MD5: Final = re.compile("[0-9a-f]{32}")
_OF_COMPLETION: Final = (200, 404)


class StoredPart(NamedTuple):
    """A part that the store has."""

    etag: str
    size: int


class BegunUpload(NamedTuple):
    """An upload that has an id, and its parts by number."""

    id: str
    parts: Mapping[int, StoredPart]


class Multipart(NamedTuple):
    """The requests of multipart uploads to one bucket."""

    objects: S3Objects
    repeat: Callable[[Callable[[], Any]], Any]  # calls again what failed with Unavailable

    def begin(self, key: str) -> str:
        """The id of a new upload. Raises: StoreError, OSError ENOSPC."""
        answer = self.objects.request_on(b"POST", key, "uploads=", self.objects.put_headers)
        found = _text(answer.body, "UploadId")
        if not found:
            raise Unavailable(f"{self.objects.place}: an upload was begun, and has no id")
        return found

    def find(self, key: str) -> BegunUpload | None:
        """The upload of `key` that was broken off with the most parts; None where there is none.

        Nor is there one where the keys may not list uploads: that costs no more than sending again.
        """
        with suppress(StoreError, OSError):
            words = query_string([("prefix", key), ("uploads", "")])
            found = self.objects.request_on(b"GET", "", words, {}).body
            ids = [each["UploadId"] for each in _rows(found, "Upload") if each["Key"] == key]
            begun = [BegunUpload(each, self._parts(key, each)) for each in ids[-_BEGUN_MAX:]]
            return max(begun, key=lambda each: len(each.parts), default=None)
        return None

    def _parts(self, key: str, upload: str) -> dict[int, StoredPart]:
        """Raises: StoreError."""
        parts: dict[int, StoredPart] = {}
        while True:
            after = str(max(parts, default=0))
            words = query_string([("part-number-marker", after), ("uploadId", upload)])
            rows = _rows(self.objects.request_on(b"GET", key, words, {}).body, "Part")
            page = {
                int(row["PartNumber"]): StoredPart(row["ETag"], int(row["Size"])) for row in rows
            }
            if not page.keys() - parts.keys():
                return parts
            parts.update(page)

    def put_part(self, key: str, upload: str, number: int, pieces: Sequence[Buffer]) -> str:
        """The part's ETag. Raises: StoreError, OSError ENOSPC."""
        digest = md5(usedforsecurity=False)
        for piece in pieces:
            digest.update(piece)
        query = query_string([("partNumber", str(number)), ("uploadId", upload)])
        headers = {b"content-md5": b64encode(digest.digest())}  # what every such store verifies
        answer = self.objects.request_on(b"PUT", key, query, headers, pieces)
        etag = answer.headers.get(b"etag", b"").decode()
        if not etag:
            raise Unavailable(f"{self.objects.place}: a part was answered, but not by an S3 store")
        return etag

    def end(self, key: str, upload: str, etags: Sequence[str], size: int) -> None:
        """Make the object of its parts. Raises: StoreError.

        Where the answer to an earlier attempt was lost, the upload is gone and the object is there.
        Another process that has gone on with the same upload may have made it of other parts.
        """
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in enumerate(etags, 1)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        query = query_string([("uploadId", upload)])
        answer = self.objects.request_on(b"POST", key, query, {}, (body,), _OF_COMPLETION)
        if answer.status == 200 and _text(answer.body, "ETag"):
            return
        failed = answer.status == 200 and _text(answer.body, "Code")  # a 200 may carry an error
        info = None if failed else self.objects.head(key)  # radosgw tells no ETag again
        if info is None or info.size != size or not _is_of(info.etag, etags):
            refusal = parse_refusal(answer.status, answer.body)
            raise translate(refusal, self.objects.place, key, False)

    def drop(self, key: str, upload: str) -> None:
        """Have the store forget the parts."""
        query = query_string([("uploadId", upload)])
        with suppress(StoreError, OSError):
            self.objects.request_on(b"DELETE", key, query, {})


def part_bytes(size: int) -> int:
    """How large parts are of an object of `size` bytes, so that PARTS_MAX suffice."""
    return max(PART_BYTES, -(-size // PARTS_MAX))


class _Sender:
    """Sends parts of one object, a few at a time."""

    def __init__(self, uploads: Multipart, key: str, runtime: Runtime) -> None:
        self._uploads = uploads
        self._key = key
        begun = uploads.find(key)
        self._kept = {} if begun is None else begun.parts
        self.upload = begun.id if begun else str(uploads.repeat(partial(uploads.begin, key)))
        self._pool = WorkerPool(runtime, "part", PARTS_AT_ONCE)
        self._cond = runtime.condition()
        self._under_way = 0  # guarded by _cond, as the next two
        self._etags: dict[int, str] = {}
        self._error: Exception | None = None

    def send(self, number: int, part: Sequence[Buffer]) -> None:
        """Have a part sent; wait while enough are. Raises: what an earlier part met."""
        with self._cond:
            while self._under_way >= PARTS_AT_ONCE and self._error is None:
                self._cond.wait()
            if self._error is not None:
                raise self._error
            self._under_way += 1
        self._pool.submit(partial(self._put, number, part))

    def _put(self, number: int, part: Sequence[Buffer]) -> None:
        uploads, error, etag = self._uploads, None, ""
        kept = self._kept.get(number)
        try:
            if kept is not None and _is_same(kept, part):
                etag = kept.etag
            else:
                etag = uploads.repeat(
                    lambda: uploads.put_part(self._key, self.upload, number, part),
                )
        except (StoreError, OSError) as caught:
            error = caught
        with self._cond:
            self._under_way -= 1
            self._etags[number] = etag
            self._error = self._error or error
            self._cond.notify_all()

    def etags(self) -> list[str]:
        """Of all parts, in order, once they are stored. Raises: what one of them met."""
        self.close()
        if self._error is not None:
            raise self._error
        return [self._etags[number] for number in sorted(self._etags)]

    def close(self) -> None:
        """Wait for the parts that are under way."""
        with self._cond:
            while self._under_way:
                self._cond.wait()
        self._pool.close()


def send_in_parts(
    uploads: Multipart, key: str, size: int, pieces: Iterable[bytes], runtime: Runtime
) -> None:
    """Store an object of `size` bytes, whole or not at all.

    Raises: StoreError, OSError, and what `pieces` raises.
    """
    sender = _Sender(uploads, key, runtime)
    try:
        for number, part in enumerate(_gathered(pieces, part_bytes(size)), 1):
            sender.send(number, part)
        etags = sender.etags()
        uploads.repeat(lambda: uploads.end(key, sender.upload, etags, size))
    except StoreError:  # the next attempt goes on from the parts
        sender.close()
        raise
    except BaseException:
        sender.close()
        uploads.drop(key, sender.upload)
        raise


def _gathered(pieces: Iterable[bytes], wanted: int) -> Iterator[list[bytes]]:
    """Parts of at least `wanted` bytes; the last one may be shorter."""
    part: list[bytes] = []
    length = 0
    for piece in pieces:
        part.append(piece)
        length += len(piece)
        if length >= wanted:
            yield part
            part, length = [], 0
    if part:
        yield part


def _is_same(kept: StoredPart, part: Sequence[Buffer]) -> bool:
    """Whether the store has these bytes: an ETag that is no MD5, as with KMS keys, differs."""
    if kept.size != sum(map(len, part)):
        return False
    digest = md5(usedforsecurity=False)
    for piece in part:
        digest.update(piece)
    return kept.etag.strip('"').lower() == digest.hexdigest()


def _is_of(etag: str, parts: Sequence[str]) -> bool:
    """Whether an object is made of these parts, as far as its ETag tells: most are digests."""
    digests = [part.strip('"').lower() for part in parts]
    if not all(_MD5.fullmatch(each) for each in (*digests, etag.partition("-")[0])):
        return True
    whole = md5(bytes.fromhex("".join(digests)), usedforsecurity=False).hexdigest()
    return etag == f"{whole}-{len(parts)}"


def _rows(body: bytes, name: str) -> list[dict[str, str]]:
    """The elements `name` of a listing, each with the text of what is in it. Raises: Unavailable.

    `name` and what a caller takes from a row are there in each answer of an S3 store.
    """
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise Unavailable(f"a listing that can't be read: {error}") from error
    return [
        {child.tag.rpartition("}")[2]: child.text or "" for child in each}
        for each in root
        if each.tag.rpartition("}")[2] == name
    ]


def _text(body: bytes, name: str) -> str:
    """What an element of an answer says; "" where it has none."""
    with suppress(ElementTree.ParseError):
        for element in ElementTree.fromstring(body).iter():
            if element.tag.rpartition("}")[2] == name:
                return (element.text or "").strip()
    return ""
