"""Which server has the volume now, and connections to it: one Redis, Sentinels' master, a cluster.

Each connection looks anew: after a fail-over the next one is to the new master. A channel that gets
the answer that a server no longer has the volume (`redis/connection.Elsewhere`) drops the
connection and tries again.

Called by `redis/engine`, whose channels and tracking make connections of it. redis-py speaks TLS
and logs in. Threading: `Servers` may be used from any thread; it remembers only where to look
first, in fields that are replaced whole.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import redis
from redis.crc import key_slot

from fsmeta.errors import ConfigError
from fsmeta.store.redis.connection import RedisConnection
from fsmeta.store.redis.url import HostPort, RedisUrl, parse
from fsmeta.store.url import shown_url

CONNECT_TIMEOUT_S: Final = 4.0  # for each step of a connection; a live server takes milliseconds
ASK_TIMEOUT_S: Final = 1.0  # the same where there are other servers to ask
NODES_MAX: Final = 1000  # the largest cluster that Redis is made for


def parse_info(text: bytes) -> dict[str, str]:
    """The `name:value` lines of INFO."""
    lines = text.decode(errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: value for name, colon, value in pairs if colon}


class ServerConnection:
    """A connection to the server that has the volume when `connect` is called."""

    def __init__(self, find: Callable[[], tuple[RedisConnection, dict[str, str]]]) -> None:
        self._find = find
        self._inner: RedisConnection | None = None
        self.run = ""  # which process it reached

    def connect(self) -> None:
        """Raises: redis.RedisError, OSError."""
        self._inner, info = self._find()
        self.run = info.get("run_id", "")

    @property
    def _sock(self) -> socket.socket | None:
        return None if self._inner is None else self._inner._sock

    def disconnect(self) -> None:
        if self._inner is not None:
            self._inner.disconnect()

    def send_command(self, *words: str, **options: Any) -> None:
        assert self._inner is not None
        self._inner.send_command(*words, **options)

    def read_response(self) -> Any:
        assert self._inner is not None
        return self._inner.read_response()

    def can_read(self, timeout: float = 0) -> bool:
        assert self._inner is not None
        return self._inner.can_read(timeout=timeout)


class Servers:
    """The servers that a metadata URL names."""

    def __init__(self, url: str) -> None:
        """Raises: ConfigError."""
        self._url = parse(url)
        self.prefix = f"{{{self._url.volume}}}".encode() if self._url.volume else b""
        self._kind, self._words = _pool_words(url, self._url)
        self._slot = key_slot(self.prefix) if self.prefix else 0
        self._known: tuple[HostPort, ...] = self._url.hosts  # to be asked, the best first

    def connection(self) -> ServerConnection:
        """A connection that is not made yet."""
        return ServerConnection(self._find)

    def moved(self, place: str) -> None:
        """The cluster says that `HOST:PORT` has our slot."""
        host, _, port = place.rpartition(":")
        if host and port.isdigit():
            self._prefer((host, int(port)))

    def _prefer(self, best: HostPort, others: Iterable[HostPort] = ()) -> None:
        known = dict.fromkeys((best, *others, *self._known, *self._url.hosts))
        self._known = tuple(known)[:NODES_MAX]

    def _find(self) -> tuple[RedisConnection, dict[str, str]]:
        if self._url.master:
            connection = self._connect(self._ask_sentinels())
        elif self.prefix:
            connection = self._find_node()
        else:
            connection = self._connect(None)
        try:
            info = _info(connection)
            role = info.get("role", "master")
            if role != "master":
                raise redis.ConnectionError(f"the server is a {role}, which takes no changes")
        except BaseException:
            connection.disconnect()
            raise
        return connection, info

    def _connect(self, place: HostPort | None, **words: Any) -> RedisConnection:
        """Raises: redis.RedisError, OSError."""
        # not `ConnectionPool.make_connection`: that counts, and refuses the hundredth reconnection
        where = {} if place is None else {"host": place[0], "port": place[1]}
        connection = cast("RedisConnection", self._kind(**{**self._words, **where, **words}))
        try:
            connection.connect()
        except BaseException:
            connection.disconnect()
            raise
        return connection

    # --- Sentinel --------------------------------------------------------------------------------

    def _ask_sentinels(self) -> HostPort:
        """Where the master is. Raises: redis.RedisError, OSError where no Sentinel knows."""
        failure: Exception | None = None
        secrets = {"username": None, "password": None, **dict(self._url.sentinel_words)}
        for place in self._known:
            try:
                asked = self._connect(place, db=0, **_HURRY, **secrets)
                try:
                    asked.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.master)
                    answer = asked.read_response()
                finally:
                    asked.disconnect()
            except (redis.RedisError, OSError) as error:
                failure = error
                continue
            if answer:
                self._prefer(place)
                return answer[0].decode(), int(answer[1])
            failure = redis.ConnectionError(f"no Sentinel knows a master {self._url.master!r}")
        assert failure is not None, "a URL with a master names Sentinels"
        try:
            raise failure
        finally:
            failure = None  # it refers to this frame

    # --- Cluster ---------------------------------------------------------------------------------

    def _find_node(self) -> RedisConnection:
        """A connection to the node that has our slot. Raises: redis.RedisError, OSError."""
        failure: Exception | None = None
        for place in self._known:
            try:
                return self._node_by(place)
            except (redis.RedisError, OSError) as error:
                failure = error
        assert failure is not None, "a URL of a cluster names nodes"
        try:
            raise failure
        finally:
            failure = None  # it refers to this frame

    def _node_by(self, place: HostPort) -> RedisConnection:
        """What the node at `place` says that it has our slot, or itself."""
        asked = self._connect(place, **_HURRY)
        owner: HostPort | None = None
        try:
            owner = self._owner(asked, place)
        finally:
            if owner != place:
                asked.disconnect()
        return asked if owner == place else self._connect(owner)

    def _owner(self, asked: RedisConnection, place: HostPort) -> HostPort:
        """The node that has our slot, as the node `asked` at `place` sees it."""
        asked.send_command("CLUSTER", "SLOTS")
        others: list[HostPort] = []
        owner: HostPort | None = None
        for first, last, *nodes in asked.read_response():
            # a node that does not say where it is, is where we found it
            places = [((node[0] or b"").decode() or place[0], int(node[1])) for node in nodes]
            others += places
            if first <= self._slot <= last:
                owner = places[0]
        if owner is None:
            raise redis.ConnectionError(f"no node of the cluster has slot {self._slot}")
        self._prefer(owner, others)
        return owner


_HURRY: Final = {"socket_connect_timeout": ASK_TIMEOUT_S, "socket_timeout": ASK_TIMEOUT_S}


def _info(connection: RedisConnection) -> dict[str, str]:
    """Raises: redis.RedisError, OSError."""
    connection.send_command("INFO")
    text = connection.read_response()
    assert isinstance(text, bytes)
    return parse_info(text)


def _pool_words(url: str, parsed: RedisUrl) -> tuple[type[Any], dict[str, Any]]:
    """How redis-py connects to a URL: the class of its connections, and its words for them."""
    try:
        pool = redis.ConnectionPool.from_url(
            parsed.plain,
            protocol=2,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=CONNECT_TIMEOUT_S,
        )
        pool.connection_class(**pool.connection_kwargs)  # options after `?` are judged here
    except (ValueError, TypeError, redis.RedisError) as error:  # its text may quote the password
        raise ConfigError(
            f"can't read metadata URL {shown_url(url)}: write redis://[:PASSWORD@]HOST:PORT/DB, and"
            " after `?` only options of redis-py"
        ) from error
    return pool.connection_class, pool.connection_kwargs
