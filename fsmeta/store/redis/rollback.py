"""Rollback detection: the answers that this client got prove that Redis has not gone back since.

A session's row has a field `n`: a token of the client whose session it is, and the highest sequence
it has committed. Every commit carries the highest that was answered; the commit script refuses it
where the row has a lower one (`StoreRolledBack`). A client that ends a session keeps the field in
the table of ended ones. Other modules ask `RedisRollbackDetector` about it, and about what matters
of Redis's configuration.

Called by `redis/engine`. Threading: any thread; `_lock` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.store.redis.topology import parse_info
from fsmeta.store.rollback import Review, RollbackDetector

TOKEN_BITS: Final = 64
_SEQUENCE_BYTES: Final = 8
_NOTHING: Final = bytes(_SEQUENCE_BYTES)


class Answers:
    """The highest sequence answered to this client in the name of its session."""

    def __init__(self, runtime: Runtime, token: int | None = None) -> None:
        """`token` is that of the process whose session this one takes over."""
        number = runtime.random_bits(TOKEN_BITS) if token is None else token
        self._token = number.to_bytes(TOKEN_BITS // 8, "big")
        self._lock = runtime.lock()
        self._last = (b"", self._token + _NOTHING)  # fence and proof; written under _lock

    def proof(self, fence: bytes, sequence: bytes) -> tuple[bytes, bytes]:
        """What field `n` must have reached, and what it is to be after a commit with `sequence`."""
        last, known = self._last
        if last != fence:
            known = self._token + _NOTHING
        after = self._token + sequence
        return known, after if after > known else known

    def note(self, fence: bytes, after: bytes) -> None:
        """A commit was answered after which field `n` is `after`, or higher."""
        with self._lock:
            last = self._last
            if after > last[1] or last[0] != fence:
                self._last = (fence, after)

    def is_proven(self, fence: bytes, value: bytes | None) -> bool:
        """Whether `value`, which was field `n` at some time, shows all that was answered.

        A shorter one says that there was no such field, None that this is not known.
        """
        known = self.proof(fence, _NOTHING)[0]
        if value is None or len(value) != len(known):
            return value is not None and known[-_SEQUENCE_BYTES:] == _NOTHING
        return value[:-_SEQUENCE_BYTES] == self._token and value >= known


class RedisRollbackDetector:
    """What a Redis says of its past and of how it keeps data."""

    def __init__(self, answers: Answers, ask: Callable[..., Any], replicas: int) -> None:
        """`ask` has a command answered; `replicas`: as many are waited for."""
        self._answers = answers
        self._ask = ask
        self._replicas = replicas

    def store_epoch(self) -> bytes:
        info = parse_info(self._ask(b"INFO"))
        # a restart is another run, a promotion another replication id; either may have lost the end
        return f"{info.get('run_id')}:{info.get('master_replid')}".encode()

    def is_proven(self, fence: bytes, value: bytes | None) -> bool:
        return self._answers.is_proven(fence, value)

    def review(self) -> Review:
        info = parse_info(self._ask(b"INFO"))
        policy = info.get("maxmemory_policy", _KEEPS_ALL)
        if policy != _KEEPS_ALL:
            return Review(
                f"Redis would delete files when its memory is used up (maxmemory-policy {policy}):"
                " `redis-cli config set maxmemory-policy noeviction`, and the same in redis.conf"
            )
        following = int(info.get("connected_slaves", "0"))
        if following < self._replicas:
            return Review(
                f"--redis-wait {self._replicas}: Redis has {following} replicas: start others,"
                " or wait for fewer"
            )
        if info.get("aof_enabled") != "1":
            return Review(warnings=tuple(self._losses()))
        if self._setting(b"appendfsync") in ("always", None):
            return Review()
        return Review(
            notes=(
                "Redis writes its log once a second or later: a loss of power may lose what it was"
                " told last, fsync or not; `appendfsync always` in redis.conf is safe, and slower",
            )
        )

    def _losses(self) -> list[str]:
        """What a Redis without a log may lose, as far as it lets us know its configuration."""
        saves = self._setting(b"save")
        if saves is None or saves:
            return [
                "Redis keeps snapshots only, if any (appendonly no): a restart loses what came"
                " after the last one; set `appendonly yes`"
            ]
        return [
            "Redis keeps nothing on disk (appendonly no, no snapshots): a restart loses the volume;"
            " set `appendonly yes`"
        ]

    def _setting(self, name: bytes) -> str | None:
        """A setting; None where we may not ask."""
        try:
            found = self._ask(b"CONFIG", b"GET", name)
        except StoreError:  # managed services, and users with few rights
            return None
        return found[1].decode() if len(found) == 2 else None


_KEEPS_ALL: Final = "noeviction"


def _conforms(history: RedisRollbackDetector) -> RollbackDetector:
    return history
