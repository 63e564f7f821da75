"""An object store in a bucket of AWS S3 or of what speaks its protocol.

Objects are read, written and listed through `s3/http`, signed by `s3/sigv4`: a tenth of the
processor time of boto3, which keeps what is hard to get right and done rarely: where keys come
from, which host has a bucket, making buckets. docs/design/object-stores has the reasons.

A put is whole or not at all, and readable at once; so is an overwrite. Errors of the client's own
clock or keys are corrected here: a request refused for its time is signed with the server's time,
one refused for its key with a newer key. Everything else is left to the wrappers.

Threading: any method from any thread.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from hashlib import md5, sha256
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from fsdata.objects.contract import (
    Buffer,
    KeysRefused,
    ObjectInfo,
    ObjectStore,
    Range,
    Unreached,
)
from fsdata.objects.s3.credentials import Keys, S3Account, bucket_url
from fsdata.objects.s3.errors import (
    CLOCK_CODES,
    KEY_CODES,
    BucketMissing,
    NoSuchBucket,
    Refusal,
    parse_refusal,
    translate,
)
from fsdata.objects.s3.http import Endpoint, HttpAnswer, HttpPool, Timeouts
from fsdata.objects.s3.listing import (
    ListingPage,
    deletion,
    is_expressible,
    parse_failures,
    parse_page,
)
from fsdata.objects.s3.sigv4 import UNSIGNED, Signer, query_string, quoted
from fsdata.resources.crc import crc32c
from fsmeta.errors import ConfigError, ObjectMissing, Unavailable
from fsmeta.runtime import Runtime

PAGE_KEYS: Final = 1000  # the most that S3 gives
_OK: Final = (200, 204, 206)
_STORED: Final = (200,)
_NO_SUCH_RANGE: Final = 416
_OF_RANGES: Final = (200, 206, _NO_SUCH_RANGE)
_FORBIDDEN: Final = (400, 401, 403)
_DENIED: Final = (401, 403)
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
    patient: bool = True  # another program may renew keys that are refused, or make the bucket


class _Request(NamedTuple):
    """A request to the bucket, or about one object of it."""

    method: bytes
    key: str  # "" for the bucket itself
    query: str = ""
    headers: dict[bytes, bytes] | None = None  # signed
    lines: Sequence[bytes] = ()  # of the header, too, and not signed
    body: Sequence[Buffer] = ()
    payload: bytes = UNSIGNED  # SHA-256 of the body, in hexadecimal
    accepted: Sequence[int] = _OK  # statuses that are no failure


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
        self.put_headers = _put_headers(settings)
        self.place = self._session.place  # the bucket's address, for messages
        self._together = True  # the store may delete many objects a request

    def _request(self, request: _Request, into: Sequence[memoryview] = ()) -> HttpAnswer:
        """One request, repeated where the clock or the keys were to blame.

        `into` gets the body of the answer.
        Raises: ObjectMissing, Unavailable, OSError ENOSPC EDQUOT.
        """
        session = self._session
        method, key = request.method, request.key
        query = f"?{request.query}" if request.query else ""
        target = (quoted(session.path + key) + query).encode()
        signed = {b"host": session.host, **(request.headers or {})}
        first = b"%b %b HTTP/1.1" % (method, target)
        mends = 0
        while True:
            used = session.keys.current()
            now_s = session.now_s()
            proof = session.signer.sign(used, now_s, method, target, signed, request.payload)
            try:
                head = (first, *proof, *request.lines)
                answer = session.pool.request(head, request.body, into)
            except Unavailable as error:
                raise Unreached(f"{session.place}: {error}") from error
            if answer.status in request.accepted:
                return answer
            refusal = parse_refusal(answer.status, answer.body)
            if mends == _MENDS_MAX or not session.mend(refusal, answer, used):
                raise self._meaning(refusal, key, headless=method == b"HEAD")
            mends += 1

    def _meaning(self, refusal: Refusal, key: str, headless: bool = False) -> Exception:
        """See `translate`. Raises: KeysRefused, BucketMissing where the caller is not patient."""
        if not self._settings.patient:
            self._require_place(refusal)
        return translate(refusal, self._session.place, key, headless)

    def _require_place(self, refusal: Refusal) -> None:
        """Raises: KeysRefused, BucketMissing where keys or bucket are to blame."""
        if refusal.code == "NoSuchBucket":
            raise BucketMissing(f"{self._session.place}: {refusal}")
        if not refusal.code and refusal.status in _FORBIDDEN:
            self._require_bucket()  # a HEAD was refused without a reason: this one has a code
        if refusal.code in KEY_CODES or refusal.status in _DENIED:
            where = self._session.keys.shown()
            raise KeysRefused(f"{self._session.place}: {refusal}; the keys are from {where}")

    def request_on(
        self,
        method: bytes,
        key: str,
        query: str,
        headers: dict[bytes, bytes],
        body: Sequence[Buffer] = (),
        accepted: Sequence[int] = _OK,
    ) -> HttpAnswer:
        """A request about one object that the contract of stores has no word for.

        Raises: as `put`; ObjectMissing.
        """
        length = b"Content-Length: %d" % sum(map(len, body))
        request = _Request(method, key, query, headers, (length,), body, accepted=accepted)
        return self._request(request)

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        headers, payload = self.put_headers, UNSIGNED
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
        request = _Request(b"PUT", key, "", headers, (length,), pieces, payload, _STORED)
        answer = self._request(request)
        if not answer.headers.get(b"etag"):
            raise Unavailable(f"{self._session.place}: a PUT was answered, but not by an S3 store")

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if begin == 0 and end is None:
            return self._request(_Request(b"GET", key)).body
        if end is not None and end <= begin:
            if self.head(key) is None:
                raise ObjectMissing(key)
            return b""
        line = _range_line(begin, end)
        answer = self._request(_Request(b"GET", key, lines=(line,), accepted=_OF_RANGES))
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
                raise self._meaning(refusal, key)
        return [
            self.get(key, *each) if answer.status in _FORBIDDEN else self._in_range(answer, *each)
            for answer, each in zip(answers, ranges, strict=True)
        ]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return self._request(_Request(b"GET", key), into=pieces).filled

    def delete(self, *keys: str) -> None:
        """What can't be deleted together is by itself, where clock and keys are mended."""
        for begin in range(0, len(keys), DELETES_TOGETHER):
            part = keys[begin : begin + DELETES_TOGETHER]
            alone = len(part) == 1 or not self._together or not all(map(is_expressible, part))
            if alone or not self._delete_together(part):
                for key in part:
                    self._delete_one(key)

    def _delete_one(self, key: str) -> None:
        try:
            self._request(_Request(b"DELETE", key))
        except ObjectMissing:
            pass

    def _delete_together(self, keys: Sequence[str]) -> bool:
        """One DeleteObjects; False where the store refuses that. Raises: Unavailable."""
        body = deletion(keys)
        digest = b64encode(md5(body, usedforsecurity=False).digest())
        length = b"Content-Length: %d" % len(body)
        headers = {b"content-md5": digest}  # the one checksum that every such store knows
        request = _Request(
            b"POST", "", "delete=", headers, (length,), (body,), accepted=_OF_DELETIONS
        )
        answer = self._request(request)
        if answer.status == 200:
            for key, _ in parse_failures(answer.body, self._session.place):
                self._delete_one(key)  # which waits where that helps, or says why not
            return True
        self._together = answer.status not in _UNKNOWN_THERE  # keys and clock can be mended
        return False

    def head(self, key: str) -> ObjectInfo | None:
        try:
            headers = self._request(_Request(b"HEAD", key)).headers
        except ObjectMissing:
            self._require_bucket()  # an answer to HEAD does not say what is missing
            return None
        try:
            when = parsedate_to_datetime(headers[b"last-modified"].decode())
            size = int(headers[b"content-length"])
        except (KeyError, ValueError) as error:
            raise Unavailable(f"{self._session.place}: HEAD says neither size nor time") from error
        etag = headers.get(b"etag", b"").decode(errors="replace").strip('"')
        return ObjectInfo(key, size, int(when.timestamp()) * 10**9, etag)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        token = ""
        while True:
            page = self.list_page(prefix, after, token)
            yield from page.infos
            if not page.next_token:
                return
            token = page.next_token

    def list_page(
        self, prefix: str, after: str = "", token: str = "", delimiter: str = ""
    ) -> ListingPage:
        """One request of a listing; `token` is the page's before. Raises: Unavailable.

        With a `delimiter`, keys that have it behind the prefix are told as what they begin with.
        """
        words = [("list-type", "2"), ("encoding-type", "url"), ("max-keys", str(PAGE_KEYS))]
        if delimiter:
            words.append(("delimiter", delimiter))
        if token:
            words.append(("continuation-token", token))
        elif after:
            words.append(("start-after", after))
        query = query_string([*words, ("prefix", prefix)])
        return parse_page(self._request(_Request(b"GET", "", query)).body, self._session.place)

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
        query = query_string([("list-type", "2"), ("max-keys", "1")])
        self._request(_Request(b"GET", "", query))

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


def _put_headers(settings: S3Settings) -> dict[bytes, bytes]:
    """What every put of a bucket says, signed."""
    words = {
        b"x-amz-storage-class": settings.storage_class,
        b"x-amz-server-side-encryption": settings.encryption,
        b"x-amz-server-side-encryption-aws-kms-key-id": settings.kms_key,
    }
    return {name: value.encode() for name, value in words.items() if value}


_CONFORMS: Callable[[Runtime, S3Settings], ObjectStore] = S3Objects
