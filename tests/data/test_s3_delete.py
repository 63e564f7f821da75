"""O1: S3 deletes many objects a request, where it can. radosgw is the judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdata.objects.contract import Throttled
from fsdata.objects.s3.http import HttpAnswer, HttpPool
from fsdata.objects.s3.s3 import DELETES_TOGETHER, S3Objects
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from tests.ceph_cluster import CephCluster
from tests.data.stores import s3_settings
from tests.http_proxy import Fault, HttpProxy, Kind


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


def test_what_is_not_deleted_is_said(
    proxy: HttpProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Objects(SystemRuntime(), s3_settings(proxy.endpoint, tmp_path, "undeleted"))
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    error = "<Error><Key>k</Key><Code>{}</Code><Message>secret</Message></Error>"

    def answered(body: str) -> None:
        answer = HttpAnswer(200, {}, body.encode(), 0)
        monkeypatch.setattr(HttpPool, "request", lambda *_: answer)
        store.delete("k", "l")

    answered(f"<DeleteResult {space}>{error.format('NoSuchKey')}</DeleteResult>")
    answered("<DeleteResult/>")
    for code, kind in (("SlowDown", Throttled), ("AccessDenied", Unavailable)):
        for name in (f"DeleteResult {space}", "DeleteResult"):
            with pytest.raises(kind, match=code) as raised:
                answered(f"<{name}>{error.format(code)}</DeleteResult>")
            assert "secret" not in str(raised.value)
    for body in ("<Error/>", "no xml", ""):
        with pytest.raises(Unavailable):
            answered(body)
    store.close()
