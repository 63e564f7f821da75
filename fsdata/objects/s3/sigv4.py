"""AWS Signature Version 4 in the Authorization header, header by header as S3 wants it.

botocore's signer does the same through request objects of its own and takes ten times as long;
tests compare the two. Source: "Signature Version 4 signing process", AWS IAM User Guide.

Threading: any thread; the remembered signing key is replaced as a whole.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final, NamedTuple
from urllib.parse import quote

UNSIGNED: Final = b"UNSIGNED-PAYLOAD"
_SAFE: Final = "/-_.~"


class AccessKey(NamedTuple):
    """The keys that sign. Never shown: `repr` would give the secret away, so it says nothing."""

    access: str
    secret: str
    token: str = ""

    def __repr__(self) -> str:
        return "AccessKey(…)"


def quoted(path: str) -> str:
    """A path as it is in the request line and in what is signed."""
    return quote(path, safe=_SAFE)


def query_string(words: Sequence[tuple[str, str]]) -> str:
    """`name=value` pairs in the order in which they are signed."""
    return "&".join(f"{_word(name)}={_word(value)}" for name, value in sorted(words))


def _word(text: str) -> str:
    return quote(text, safe="-_.~")


class Signer:
    """Signs for one region."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._second = (0, b"")  # a second and its date, as signatures have it
        self._derived = ((b"", ""), b"")  # of which day and secret the signing key is; the key

    def sign(
        self,
        key: AccessKey,
        now_s: int,
        method: bytes,
        target: bytes,
        headers: Mapping[bytes, bytes],
        payload: bytes = UNSIGNED,
    ) -> list[bytes]:
        """The header lines that make a request authentic, `headers` among them.

        `headers`: all that are signed, `host` and those beginning with `x-amz-`, in lower case.
        `payload`: the body's SHA-256 in hexadecimal.
        """
        date = self._date(now_s)
        signed = {**headers, b"x-amz-content-sha256": payload, b"x-amz-date": date}
        if key.token:
            signed[b"x-amz-security-token"] = key.token.encode()
        ordered = sorted(signed.items())
        names = b";".join([name for name, _ in ordered])
        path, _, query = target.partition(b"?")
        lines = [b"%b:%b\n" % each for each in ordered]
        request = b"\n".join((method, path, query, b"".join(lines), names, payload))
        day = date[:8]
        scope = b"%b/%b/s3/aws4_request" % (day, self._region.encode())
        digest = sha256(request).hexdigest().encode()
        text = b"\n".join((b"AWS4-HMAC-SHA256", date, scope, digest))
        signature = hmac.digest(self._signing_key(key.secret, day), text, "sha256").hex().encode()
        credential = b"%b/%b" % (key.access.encode(), scope)
        return [
            *(b"%b: %b" % each for each in ordered),
            b"Authorization: AWS4-HMAC-SHA256 Credential=%b, SignedHeaders=%b, Signature=%b"
            % (credential, names, signature),
        ]

    def _date(self, now_s: int) -> bytes:
        second, date = self._second
        if second != now_s:
            date = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ").encode()
            self._second = now_s, date
        return date

    def _signing_key(self, secret: str, day: bytes) -> bytes:
        of, derived = self._derived
        if of != (day, secret):
            derived = b"AWS4" + secret.encode()
            for word in (day, self._region.encode(), b"s3", b"aws4_request"):
                derived = hmac.digest(derived, word, "sha256")
            self._derived = (day, secret), derived
        return derived
