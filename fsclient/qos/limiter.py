"""Which limits a request comes under, and when they let it begin.

A request comes under the limits of the volume, of the mount, of the user and the group it is made
for, and of each directory above what it is about; it begins when all of them let it. Bytes count
for reads and writes, and each request is one operation. What the kernel answers from its own caches
makes no request, and so costs nothing.

Threading: any method from any thread; `_lock` is a leaf. Looking for the directories above an inode
may ask the metadata store, and is done without the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from fsclient.qos.bucket import TokenBucket
from fsmeta.errors import StoreError
from fsmeta.rules import quota
from fsmeta.rules.rate_limits import MOUNT, VOLUME, Demand, RateLimits
from fsmeta.runtime import Runtime
from fsmeta.types import Caller, Ino

ABOVE_S: Final = 5.0  # how long the directories above an inode are cached
ABOVE_MAX: Final = 50_000  # inodes of which they are remembered

_Buckets: TypeAlias = tuple[TokenBucket | None, ...]  # for reads, for writes, for operations


class RequestCost(NamedTuple):
    """What a request takes of its limits."""

    read: int = 0  # bytes
    write: int = 0
    ops: int = 1


class Reservation(NamedTuple):
    """When a request may begin, by the monotonic clock; and what was taken for it."""

    begin: float
    taken: Sequence[tuple[TokenBucket, int]]


class RateLimiter:
    """The limits of one mount."""

    def __init__(
        self, runtime: Runtime, mount: RateLimits, above: Callable[[Ino], Sequence[bytes]]
    ) -> None:
        """`mount`: the limits of this mount alone. `above`: the directories above an inode, as
        nodes."""
        self._clock = runtime.monotonic
        self._above_of = above
        self._mount = mount
        self._lock = runtime.lock()
        self._nodes: dict[bytes, _Buckets] = {}  # guarded by _lock
        self._above: OrderedDict[int, tuple[float, Sequence[bytes]]] = OrderedDict()  # by _lock
        self._has_dirs = False
        self.limits: Mapping[bytes, RateLimits] = {}
        self.active = False  # whether there is any limit
        self.obey({})

    def obey(self, limits: Mapping[bytes, RateLimits]) -> bool:
        """From now on these are the volume's limits; whether they are others than before."""
        if any(self._mount):
            limits = {**limits, MOUNT: self._mount}
        with self._lock:
            changed = limits != self.limits
            if changed:
                old = self._nodes
                self._nodes = {node: _buckets(each, old.get(node)) for node, each in limits.items()}
                self._has_dirs = any(node[:1] == quota.DIR for node in limits)
                self.limits = dict(limits)
                self.active = bool(limits)
            return changed

    def divide(self, share: Callable[[bytes, int, int], float]) -> None:
        """This mount's part of each limit is what `share` makes of node, kind and limit."""
        with self._lock:
            for node, limits in self.limits.items():
                if node == MOUNT:
                    continue
                for kind, bucket in enumerate(self._nodes[node]):
                    if bucket is not None:
                        bucket.rate = share(node, kind, limits[kind])

    def take_demands(self, seconds: float) -> dict[bytes, Demand]:
        """What was done in a second under each of the volume's limits, since this was asked last,
        which is so long ago. Those under which nothing was done are left out."""
        found: dict[bytes, Demand] = {}
        with self._lock:
            for node, buckets in self._nodes.items():
                taken = [(0, False) if each is None else each.take_demand() for each in buckets]
                if node != MOUNT and any(done or hungry for done, hungry in taken):
                    done = RateLimits(*(int(each / seconds) for each, _ in taken))
                    read, write, ops = (hungry for _, hungry in taken)
                    found[node] = Demand(done, (read, write, ops))
        return found

    def reserve(self, caller: Caller, ino: Ino, cost: RequestCost) -> Reservation:
        """Take what a request costs."""
        nodes = [VOLUME, MOUNT, quota.user_node(caller.uid), quota.group_node(caller.gid)]
        now = self._clock()
        if self._has_dirs:
            nodes += self._dirs_above(ino, now)
        begin = now
        taken: list[tuple[TokenBucket, int]] = []
        with self._lock:
            for bucket, tokens in self._meant(nodes, cost):
                begin = max(begin, bucket.reserve(tokens, now))
                taken.append((bucket, tokens))
        return Reservation(begin, taken)

    def refund(self, reservation: Reservation) -> None:
        """The request does not take place."""
        with self._lock:
            for bucket, tokens in reservation.taken:
                bucket.refund(tokens)

    def _meant(
        self, nodes: Iterable[bytes], cost: RequestCost
    ) -> Iterable[tuple[TokenBucket, int]]:
        for node in nodes:
            for bucket, tokens in zip(self._nodes.get(node, ()), cost, strict=False):
                if bucket is not None and tokens:
                    yield bucket, tokens

    def _dirs_above(self, ino: Ino, now: float) -> Sequence[bytes]:
        with self._lock:
            known = self._above.get(ino)
        if known is not None and now < known[0]:
            return known[1]
        try:
            nodes = [node for node in self._above_of(ino) if node in self._nodes]
        except (StoreError, OSError):
            return () if known is None else known[1]  # the request meets the error itself
        with self._lock:
            self._above[ino] = (now + ABOVE_S, nodes)
            self._above.move_to_end(ino)
            if len(self._above) > ABOVE_MAX:
                self._above.popitem(last=False)
        return nodes


def _buckets(limits: RateLimits, before: _Buckets | None) -> _Buckets:
    """Buckets for limits; those that there were go on, with what was reserved."""
    found: list[TokenBucket | None] = []
    for kind, limit in enumerate(limits):
        bucket = None
        if limit:
            bucket = None if before is None else before[kind]
            bucket = bucket or TokenBucket(limit)
            bucket.rate = limit
        found.append(bucket)
    return tuple(found)
