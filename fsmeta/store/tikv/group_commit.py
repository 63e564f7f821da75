"""Commits on TiKV: those that touch the same rows share a transaction, the rest run in parallel.

Used by `tikv/engine`. A commit of the contract becomes one optimistic transaction: a timestamp, one
request for what it checks and merges into, then two-phase commit. Values that were only checked
are locked along, so that two commits can't each rely on what the other changes.

Two transactions that write the same key can't both commit, and a directory's times are written by
every create in it. Commits of this client that touch the same row therefore wait for each other,
and all that have waited go together, checked one after the other in memory: one transaction for as
many creates as there are threads. A conflict with another client's transaction is tried again.

Threading: loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from typing import Final

from fsmeta.errors import (
    Ambiguous,
    Conflict,
    Fenced,
    NotEmpty,
    Outdated,
    StoreError,
    Unavailable,
)
from fsmeta.runtime import Runtime
from fsmeta.store.contract import COMMIT_OPS_MAX, Commit, Key, is_table
from fsmeta.store.tikv.batch import Image, Plan
from fsmeta.store.tikv.client import (
    KeyLocked,
    TikvClient,
    Transaction,
    WriteConflict,
)
from fsmeta.store.tikv.counter_claims import PATIENCE, Claim, Claimed, CounterClaims
from fsmeta.store.tikv.counter_parts import CounterParts
from fsmeta.store.tikv.keys import KeySpace, is_sum
from fsmeta.store.tikv.known_workers import KnownWorkers
from fsmeta.store.tikv.plan_reads import ROW_FIELDS_MAX, PlanReads, RowTooLong
from fsmeta.store.writes import DeleteRow, Shift

# repetitions of a transaction; after them the caller's loop takes over: it knows deadlines
CONFLICTS_MAX: Final = 30
_BACKOFF_FIRST_S: Final = 0.0005
_BACKOFF_MAX_S: Final = 0.1
STEP_FIELDS: Final = 1024  # of it in one transaction, which takes a tenth of a second
CLAIM_WAITS_MAX: Final = 400  # two seconds: some claims in a row, of CLAIM_S at most each
_CLAIM_WAIT_S: Final = 0.005  # about what a transaction takes


class _PendingCommit:
    """A commit that a caller waits for."""

    def __init__(self, commit: Commit, done: asyncio.Future[None], tight: Container[Key]) -> None:
        self.commit = commit
        self.done = done
        self.touched = _touched(commit, tight)
        self.size = len(commit.checks) + len(commit.writes)

    def answer(self, error: StoreError | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


def _touched(commit: Commit, tight: Container[Key]) -> frozenset[object]:
    """What lets two commits meet: rows, single fields of tables and sessions, full counters."""
    glances = set(commit.glances)
    keys = [(row, field) for row, field, _ in commit.checks if (row, field) not in glances]
    keys += [(w.row, w.field) for w in commit.writes if not isinstance(w, DeleteRow)]
    keys += [(w.row, w.source) for w in commit.writes if isinstance(w, Shift)]
    touched: set[object] = {
        key if is_table(key[0]) else key[0] for key in keys if not is_sum(key[0]) or key in tight
    }
    touched.update(commit.empties)
    touched.update(w.row for w in commit.writes if isinstance(w, DeleteRow))
    if commit.fence is not None:
        touched.add((commit.fence, commit.worker))
    return frozenset(touched)


class Committer:
    """Runs commits against one volume."""

    def __init__(self, link: TikvClient, space: KeySpace, runtime: Runtime) -> None:
        self._link = link
        self._space = space
        self._runtime = runtime
        self._claims = CounterClaims(link, space, runtime)
        self._waiting: list[_PendingCommit] = []
        self._busy: set[object] = set()  # touched by transactions under way
        self._tasks: set[asyncio.Task[None]] = set()
        self._parts = CounterParts(runtime)
        self._workers = KnownWorkers()
        self._reads = PlanReads(link, space)

    async def commit(self, commit: Commit) -> None:
        """Raises: what `Store.commit` says."""
        if not commit.writes:
            await self._validate(commit)
            return
        job = _PendingCommit(commit, asyncio.get_running_loop().create_future(), self._reads.tight)
        self._waiting.append(job)
        self._start()
        await job.done

    async def _validate(self, commit: Commit) -> None:
        """A commit of checks alone: one snapshot tells whether they all hold."""
        snapshot = await self._link.snapshot()
        _, (error,) = await self._reads.judge(snapshot, Plan([commit], 0, frozenset()))
        if error is not None:
            raise error

    # --- which commits go together ---------------------------------------------------------------

    def _start(self) -> None:
        """Start what need not wait for a transaction under way, together where it meets."""
        groups: list[tuple[set[object], list[_PendingCommit]]] = []
        taken = set(self._busy)  # by those under way, and by earlier ones that must wait
        left: list[_PendingCommit] = []
        for job in self._waiting:
            if job.done.done():
                continue  # no caller waits any more
            if not taken.isdisjoint(job.touched):
                taken |= job.touched
                left.append(job)
                continue
            met = [group for group in groups if not group[0].isdisjoint(job.touched)]
            if not met:
                groups.append((set(job.touched), [job]))
            elif len(met) == 1 and sum(j.size for j in met[0][1]) + job.size <= COMMIT_OPS_MAX:
                met[0][0].update(job.touched)
                met[0][1].append(job)
            else:
                taken |= job.touched
                left.append(job)
        self._waiting = left
        for touched, jobs in groups:
            self._busy |= touched
            task = asyncio.get_running_loop().create_task(self._run(touched, jobs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, touched: set[object], jobs: list[_PendingCommit]) -> None:
        part = self._parts.take(jobs[0].commit.fence)
        try:
            await self._transact(jobs, part)
        except StoreError as error:
            for job in jobs:
                job.answer(error)
        except BaseException:
            for job in jobs:
                job.done.cancel()
            raise
        finally:
            self._parts.give_back(part)
            self._busy -= touched
            self._start()

    async def _transact(self, jobs: list[_PendingCommit], part: int) -> None:
        """Repeat the jobs' transaction until other clients let it through, and answer them."""
        claim = Claim()
        try:
            await self._repeat(jobs, part, claim)
        except asyncio.CancelledError:
            claim.laid.clear()  # closing; other clients disregard it in time
            raise
        finally:
            if claim.laid:
                self._link.later(self._claims.lift(claim))

    async def _repeat(self, jobs: list[_PendingCommit], part: int, claim: Claim) -> None:
        conflicts = waits = 0
        while jobs:
            try:
                refused = await self._attempt([job.commit for job in jobs], part, claim)
            except Claimed as error:
                waits += 1
                if waits == CLAIM_WAITS_MAX:
                    raise Unavailable(
                        "tikv: other clients keep claiming the same counter"
                    ) from error
                await asyncio.sleep(_CLAIM_WAIT_S * (0.5 + self._runtime.random()))
                continue
            except (
                KeyLocked
            ):  # for two seconds: a client has died, or one lock has followed the other
                if not claim.wanted or claim.laid:
                    raise
                await self._claims.lay(claim)
                continue
            except WriteConflict as error:
                conflicts += 1
                if conflicts == CONFLICTS_MAX:
                    raise Unavailable("tikv: other clients keep changing the same rows") from error
                if conflicts % PATIENCE == 0 and claim.wanted:
                    await self._claims.lay(claim)
                    continue
                longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * (1 << conflicts))
                await asyncio.sleep(longest * self._runtime.random())
                continue
            except RowTooLong as found:
                await self._shorten(jobs, found)
                continue
            for job, why in zip(jobs, refused, strict=True):
                if why is None:
                    self._workers.remember(job.commit)
                job.answer(why)
            return

    # --- one transaction -------------------------------------------------------------------------

    async def _attempt(
        self, commits: Sequence[Commit], part: int, claim: Claim
    ) -> list[StoreError | None]:
        """Try once; why each commit was refused, or None.

        Raises: WriteConflict where others were faster, Claimed where they are to be, else as
        `TikvClient.commit`.
        """
        transaction = await self._link.begin()
        try:
            plan = Plan(commits, part, self._workers.blind(commits), self._reads.tight)
            image, refused = await self._reads.judge(transaction.inner, plan)
            changes = image.changes()
            if changes:
                claim.wanted = image.contended()
                self._give_way(image, claim)
                await self._write(transaction, image, changes)
        except BaseException:
            await self._link.abandon(transaction)
            raise
        if not changes:
            await self._link.abandon(transaction)
            return refused
        try:
            await self._link.commit(transaction, self._witness(commits, changes))
        except Ambiguous:
            for commit in commits:
                self._workers.doubt(commit)
            raise
        claim.laid.clear()  # what was laid has been lifted
        return refused

    def _give_way(self, image: Image, claim: Claim) -> None:
        """Raises: Claimed."""
        found = image.claims()
        if found and self._claims.must_wait(found, claim):
            raise Claimed("tikv: another commit waits for this counter")

    def _witness(
        self, commits: Sequence[Commit], changes: dict[Key, bytes | None]
    ) -> Callable[[], Awaitable[bool]] | None:
        """How to see whether `changes` were applied: a worker's record says so of its commit."""
        for commit in commits:
            if commit.fence is not None and (commit.fence, commit.worker) in changes:
                record = (commit.fence, commit.worker)
                return partial(self._holds, record, changes[record])
        return None

    async def _holds(self, key: Key, value: bytes | None) -> bool:
        place = self._space.key(*key)
        found = await self._link.get(await self._link.snapshot(), [place])
        return found.get(place) == value

    async def _write(
        self, transaction: Transaction, image: Image, changes: dict[Key, bytes | None]
    ) -> None:
        """Hand everything to the package, which keeps it until the commit."""
        first = image.first() or next(iter(changes))
        begin = self._places({first: changes[first]})  # is then committed first
        await self._link.hand_over(transaction, begin)
        locks = [self._space.key(*key) for key in image.locks()]
        rest = {key: value for key, value in changes.items() if key != first}
        await self._link.hand_over(transaction, self._places(rest), locks)

    def _places(self, changes: Mapping[Key, bytes | None]) -> dict[bytes, bytes | None]:
        return {self._space.key(*key): value for key, value in changes.items()}

    async def _shorten(self, jobs: list[_PendingCommit], found: RowTooLong) -> None:
        """Delete all but the end of a row that is too long for one transaction, from the front.

        If its job would pass; it is answered here if not. Behind what was deleted a scan meets none
        of the locks that are still being turned into deletions.
        """
        job = next(j for j in jobs if DeleteRow(found.row) in j.commit.writes)
        try:
            await self._validate(job.commit._replace(writes=()))
        except (Conflict, Fenced, NotEmpty, Outdated) as error:
            jobs.remove(job)
            job.answer(error)
            return
        fields = found.fields
        while len(fields) > ROW_FIELDS_MAX:
            for begin in range(0, ROW_FIELDS_MAX, STEP_FIELDS):
                await self._delete(found.row, fields[begin : begin + STEP_FIELDS])
            snapshot = await self._link.snapshot()
            cursor = fields[ROW_FIELDS_MAX]
            fields = await self._reads.fields(snapshot, found.row, ROW_FIELDS_MAX + 1, cursor)

    async def _delete(self, row: bytes, fields: list[bytes]) -> None:
        """Delete some fields, unless a client changes them just now."""
        transaction = await self._link.begin()
        try:
            gone = self._places({(row, field): None for field in fields})
            await self._link.hand_over(transaction, gone)
        except BaseException:
            await self._link.abandon(transaction)
            raise
        try:
            await self._link.commit(transaction, None)
        except WriteConflict:
            pass  # they are found again
