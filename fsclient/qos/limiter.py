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
from collections.abc import Callable, Iterator, Mapping, Sequence
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


LimitKeys: TypeAlias = tuple[tuple[bytes, int], ...]
"""Of some limits each node and kind, an index of `RateLimits`."""


class RequestCost(NamedTuple):
    """What a request takes of its limits."""

    read: int = 0  # bytes
    write: int = 0
    ops: int = 1


class RateLimiter:
    """The limits of one mount."""

    def __init__(
        self, runtime: Runtime, mount: RateLimits, above: Callable[[Ino], Sequence[bytes] | None]
    ) -> None:
        """`mount`: the limits of this mount alone. `above`: the directories above an inode, as
        nodes; None where it has no name."""
        self._clock = runtime.monotonic
        self._above_of = above
        self._mount = mount
        self._lock = runtime.lock()
        self._nodes: dict[bytes, _Buckets] = {}  # guarded by _lock
        self._above: OrderedDict[int, tuple[float, Sequence[bytes]]] = OrderedDict()  # by _lock
        self._ask_at = 0.0  # not before are directories looked for
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
                old, now = self._nodes, self._clock()
                self._nodes = {
                    node: _buckets(each, old.get(node), now) for node, each in limits.items()
                }
                self._has_dirs = any(node[:1] == quota.DIR for node in limits)
                self.limits = dict(limits)
                self.active = bool(limits)
            return changed

    def divide(self, share: Callable[[bytes, int, int], float]) -> None:
        """This mount's part of each limit is what `share` makes of node, kind and limit."""
        now = self._clock()
        with self._lock:
            for node, limits in self.limits.items():
                if node == MOUNT:
                    continue
                for kind, bucket in enumerate(self._nodes[node]):
                    if bucket is not None:
                        bucket.set_rate(share(node, kind, limits[kind]), now)

    def take_demands(self, seconds: float) -> dict[bytes, Demand]:
        """What was done in a second under each of the volume's limits, since this was asked last,
        which is so long ago. Those under which nothing was done are left out."""
        found: dict[bytes, Demand] = {}
        now = self._clock()
        with self._lock:
            for node, buckets in self._nodes.items():
                taken = [(0, False) if each is None else each.take_demand(now) for each in buckets]
                if node != MOUNT and any(done or hungry for done, hungry in taken):
                    done = RateLimits(*(int(each / seconds) for each, _ in taken))
                    read, write, ops = (hungry for _, hungry in taken)
                    found[node] = Demand(done, (read, write, ops))
        return found

    def limits_of(self, caller: Caller, ino: Ino, cost: RequestCost) -> LimitKeys:
        """What limits a request of `caller` about `ino`."""
        nodes = [VOLUME, MOUNT, quota.user_node(caller.uid), quota.group_node(caller.gid)]
        if self._has_dirs:
            nodes += self._dirs_above(ino)
        known, kinds = self._nodes, [kind for kind, tokens in enumerate(cost) if tokens]
        return tuple(
            [
                (node, kind)
                for node in nodes
                if (buckets := known.get(node)) is not None
                for kind in kinds
                if buckets[kind] is not None
            ]
        )

    def ready_at(self, keys: LimitKeys, now: float) -> float:
        """When a request may begin, as far as is known; not after `now`: at once."""
        with self._lock:
            return max((bucket.ready_at(now) for bucket, _ in self._meant(keys)), default=now)

    def begin(self, keys: LimitKeys, cost: RequestCost, now: float) -> float:
        """Take what a request costs if it may begin; when it may, as `ready_at`."""
        with self._lock:
            meant = [*self._meant(keys)]
            ready = max((bucket.ready_at(now) for bucket, _ in meant), default=now)
            if ready <= now:
                for bucket, kind in meant:
                    bucket.take(cost[kind], now)
            return ready

    def begin_out_of_turn(self, keys: LimitKeys, cost: RequestCost, now: float) -> None:
        """Take what a request costs that can't wait any longer."""
        with self._lock:
            for bucket, kind in self._meant(keys):
                bucket.take_out_of_turn(cost[kind], now)

    def made_in(self, ino: Ino, parent: Ino) -> None:
        """A request has found, or made, `ino` in the directory `parent`."""
        if self._has_dirs and ino not in self._above:
            nodes = (quota.dir_node(ino), *self._dirs_above(parent))
            self._learn(ino, nodes, self._clock())

    def _meant(self, keys: LimitKeys) -> Iterator[tuple[TokenBucket, int]]:
        """The buckets of those limits that are there still, and their kinds."""
        for node, kind in keys:
            buckets = self._nodes.get(node)
            if buckets is not None and (bucket := buckets[kind]) is not None:
                yield bucket, kind

    def _dirs_above(self, ino: Ino) -> Sequence[bytes]:
        """The limited directories above an inode. Once it has no name they are what they were."""
        now = self._clock()
        with self._lock:
            known = self._above.get(ino)
        if known is not None and now < known[0]:
            return known[1]
        found: Sequence[bytes] | None = None
        if now >= self._ask_at:
            try:
                found = self._above_of(ino)
            except (StoreError, OSError):
                self._ask_at = now + ABOVE_S  # requests meet the error themselves
        if found is None:
            found = () if known is None else known[1]
        self._learn(ino, found, now)
        return found

    def _learn(self, ino: Ino, nodes: Sequence[bytes], now: float) -> None:
        with self._lock:
            self._above[ino] = (now + ABOVE_S, nodes)
            self._above.move_to_end(ino)
            if len(self._above) > ABOVE_MAX:
                self._above.popitem(last=False)


def _buckets(limits: RateLimits, before: _Buckets | None, now: float) -> _Buckets:
    """Buckets for limits; those that there were go on, with what they owe."""
    found: list[TokenBucket | None] = []
    for kind, limit in enumerate(limits):
        bucket = None if before is None else before[kind]
        if not limit:
            bucket = None
        elif bucket is None:
            bucket = TokenBucket(limit, now)
        else:
            bucket.set_rate(limit, now)
        found.append(bucket)
    return tuple(found)
