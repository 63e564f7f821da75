"""Commits to Redis: how one is said to `redis/redis_commit.lua`, and what its answer means.

The rows that this client wants to hear of go as declared keys. Where `--redis-wait` asks for it, a
commit counts once so many replicas have it. Redis can go back to an older state: the script
notices by what this client was answered, which is noted here (`redis/rollback`); where the
connection was lost meanwhile, the next one is asked at once.

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
    ADD,
    APPEND,
    DELETE,
    DELETE_ROW,
    FENCE_FIELD,
    Applied,
    Commit,
    is_table,
)
from fsmeta.store.redis import snapshot
from fsmeta.store.redis.connection import Channel, NoScript
from fsmeta.store.redis.rollback import Answers
from fsmeta.store.redis.script import Script, as_msgpack, ask, pack

_SCRIPT: Final = Script(
    resources.files("fsmeta.store.redis").joinpath("redis_commit.lua").read_bytes()
)
_GONE_BACK: Final = 4  # an answer of the script


class ReplicaWait(NamedTuple):
    """`--redis-wait`: who has to have a commit before it is answered."""

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
        """`main` hears of changes, `plain` asks aside."""
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
        fence, worker, sequence, checks, empties, writes, edition = commit[:7]
        links, answers = self._main.links, self._answers
        keys: Collection[bytes] = _watched(commit)
        if self._prefix:
            keys = [self._prefix + row for row in keys] or self._keyless
            fence, checks, empties, writes = _prefixed(commit, self._prefix)
        flat: list[object] = []
        for row, field, value in checks:
            flat += (row, field, False if value is None else value)
        number = sequence.to_bytes(8, "big")
        session = commit.fence
        known, after = answers.proof(session, number) if session else (b"", b"")
        head = (fence or False, worker, number, flat, empties, writes)
        body = as_msgpack((*head, self._notes, known, after, edition))
        mode = self._mode + b"m" if commit.busy else self._mode
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

    Sessions join, beat and leave, and whoever leads deletes. A commit that gives a record more at
    its end frees nothing by what it deletes besides: appends to a file drop its capabilities.
    """
    if commit.fence is None:
        return all(is_table(write[1]) or write[2] == FENCE_FIELD for write in commit.writes)
    grows = any(write[0] == APPEND and write[3] and len(write[1]) > 1 for write in commit.writes)
    for write in commit.writes:
        op = write[0]
        if op in (DELETE, DELETE_ROW) and not grows:
            return True
        if op == ADD and write[3][:1] == b"-":
            return True
    return all(is_table(write[1]) or write[1] == commit.fence for write in commit.writes)


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
