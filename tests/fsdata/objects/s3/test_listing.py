"""Pages of a listing as different stores write them."""

from __future__ import annotations

import pytest

from fsdata.objects.s3.listing import parse_page


def page(encoding: str, *keys: str) -> bytes:
    objects = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
        "<Size>1</Size></Contents>"
        for key in keys
    )
    folders = "".join(f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>" for key in keys)
    return f"<ListBucketResult>{encoding}{objects}{folders}</ListBucketResult>".encode()


@pytest.mark.parametrize(
    ("encoding", "keys"),
    [
        ("<EncodingType>url</EncodingType>", ["a+b", "a%2Bb", "%25+%C3%A9"]),  # AWS
        ("<EncodingType>url</EncodingType>", ["a%20b", "a%2Bb", "%25%20%C3%A9"]),  # radosgw
        ("", ["a b", "a+b", "% é"]),  # a store that ignores what it was asked for
    ],
)
def test_keys_with_spaces_and_pluses(encoding: str, keys: list[str]) -> None:
    found = parse_page(page(encoding, *keys), "there")
    assert [info.key for info in found.infos] == ["a b", "a+b", "% é"]
    assert found.folders == ["a b/", "a+b/", "% é/"]
