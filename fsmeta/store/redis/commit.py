"""Commits to Redis: how one is passed to `redis/redis_commit.lua`, and what its answer means.

The rows that this client tracks go as declared keys. Where `--redis-wait` asks for it, a commit
counts once so many replicas have it. Redis can go back to an older state: the script compares the
row with the highest answered sequence, which is noted here (`redis/rollback`); where the connection
was lost meanwhile, the next one is asked at once.

Called by `redis/engine`; any thread.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import resources
from typing import Any, Final, NamedTuple

from fsmeta.errors import (
    Ambiguous,
    Conflict,
    Fenced,
    LimitExceeded,
    NotEmpty,
    Outdated,
    StoreFull,
    StoreRolledBack,
    Unavailable,
)
from fsmeta.store.contract import (
    FENCE_FIELD,
    TAIL_BYTES,
    TAIL_FROM,
    Applied,
    Commit,
    Key,
    is_table,
)
from fsmeta.store.redis import snapshot
from fsmeta.store.redis.connection import Channel, NoScript
from fsmeta.store.redis.rollback import Answers
from fsmeta.store.redis.script import Script, as_msgpack, ask, pack
from fsmeta.store.writes import Add, Append, Delete, DeleteRow, Write, row_of, with_row

_SCRIPT: Final = Script(
    resources.files("fsmeta.store.redis").joinpath("redis_commit.lua").read_bytes()
)
_GONE_BACK: Final = 4  # an answer of the script


class ReplicaWait(NamedTuple):
    """`--redis-wait`: how many replicas must have a commit before it is answered."""

    replicas: int
    ms: int = 1000  # after that the commit is in doubt and asked for again

    @property
    def packed(self) -> bytes:
        """The command that follows a commit."""
        return pack((b"WAIT", b"%d" % self.replicas, b"%d" % self.ms))


class RedisCommits:
    """Sends what one client commits."""

    def __init__(
        self,
        main: Channel,
        plain: Channel,
        answers: Answers,
        prefix: bytes,
        wait: ReplicaWait | None,
    ) -> None:
        """`main` is the tracked channel; `plain` is not tracked."""
        self._main = main
        self._plain = plain
        self._answers = answers
        self._prefix = prefix
        self._keyless = (prefix,) if prefix else ()
        self._replicas = 0 if wait is None else wait.replicas
        self._wait = b"" if wait is None else wait.packed
        self._mode = b"c" if prefix else b""  # of the script
        self._notes = prefix + snapshot.NOTES
        self._plainly = not self._mode and not self._wait

    def commit(self, commit: Commit) -> Applied | None:
        """See `Store`."""
        session, worker, sequence, checks, empties, writes, edition, _, _, busy, _, tails = commit
        links, answers, fence = self._main.links, self._answers, session
        keys: Collection[bytes] = _watched(commit)
        if self._prefix:
            keys = [self._prefix + row for row in keys] or self._keyless
            fence, checks, empties, writes = _prefixed(commit, self._prefix)
        flat: list[object] = []
        ends: list[object] = []
        for row, field, value in checks:
            if tails and value and len(value) >= TAIL_FROM and self._is_key(row, field, tails):
                ends += (row, field, len(value), value[-TAIL_BYTES:])
            else:
                flat += (row, field, False if value is None else value)
        number = sequence.to_bytes(8, "big")
        known, after = answers.proof(session, number) if session else (b"", b"")
        head = (fence or False, worker, number, flat, empties, writes)
        body = as_msgpack((*head, self._notes, known, after, edition, ends))
        mode = self._mode + b"m" if busy else self._mode
        try:
            if self._plainly:
                arguments = (body, mode) if mode else (body,)
                reply = _SCRIPT.run(self._main, keys, arguments, bool(writes))
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

    def _is_key(self, row: bytes, field: bytes, keys: Collection[Key]) -> bool:
        """Whether a field of a row, as Redis names it, is one of `keys`."""
        return (row[len(self._prefix) :], field) in keys

    def _send(self, keys: Collection[bytes], body: bytes, mode: bytes, commit: Commit) -> Any:
        """The answer of the commit script, which `--redis-wait` lets wait for replicas."""
        arguments = (body, mode) if mode else (body,)
        if not self._wait or not commit.fence or not commit.writes:  # without fence: not repeatable
            return _SCRIPT.run(self._main, keys, arguments, bool(commit.writes))
        tail = (b"%d" % len(keys), *keys, *arguments)
        try:
            packed = pack((b"EVALSHA", _SCRIPT.sha, *tail))
            reply, copies = self._main.request_many(packed + self._wait, 2)
        except NoScript:
            packed = pack((b"EVAL", _SCRIPT.source, *tail))
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
            state = ask(self._plain, command)
        except Unavailable as error:  # of the question: the commit was applied
            raise Ambiguous(str(error)) from error
        if state[0] is not None and (state[1] is None or state[1] < number):
            raise _refusal(_GONE_BACK)


def _watched(commit: Commit) -> set[bytes]:
    """The rows of a commit that this client will cache, and so tracks."""
    rows = {check[0] for check in commit.checks}
    rows.update(map(row_of, commit.writes), commit.empties)
    rows.difference_update(commit.busy)
    return {row for row in rows if len(row) > 1}  # no tables


def _prefixed(
    commit: Commit, prefix: bytes
) -> tuple[bytes | None, list[Any], list[Any], list[Write]]:
    """Fence, checks, empties and writes as a cluster has them."""
    fence, _, _, checks, empties, writes = commit[:6]
    return (
        prefix + fence if fence else None,
        [(prefix + row, field, value) for row, field, value in checks],
        [prefix + row for row in empties],
        [with_row(write, prefix + write.row) for write in writes],
    )


def _is_relief(commit: Commit) -> bool:
    """Whether a store that is full should take a commit: it frees something, or only keeps books.

    Sessions join, beat and leave, and the leader deletes. A commit that appends to a record frees
    nothing by what it deletes besides: appends to a file drop its capabilities.
    """
    if commit.fence is None:
        return all(
            is_table(write.row) or isinstance(write, DeleteRow) or write.field == FENCE_FIELD
            for write in commit.writes
        )
    grows = any(
        isinstance(write, Append) and write.suffix and len(write.row) > 1 for write in commit.writes
    )
    for write in commit.writes:
        if isinstance(write, Delete | DeleteRow) and not grows:
            return True
        if isinstance(write, Add) and write.delta < 0:
            return True
    return all(is_table(write.row) or write.row == commit.fence for write in commit.writes)


def _refusal(reply: int | bytes) -> Exception:
    if isinstance(reply, bytes):
        return LimitExceeded(reply.decode())
    if reply == _GONE_BACK:
        return StoreRolledBack(
            "redis: the data has gone back to an older state, without what this mount was told is"
            " stored (an old backup, a lost end of its log, a replica that lagged)"
        )
    kinds = {1: Conflict, 2: Fenced, 3: NotEmpty, 5: Outdated}
    return kinds[reply](f"redis: commit refused ({kinds[reply].__name__})")
