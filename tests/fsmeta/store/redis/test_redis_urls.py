"""How a Redis is reached: passwords, unix sockets, TLS; and one line where it can't be."""

from __future__ import annotations

import shutil
import subprocess
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.volume.metadata_url import open_store
from fsmeta.errors import Ambiguous, ConfigError, StoreError, Unavailable
from fsmeta.store.redis import connection
from fsmeta.store.redis.engine import RedisStore
from fsmeta.store.redis.script import ask
from fsmeta.store.redis.topology import CONNECT_TIMEOUT_S
from fsmeta.store.writes import Add, Put
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, change, make_volume
from tests.support.redis_server import RedisServer, free_port
from tests.support.waiting import wait_until

SECRET = "hunter2-S3cr3t"
ROW = b"trow"
REFUSED_WITHIN_S = 25 * CONNECT_TIMEOUT_S


def _use(url: str, watch: bool = False) -> None:
    """A volume can be made, written and checked there; `watch`: and news would come."""
    store = RedisStore(url, RUNTIME)
    make_volume(store, RUNTIME)
    if watch:
        store.watch(lambda _: None)
    store.commit(change(Put(ROW, b"x", bytes(100_000))))
    assert store.read([(ROW, b"x")]) == [bytes(100_000)]
    if watch:
        wait_until(lambda: store.read([(ROW, b"x")]) and store.has_leases())
    else:
        assert not store.has_leases()
    assert_clean(store)
    store.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that wants a password."""
    with RedisServer(tmp_path_factory.mktemp("guarded"), "--requirepass", SECRET) as server:
        yield server


@pytest.mark.parametrize(
    "form",
    [
        "redis://:{secret}@127.0.0.1:{port}/0",
        "redis://default:{secret}@127.0.0.1:{port}/1",
        "redis://127.0.0.1:{port}/2?password={secret}",
        "unix://:{secret}@{socket}?db=3",
    ],
)
def test_the_right_password(guarded: RedisServer, form: str) -> None:
    _use(form.format(secret=SECRET, port=guarded.port, socket=guarded.socket))


def test_a_unix_socket(redis_server: RedisServer) -> None:
    number = redis_server.empty_url().rpartition("/")[2]
    _use(f"unix://{redis_server.socket}?db={number}", watch=True)
    assert redis_server.ask("HLEN", ROW, database=int(number)) == 1


WRONG = [
    "redis://:{secret}@127.0.0.1:{port}/0",  # not the password
    "redis://user:{secret}@127.0.0.1:{port}/0",
    "redis://127.0.0.1:{port}/0?password={secret}",
    "unix://:{secret}@{socket}?db=3",
    "redis://:{secret}@127.0.0.1:{closed}/0",  # nobody there
    "redis://127.0.0.1:{closed}/0?password={secret}",
    "redis://:{secret}@nowhere.invalid:6379/0",
    "unix://:{secret}@/nowhere/redis.sock",
    "redis://:{secret}@127.0.0.1:port/0",  # not a URL
    "redis://:{secret}/{secret}@127.0.0.1:{port}/0",
    "redis://:a@{secret}@127.0.0.1:{closed}/0",
]


def test_an_unreachable_database_is_named() -> None:
    """`?db=` and the files of TLS were once left out of the URL that was shown."""
    with pytest.raises(ConfigError, match=r"can't reach unix:///nowhere/redis.sock\?db=3: "):
        open_store(f"unix://:{SECRET}@/nowhere/redis.sock?db=3", RUNTIME)


@pytest.mark.parametrize("form", WRONG)
def test_errors_are_one_line_without_the_password(guarded: RedisServer, form: str) -> None:
    wrong = SECRET + "-wrong"
    url = form.format(secret=wrong, port=guarded.port, socket=guarded.socket, closed=free_port())
    with pytest.raises(ConfigError) as caught:
        open_store(url, RUNTIME)
    text = str(caught.value)
    assert "\n" not in text
    for part in (wrong, SECRET, "wrong", "hunter2"):
        assert part not in text, text
    assert len(text) > 20


def test_a_server_without_password_is_told_apart(guarded: RedisServer) -> None:
    with pytest.raises(ConfigError, match=r"redis://127.0.0.1:\d+/0: .*uthentication"):
        open_store(guarded.url(), RUNTIME)


def test_a_password_that_changed_is_not_shown(tmp_path: Path) -> None:
    """Later errors name the reason, not the URL."""
    with RedisServer(tmp_path, "--requirepass", SECRET) as server:
        store = RedisStore(f"redis://:{SECRET}@127.0.0.1:{server.port}/0", RUNTIME)
        make_volume(store, RUNTIME)
        assert_clean(store)
        server.stop()
        with pytest.raises(Unavailable) as caught:
            store.read([(ROW, b"x")])
        told = "".join(traceback.format_exception(caught.value))
        assert SECRET not in told
        store.close()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "redis",
            "http://127.0.0.1/0",
            "redis:/127.0.0.1",
            "redis://127.0.0.1:99999/0",
            "://",
            "",
        ),
        *("redis://127.0.0.1/0?bogus=1", "rediss://127.0.0.1/0?ssl_cert_reqs=bogus"),
    ],
)
def test_what_is_no_url_of_ours(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, RUNTIME)
    assert "\n" not in str(caught.value)


# --- TLS -----------------------------------------------------------------------------------------


def _certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for the loopback address, and its key."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return key, certificate


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, int, Path]]:
    """A server that speaks TLS, the port where it does, and its certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = _certificate(directory)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-key-file", str(key), "--tls-cert-file", str(certificate)]
    with RedisServer(directory, *options) as server:
        yield server, port, certificate


def test_tls(secure: tuple[RedisServer, int, Path]) -> None:
    _, port, certificate = secure
    _use(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}", watch=True)


def test_tls_with_a_stranger(secure: tuple[RedisServer, int, Path]) -> None:
    """A certificate nobody vouches for is refused."""
    _, port, _ = secure
    with pytest.raises(ConfigError, match=r"certificate.*ssl_ca_certs=FILE") as caught:
        open_store(f"rediss://:{SECRET}@127.0.0.1:{port}/0", RUNTIME)
    assert SECRET not in str(caught.value)


def test_tls_for_another_host(secure: tuple[RedisServer, int, Path]) -> None:
    """M1: the certificate is good, and of somebody else."""
    _, port, certificate = secure
    with pytest.raises(ConfigError, match=r"[Hh]ostname|not valid for"):
        open_store(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}", RUNTIME)


def test_tls_with_a_certificate_of_our_own(tmp_path: Path) -> None:
    """M1: a server that lets in only who shows one."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, certificate = _certificate(tmp_path)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "yes"]
    options += ["--tls-key-file", str(key), "--tls-cert-file", str(certificate)]
    with RedisServer(tmp_path, *options, "--tls-ca-cert-file", str(certificate)):
        place = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        _use(f"{place}&ssl_certfile={certificate}&ssl_keyfile={key}", watch=True)
        with pytest.raises(ConfigError, match="can't reach rediss://127"):
            open_store(place, RUNTIME)


def test_tls_from_many_threads(secure: tuple[RedisServer, int, Path]) -> None:
    """One TLS stream can't be read and written at once: requests take turns."""
    _, port, certificate = secure
    store = RedisStore(f"rediss://127.0.0.1:{port}/1?ssl_ca_certs={certificate}", RUNTIME)
    make_volume(store, RUNTIME)

    def work() -> None:
        for _ in range(100):
            store.commit(change(Add(ROW, b"n", 1)))

    threads = [RUNTIME.spawn(f"w{n}", work) for n in range(4)]
    for thread in threads:
        thread.join()
    assert store.read([(ROW, b"n")]) == [b"400"]
    assert_clean(store)
    store.close()


@pytest.mark.parametrize(
    "timeout_s", [0.5, pytest.param(CONNECT_TIMEOUT_S, marks=pytest.mark.soak)]
)
def test_tls_where_there_is_none(
    guarded: RedisServer, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis waits for the rest of a line, and we for an answer."""
    monkeypatch.setattr("fsmeta.store.redis.topology.CONNECT_TIMEOUT_S", timeout_s)
    _refused(f"rediss://:{SECRET}@127.0.0.1:{guarded.port}/0", "write redis://")


@pytest.mark.parametrize("form", ["", f":{SECRET}@"])
def test_no_tls_where_there_is(secure: tuple[RedisServer, int, Path], form: str) -> None:
    _, port, _ = secure
    _refused(f"redis://{form}127.0.0.1:{port}/0", "write rediss://")


def _refused(url: str, advice: str) -> None:
    """One line that says what to do, not too late, and no password in it."""
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        open_store(url, RUNTIME)
    assert time.monotonic() - began < REFUSED_WITHIN_S
    text = str(caught.value)
    assert text.endswith(advice)
    assert "\n" not in text
    assert SECRET not in text


def test_close_ends_a_wait_over_tls(
    secure: tuple[RedisServer, int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits there holds the lock of all; whoever closes doesn't take it.

    Nothing else ends it: neither Redis nor we lose patience.
    """
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT_S", 1000.0)
    server, port, certificate = secure
    store = RedisStore(f"rediss://127.0.0.1:{port}/2?ssl_ca_certs={certificate}", RUNTIME)
    errors: list[type[StoreError]] = []

    def wait() -> None:
        try:
            ask(store._main, (b"BLPOP", b"nothing", b"0"), changes=True)
        except StoreError as error:
            errors.append(type(error))  # itself, it would keep the connection

    thread = RUNTIME.spawn("waits", wait)
    wait_until(lambda: server.ask("INFO", "clients")["blocked_clients"] == 1)
    store.close()
    thread.join()
    assert errors == [Ambiguous]
