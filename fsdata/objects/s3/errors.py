"""What an S3 store's refusals mean: the one table from statuses and codes to our errors.

Messages name the code and what to do; they never quote the answer, which may hold access keys.
"""

from __future__ import annotations

from errno import EDQUOT, ENOSPC
from typing import Final, NamedTuple
from xml.etree import ElementTree

from fsdata.objects.contract import Throttled
from fsmeta.errors import ObjectMissing, Refused, Unavailable

# The store does not take these keys (any more): others may do.
KEY_CODES: Final = frozenset(
    {
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "ExpiredTokenException",
        "TokenRefreshRequired",
        "InvalidToken",
        "InvalidSecurity",
        "AccessDenied",
    }
)
CLOCK_CODES: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_BUSY_CODES: Final = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "TooManyRequests", "RequestLimitExceeded"}
)
_BUSY: Final = (429, 503)
# What the request asks for, not the moment, is to blame: it is refused each time.
_FOR_GOOD: Final = frozenset(
    {
        "InvalidArgument",
        "InvalidRequest",
        "InvalidStorageClass",
        "InvalidEncryptionAlgorithmError",
        "NotImplemented",
        "KMS.DisabledException",
        "KMS.NotFoundException",
    }
)
_FULL: Final = {
    "QuotaExceeded": EDQUOT,
    "XMinioStorageFull": ENOSPC,
    "EntityTooLarge": ENOSPC,
}
_FULL_STATUS: Final = 507
_REFUSED_OPTION: Final = "see storage-class, sse and sse-kms-key of --store-option"
_HINTS: Final = {
    "InvalidAccessKeyId": "the access key is unknown there",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "ExpiredToken": "the session token has expired and there is no newer one",
    "InvalidToken": "the session token is wrong",
    "AccessDenied": "the keys are wrong or may not do that; see the bucket's policy",
    "NoSuchBucket": "there is no such bucket",
    "AllAccessDisabled": "the bucket is disabled",
    "AuthorizationHeaderMalformed": "another region, most likely: --store-option region=NAME",
    "PermanentRedirect": "the bucket is in another region: --store-option region=NAME",
    "RequestTimeTooSkewed": "the clocks differ too much",
    "InvalidArgument": _REFUSED_OPTION,
    "InvalidRequest": _REFUSED_OPTION,
    "InvalidStorageClass": _REFUSED_OPTION,
    "InvalidEncryptionAlgorithmError": _REFUSED_OPTION,
    "KMS.DisabledException": _REFUSED_OPTION,
    "KMS.NotFoundException": _REFUSED_OPTION,
    "NotImplemented": "the store does not know part of the request",
}


class NoSuchBucket(Unavailable):
    """The bucket is not there: perhaps not yet, or not any more."""


class BucketMissing(NoSuchBucket, Refused):
    """The same for a caller that does not wait for it: see `S3Settings.patient`."""


class Refusal(NamedTuple):
    """An answer that is no success."""

    status: int
    code: str  # "" where the answer has none: HEAD has no body

    def __str__(self) -> str:
        text = self.code or f"HTTP status {self.status}"
        hint = _HINTS.get(self.code, "")
        return f"{text} ({hint})" if hint else text


def parse_refusal(status: int, body: bytes) -> Refusal:
    """The code in the answer's XML, if it is XML."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return Refusal(status, "")
    for element in root.iter():
        if element.tag.rpartition("}")[2] == "Code":
            return Refusal(status, (element.text or "").strip())
    return Refusal(status, "")


def translate(refusal: Refusal, place: str, key: str, headless: bool) -> Exception:
    """What a caller of the store should see of a request for `key` at `place`.

    `headless`: it was a HEAD, whose answer does not say what is missing.
    """
    status, code = refusal
    if code == "NoSuchKey" or (headless and status == 404):
        return ObjectMissing(key)
    if code == "NoSuchBucket":
        return NoSuchBucket(f"{place}: {refusal}")
    if code in _FULL or status == _FULL_STATUS:
        return OSError(_FULL.get(code, ENOSPC), f"{place}: {refusal}", key)
    if status in _BUSY or code in _BUSY_CODES:
        return Throttled(f"{place}: {refusal}")
    if code in _FOR_GOOD:
        return Refused(f"{place}: {refusal}")
    return Unavailable(f"{place}: {refusal}")
