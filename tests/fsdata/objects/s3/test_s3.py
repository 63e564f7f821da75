"""O1: S3 by itself: signatures, keys and their rotation, addresses, TLS. radosgw is the judge."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from fsdata.objects.contract import Throttled, check_usable
from fsdata.objects.s3.credentials import S3Account, bucket_url, new_client, new_session
from fsdata.objects.s3.errors import parse_refusal, translate
from fsdata.objects.s3.http import IDLE_AGE_S
from fsdata.objects.s3.s3 import S3Objects, S3Settings
from fsdata.objects.s3.sigv4 import AccessKey, Signer, query_string, quoted
from fsmeta.errors import ConfigError, ObjectMissing, Refused, Unavailable
from fsmeta.runtime import SystemRuntime
from tests.fsdata.stores import credentials_file, fresh_name, hide_own_keys, s3_bucket, s3_settings
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind

NOW_S = 1_790_000_000


@pytest.fixture(autouse=True)
def no_aws_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide_own_keys(monkeypatch, tmp_path)


# --- signatures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "tok/en=="])
@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("GET", "/bucket/vol/chunks/0/1/7_0_4194304", []),
        ("PUT", "/bucket/a~b_c.d-e/ü +&=x", []),
        (
            "GET",
            "/bucket/",
            [("list-type", "2"), ("prefix", "a/b c"), ("continuation-token", "=/+")],
        ),
        ("DELETE", "/volume", []),
    ],
)
def test_signatures_are_botocore_s(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    query: list[tuple[str, str]],
    token: str,
) -> None:
    moment = datetime.fromtimestamp(NOW_S, UTC)
    monkeypatch.setattr(auth, "get_current_datetime", lambda: moment)
    text = f"?{query_string(query)}" if query else ""
    target = quoted(path) + text
    headers = {"x-amz-storage-class": "GLACIER"}
    request = AWSRequest(method, f"https://host:99{target}", headers=headers, data=b"body")
    key = AccessKey("AKIA", "secret", token)
    credentials = Credentials(key.access, key.secret, token or None)
    auth.S3SigV4Auth(credentials, "s3", "eu-west-1").add_auth(request)

    signer = Signer("eu-west-1")
    for _ in range(2):  # the second time from what is remembered
        lines = signer.sign(
            key,
            NOW_S,
            method.encode(),
            target.encode(),
            {b"host": b"host:99", b"x-amz-storage-class": b"GLACIER"},
            sha256(b"body").hexdigest().encode(),
        )
        ours = dict(line.decode().split(": ", 1) for line in lines)
        assert ours["Authorization"] == request.headers["Authorization"]
        assert ours["x-amz-date"] == request.headers["X-Amz-Date"]


def test_a_key_never_shows_itself() -> None:
    key = AccessKey("AKIA", "the secret", "the token")
    assert "secret" not in f"{key} {key!r} {[key]}"


# --- keys ----------------------------------------------------------------------------------------


def test_keys_of_the_environment(ceph: CephCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    account = S3Account(ceph.endpoint)
    with pytest.raises(ConfigError, match="there are no S3 credentials"):
        S3Objects(SystemRuntime(), S3Settings(fresh_name(), account))
    monkeypatch.setenv("ACCESS_KEY", ACCESS_KEY)
    monkeypatch.setenv("SECRET_KEY", SECRET_KEY)
    store = S3Objects(SystemRuntime(), S3Settings(fresh_name(), account))
    assert not store.has_bucket()
    store.make_bucket()
    check_usable(store)
    store.remove_bucket()
    assert not store.has_bucket()
    store.close()


def test_keys_of_a_profile(
    ceph: CephCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shared"
    keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    file.write_text(f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n[mine]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    account = S3Account(ceph.endpoint, profile="mine")
    store = S3Objects(SystemRuntime(), S3Settings(fresh_name(), account))
    store.make_bucket()
    store.close()
    with pytest.raises(ConfigError, match="other"):
        S3Objects(SystemRuntime(), S3Settings("b", account._replace(profile="other")))


def test_session_tokens(token_ceph: CephCluster, tmp_path: Path) -> None:
    settings = s3_settings(token_ceph.endpoint, tmp_path)
    credentials_file(tmp_path, *token_ceph.session_keys().values())
    store = S3Objects(SystemRuntime(), settings)
    store.make_bucket()
    check_usable(store)
    store.close()


def test_an_expired_token_is_replaced_in_flight(token_ceph: CephCluster, tmp_path: Path) -> None:
    old, new = token_ceph.session_keys(), token_ceph.session_keys()
    with HttpProxy(token_ceph.s3_port) as proxy:
        replace_an_expired_token(proxy, tmp_path, old, new)


def replace_an_expired_token(
    proxy: HttpProxy, tmp_path: Path, old: dict[str, str], new: dict[str, str]
) -> None:
    """radosgw's tokens live for a quarter of an hour at least, so the proxy ends the old one."""
    settings = s3_settings(proxy.endpoint, tmp_path)
    credentials_file(tmp_path, *old.values())
    maker = S3Objects(SystemRuntime(), settings)
    maker.make_bucket()
    maker.close()
    store = S3Objects(SystemRuntime(), settings)
    store.put("k", (b"before",))
    expired = Fault(Kind.STATUS, 1e9, status=400, code="ExpiredToken")
    expired.when = lambda request: any(old["SessionToken"] == value for _, value in request.headers)
    proxy.add(expired)
    with pytest.raises(Unavailable, match=r"ExpiredToken .*there is no newer one"):
        store.get("k")
    credentials_file(tmp_path, *new.values())
    SystemRuntime().sleep(1.1)  # RENEW_PAUSE_S
    assert store.get("k") == b"before"
    expired.hits = 0
    store.put("k", (b"after",))
    assert store.head("k") is not None
    assert expired.hits == 0  # the new token is used from the first
    store.close()


def test_keys_are_rotated_without_a_new_mount(ceph: CephCluster, tmp_path: Path) -> None:
    """The store forgets the first key; the file has the second by then."""
    ceph.add_user("test", "second-key", "second-secret")
    ceph.add_user("test", "first-key", "first-secret")
    s3_bucket(ceph, tmp_path, bucket="rotated-keys").close()
    settings = s3_settings(ceph.endpoint, tmp_path, "rotated-keys")
    credentials_file(tmp_path, "first-key", "first-secret")
    store = S3Objects(SystemRuntime(), settings)
    store.put("k", (b"v",))
    credentials_file(tmp_path, "second-key", "second-secret")
    ceph.remove_key("test", "first-key")
    SystemRuntime().sleep(1.1)  # RENEW_PAUSE_S
    assert store.get("k") == b"v"
    store.close()


def test_temporary_keys_are_renewed_before_they_end(
    ceph: CephCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A credential process whose keys are always about to end is asked again and again."""
    end = (datetime.now(UTC) + timedelta(minutes=5)).isoformat()
    answer = {
        "Version": 1,
        "AccessKeyId": ACCESS_KEY,
        "SecretAccessKey": SECRET_KEY,
        "Expiration": end,
    }
    (tmp_path / "answer").write_text(json.dumps(answer))
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/log\ncat {tmp_path}/answer\n")
    program.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    store = S3Objects(SystemRuntime(), S3Settings(fresh_name(), S3Account(ceph.endpoint)))
    store.make_bucket()
    before = (tmp_path / "log").read_text().count("asked")
    store.put("k", (b"v",))
    assert store.get("k") == b"v"
    assert (tmp_path / "log").read_text().count("asked") > before
    store.close()


@pytest.mark.parametrize(
    ("access", "secret", "message"),
    [
        (ACCESS_KEY, "wrong-secret", r"SignatureDoesNotMatch \(the secret key is wrong\)"),
        ("nobody", SECRET_KEY, r"InvalidAccessKeyId \(the access key is unknown there\)"),
    ],
)
def test_wrong_keys_are_named_and_not_shown(
    ceph: CephCluster, tmp_path: Path, access: str, secret: str, message: str
) -> None:
    s3_bucket(ceph, tmp_path, bucket="locked").close()
    settings = s3_settings(ceph.endpoint, tmp_path, "locked")
    credentials_file(tmp_path, access, secret)
    store = S3Objects(SystemRuntime(), settings)
    for request in (
        lambda: store.put("k", (b"v",)),
        lambda: store.get("k"),
        lambda: list(store.list("")),
        store.has_bucket,
    ):
        with pytest.raises(Unavailable, match=message) as caught:
            request()
        assert secret not in str(caught.value)
    with pytest.raises(Unavailable, match="HTTP status 403"):
        store.head("k")
    store.close()


def test_a_bucket_that_is_not_there(ceph: CephCluster, tmp_path: Path) -> None:
    store = S3Objects(SystemRuntime(), s3_settings(ceph.endpoint, tmp_path))
    assert not store.has_bucket()
    for request in (
        lambda: store.put("k", (b"v",)),
        lambda: store.get("k"),
        lambda: store.get("k", 1, 2),
        lambda: store.delete("k"),
        lambda: list(store.list("")),
        lambda: store.head("k"),
    ):
        with pytest.raises(Unavailable, match=r"NoSuchBucket \(there is no such bucket\)"):
            request()
    store.close()


class Skewed(SystemRuntime):
    """A host whose clock is wrong."""

    def __init__(self, ahead_s: int) -> None:
        super().__init__()
        right = self.now_ns
        self.now_ns = lambda: right() + ahead_s * 10**9


@pytest.mark.parametrize("ahead_s", [-7200, 7200])
def test_a_wrong_clock_is_mended_in_flight(
    ceph: CephCluster, proxy: HttpProxy, tmp_path: Path, ahead_s: int
) -> None:
    s3_bucket(ceph, tmp_path, bucket="skewed").close()
    store = S3Objects(Skewed(ahead_s), s3_settings(proxy.endpoint, tmp_path, "skewed"))
    store.put("k", (b"v",))
    assert len(proxy.requests()) == 2
    assert store.get("k") == b"v"
    assert [info.key for info in store.list("")] == ["k"]
    assert store.head("k") is not None
    assert len(proxy.requests()) == 5  # from then on it knows
    store.close()


def test_connections_are_kept_but_not_for_long(
    ceph: CephCluster, proxy: HttpProxy, tmp_path: Path
) -> None:
    """Networks forget idle connections without a word, and what is sent then hangs."""
    s3_bucket(ceph, tmp_path, bucket="idle").close()
    runtime = SystemRuntime()
    late_s = 0.0
    runtime.monotonic = lambda: late_s
    store = S3Objects(runtime, s3_settings(proxy.endpoint, tmp_path, "idle"))
    for _ in range(5):
        store.put("k", (b"v",))
        store.get("k")
    assert proxy.connections() == 1
    late_s = IDLE_AGE_S + 1
    store.get("k")
    assert proxy.connections() == 2
    store.close()


# --- what is asked -------------------------------------------------------------------------------


def test_puts_say_what_they_were_told_to(proxy: HttpProxy, tmp_path: Path) -> None:
    settings = s3_settings(
        proxy.endpoint,
        tmp_path,
        storage_class="STANDARD_IA",
        encryption="aws:kms",
        kms_key="my-key",
    )
    store = S3Objects(SystemRuntime(), settings)
    proxy.add(Fault(Kind.STATUS, 1, status=200))
    with pytest.raises(Unavailable, match="not by an S3 store"):  # it has no ETag
        store.put("k", (b"1234", b"56789"))
    sent = dict(proxy.requests()[-1].headers)
    assert sent["x-amz-storage-class"] == "STANDARD_IA"
    assert sent["x-amz-server-side-encryption"] == "aws:kms"
    assert sent["x-amz-server-side-encryption-aws-kms-key-id"] == "my-key"
    assert sent["x-amz-checksum-crc32c"] == "4waSgw=="  # E3069283, the check value of CRC-32C
    assert "x-amz-storage-class" in sent["Authorization"]
    store.close()


def test_sha256_finds_a_bit_that_the_network_flipped(
    ceph: CephCluster, proxy: HttpProxy, tmp_path: Path
) -> None:
    s3_bucket(ceph, tmp_path, bucket="hashes").close()
    store = S3Objects(
        SystemRuntime(), s3_settings(proxy.endpoint, tmp_path, "hashes", checksum="sha256")
    )
    proxy.add(Fault(Kind.FLIP_REQUEST, 1))
    with pytest.raises(Unavailable, match="XAmzContentSHA256Mismatch"):
        store.put("k", (b"abc", b"def"))
    assert store.head("k") is None
    store.put("k", (b"abc", b"def"))
    assert store.get("k") == b"abcdef"
    store.close()


@pytest.mark.parametrize(
    ("account", "url"),
    [
        (S3Account(region="eu-west-1"), "https://bucket.s3.eu-west-1.amazonaws.com/"),
        (S3Account("http://h:9000"), "http://h:9000/bucket/"),
        (S3Account("https://h", path_style=False), "https://bucket.h/"),
        (
            S3Account(region="eu-west-1", path_style=True),
            "https://s3.eu-west-1.amazonaws.com/bucket/",
        ),
    ],
)
def test_addresses(account: S3Account, url: str) -> None:
    client = new_client(new_session(account), account, AccessKey("a", "s"))
    assert bucket_url(client, "bucket") == url
    client.close()


def test_refusals_become_errors() -> None:
    def error(status: int, code: str, headless: bool = False) -> Exception:
        body = f"<Error><Code>{code}</Code></Error>" if code else "<html>"
        return translate(parse_refusal(status, body.encode()), "place", "key", headless)

    assert type(error(404, "NoSuchKey")) is ObjectMissing
    assert type(error(404, "", headless=True)) is ObjectMissing
    assert type(error(404, "")) is Unavailable  # whoever says so is no S3 server
    for status, code in ((503, "SlowDown"), (503, ""), (429, ""), (400, "SlowDown")):
        assert type(error(status, code)) is Throttled
    assert type(error(500, "InternalError")) is Unavailable
    for status, code in ((400, "InvalidArgument"), (501, "NotImplemented")):
        assert type(error(status, code)) is Refused
    for status, code, number in ((403, "QuotaExceeded", 122), (507, "", 28)):
        full = error(status, code)
        assert isinstance(full, OSError)
        assert full.errno == number
    with_name_space = b'<Error xmlns="x"><Code>SlowDown</Code></Error>'
    assert parse_refusal(503, with_name_space).code == "SlowDown"


# --- TLS -----------------------------------------------------------------------------------------


class TlsFront:
    """TLS in front of a plain server, with a certificate nobody else knows."""

    def __init__(self, directory: Path, server_port: int) -> None:
        self.certificate = directory / "certificate.pem"
        key = directory / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
                *("ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
                *("-addext", "subjectAltName=DNS:localhost"),
                *("-keyout", str(key), "-out", str(self.certificate)),
            ],
            check=True,
            capture_output=True,
        )
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate, key)
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"https://localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(raw,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with raw:
            try:
                client = self._context.wrap_socket(raw, server_side=True)
            except OSError:
                return  # it does not trust us
        server = socket.create_connection(("127.0.0.1", self._server_port))
        with client, server:
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()

    def close(self) -> None:
        self._listener.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other side has gone


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_with_an_authority_of_one_s_own(ceph: CephCluster, tmp_path: Path) -> None:
    front = TlsFront(tmp_path, ceph.s3_port)
    settings = s3_settings(front.endpoint, tmp_path)
    distrustful = S3Objects(SystemRuntime(), settings)
    with pytest.raises(Unavailable, match="name its certificate authority with the option ca"):
        distrustful.get("k")
    account = settings.account._replace(ca=str(front.certificate))
    store = S3Objects(SystemRuntime(), settings._replace(account=account))
    store.make_bucket()
    check_usable(store)
    data = os.urandom(3 << 20)
    store.put("large", (data[:5], data[5:]))
    assert store.get("large") == data
    room = bytearray(len(data))
    assert store.get_into("large", (memoryview(room),)) == len(data)
    assert room == data
    for each in (distrustful, store):
        each.close()
    front.close()
    with pytest.raises(ConfigError, match="certificate authorities /nowhere"):
        S3Objects(SystemRuntime(), settings._replace(account=account._replace(ca="/nowhere")))


def test_commands_that_need_no_s3_do_not_load_boto3() -> None:
    modules = "sys, fsclient.client.client, fsclient.cli.volume.format"
    text = f"import {modules}; print('boto3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_boto3_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match="pip install 'slicefs"):
        S3Objects(SystemRuntime(), S3Settings("bucket"))


def test_the_host_is_what_the_user_wrote(ceph: CephCluster, tmp_path: Path) -> None:
    """Signed and sent as one: a port that is not the usual one is part of it."""
    store = s3_bucket(ceph, tmp_path)
    assert store._session.host.decode() == urlsplit(ceph.endpoint).netloc
    store.close()
