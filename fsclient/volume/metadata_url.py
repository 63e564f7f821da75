"""Metadata URLs: what users write, turned into what the rest trusts.

Called by the commands and by `client`. Everything that can be wrong in it is a ConfigError of one
line. The engines are imported when a URL names them: redis-py alone takes longer to import than
most commands take to run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from fsclient.volume.object_stores import directories
from fsdata.format.block_v1 import Codec
from fsmeta.errors import ConfigError, NoVolume, StoreError
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime
from fsmeta.store.contract import Store
from fsmeta.store.redis import url as redis_urls
from fsmeta.store.rollback import Review
from fsmeta.store.url import TLS_FILES, shown_url

CODECS: Final = {"none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
META_HELP: Final = "use redis://HOST:PORT/DB, tikv://PD:PORT/PREFIX or sqlite:///FILE.db"
_TIKV: Final = "tikv"
_SQLITE: Final = ("sqlite", "sqlite3")
_SERVER_WORDS: Final = ("db", "username", "password")  # `?name=value` of a server's URL
_TLS_WORDS: Final = (*TLS_FILES, "ssl_cert_reqs", "ssl_check_hostname", "ssl_password")
_CERT_REQS: Final = ("none", "optional", "required")


def on_redis(url: str) -> bool:
    """Whether `url` names metadata in Redis."""
    return sqlite_file(url) is None and url.partition("://")[0] != _TIKV


def open_store(
    url: str,
    runtime: Runtime,
    create: bool = False,
    redis_wait: tuple[int, int] | None = None,
    tikv_gc: bool = False,
    token: int | None = None,
) -> Store:
    """The metadata engine that `url` names; `create` makes a SQLite file that is not there.

    `redis_wait`: how many replicas must have a change, and how many milliseconds they may take.
    `tikv_gc`: if it leads, this client has old values in TiKV dropped. `token`: names the client to
    a store that tells clients apart; processes that take a session over have the same.
    Raises: ConfigError.
    """
    path = sqlite_file(url)
    if redis_wait is not None and (path is not None or url.partition("://")[0] == _TIKV):
        raise ConfigError("--redis-wait is for metadata in Redis: leave it out")
    if path is None:
        return _open_server(url, runtime, redis_wait, tikv_gc, token)
    _check_file(path, create)
    from fsmeta.store.sqlite import SqliteStore

    return SqliteStore(path, runtime, create)


def _open_server(
    url: str,
    runtime: Runtime,
    redis_wait: tuple[int, int] | None,
    tikv_gc: bool,
    token: int | None,
) -> Store:
    """Raises: ConfigError."""
    if url.partition("://")[0] == _TIKV:
        from fsmeta.store.tikv.engine import TikvStore

        return TikvStore(url, runtime, tikv_gc)
    _check_server(url)
    from fsmeta.store.redis.commit import ReplicaWait
    from fsmeta.store.redis.engine import RedisStore

    try:
        wait = None if redis_wait is None else ReplicaWait(*redis_wait)
        return RedisStore(url, runtime, wait, token)
    except StoreError as error:
        raise ConfigError(
            f"{shown_url(url)}: {error}; check user and password in the URL"
        ) from error


def _check_server(url: str) -> None:
    """Say what redis-py would take for database 0, or not survive. Raises: ConfigError."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"can't read metadata URL {shown_url(url)}: {error}") from error
    if parts.fragment or "@" in parts.query or (parts.scheme != "unix" and "@" in parts.path):
        raise ConfigError(
            f"can't read metadata URL {shown_url(url)}: "
            "in a password write @ as %40, / as %2F, ? as %3F, # as %23"
        )
    several = bool(redis_urls.parse(url).hosts)
    number = "" if several else parts.path.removeprefix("/")
    if several:
        pass  # taken apart above
    elif parts.scheme == "unix":
        if not number:
            raise ConfigError("the metadata URL names no socket: use unix:///PATH?db=DB")
    elif number and not (number.isascii() and number.isdigit()):
        raise ConfigError(f"{shown_url(url)}: {number!r} is no database number: {META_HELP}")
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        _check_parameter(url, parts.scheme, name, value)


def _check_parameter(url: str, scheme: str, name: str, value: str) -> None:
    """One `name=value` of a server's URL. Raises: ConfigError."""
    known = (*_SERVER_WORDS, *(_TLS_WORDS if scheme.startswith("rediss") else ()))
    if redis_urls.parse(url).master:
        known += redis_urls.SENTINEL_WORDS
    if name not in known:
        raise ConfigError(f"{shown_url(url)}: parameter {name!r}: use one of {', '.join(known)}")
    if name == "db" and scheme != "unix":
        raise ConfigError(f"{shown_url(url)}: write the database as redis://HOST:PORT/DB")
    if name == "ssl_cert_reqs" and value not in _CERT_REQS:
        raise ConfigError(f"{shown_url(url)}: {name}: use one of {', '.join(_CERT_REQS)}")
    if name in TLS_FILES and not os.path.exists(value):
        raise ConfigError(f"{shown_url(url)}: {name}: {value} does not exist")


def require_sound(url: str, store: Store) -> Review:
    """What may be lost because of how the metadata server is set up.

    Raises: ConfigError where no volume may live on it.
    """
    try:
        review = store.history.review()
    except StoreError as error:
        raise ConfigError(f"{shown_url(url)}: {error}") from error
    if review.refusal:
        raise ConfigError(f"{shown_url(url)}: {review.refusal}")
    return review


@contextmanager
def naming(url: str) -> Iterator[None]:
    """Say where there is no volume. Raises: ConfigError."""
    try:
        yield
    except NoVolume as error:
        shown = shown_url(url)
        raise ConfigError(
            f"there is no volume in {shown}: make one with "
            f"`slicefs format {shown} NAME --bucket DIR`, or correct the URL"
        ) from error


def sqlite_file(url: str) -> str | None:
    """The file that an embedded volume's URL names; None where it names a server.

    Raises: ConfigError where the URL is neither.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigError(f"metadata URL {shown_url(url)!r} has no scheme: {META_HELP}")
    if scheme in _SQLITE:
        return sqlite_path(rest)
    if scheme in redis_urls.SCHEMES or scheme == _TIKV:
        return None
    raise ConfigError(f"metadata URL scheme {scheme!r} is unknown: {META_HELP}")


@contextmanager
def nothing_left(url: str) -> Iterator[None]:
    """A SQLite file that was not there before goes again where what is done in it fails."""
    file = sqlite_file(url)
    if file is None or os.path.exists(file):
        yield
        return
    try:
        yield
    except BaseException:
        for end in ("", "-wal", "-shm"):
            with suppress(OSError):
                os.unlink(file + end)
        raise


def sqlite_path(rest: str) -> str:
    """The file in `sqlite://` + `rest`: `/name.db` is in the working directory, any other path as
    it is.

    Raises: ConfigError.
    """
    if rest.strip("/") == "":
        raise ConfigError(f"the metadata URL names no file: {META_HELP}")
    if rest.startswith("/") and rest.count("/") == 1:
        return os.path.abspath(rest[1:])
    # abspath keeps two leading slashes, and `sqlite:////dir/x.db` has them
    return os.path.abspath("/" + rest.lstrip("/") if rest.startswith("/") else rest)


def _check_file(path: str, create: bool) -> None:
    """Say what SQLite would only call "unable to open". Raises: ConfigError."""
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        raise ConfigError(f"metadata file {path} is a directory: name a file")
    if not os.path.isdir(folder):
        raise ConfigError(f"the directory {folder} of the metadata file is not there: create it")
    if not os.path.exists(path):
        if not os.access(folder, os.X_OK):
            raise ConfigError(f"the directory {folder} of the metadata file: you may not enter it")
        if not create:
            raise ConfigError(f"there is no metadata file {path}: run `slicefs format` first")
    elif not os.access(path, os.R_OK | os.W_OK):
        raise ConfigError(f"metadata file {path}: you may not read and write it")
    # SQLite keeps its log beside the file
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the directory {folder} of the metadata file: you may not write to it")


def require_apart(url: str, settings: VolumeFormat, mountpoint: str) -> None:
    """Raises: ConfigError where the mount would hide what it is made of, and wait for itself."""
    file = urlsplit(url).path if url.startswith("unix://") else sqlite_file(url)
    above = os.path.realpath(mountpoint)
    for path in (file, *directories(settings)):
        if path and os.path.commonpath((above, os.path.realpath(path))) == above:
            raise ConfigError(
                f"can't mount on {mountpoint}: {path} of this volume is in it: "
                "mount on a directory of its own"
            )
