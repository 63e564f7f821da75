"""The Redis engine: a row is a hash, a commit is one Lua script, a lookup is another.

Works on Redis 6.2 and later and what speaks like it. Rows go as declared keys where this client
wants to hear of changes; all keys of a volume are on one server, which `redis_servers` finds. In a
cluster each row's name has `{NAME}` before it, and scripts declare one key at least, by which the
cluster knows where they belong.

Redis can go back to an older state: `redis_commit.lua` notices by what this client was answered.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import resources
from typing import Any, Final, NamedTuple

import hiredis
import msgpack
import redis

from fsmeta import redis_moment
from fsmeta.errors import (
    Ambiguous,
    ConfigError,
    Conflict,
    Fenced,
    LimitExceeded,
    NotEmpty,
    Outdated,
    Rewound,
    StoreError,
    StoreFull,
    Unavailable,
)
from fsmeta.history import History
from fsmeta.redis_channel import Channel, NoScript, RedisConnection
from fsmeta.redis_history import Answers, RedisHistory
from fsmeta.redis_servers import ServerConnection, Servers
from fsmeta.redis_tracking import Tracking
from fsmeta.runtime import Runtime
from fsmeta.store import (
    ADD,
    DELETE,
    DELETE_ROW,
    FENCE_FIELD,
    SCAN_PAGE,
    Applied,
    Commit,
    Key,
    Listener,
    Page,
    Record,
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

# KEYS[1]: row, if it is to be tracked; ARGV: row, field, skip, prefix, fields. The value, then
# those of the row it names.
_LINKED_LUA: Final = b"""
local value = redis.call('HGET', ARGV[1], ARGV[2])
if not value then return false end
local row = ARGV[4] .. string.sub(value, ARGV[3] + 1)
local found = redis.call('HMGET', row, unpack(ARGV, 5))
return {value, unpack(found)}
"""

# ARGV: rows. A flat list of fields and values for each.
_ROWS_LUA: Final = b"""
local out = {}
for i, row in ipairs(ARGV) do out[i] = redis.call('HGETALL', row) end
return out
"""

SNAPSHOT_ROWS_MAX: Final = 16  # no verb reads more rows that must be of one moment

_GONE_BACK: Final = 4  # an answer of the commit script

_pack: Final = hiredis.pack_command


class Wait(NamedTuple):
    """`--redis-wait`: who has to have a commit before it is answered."""

    replicas: int
    ms: int = 1000  # after that the commit is in doubt and asked for again

    @property
    def packed(self) -> bytes:
        """The command that follows a commit."""
        words = (b"WAIT", b"%d" % self.replicas, b"%d" % self.ms)
        command: bytes = _pack(words)  # type: ignore[arg-type]  # any length will do
        return command


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

    def __init__(self, url: str, runtime: Runtime, wait: Wait | None = None) -> None:
        """`wait`: how many replicas are to have a commit before it is answered.

        Raises: ConfigError where the URL is wrong or nothing answers there.
        """
        self._runtime = runtime
        self._replicas = 0 if wait is None else wait.replicas
        self._wait = b"" if wait is None else wait.packed
        self._servers = Servers(url)
        self._prefix = self._servers.prefix
        self._keyless = (self._prefix,) if self._prefix else ()  # for a script without rows
        self._mode = b"c" if self._prefix else b""  # of the commit script
        self._notes = self._prefix + redis_moment.NOTES
        self._plainly = not self._mode and not self._wait
        self._tracking: Tracking | None = None
        make, moved = self._servers.connection, self._servers.moved
        self._main = Channel(make, runtime, self._attach, moved)
        self._plain = Channel(make, runtime, on_moved=moved)  # tables, whole rows: none watches
        self._answers = Answers(runtime)
        self.history: History = RedisHistory(self._answers, self._ask_plainly, self._replicas)
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
        return self._ask(self._plain, command)

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
            row_reply: list[bytes | None] = self._ask(channel, (b"HMGET", prefix + first, *fields))
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
        reply: list[bytes | None] = self._run(_READ, self._main, tracked, (_msgpack(wants),))
        return reply

    def _read_apart(self, wants: list[list[bytes]]) -> list[bytes | None]:
        """Many rows, each at its own moment: a script would register all its keys with each."""
        packed = [_pack((b"HMGET", *want)) for want in wants]  # type: ignore[arg-type]
        answers = self._ask_many(b"".join(packed), len(packed), self._main)
        return [value for values in answers for value in values]

    def _ask_many(self, packed: bytes, count: int, channel: Channel) -> list[Any]:
        """Requests that change nothing, sent together."""
        try:
            return channel.request_many(packed, count)
        except Ambiguous as error:
            raise Unavailable(str(error)) from error

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
        return self._ask_many(head + (tail + head).join(rows) + tail, len(rows), self._main)

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
        keys = () if busy else (found,)
        reply = self._run(_LINKED, self._main, keys, (found, *arguments))
        return (None, []) if reply is None else (reply[0], reply[1:])

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        if not rows:
            return []
        reply = self._run(_ROWS, self._plain, (), tuple(self._prefix + row for row in rows))
        return [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in reply]

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        command = (b"HSCAN", self._prefix + row, cursor or b"0", b"COUNT", b"%d" % limit)
        following, flat = self._ask(self._plain if is_table(row) else self._main, command)
        items = list(zip(flat[::2], flat[1::2], strict=True))
        return Page(items, None if following == b"0" else following)

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        pattern = _glob_escape(self._prefix + prefix) + b"*"
        command = (b"SCAN", cursor or b"0", b"MATCH", pattern, b"COUNT", b"%d" % limit)
        packed = _pack(command)  # type: ignore[arg-type]
        if self._prefix:  # SCAN would be answered by a node that no longer has our rows
            packed = _pack((b"EXISTS", self._prefix)) + packed  # type: ignore[arg-type]
        count = 2 if self._prefix else 1
        following, keys = self._ask_many(packed, count, self._plain)[-1]
        rows = [key[len(self._prefix) :] for key in keys] if self._prefix else keys
        return RowPage(rows, None if following == b"0" else following)

    def commit(self, commit: Commit) -> Applied | None:
        fence, worker, sequence, checks, empties, writes, edition = commit[:7]
        links, answers = self._main.links, self._answers
        keys: Collection[bytes] = _watched(commit)
        if self._prefix:
            keys = [self._prefix + row for row in keys]
            fence, checks, empties, writes = _prefixed(commit, self._prefix)
        flat: list[object] = []
        for row, field, value in checks:
            flat += (row, field, False if value is None else value)
        number = sequence.to_bytes(8, "big")
        session = commit.fence
        known, after = answers.proof(session, number) if session else (b"", b"")
        head = (fence or False, worker, number, flat, empties, writes)
        body = _msgpack((*head, self._notes, known, after, edition))
        mode = self._mode + b"m" if commit.busy else self._mode
        try:
            if self._plainly:
                arguments = (body, mode) if mode else (body,)
                reply = self._run(_COMMIT, self._main, keys, arguments, bool(writes))
            else:
                reply = self._send(keys, body, mode, commit)
        except StoreFull:
            if not _is_relief(commit):
                raise
            reply = self._send(keys, body, mode + b"o", commit)
        merged = isinstance(reply, list)
        if reply and not merged:
            raise _refusal(reply)
        if session and writes:
            answers.note(session, after)
            if links and self._main.links != links:
                self._ask_again(session, worker, number)
        return Applied(merged=reply) if merged else None

    def _send(self, keys: Collection[bytes], body: bytes, mode: bytes, commit: Commit) -> Any:
        """The answer of the commit script, which `--redis-wait` lets wait for replicas."""
        arguments = (body, mode) if mode else (body,)
        if not self._wait or not commit.fence or not commit.writes:  # without fence: not repeatable
            return self._run(_COMMIT, self._main, keys, arguments, bool(commit.writes))
        tail = (b"%d" % len(keys or self._keyless), *(keys or self._keyless), *arguments)
        try:
            packed = _pack((b"EVALSHA", _COMMIT.sha, *tail))
            reply, copies = self._main.request_many(packed + self._wait, 2)
        except NoScript:
            packed = _pack((b"EVAL", _COMMIT.source, *tail))
            reply, copies = self._main.request_many(packed + self._wait, 2)
        if (not reply or isinstance(reply, list)) and copies < self._replicas:
            raise Ambiguous(f"redis: {copies} of {self._replicas} replicas have the commit")
        return reply

    def _ask_again(self, fence: bytes, worker: bytes, number: bytes) -> None:
        """What a lost connection has answered: does the one after it know of that, too?

        Raises: Rewound, Ambiguous.
        """
        command = (b"HMGET", self._prefix + fence, FENCE_FIELD, worker)
        try:
            state = self._ask(self._plain, command)
        except Unavailable as error:  # of the question: the commit was applied
            raise Ambiguous(str(error)) from error
        if state[0] is not None and (state[1] is None or state[1] < number):
            raise _refusal(_GONE_BACK)

    def everything(self) -> AbstractContextManager[Iterator[Record]]:
        def ask(commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
            packed = b"".join(_pack(command) for command in commands)  # type: ignore[arg-type]
            # what of it changes something may be repeated
            return self._ask_many(packed, len(commands), self._plain)

        return redis_moment.everything(ask, self._prefix)

    def sync(self) -> None:
        """Redis answers after it has applied; its own `appendfsync` says when that is on disk."""

    def watch(self, listener: Listener) -> None:
        assert self._tracking is None, "watched already"
        make, lost = self._servers.connection, self._main.reset
        self._tracking = Tracking(make, self._runtime, listener, lost, self._prefix)

    def hear(self) -> None:
        if self._tracking is not None:
            self._tracking.hear()

    def vouches(self) -> bool:
        return self._tracking is not None and self._tracking.healthy()

    def tidy(self) -> None:
        """Redis keeps no old values."""

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
        keys = keys or self._keyless
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
    rows.difference_update(commit.busy)
    return rows


def _prefixed(
    commit: Commit, prefix: bytes
) -> tuple[bytes | None, list[Any], list[Any], list[Any]]:
    """Fence, checks, empties and writes as a cluster has them."""
    fence, _, _, checks, empties, writes = commit[:6]
    return (
        prefix + fence if fence else None,
        [(prefix + row, field, value) for row, field, value in checks],
        [prefix + row for row in empties],
        [(write[0], prefix + write[1], *write[2:]) for write in writes],
    )


def _is_relief(commit: Commit) -> bool:
    """Whether a store that is full should take a commit: it frees something, or only keeps books.

    Sessions join, beat and leave, and whoever leads deletes.
    """
    if commit.fence is None:
        return all(is_table(write[1]) or write[2] == FENCE_FIELD for write in commit.writes)
    for write in commit.writes:
        op = write[0]
        if op in (DELETE, DELETE_ROW) or (op == ADD and write[3][:1] == b"-"):
            return True
    return all(is_table(write[1]) or write[1] == commit.fence for write in commit.writes)


def _refusal(reply: int | bytes) -> Exception:
    if isinstance(reply, bytes):
        return LimitExceeded(reply.decode())
    if reply == _GONE_BACK:
        return Rewound(
            "redis: the data has gone back to an older state, without what this mount was told is"
            " stored (an old backup, a lost end of its log, a replica that lagged)"
        )
    kinds = {1: Conflict, 2: Fenced, 3: NotEmpty, 5: Outdated}
    return kinds[reply](f"redis: commit refused ({kinds[reply].__name__})")


def _msgpack(body: object) -> bytes:
    packed: bytes = msgpack.packb(body, use_bin_type=False)
    return packed


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
