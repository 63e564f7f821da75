"""Claims on counters: a transaction that needs a whole counter makes other clients pause.

A transaction that needs a counter with all its parts (to move a directory, set a limit, take room
back) conflicts with each transaction that spends of a part meanwhile, and begins anew. Spenders do
not conflict with each other, so there is always one. After some attempts the transaction claims the
counter: the claim is written behind the base, which every spender reads anyway. A spender that
finds a claim waits for some milliseconds and begins anew; the transaction that laid the claim lifts
it.

A claim is a request. Correctness does not depend on it: a client that has not seen it commits or
conflicts as ever. If the claiming client dies, another client disregards and lifts the claim
CLAIM_S after it has first seen it, by its own clock alone.

Used by `tikv/group_commit`. Threading: loop thread only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Final

from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.store.contract import Key
from fsmeta.store.tikv.client import TikvClient
from fsmeta.store.tikv.escrow_counters import CLAIM_BYTES, bare, claim_of, with_claim
from fsmeta.store.tikv.keys import KeySpace

log = logging.getLogger(__name__)

CLAIM_S: Final = 1.0  # after a claim a few tries of some 20 ms follow, more on a busy machine
PATIENCE: Final = 2  # tries before the first claim, and between claims, for one may get lost
SEEN_MAX: Final = 1024  # claims remembered; of one that is forgotten the time begins anew


class Claimed(StoreError):
    """Another transaction has claimed the counter: pause."""


class Claim:
    """What one transaction, through all its tries, has claimed."""

    def __init__(self) -> None:
        self.name = b""  # before it is laid
        self.wanted: Collection[Key] = ()  # what other clients move while it is needed whole
        self.laid: set[Key] = set()


class CounterClaims:
    """Lays claims, lifts them, and knows which to respect."""

    def __init__(self, link: TikvClient, space: KeySpace, runtime: Runtime) -> None:
        self._link = link
        self._space = space
        self._runtime = runtime
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # foreign claims, and since when

    def must_wait(self, found: Collection[bytes], own: Claim) -> bool:
        """Whether one of the claims that were found is another's and not too old."""
        return any(claim != own.name and self._is_young(claim) for claim in found)

    def _is_young(self, claim: bytes) -> bool:
        now = self._runtime.monotonic()
        since = self._seen.setdefault(claim, now)
        while len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        return now - since < CLAIM_S

    async def lay(self, claim: Claim) -> None:
        """Claim all that is wanted, or nothing where another has claimed some of it."""
        wanted = set(claim.wanted)
        claim.laid |= wanted
        claim.name = claim.name or b"%0*x" % (
            2 * CLAIM_BYTES,
            self._runtime.random_bits(8 * CLAIM_BYTES),
        )
        try:
            await self._change(wanted, claim, lay=True)
        except StoreError as error:  # it will be tried again
            log.debug("tikv: could not claim: %s", error)

    async def lift(self, claim: Claim) -> None:
        """Lift what the claim's transaction has not; other clients disregard what remains."""
        try:
            await self._change(claim.laid, claim, lay=False)
        except StoreError as error:
            log.debug("tikv: could not lift a claim: %s", error)

    async def _change(self, counters: Collection[Key], claim: Claim, lay: bool) -> None:
        places = [self._space.key(*counter) for counter in counters]
        transaction = await self._link.begin()
        try:
            found = await self._link.get(transaction.inner, places)
            changes = _laid(found, claim.name) if lay else _lifted(found, claim.name)
            await self._link.hand_over(transaction, changes)
        except BaseException:
            await self._link.abandon(transaction)
            raise
        if changes:
            await self._link.commit(transaction, None)
        else:
            await self._link.abandon(transaction)


def _laid(bases: Mapping[bytes, bytes], name: bytes) -> dict[bytes, bytes | None]:
    """Bases with the claim; a counter without a base is moved by no client."""
    if any(claim_of(base) not in (b"", name) for base in bases.values()):
        return {}
    return {place: with_claim(base, name) for place, base in bases.items() if not claim_of(base)}


def _lifted(bases: Mapping[bytes, bytes], name: bytes) -> dict[bytes, bytes | None]:
    return {place: bare(base) for place, base in bases.items() if claim_of(base) == name}
