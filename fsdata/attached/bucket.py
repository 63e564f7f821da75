"""A bucket of attached objects: each request names the ETag, and each answer is looked at.

Keys come from the environment or the AWS profile of the client, as for any `s3://` URL.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from fsdata.attached.source import changed
from fsdata.objects.s3.credentials import S3Account
from fsdata.objects.s3.s3 import S3Objects, S3Settings
from fsdata.objects.wrappers import Backoff, Retrying
from fsmeta.errors import ObjectMissing, Unavailable
from fsmeta.runtime import Runtime
from fsmeta.types import AttachedObject

if TYPE_CHECKING:
    from fsdata.objects.s3.http import HttpAnswer

TIMEOUT_S: Final = 120.0  # how long a request is repeated
_WHOLE, _PART, _CHANGED, _NO_SUCH_RANGE = 200, 206, 412, 416


class AttachedBucket:
    """A bucket that is open."""

    on_disks = True

    def __init__(self, runtime: Runtime, found: AttachedObject) -> None:
        """Raises: ConfigError where there are no keys for it."""
        account = S3Account(endpoint=found.endpoint, region=found.region)
        self._objects = S3Objects(runtime, S3Settings(found.bucket, account))
        self.place = self._objects.place
        self._leaving = runtime.event()
        backoff = Backoff(total_s=TIMEOUT_S)
        self._repeat = Retrying(runtime, self._objects, backoff, self._leaving).repeat

    def close(self) -> None:
        """See `AttachedSource`."""
        self._leaving.set()
        self._objects.close()

    def get(self, found: AttachedObject, begin: int, end: int) -> bytes:
        """See `AttachedSource`."""
        name = f"s3://{found.bucket}/{found.key}"
        try:
            answer = self._repeat(partial(_ask, self._objects, found, begin, end))
        except ObjectMissing as error:
            raise changed(name, "is gone") from error
        if answer.status == _CHANGED:
            raise changed(name, "has other bytes now")
        etag = answer.headers.get(b"etag", b"").decode(errors="replace").strip('"')
        if etag != found.etag:
            raise changed(name, "has other bytes now")
        data = answer.body[begin:end] if answer.status == _WHOLE else answer.body
        if answer.status == _NO_SUCH_RANGE or len(data) != end - begin:
            raise changed(name, "has another length")
        if answer.status == _PART:
            told = answer.headers.get(b"content-range", b"")
            if not told.startswith(b"bytes %d-%d/" % (begin, end - 1)):
                raise Unavailable(f"s3://{found.bucket}: asked for another range than it sent")
        return data


def _ask(objects: S3Objects, found: AttachedObject, begin: int, end: int) -> HttpAnswer:
    headers = {
        b"if-match": f'"{found.etag}"'.encode(),
        b"range": b"bytes=%d-%d" % (begin, end - 1),
    }
    accepted = (_WHOLE, _PART, _CHANGED, _NO_SUCH_RANGE)
    return objects.request_on(b"GET", found.key, "", headers, accepted=accepted)
