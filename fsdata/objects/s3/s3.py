"""An object store in a bucket of AWS S3 or of what speaks its protocol.

Objects are read, written and listed through `s3/http`, signed by `s3/sigv4`: a tenth of the
processor time of boto3, which keeps what is hard to get right and done rarely: where keys come
from, which host has a bucket, making buckets. docs/design/object-stores has the reasons.

A put is whole or not at all, and readable at once; so is an overwrite. What the client's own clock
or keys are to blame for is mended in flight: a request refused for its time is signed with the
server's, one refused for its key with a newer one. Everything else is left to the wrappers.

Threading: any method from any thread.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from hashlib import md5, sha256
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from crc32c import crc32c

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, Unreached
from fsdata.objects.s3.credentials import Keys, S3Account, bucket_url
from fsdata.objects.s3.errors import (
    CLOCK_CODES,
    KEY_CODES,
    NoSuchBucket,
    Refusal,
    parse_refusal,
    translate,
)
from fsdata.objects.s3.http import Endpoint, HttpAnswer, HttpPool, Timeouts
from fsdata.objects.s3.sigv4 import UNSIGNED, Signer, query_string, quoted
from fsmeta.errors import ConfigError, ObjectMissing, Unavailable
from fsmeta.runtime import Runtime

PAGE_KEYS: Final = 1000  # the most that S3 gives
_OK: Final = (200, 204, 206)
_STORED: Final = (200,)
_NO_SUCH_RANGE: Final = 416
_OF_RANGES: Final = (200, 206, _NO_SUCH_RANGE)
_FORBIDDEN: Final = (400, 401, 403)
_UNKNOWN_THERE: Final = (405, 501)  # to stores that know no DeleteObjects
_OF_DELETIONS: Final = (200, *_FORBIDDEN, 404, *_UNKNOWN_THERE)
DELETES_TOGETHER: Final = 500  # S3 takes 1000; what takes long had better not be repeated whole
_MENDS_MAX: Final = 2  # once the clock, once the keys


class S3Settings(NamedTuple):
    """A bucket and how to use it."""

    bucket: str
    account: S3Account = S3Account()
    storage_class: str = ""
    encryption: str = ""  # AES256 or aws:kms
    kms_key: str = ""
    checksum: str = "crc32c"  # or sha256, none: how the store knows what it should receive
    timeouts: Timeouts = Timeouts()


class _Session:
    """What the requests to one bucket share: keys, clock, connections."""

    def __init__(self, runtime: Runtime, settings: S3Settings, keys: Keys) -> None:
        self.keys = keys
        client = keys.client()
        url = bucket_url(client, settings.bucket)
        parts = urlsplit(url)
        self.host = parts.netloc.encode()
        self.path = parts.path
        self.place = url.rstrip("/")
        self.region: str = client.meta.region_name
        self.signer = Signer(self.region)
        self._runtime = runtime
        self._skew_s = 0  # what the server's clock is ahead of ours; replaced as a whole
        tls = None
        if parts.scheme == "https":
            tls = _tls_context(settings.account.ca)
        host = parts.hostname or ""
        port = parts.port or (443 if tls else 80)
        self.pool = HttpPool(runtime, Endpoint(host, port, tls), settings.timeouts)

    def now_s(self) -> int:
        """The server's time, as far as it is known."""
        return self._runtime.now_ns() // 10**9 + self._skew_s

    def mend(self, refusal: Refusal, answer: HttpAnswer, used: Any) -> bool:
        """Whether the same request has better chances now. Raises: Unavailable."""
        if refusal.status not in _FORBIDDEN:
            return False
        # a HEAD does not say why
        skewed = refusal.code in CLOCK_CODES or not refusal.code
        if skewed and self._set_clock(answer.headers.get(b"date", b"")):
            return True
        return (refusal.code in KEY_CODES or not refusal.code) and self.keys.renew(used)

    def _set_clock(self, date: bytes) -> bool:
        """Whether the server's clock differs by more than a request takes."""
        try:
            there_s = int(parsedate_to_datetime(date.decode()).timestamp())
        except ValueError:
            return False
        ahead_s = there_s - self._runtime.now_ns() // 10**9
        wrong = abs(ahead_s - self._skew_s) > 60
        if wrong:
            self._skew_s = ahead_s
        return wrong


def _range_line(begin: int, end: int | None) -> bytes:
    return b"Range: bytes=%d-%b" % (begin, b"" if end is None else b"%d" % (end - 1))


def _tls_context(ca: str) -> Any:
    """Raises: ConfigError."""
    import ssl

    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ConfigError(f"certificate authorities {ca}: {error.strerror or error}") from error


class S3Objects:
    """The objects of one bucket; buckets of one account can share `keys`.

    Raises: ConfigError where there are no keys to begin with.
    """

    def __init__(self, runtime: Runtime, settings: S3Settings, keys: Keys | None = None) -> None:
        self._settings = settings
        self._session = _Session(runtime, settings, keys or Keys(runtime, settings.account))
        self._put_headers = _put_headers(settings)
        self._together = True  # the store may delete many objects a request

    def _request(
        self,
        method: bytes,
        key: str,
        query: str = "",
        headers: dict[bytes, bytes] | None = None,
        lines: Sequence[bytes] = (),
        body: Sequence[Buffer] = (),
        into: Sequence[memoryview] = (),
        payload: bytes = UNSIGNED,
        accepted: Sequence[int] = _OK,
    ) -> HttpAnswer:
        """One request, repeated where the clock or the keys were to blame.

        `headers` are signed, `lines` are not.
        Raises: ObjectMissing, Unavailable, OSError ENOSPC EDQUOT.
        """
        session = self._session
        target = (quoted(session.path + key) + (f"?{query}" if query else "")).encode()
        signed = {b"host": session.host, **(headers or {})}
        first = b"%b %b HTTP/1.1" % (method, target)
        mends = 0
        while True:
            used = session.keys.current()
            proof = session.signer.sign(used, session.now_s(), method, target, signed, payload)
            try:
                answer = session.pool.request((first, *proof, *lines), body, into)
            except Unavailable as error:
                raise Unreached(f"{session.place}: {error}") from error
            if answer.status in accepted:
                return answer
            refusal = parse_refusal(answer.status, answer.body)
            if mends == _MENDS_MAX or not session.mend(refusal, answer, used):
                raise translate(refusal, session.place, key, method == b"HEAD")
            mends += 1

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        headers, payload = self._put_headers, UNSIGNED
        if self._settings.checksum == "crc32c":
            value = 0
            for piece in pieces:
                value = crc32c(piece, value)
            checksum = b64encode(value.to_bytes(4, "big"))
            headers = {**headers, b"x-amz-checksum-crc32c": checksum}
        elif self._settings.checksum == "sha256":
            digest = sha256()
            for piece in pieces:
                digest.update(piece)
            payload = digest.hexdigest().encode()
        length = b"Content-Length: %d" % sum(map(len, pieces))
        answer = self._request(
            b"PUT", key, "", headers, (length,), pieces, (), payload, accepted=_STORED
        )
        if not answer.headers.get(b"etag"):
            raise Unavailable(f"{self._session.place}: a PUT was answered, but not by an S3 store")

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if begin == 0 and end is None:
            return self._request(b"GET", key).body
        if end is not None and end <= begin:
            if self.head(key) is None:
                raise ObjectMissing(key)
            return b""
        line = _range_line(begin, end)
        answer = self._request(b"GET", key, lines=(line,), accepted=_OF_RANGES)
        return self._in_range(answer, begin, end)

    def _in_range(self, answer: HttpAnswer, begin: int, end: int | None) -> bytes:
        """What the answer to a ranged GET has of it. Raises: Unavailable."""
        if answer.status == _NO_SUCH_RANGE:
            return b""
        if answer.status == 200:  # a server without ranges
            return answer.body[begin:end]
        told = answer.headers.get(b"content-range", b"")
        expected = b"bytes %d-%d/" % (begin, begin + len(answer.body) - 1)
        if not told.startswith(expected) or (end is not None and len(answer.body) > end - begin):
            raise Unavailable(f"{self._session.place}: asked for another range than it sent")
        return answer.body

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """A request each, on connections of their own, signed once: ranges are not signed.

        What is refused is asked for by itself, where clock and keys are mended.
        """
        session = self._session
        assert all(begin < end for begin, end in ranges), ranges
        target = quoted(session.path + key).encode()
        used, now_s = session.keys.current(), session.now_s()
        proof = session.signer.sign(used, now_s, b"GET", target, {b"host": session.host}, UNSIGNED)
        first = b"GET %b HTTP/1.1" % target
        heads = [(first, *proof, _range_line(*each)) for each in ranges]
        try:
            answers = session.pool.request_all(heads)
        except Unavailable as error:
            raise Unreached(f"{session.place}: {error}") from error
        for answer in answers:
            if answer.status not in (*_OF_RANGES, *_FORBIDDEN):
                refusal = parse_refusal(answer.status, answer.body)
                raise translate(refusal, session.place, key, False)
        return [
            self.get(key, *each) if answer.status in _FORBIDDEN else self._in_range(answer, *each)
            for answer, each in zip(answers, ranges, strict=True)
        ]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return self._request(b"GET", key, into=pieces).filled

    def delete(self, *keys: str) -> None:
        """What can't be deleted together is by itself, where clock and keys are mended."""
        for begin in range(0, len(keys), DELETES_TOGETHER):
            part = keys[begin : begin + DELETES_TOGETHER]
            if len(part) == 1 or not self._together or not self._delete_together(part):
                for key in part:
                    self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            self._request(b"DELETE", key)
        except ObjectMissing:
            pass

    def _delete_together(self, keys: Sequence[str]) -> bool:
        """One DeleteObjects; False where the store refuses that. Raises: Unavailable."""
        body = _deletion(keys)
        digest = b64encode(md5(body, usedforsecurity=False).digest())
        length = b"Content-Length: %d" % len(body)
        headers = {b"content-md5": digest}  # the one checksum that every such store knows
        answer = self._request(
            b"POST", "", "delete=", headers, (length,), (body,), (), UNSIGNED, _OF_DELETIONS
        )
        place = self._session.place
        if answer.status == 200:
            for key, code in _parse_failures(answer.body, place):
                raise translate(Refusal(200, code), place, key, False)
            return True
        self._together = answer.status not in _UNKNOWN_THERE  # keys and clock can be mended
        return False

    def head(self, key: str) -> ObjectInfo | None:
        try:
            headers = self._request(b"HEAD", key).headers
        except ObjectMissing:
            self._require_bucket()  # an answer to HEAD does not say what is missing
            return None
        try:
            when = parsedate_to_datetime(headers[b"last-modified"].decode())
            size = int(headers[b"content-length"])
        except (KeyError, ValueError) as error:
            raise Unavailable(f"{self._session.place}: HEAD says neither size nor time") from error
        return ObjectInfo(key, size, int(when.timestamp()) * 10**9)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        words = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(PAGE_KEYS))]
        token = ""
        while True:
            if token:
                more = [("continuation-token", token)]
            else:
                more = [("start-after", after)] if after else []
            query = query_string([*words, ("prefix", prefix), *more])
            page = _parse_page(self._request(b"GET", "", query).body, self._session.place)
            yield from page.infos
            if not page.next_token:
                return
            token = page.next_token

    def sync(self, keys: Iterable[str]) -> None:
        """A put that was answered is durable."""

    def close(self) -> None:
        self._session.pool.close()
        self._session.keys.close()

    def set_timeouts(self, timeouts: Timeouts | None) -> None:
        """How long requests from now on may take; None: as the settings say."""
        self._session.pool.timeouts = timeouts or self._settings.timeouts

    def has_bucket(self) -> bool:
        """Whether the bucket is there. Raises: Unavailable, with what the keys may not do."""
        try:
            self._require_bucket()
        except NoSuchBucket:
            return False
        return True

    def _require_bucket(self) -> None:
        """Raises: NoSuchBucket, Unavailable."""
        self._request(b"GET", "", query_string([("list-type", "2"), ("max-keys", "1")]))

    def make_bucket(self) -> None:
        """Raises: Unavailable."""
        region = self._session.region
        elsewhere = not self._settings.account.endpoint and region != "us-east-1"
        where = {"CreateBucketConfiguration": {"LocationConstraint": region}} if elsewhere else {}
        self._by_boto(lambda client, bucket: client.create_bucket(Bucket=bucket, **where))

    def remove_bucket(self) -> None:
        """Remove the bucket, which must be empty. Raises: Unavailable."""
        self._by_boto(lambda client, bucket: client.delete_bucket(Bucket=bucket))

    def _by_boto(self, request: Callable[[Any, str], object]) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            request(self._session.keys.client(), self._settings.bucket)
        except ClientError as error:
            status = int(error.response["ResponseMetadata"]["HTTPStatusCode"])
            refusal = Refusal(status, str(error.response["Error"]["Code"]))
            raise Unavailable(f"{self._session.place}: {refusal}") from error
        except BotoCoreError as error:
            raise Unavailable(f"{self._session.place}: {error}") from error


class _Page(NamedTuple):
    """Part of a listing."""

    infos: list[ObjectInfo]
    next_token: str


def _parse_page(body: bytes, place: str) -> _Page:
    """An answer to ListObjectsV2. Raises: Unavailable."""
    infos: list[ObjectInfo] = []
    try:
        root = ElementTree.fromstring(body)
        space, _, kind = root.tag.rpartition("}")
        space += "}" if space else ""
        if kind != "ListBucketResult":
            raise Unavailable(f"{place}: {kind} is no listing")
        for each in root.iterfind(f"{space}Contents"):
            text = {child.tag.removeprefix(space): child.text or "" for child in each}
            when = datetime.fromisoformat(text["LastModified"])
            mtime_ns = int(when.timestamp()) * 10**9  # HEAD tells whole seconds
            infos.append(ObjectInfo(unquote(text["Key"]), int(text["Size"]), mtime_ns))
        cut = root.findtext(f"{space}IsTruncated", "false") == "true"
        token = root.findtext(f"{space}NextContinuationToken", "")
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise Unavailable(f"{place}: a listing that can't be read: {error}") from error
    if cut and not token:
        raise Unavailable(f"{place}: a listing that is cut off and can't be continued")
    return _Page(infos, token if cut else "")


def _deletion(keys: Iterable[str]) -> bytes:
    """The body of DeleteObjects."""
    objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    return f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()


def _parse_failures(body: bytes, place: str) -> list[tuple[str, str]]:
    """Keys that are still there, by an answer to DeleteObjects, and why. Raises: Unavailable."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise Unavailable(f"{place}: an answer that can't be read: {error}") from error
    space, _, kind = root.tag.rpartition("}")
    space += "}" if space else ""
    if kind != "DeleteResult":
        raise Unavailable(f"{place}: {kind} says nothing of what was deleted")
    failures = [
        (each.findtext(f"{space}Key", ""), each.findtext(f"{space}Code", ""))
        for each in root.iterfind(f"{space}Error")
    ]
    return [failure for failure in failures if failure[1] != "NoSuchKey"]


def _put_headers(settings: S3Settings) -> dict[bytes, bytes]:
    """What every put of a bucket says, signed."""
    words = {
        b"x-amz-storage-class": settings.storage_class,
        b"x-amz-server-side-encryption": settings.encryption,
        b"x-amz-server-side-encryption-aws-kms-key-id": settings.kms_key,
    }
    return {name: value.encode() for name, value in words.items() if value}


_CONFORMS: Callable[[Runtime, S3Settings], ObjectStore] = S3Objects
