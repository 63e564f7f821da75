"""Bodies of S3's requests about many keys: pages of a listing, and deletions.

Called by `s3/s3`. Pure: from bytes to values and back; an answer that can't be read is Unavailable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from fsdata.objects.contract import ObjectInfo
from fsmeta.errors import Unavailable

_ENDS: Final = {"\r": "&#13;", "\n": "&#10;"}  # raw, both are read as a line feed
_UNSPEAKABLE: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # in no XML 1.0


class ListingPage(NamedTuple):
    """Part of a listing."""

    infos: list[ObjectInfo]
    folders: list[str]  # what keys begin with, up to the delimiter and with it
    next_token: str  # empty on the last page


def parse_page(body: bytes, place: str) -> ListingPage:
    """An answer to ListObjectsV2. Raises: Unavailable."""
    infos: list[ObjectInfo] = []
    try:
        root = ElementTree.fromstring(body)
        space, _, kind = root.tag.rpartition("}")
        space += "}" if space else ""
        if kind != "ListBucketResult":
            raise Unavailable(f"{place}: {kind} is no listing")
        is_encoded = root.findtext(f"{space}EncodingType") == "url"  # " " is "+" then
        decoded = unquote_plus if is_encoded else str
        for each in root.iterfind(f"{space}Contents"):
            text = {child.tag.removeprefix(space): child.text or "" for child in each}
            when = datetime.fromisoformat(text["LastModified"])
            mtime_ns = int(when.timestamp()) * 10**9  # HEAD tells whole seconds
            etag = text.get("ETag", "").strip('"')
            infos.append(ObjectInfo(decoded(text["Key"]), int(text["Size"]), mtime_ns, etag))
        folders = [
            decoded(each.findtext(f"{space}Prefix", ""))
            for each in root.iterfind(f"{space}CommonPrefixes")
        ]
        cut = root.findtext(f"{space}IsTruncated", "false") == "true"
        token = root.findtext(f"{space}NextContinuationToken", "")
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise Unavailable(f"{place}: a listing that can't be read: {error}") from error
    if cut and not token:
        raise Unavailable(f"{place}: a listing that is cut off and can't be continued")
    return ListingPage(infos, folders, token if cut else "")


def is_expressible(key: str) -> bool:
    """Whether XML can name a key."""
    return _UNSPEAKABLE.search(key) is None


def deletion(keys: Iterable[str]) -> bytes:
    """The body of DeleteObjects."""
    objects = "".join(f"<Object><Key>{escape(key, _ENDS)}</Key></Object>" for key in keys)
    return f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()


def parse_failures(body: bytes, place: str) -> list[tuple[str, str]]:
    """Keys that are still there, by an answer to DeleteObjects, and why. Raises: Unavailable."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise Unavailable(f"{place}: an answer that can't be read: {error}") from error
    space, _, kind = root.tag.rpartition("}")
    space += "}" if space else ""
    if kind != "DeleteResult":
        raise Unavailable(f"{place}: {kind} does not name what was deleted")
    failures = [
        (each.findtext(f"{space}Key", ""), each.findtext(f"{space}Code", ""))
        for each in root.iterfind(f"{space}Error")
    ]
    return [failure for failure in failures if failure[1] != "NoSuchKey"]
