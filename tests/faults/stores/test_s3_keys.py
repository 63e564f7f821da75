"""O1: mounts on S3 whose clock is wrong, and whose keys are temporary.

radosgw judges every request. Who hands out keys on AWS, its token service and an instance's
metadata, can't be had here: `KeyGiver` answers as they do, with session keys of that radosgw.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.faults.judge import Worker, await_operations, failing, start
from tests.faults.places import s3_place
from tests.faults.program import Volume, needs_mounts, wait_until
from tests.fsdata.stores import credentials_file, fresh_name, hide_own_keys
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind, Request

pytestmark = needs_mounts

SOME = 4  # operations: enough to need the store
AHEAD_S = 7200
ROLE = "tests-role"
IDENTITY = "who-this-pod-is"
_XML = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{AccessKeyId}</AccessKeyId>
<SecretAccessKey>{SecretAccessKey}</SecretAccessKey><SessionToken>{SessionToken}</SessionToken>
<Expiration>{Expiration}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
<ResponseMetadata><RequestId>1</RequestId></ResponseMetadata></AssumeRoleWithWebIdentityResponse>"""


@pytest.fixture(autouse=True)
def no_aws_settings(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    hide_own_keys(monkeypatch, base)


def token_of(request: Request) -> str:
    """The session token that a request is signed with."""
    headers = {name.lower(): value for name, value in request.headers}
    return headers.get("x-amz-security-token", "")


def test_o1_a_token_that_ends_under_load(base: Path, token_ceph: CephCluster) -> None:
    """radosgw's tokens live for a quarter of an hour at least, so the proxy ends the first."""
    old, new = token_ceph.session_keys(), token_ceph.session_keys()
    worker = Worker(base / "mnt/work", base / "journal", 5)
    with HttpProxy(token_ceph.s3_port) as proxy:
        volume = Volume(base, place=s3_place(base, proxy.endpoint))
        credentials_file(base, *old.values())
        try:
            volume.format()
            mount = volume.mount()
            start([worker])
            await_operations([worker], SOME)
            ended = proxy.add(Fault(Kind.STATUS, 1e9, status=400, code="ExpiredToken"))
            ended.when = lambda request: token_of(request) == old["SessionToken"]
            wait_until("the first token is refused", 60, lambda: ended.hits)
            time.sleep(1.5)  # and looked up again in vain
            credentials_file(base, *new.values())
            await_operations([worker], SOME)
            worker.stop()
            assert failing([worker]) == []
            refused = ended.hits
            worker.judge()
            mount.umount()
            assert ended.hits == refused, "the old token was used again"
            volume.mount()
            worker.judge()
            volume.end()
        finally:
            worker.abandon()
            volume.clean_up()


def blocks_asked(proxy: HttpProxy) -> list[Request]:
    """Requests for data so far: who leads asks the store for other things, too."""
    return [request for request in proxy.requests() if "/chunks/" in request.target]


# --- a clock that is wrong -----------------------------------------------------------------------

_WRONG_CLOCK = """
import sys
from fsmeta.runtime import SystemRuntime
init = SystemRuntime.__init__
def set_wrong(self):
    init(self)
    right = self.now_ns
    self.now_ns = lambda: right() + {ahead_s} * 10**9
SystemRuntime.__init__ = set_wrong
from fsclient.cli.main import main
sys.argv[0] = "slicefs"
main()
"""


def test_o1_a_clock_that_is_two_hours_wrong(base: Path, ceph: CephCluster) -> None:
    """Each request is signed with the time: the mount learns the store's, and is refused once."""
    with HttpProxy(ceph.s3_port) as proxy:
        volume = Volume(base, place=s3_place(base, proxy.endpoint))
        data = os.urandom(5 << 20)
        try:
            volume.format()
            wrong = (sys.executable, "-c", _WRONG_CLOCK.format(ahead_s=AHEAD_S))
            mount = volume.mount("--object-timeout", "30", program=wrong)
            path = mount.path
            before = len(blocks_asked(proxy))
            (path / "file").write_bytes(data)
            assert abs((path / "file").stat().st_mtime - time.time() - AHEAD_S) < 60
            assert (path / "file").read_bytes() == data
            assert len(blocks_asked(proxy)) - before == 2, "two blocks, and the clock was known"
            mount.umount()
            assert (volume.mount().path / "file").read_bytes() == data
            volume.end()
        finally:
            volume.clean_up()


# --- keys that others hand out -------------------------------------------------------------------

_LATER = """
import sys
from pathlib import Path
from botocore.credentials import RefreshableCredentials
remaining = RefreshableCredentials._seconds_remaining
def later(self):
    return remaining(self) - float(Path({file!r}).read_text())
RefreshableCredentials._seconds_remaining = later
from fsclient.cli.main import main
sys.argv[0] = "slicefs"
main()
"""


class KeyGiver:
    """A token service and the metadata of an instance: one set of keys after the other."""

    def __init__(self) -> None:
        self._left: list[tuple[dict[str, str], int]] = []
        self.given: list[str] = []  # tokens
        giver = self

        class Handler(BaseHTTPRequestHandler):
            """What is asked."""

            def log_message(self, *args: object) -> None:
                """Nothing."""

            def do_PUT(self) -> None:
                self._answer("a session of metadata")

            def do_GET(self) -> None:
                ending = self.path.rpartition("/")[2]
                self._answer(json.dumps(giver.next()) if ending else ROLE)

            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
                right = f"WebIdentityToken={IDENTITY}" in asked and ROLE in asked
                self._answer(_XML.format(**giver.next()) if right else "", 200 if right else 403)

            def _answer(self, text: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def will_give(self, *keys: tuple[dict[str, str], int]) -> None:
        """These, which live for so many minutes; the last ones again and again."""
        self._left[:] = keys
        self.given.clear()

    def next(self) -> dict[str, str]:
        """What is given now."""
        keys, minutes = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        self.given.append(keys["SessionToken"])
        end = (datetime.now(UTC) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"Code": "Success", "Token": keys["SessionToken"], **keys, "Expiration": end}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def giver() -> Iterator[KeyGiver]:
    made = KeyGiver()
    yield made
    made.close()


@pytest.fixture
def handed_out(base: Path, token_ceph: CephCluster) -> Iterator[tuple[Volume, HttpProxy]]:
    """A volume that is told nothing of keys, not formatted yet."""
    with HttpProxy(token_ceph.s3_port) as proxy:
        place = ("--storage", "s3", "--bucket", f"{proxy.endpoint}/{fresh_name()}")
        volume = Volume(base, place=place)
        yield volume, proxy
        volume.clean_up()


def tokens_used(proxy: HttpProxy, begin: int) -> list[str]:
    """Of the requests from number `begin` on, each once in the order of their first use."""
    return list(dict.fromkeys(token_of(request) for request in proxy.requests()[begin:]))


def test_o1_web_identity(
    token_ceph: CephCluster,
    giver: KeyGiver,
    handed_out: tuple[Volume, HttpProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a pod has them: those that end in five minutes are exchanged while they are good."""
    volume, proxy = handed_out
    first, second, third = (token_ceph.session_keys() for _ in range(3))
    (volume.base / "identity").write_text(IDENTITY)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(volume.base / "identity"))
    monkeypatch.setenv("AWS_ROLE_ARN", f"arn:aws:iam::1:role/{ROLE}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", giver.endpoint)
    giver.will_give((first, 60))
    volume.format()
    giver.will_give((first, 5), (second, 5), (third, 60))
    begin = len(proxy.requests())
    mount = volume.mount()
    (mount.path / "file").write_bytes(b"data")
    mount.umount()
    assert giver.given == [each["SessionToken"] for each in (first, second, third)]
    assert tokens_used(proxy, begin)[-1] == third["SessionToken"]
    volume.end()


def test_o1_the_role_of_an_instance(
    token_ceph: CephCluster,
    giver: KeyGiver,
    handed_out: tuple[Volume, HttpProxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An hour's keys are exchanged before they end, and when the store refuses them earlier."""
    volume, proxy = handed_out
    first, second, third = (token_ceph.session_keys() for _ in range(3))
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", giver.endpoint)
    monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "60")  # it is a second
    giver.will_give((first, 60), (second, 600), (third, 600))
    volume.format()
    giver.will_give((first, 60), (second, 600), (third, 600))
    later = volume.base / "later"
    later.write_text("0")
    begin = len(proxy.requests())
    program = (sys.executable, "-c", _LATER.format(file=str(later)))
    mount = volume.mount("--object-timeout", "30", program=program)
    (mount.path / "before").write_bytes(b"before")
    assert tokens_used(proxy, begin) == [first["SessionToken"]]
    written = later.with_suffix(".new")
    written.write_text(str(50 * 60))
    written.rename(later)
    begin = len(proxy.requests())
    (mount.path / "after").write_bytes(b"after")
    assert tokens_used(proxy, begin) == [second["SessionToken"]]
    ended = proxy.add(Fault(Kind.STATUS, 1e9, status=400, code="ExpiredToken"))
    ended.when = lambda request: token_of(request) == second["SessionToken"]
    (mount.path / "last").write_bytes(b"last")
    mount.umount()
    assert ended.hits, "it was not refused"
    assert giver.given == [each["SessionToken"] for each in (first, second, third)]
    mount = volume.mount()
    assert [(mount.path / each).read_bytes() for each in ("before", "after", "last")] == [
        b"before",
        b"after",
        b"last",
    ]
    volume.end()
