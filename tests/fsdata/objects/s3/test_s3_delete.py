"""O1: S3 deletes many objects a request, where it can. radosgw is the judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdata.objects.contract import Throttled
from fsdata.objects.s3.http import HttpAnswer, HttpPool
from fsdata.objects.s3.s3 import DELETES_TOGETHER, S3Objects
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from tests.fsdata.stores import s3_settings
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind


def test_many_are_deleted_by_few_requests(
    ceph: CephCluster, proxy: HttpProxy, tmp_path: Path
) -> None:
    """A store that can't is asked once; expired keys and busy stores say nothing about that."""
    del ceph
    store = S3Objects(SystemRuntime(), s3_settings(proxy.endpoint, tmp_path, "deletions"))
    store.make_bucket()
    keys = [f"a&b/{number}" for number in range(DELETES_TOGETHER + 2)]

    def deleted(*faults: Fault) -> list[str]:
        """The requests that it takes."""
        for key in keys[::100]:
            store.put(key, (b"data",))
        before = len(proxy.requests())
        for fault in faults:
            proxy.add(fault)
        store.delete(*keys[:2], *keys[100::100])
        assert list(store.list("")) == []
        return [each.method for each in proxy.requests()[before:-1]]

    def refusal(status: int, code: str) -> Fault:
        return Fault(Kind.STATUS, 1, "POST", status=status, code=code)

    singly = ["DELETE"] * 7
    assert deleted() == ["POST"]
    before = len(proxy.requests())
    store.delete(*keys)
    assert len(proxy.requests()) - before == 2
    with pytest.raises(Throttled):
        deleted(refusal(503, "SlowDown"))
    assert deleted(refusal(400, "ExpiredToken")) == ["POST", *singly]
    assert deleted() == ["POST"]
    assert deleted(refusal(501, "NotImplemented")) == ["POST", *singly]
    assert deleted() == singly
    store.close()


def test_what_is_not_deleted_is_asked_for_by_itself(
    proxy: HttpProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other keys of its request are not deleted once more: they may have been written again."""
    store = S3Objects(SystemRuntime(), s3_settings(proxy.endpoint, tmp_path, "undeleted"))
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    error = "<Error><Key>k</Key><Code>{}</Code><Message>secret</Message></Error>"
    asked: list[str] = []

    def answered(together: str, alone: int, code: str = "") -> list[str]:
        """The requests for two keys, by what the store says of both and of one."""
        asked.clear()

        def request(_pool: HttpPool, head: Sequence[bytes], *_: object) -> HttpAnswer:
            method, target = head[0].decode().split(" ")[:2]
            asked.append(f"{method} {target.rsplit('/', 1)[-1]}")
            if method == "POST":
                return HttpAnswer(200, {}, together.encode(), 0)
            return HttpAnswer(alone, {}, error.format(code).encode(), 0)

        monkeypatch.setattr(HttpPool, "request", request)
        store.delete("k", "l")
        return asked

    assert answered("<DeleteResult/>", 204) == ["POST ?delete="]
    nothing = f"<DeleteResult {space}>{error.format('NoSuchKey')}</DeleteResult>"
    assert answered(nothing, 204) == ["POST ?delete="]
    for name in (f"DeleteResult {space}", "DeleteResult"):
        body = f"<{name}>{error.format('InternalError')}</DeleteResult>"
        assert answered(body, 204) == ["POST ?delete=", "DELETE k"]
        for status, code, kind in (
            (503, "SlowDown", Throttled),
            (403, "AccessDenied", Unavailable),
        ):
            with pytest.raises(kind, match=code) as raised:
                answered(body, status, code)
            assert asked == ["POST ?delete=", "DELETE k"]
            assert "secret" not in str(raised.value)
    for body in ("<Error/>", "no xml", ""):
        with pytest.raises(Unavailable):
            answered(body, 204)
    store.close()


def test_keys_that_xml_changes_or_can_not_name(
    ceph: CephCluster, proxy: HttpProxy, tmp_path: Path
) -> None:
    del ceph
    store = S3Objects(SystemRuntime(), s3_settings(proxy.endpoint, tmp_path, "odd-keys"))
    store.make_bucket()
    for keys in (["a\rb", "c\r\nd"], ["e\x01f", "g h", "i+j"]):
        kept = [key.replace("\r", "\n") for key in keys]
        for key in {*keys, *kept}:
            store.put(key, (b"data",))
        store.delete(*keys)
        assert [key for key in {*keys, *kept} if store.head(key)] == [
            key for key in {*keys, *kept} if key not in keys
        ]
    store.close()
