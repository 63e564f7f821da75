"""The Redis engine: a row is a hash, a commit is one Lua script, a lookup is another.

Works on Redis 6.2 and later and what speaks like it. Rows go as declared keys where this client
wants to hear of changes; all keys of a volume are on one server.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable, Collection, Sequence
from importlib import resources
from typing import Any, Final, cast

import hiredis
import msgpack
import redis

from fsmeta.errors import (
    Ambiguous,
    ConfigError,
    Conflict,
    Fenced,
    LimitExceeded,
    NotEmpty,
    Unavailable,
)
from fsmeta.redis_channel import Channel, NoScript, RedisConnection
from fsmeta.redis_tracking import Tracking
from fsmeta.runtime import Runtime
from fsmeta.store import (
    SCAN_PAGE,
    Commit,
    Key,
    Listener,
    Page,
    RowPage,
    Store,
    is_table,
)
from fsmeta.urls import shown_url

# KEYS: rows; ARGV[1]: msgpack of {row, field, field, …} for each. One flat list of values.
_READ_LUA: Final = b"""
local out = {}
for _, want in ipairs(cmsgpack.unpack(ARGV[1])) do
  local values = redis.call('HMGET', unpack(want))
  for i = 1, #want - 1 do out[#out + 1] = values[i] end
end
return out
"""

# KEYS[1]: row; ARGV: field, skip, prefix, fields. The value, then those of the row it names.
_LINKED_LUA: Final = b"""
local value = redis.call('HGET', KEYS[1], ARGV[1])
if not value then return false end
local row = ARGV[3] .. string.sub(value, ARGV[2] + 1)
local found = redis.call('HMGET', row, unpack(ARGV, 4))
return {value, unpack(found)}
"""

# ARGV: rows. A flat list of fields and values for each.
_ROWS_LUA: Final = b"""
local out = {}
for i, row in ipairs(ARGV) do out[i] = redis.call('HGETALL', row) end
return out
"""

CONNECT_TIMEOUT_S: Final = 4.0  # for each step of a connection; a live server takes milliseconds
SNAPSHOT_ROWS_MAX: Final = 16  # no verb reads more rows that must be of one moment

_pack: Final = hiredis.pack_command

# what lies behind a connection that can't be made: what to do; for the rest see `_advice`
_ADVICE: Final[dict[type[Exception], str]] = {
    ssl.SSLCertVerificationError: "name who signed it in the URL: ?ssl_ca_certs=FILE",
    redis.AuthenticationError: "check user and password in the URL",
    redis.ResponseError: "check the URL",
    ConnectionRefusedError: "check that Redis runs there",
    FileNotFoundError: "check the files that the URL names",
}


class _Script:
    """A Lua script and the hash the server knows it by."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


_COMMIT: Final = _Script(resources.files("fsmeta").joinpath("redis_commit.lua").read_bytes())
_READ: Final = _Script(_READ_LUA)
_LINKED: Final = _Script(_LINKED_LUA)
_ROWS: Final = _Script(_ROWS_LUA)


class RedisStore:
    """One client's connections to the Redis database that holds a volume."""

    name = "redis"

    def __init__(self, url: str, runtime: Runtime) -> None:
        """Raises: ConfigError where the URL is wrong or nothing answers there."""
        self._runtime = runtime
        self._make = _connection_maker(url)
        self._tracking: Tracking | None = None
        self._main = Channel(self._make, runtime, self._attach)
        self._plain = Channel(self._make, runtime)  # tables and whole rows: watched by nobody
        try:
            self._plain.request(_pack((b"PING",)))
        except Unavailable as error:
            shown, advice = shown_url(url), _advice(url, error)
            why = str(error).rstrip(".")
            raise ConfigError(f"can't reach {shown}: {why}; {advice}") from error

    def _attach(self, connection: RedisConnection) -> None:
        if self._tracking is not None:
            self._tracking.attach(connection)

    @property
    def round_trips(self) -> int:
        return self._main.requests + self._plain.requests

    def read(self, keys: Sequence[Key]) -> list[bytes | None]:
        if not keys:
            return []
        first = keys[0][0]
        if all(row == first for row, _ in keys):
            fields = [field for _, field in keys]
            channel = self._plain if is_table(first) else self._main
            row_reply: list[bytes | None] = self._ask(channel, (b"HMGET", first, *fields))
            return row_reply
        wants: list[list[bytes]] = []
        last = b""
        for row, field in keys:
            if row != last:
                last, want = row, [row]
                wants.append(want)
            want.append(field)
        if len(wants) > SNAPSHOT_ROWS_MAX:
            return self._read_apart(wants)
        tracked = {want[0] for want in wants if len(want[0]) > 1}
        reply: list[bytes | None] = self._run(_READ, self._main, tracked, (_msgpack(wants),))
        return reply

    def _read_apart(self, wants: list[list[bytes]]) -> list[bytes | None]:
        """Many rows, each at its own moment: a script would register all its keys with each."""
        packed = [_pack((b"HMGET", *want)) for want in wants]  # type: ignore[arg-type]
        return [value for values in self._ask_many(packed) for value in values]

    def _ask_many(self, packed: Sequence[bytes]) -> list[Any]:
        """Requests that change nothing, sent together."""
        try:
            return self._main.request_many(b"".join(packed), len(packed))
        except Ambiguous as error:
            raise Unavailable(str(error)) from error

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        head = b"*%d\r\n$5\r\nHMGET\r\n" % (2 + len(fields))
        tail = b"".join(b"$%d\r\n%b\r\n" % (len(field), field) for field in fields)
        packed = [b"%b$%d\r\n%b\r\n%b" % (head, len(row), row, tail) for row in rows]
        return self._ask_many(packed)

    def read_linked(
        self, row: bytes, field: bytes, skip: int, prefix: bytes, fields: Sequence[bytes]
    ) -> tuple[bytes | None, list[bytes | None]]:
        arguments = (field, b"%d" % skip, prefix, *fields)
        reply = self._run(_LINKED, self._main, (row,), arguments)
        return (None, []) if reply is None else (reply[0], reply[1:])

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        if not rows:
            return []
        reply = self._run(_ROWS, self._plain, (), tuple(rows))
        return [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in reply]

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        command = (b"HSCAN", row, cursor or b"0", b"COUNT", b"%d" % limit)
        following, flat = self._ask(self._plain if is_table(row) else self._main, command)
        items = list(zip(flat[::2], flat[1::2], strict=True))
        return Page(items, None if following == b"0" else following)

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        pattern = _glob_escape(prefix) + b"*"
        command = (b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", b"%d" % limit)
        following, rows = self._ask(self._plain, command)
        return RowPage(rows, None if following == b"0" else following)

    def commit(self, commit: Commit) -> None:
        fence, worker, sequence, checks, empties, writes = commit
        flat: list[object] = []
        for row, field, value in checks:
            flat += (row, field, False if value is None else value)
        body = (fence or False, worker, sequence.to_bytes(8, "big"), flat, empties, writes)
        reply = self._run(_COMMIT, self._main, _watched(commit), (_msgpack(body),), bool(writes))
        if reply:
            raise _refusal(reply)

    def sync(self) -> None:
        """Redis answers after it has applied; its own `appendfsync` says when that is on disk."""

    def watch(self, listener: Listener) -> None:
        assert self._tracking is None, "watched already"
        self._tracking = Tracking(self._make, self._runtime, listener, self._main.reset)

    def vouches(self) -> bool:
        return self._tracking is not None and self._tracking.healthy()

    def close(self) -> None:
        if self._tracking is not None:
            self._tracking.close()
        self._main.close()
        self._plain.close()

    def _ask(self, channel: Channel, command: tuple[bytes, ...], changes: bool = False) -> Any:
        """One request; if it changes nothing, a lost answer is as good as an unsent request."""
        try:
            return channel.request(_pack(command))  # type: ignore[arg-type]  # any length will do
        except Ambiguous as error:
            if changes:
                raise
            raise Unavailable(str(error)) from error

    def _run(
        self,
        script: _Script,
        channel: Channel,
        keys: Collection[bytes],
        arguments: tuple[bytes, ...],
        changes: bool = False,
    ) -> Any:
        tail = (b"%d" % len(keys), *keys, *arguments)
        try:
            return self._ask(channel, (b"EVALSHA", script.sha, *tail), changes)
        except NoScript:
            return self._ask(channel, (b"EVAL", script.source, *tail), changes)


def _watched(commit: Commit) -> set[bytes]:
    """The rows of a commit that this client will remember, and so wants to hear of."""
    rows = {check[0] for check in commit.checks if len(check[0]) > 1}
    rows |= {write[1] for write in commit.writes if len(write[1]) > 1}
    rows.update(commit.empties)
    return rows


def _refusal(reply: int | bytes) -> Exception:
    if isinstance(reply, bytes):
        return LimitExceeded(reply.decode())
    kinds = {1: Conflict, 2: Fenced, 3: NotEmpty}
    return kinds[reply](f"redis: commit refused ({kinds[reply].__name__})")


def _msgpack(body: object) -> bytes:
    packed: bytes = msgpack.packb(body, use_bin_type=False)
    return packed


def _glob_escape(prefix: bytes) -> bytes:
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^-" else bytes([c]) for c in prefix)


def _connection_maker(url: str) -> Callable[[], RedisConnection]:
    """How redis-py connects to `url`: redis://, rediss:// or unix://. Raises: ConfigError."""
    try:
        pool = redis.ConnectionPool.from_url(
            url,
            protocol=2,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=CONNECT_TIMEOUT_S,
        )

        def make() -> RedisConnection:
            # not `pool.make_connection`: that counts, and refuses the hundredth reconnection
            return cast("RedisConnection", pool.connection_class(**pool.connection_kwargs))

        make()  # options after `?` are judged here
    except (ValueError, TypeError, redis.RedisError) as error:  # its text may quote the password
        raise ConfigError(
            f"can't read metadata URL {shown_url(url)}: write redis://[:PASSWORD@]HOST:PORT/DB, and"
            " after `?` only options of redis-py"
        ) from error
    return make


def _advice(url: str, error: BaseException) -> str:
    """What to do about an `error` that came of connecting to `url`."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for kind, advice in _ADVICE.items():
        if any(isinstance(each, kind) for each in causes):
            return advice
    if url.startswith("unix:"):
        return "check the path"
    if url.startswith("rediss:"):
        return "check host and port; if it does not speak TLS, write redis://"
    return "check host and port; if it speaks TLS, write rediss://"


def _conforms(store: RedisStore) -> Store:
    return store
