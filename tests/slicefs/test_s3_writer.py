"""Parts of one object: their bytes, and what happens to the object when one is refused.

The store is a stand-in: which call of boto3 fails, and when it reads a body, is chosen here.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from slicefs.client.parallel import RUNTIME
from slicefs.stores import s3_writer
from slicefs.stores.s3_writer import S3Writer

PART = 1000


class Store:
    """What boto3 does for parts; `visible` is the object."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.visible: bytes | None = None
        self.begins = True
        self.refused: set[int] = set()
        self.aborted = False

    def create_multipart_upload(self, **_: Any) -> dict[str, str]:
        if not self.begins:
            raise OSError("SlowDown")
        return {"UploadId": "u"}

    def upload_part(self, *, PartNumber: int, Body: Any, **_: Any) -> dict[str, str]:  # noqa: N803
        """Reads the body twice, as a part that is sent again is read."""
        first = b"".join(iter(lambda: Body.read(17), b""))
        threading.Event().wait(random.random() / 1000)
        Body.seek(0)
        again = Body.read()
        assert first == again, "the buffer was used for another part"
        if PartNumber in self.refused:
            raise OSError("InternalError")
        self.parts[PartNumber] = again
        return {"ETag": str(PartNumber)}

    def complete_multipart_upload(self, *, MultipartUpload: Any, **_: Any) -> None:  # noqa: N803
        assert [int(each["ETag"]) for each in MultipartUpload["Parts"]] == sorted(self.parts)
        self.visible = b"".join(self.parts[number] for number in sorted(self.parts))

    def abort_multipart_upload(self, **_: Any) -> None:
        self.aborted = True

    def put(self, key: str, pieces: Any) -> None:
        del key
        self.visible = b"".join(pieces)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_writer, "PART_BYTES", PART)


def writer(store: Any) -> S3Writer:
    return S3Writer(store, store, "bucket", "key", None)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 20 * PART + 7])
def test_the_object_is_what_was_written(size: int) -> None:
    store, source = Store(), random.Random(size)
    data = source.randbytes(size)
    at = 0
    with writer(store) as file:
        while at < size:
            step = source.choice((1, 100, PART, 2 * PART + 3))
            file.write(data[at : at + step])
            at += step
    assert store.visible == data


def test_an_upload_that_does_not_begin_leaves_no_object() -> None:
    """Also where the program closes the file all the same."""
    store = Store()
    store.begins = False
    file = writer(store)
    with pytest.raises(OSError, match="SlowDown"):
        file.write(bytes(2 * PART))
    with pytest.raises(OSError, match="SlowDown"):
        file.close()
    assert store.visible is None


def test_a_part_that_is_refused_leaves_no_object() -> None:
    store = Store()
    store.refused = {2}
    with pytest.raises(OSError, match="InternalError"), writer(store) as file:
        file.write(bytes(9 * PART))
    assert store.visible is None
    assert store.aborted


def test_a_thread_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(type(RUNTIME), "spawn", refuse)
    store = Store()
    with pytest.raises(RuntimeError, match="new thread"), writer(store) as file:
        file.write(bytes(2 * PART))
    assert store.visible is None
    assert store.aborted
