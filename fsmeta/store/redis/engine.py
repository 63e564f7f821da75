"""The Redis engine: a row is a hash, a lookup is one Lua script, a commit another (`redis/commit`).

Works on Redis 6.2 and later and on servers with its protocol. Rows that this client tracks go as
declared keys; all keys of a volume are on one server, which `redis/topology` finds. In a cluster
each row's name has `{NAME}` before it, and scripts declare one key at least, by which the cluster
routes them.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import redis

from fsmeta.errors import ConfigError, StoreError
from fsmeta.runtime import Runtime
from fsmeta.store.contract import (
    SCAN_PAGE,
    SHORT_ROW_FIELDS,
    SHORT_ROWS_BYTES,
    Key,
    Listener,
    Page,
    Record,
    RowPage,
    Store,
    is_table,
)
from fsmeta.store.redis import snapshot
from fsmeta.store.redis.commit import RedisCommits, ReplicaWait
from fsmeta.store.redis.connection import Channel, NotPermitted, RedisConnection
from fsmeta.store.redis.invalidation import InvalidationStream
from fsmeta.store.redis.rollback import Answers, RedisRollbackDetector
from fsmeta.store.redis.script import Script, as_msgpack, ask, ask_many, pack
from fsmeta.store.redis.topology import ServerConnection, Servers
from fsmeta.store.rollback import RollbackDetector
from fsmeta.store.url import shown_url

# KEYS: rows; ARGV[1]: msgpack of {row, field, field, …} for each. One flat list of values.
_READ: Final = Script(b"""
local out = {}
for _, want in ipairs(cmsgpack.unpack(ARGV[1])) do
  local values = redis.call('HMGET', unpack(want))
  for i = 1, #want - 1 do out[#out + 1] = values[i] end
end
return out
""")

# KEYS[1]: row, if it is to be tracked; ARGV: row, field, skip, prefix, fields. The value, then
# those of the row it names.
_LINKED: Final = Script(b"""
local value = redis.call('HGET', ARGV[1], ARGV[2])
if not value then return false end
local row = ARGV[4] .. string.sub(value, ARGV[3] + 1)
local found = redis.call('HMGET', row, unpack(ARGV, 5))
return {value, unpack(found)}
""")

# ARGV: rows. A flat list of fields and values for each.
_ROWS: Final = Script(b"""
local out = {}
for i, row in ipairs(ARGV) do out[i] = redis.call('HGETALL', row) end
return out
""")

# ARGV: how many bytes are enough, how many fields are too many, rows. As `_ROWS`; false for those
# that are too long, or come after enough.
_SHORT_ROWS: Final = Script(b"""
local out, left, most = {}, tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV do
  local flat = false
  if left > 0 and redis.call('HLEN', ARGV[i]) <= most then
    flat = redis.call('HGETALL', ARGV[i])
    for j = 2, #flat, 2 do left = left - #flat[j] end
  end
  out[i - 2] = flat
end
return out
""")

log = logging.getLogger(__name__)

SNAPSHOT_ROWS_MAX: Final = 16  # no verb reads more rows that must be of one moment

# why a connection can't be made: what to do; for the rest see `_advice`
_ADVICE: Final[dict[type[Exception], str]] = {
    ssl.SSLCertVerificationError: "name the signing authority in the URL: ?ssl_ca_certs=FILE",
    redis.AuthenticationError: "check user and password in the URL",
    redis.ResponseError: "check the URL",
    ConnectionRefusedError: "check that Redis runs there",
    FileNotFoundError: "check the files that the URL names",
}


class RedisStore:
    """One client's connections to the Redis database that holds a volume."""

    name = "redis"

    def __init__(
        self,
        url: str,
        runtime: Runtime,
        wait: ReplicaWait | None = None,
        token: int | None = None,
    ) -> None:
        """`wait`: how many replicas are to have a commit before it is answered. `token` names this
        client; processes that take a session over have the same.

        Raises: ConfigError where the URL is wrong or nothing answers there.
        """
        self._runtime = runtime
        self._has_clock = True  # until the server says that we may not ask for its time
        self._servers = Servers(url)
        self._prefix = self._servers.prefix
        self._keyless = (self._prefix,) if self._prefix else ()  # for a script without rows
        self._tracking: InvalidationStream | None = None
        make, moved = self._servers.connection, self._servers.moved
        self._main = Channel(make, runtime, self._attach, moved)
        self._plain = Channel(make, runtime, on_moved=moved)  # tables, whole rows: none watches
        answers = Answers(runtime, token)
        replicas = 0 if wait is None else wait.replicas
        self.history: RollbackDetector = RedisRollbackDetector(answers, self._ask_plainly, replicas)
        self._commits = RedisCommits(self._main, self._plain, answers, self._prefix, wait)
        self.commit = self._commits.commit
        try:
            self._ask_plainly(b"PING")
        except StoreError as error:
            shown, advice = shown_url(url), _advice(url, error)
            why = str(error).rstrip(".")
            raise ConfigError(f"can't reach {shown}: {why}; {advice}") from error

    def _attach(self, connection: RedisConnection) -> None:
        if self._tracking is not None:
            assert isinstance(connection, ServerConnection)
            self._tracking.attach(connection)

    def _ask_plainly(self, *command: bytes) -> Any:
        return ask(self._plain, command)

    @property
    def round_trips(self) -> int:
        return self._main.requests + self._plain.requests

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        if not keys:
            return []
        prefix = self._prefix
        first = keys[0][0]
        if first not in busy and all(row == first for row, _ in keys):
            fields = [field for _, field in keys]
            channel = self._plain if is_table(first) else self._main
            row_reply: list[bytes | None] = ask(channel, (b"HMGET", prefix + first, *fields))
            return row_reply
        wants: list[list[bytes]] = []
        last = b""
        for row, field in keys:
            if row != last:
                last, want = row, [prefix + row]
                wants.append(want)
            want.append(field)
        if len(wants) > SNAPSHOT_ROWS_MAX:
            return self._read_apart(wants)
        tracked = {want[0] for want in wants if len(want[0]) > len(prefix) + 1}
        tracked.difference_update([prefix + row for row in busy])  # so that nothing tracks them
        reply: list[bytes | None] = _READ.run(
            self._main, tracked or self._keyless, (as_msgpack(wants),)
        )
        return reply

    def _read_apart(self, wants: list[list[bytes]]) -> list[bytes | None]:
        """Many rows, each at its own moment: a script would register all its keys with each."""
        packed = [pack((b"HMGET", *want)) for want in wants]
        answers = ask_many(self._main, b"".join(packed), len(packed))
        return [value for values in answers for value in values]

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        if not rows:
            return []
        if self._prefix:
            rows = [self._prefix + row for row in rows]
        # by hand: the same before and behind each row, so that all of it is one join
        (length,) = set(map(len, rows))
        head = b"*%d\r\n$5\r\nHMGET\r\n$%d\r\n" % (2 + len(fields), length)
        tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(field), field) for field in fields)
        return ask_many(self._main, head + (tail + head).join(rows) + tail, len(rows))

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        arguments = (field, b"%d" % skip, self._prefix + prefix, *fields)
        found = self._prefix + row
        keys = self._keyless if busy else (found,)
        reply = _LINKED.run(self._main, keys, (found, *arguments))
        return (None, []) if reply is None else (reply[0], reply[1:])

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        if not rows:
            return []
        reply = _ROWS.run(self._plain, self._keyless, [self._prefix + row for row in rows])
        return [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in reply]

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        if not rows:
            return []
        limits = (b"%d" % SHORT_ROWS_BYTES, b"%d" % SHORT_ROW_FIELDS)
        arguments = [*limits, *(self._prefix + row for row in rows)]
        reply = _SHORT_ROWS.run(self._plain, self._keyless, arguments)
        return [
            None if flat is None else dict(zip(flat[::2], flat[1::2], strict=True))
            for flat in reply
        ]

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        channel = self._plain if is_table(row) else self._main
        following, count = cursor or b"0", limit
        while True:  # a part of the hash that has lost its fields is an empty page
            command = (b"HSCAN", self._prefix + row, following, b"COUNT", b"%d" % count)
            following, flat = ask(channel, command)
            if flat or following == b"0":
                items = list(zip(flat[::2], flat[1::2], strict=True))
                return Page(items, None if following == b"0" else following)
            count = max(count, min(2 * count, SCAN_PAGE))

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        pattern = _glob_escape(self._prefix + prefix) + b"*"
        page = (b"COUNT", b"%d" % limit, b"TYPE", b"hash")  # others in the database are not ours
        command = (b"SCAN", cursor or b"0", b"MATCH", pattern, *page)
        packed = pack(command)
        if self._prefix:  # SCAN would be answered by a node that no longer has our rows
            packed = pack((b"EXISTS", self._prefix)) + packed
        count = 2 if self._prefix else 1
        following, keys = ask_many(self._plain, packed, count)[-1]
        rows = [key[len(self._prefix) :] for key in keys] if self._prefix else keys
        return RowPage(rows, None if following == b"0" else following)

    def everything(self) -> AbstractContextManager[Iterator[Record]]:
        def together(commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
            packed = b"".join(pack(command) for command in commands)
            # what of it changes something may be repeated
            return ask_many(self._plain, packed, len(commands))

        return snapshot.everything(together, self._prefix)

    def sync(self) -> None:
        """Redis answers after it has applied; its own `appendfsync` says when that is on disk."""

    def watch(self, listener: Listener) -> None:
        assert self._tracking is None, "watched already"
        make, lost = self._servers.connection, self._main.reset
        self._tracking = InvalidationStream(make, self._runtime, listener, lost, self._prefix)

    def poll_invalidations(self) -> None:
        if self._tracking is not None:
            self._tracking.poll_invalidations()

    def has_leases(self) -> bool:
        return self._tracking is not None and self._tracking.healthy()

    def now_ns(self) -> int:
        """The server's clock, or this host's where the user may not ask: rights of older setups."""
        if self._has_clock:
            try:
                seconds, micros = self._ask_plainly(b"TIME")
                return (int(seconds) * 1_000_000 + int(micros)) * 1000
            except NotPermitted as error:
                self._has_clock = False
                log.info("%s: the clock of this host decides what the trash expires by", error)
        return self._runtime.now_ns()

    def tidy(self) -> None:
        """Redis keeps no old values."""

    def close(self) -> None:
        if self._tracking is not None:
            self._tracking.close()
        self._main.close()
        self._plain.close()


def _glob_escape(prefix: bytes) -> bytes:
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^-" else bytes([c]) for c in prefix)


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
