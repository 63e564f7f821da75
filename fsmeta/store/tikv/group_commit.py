"""Commits on TiKV: those that meet share a transaction, the others run side by side.

Used by `tikv/engine`. A commit of the contract becomes one optimistic transaction: a timestamp, one
request for what it checks and merges into, then two-phase commit. Values that were only checked
are locked along, so that two commits can't each rely on what the other changes.

Two transactions that write the same key can't both commit, and a directory's times are written by
every create in it. Commits of this client that touch the same row therefore wait for each other,
and all that have waited go together, judged one after the other in memory: one transaction for as
many creates as there are threads. Other clients' transactions are met by trying again.

Threading: loop thread only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Container, Mapping, Sequence
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
from fsmeta.store.contract import COMMIT_OPS_MAX, DELETE_ROW, SHIFT, Commit, Key, is_table
from fsmeta.store.tikv.batch import Image, PartsWanted, Plan
from fsmeta.store.tikv.client import (
    SCAN_MAX,
    Locked,
    Snapshot,
    TikvClient,
    Transaction,
    WriteConflict,
)
from fsmeta.store.tikv.counter_claims import PATIENCE, Claim, Claimed, CounterClaims
from fsmeta.store.tikv.escrow_counters import load
from fsmeta.store.tikv.keys import PARTS, KeySpace, is_sum

# A transaction is repeated while others win, then the caller's loop takes over: it knows deadlines.
CONFLICTS_MAX: Final = 30
_BACKOFF_FIRST_S: Final = 0.0005
_BACKOFF_MAX_S: Final = 0.1
ROW_FIELDS_MAX: Final = 4096  # deleted at once; of a row with more the front is deleted first
STEP_FIELDS: Final = 1024  # of it in one transaction, which takes a tenth of a second
WORKERS_MAX: Final = 4096  # whose last sequence we remember; a mount has as many as threads
TIGHT_MAX: Final = 1024  # counters remembered as nearly full; forgetting one costs a request
_PART_STEP: Final = 27  # odd and far: neighbouring clients don't share their first parts
CLAIM_WAITS_MAX: Final = 400  # two seconds: some claims in a row, of CLAIM_S at most each
_CLAIM_WAIT_S: Final = 0.005  # about what a transaction takes


class _TooLong(Exception):
    """A row that is to be deleted has more fields than one transaction takes."""

    def __init__(self, row: bytes, fields: list[bytes]) -> None:
        super().__init__(row)
        self.row = row
        self.fields = fields


class _Job:
    """A commit that somebody waits for."""

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
    keys += [(w[1], w[2]) for w in commit.writes if w[0] != DELETE_ROW]
    keys += [(w[1], w[3]) for w in commit.writes if w[0] == SHIFT]
    touched: set[object] = {
        key if is_table(key[0]) else key[0] for key in keys if not is_sum(key[0]) or key in tight
    }
    touched.update(commit.empties)
    touched.update(w[1] for w in commit.writes if w[0] == DELETE_ROW)
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
        self._waiting: list[_Job] = []
        self._busy: set[object] = set()  # touched by transactions under way
        self._tasks: set[asyncio.Task[None]] = set()
        self._home = runtime.random_bits(16) % PARTS  # the part of counters that we take first
        self._is_ours = False  # that one is of our session
        self._made = 0  # parts that we have used so far
        self._spare: deque[int] = deque()  # those that no transaction has, the one used last last
        # counters that are nearly full, so that all their parts are wanted; the latest last
        self._tight: OrderedDict[Key, None] = OrderedDict()
        # the last sequence of workers that nobody is in doubt about, the latest last
        self._known: OrderedDict[Key, int] = OrderedDict()

    async def commit(self, commit: Commit) -> None:
        """Raises: what `Store.commit` says."""
        if not commit.writes:
            await self._validate(commit)
            return
        job = _Job(commit, asyncio.get_running_loop().create_future(), self._tight)
        self._waiting.append(job)
        self._start()
        await job.done

    async def _validate(self, commit: Commit) -> None:
        """A commit of checks alone: one snapshot tells whether they all hold."""
        snapshot = await self._link.snapshot()
        _, (error,) = await self._judge(snapshot, Plan([commit], 0, frozenset()))
        if error is not None:
            raise error

    # --- who goes with whom ----------------------------------------------------------------------

    def _start(self) -> None:
        """Start what need not wait for a transaction under way, together where it meets."""
        groups: list[tuple[set[object], list[_Job]]] = []
        taken = set(self._busy)  # by those under way, and those who were here before and must wait
        left: list[_Job] = []
        for job in self._waiting:
            if job.done.done():
                continue  # nobody waits any more
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

    async def _run(self, touched: set[object], jobs: list[_Job]) -> None:
        part = self._take_part(jobs)
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
            self._give_back(part)
            self._busy -= touched
            self._start()

    def _take_part(self, jobs: Sequence[_Job]) -> int:
        """A part of counters that no transaction under way has: the same ones again and again, in
        which there is room, and others than those of other clients, whose sessions are near ours.

        Not the one that was used last, which may be locked until its commit has quite ended.
        """
        if len(self._spare) > 1 or self._made == PARTS:
            return self._spare.popleft() if self._spare else self._home
        fence = jobs[0].commit.fence
        if fence is not None and not self._is_ours:
            self._home, self._is_ours = fence[-1] % PARTS, True
        self._made += 1
        return (self._home + self._made * _PART_STEP) % PARTS

    def _give_back(self, part: int) -> None:
        if part not in self._spare and len(self._spare) < self._made:
            self._spare.append(part)

    async def _transact(self, jobs: list[_Job], part: int) -> None:
        """Repeat the jobs' transaction until others let it through, and answer them."""
        claim = Claim()
        try:
            await self._repeat(jobs, part, claim)
        except asyncio.CancelledError:
            claim.laid.clear()  # we are closing; others disregard it in time
            raise
        finally:
            if claim.laid:
                self._link.later(self._claims.lift(claim))

    async def _repeat(self, jobs: list[_Job], part: int, claim: Claim) -> None:
        conflicts = waits = 0
        while jobs:
            try:
                refused = await self._attempt([job.commit for job in jobs], part, claim)
            except Claimed as error:
                waits += 1
                if waits == CLAIM_WAITS_MAX:
                    raise Unavailable("tikv: others claim the same all the time") from error
                await asyncio.sleep(_CLAIM_WAIT_S * (0.5 + self._runtime.random()))
                continue
            except Locked:  # for two seconds: somebody has died, or one lock has followed the other
                if not claim.wanted or claim.laid:
                    raise
                await self._claims.lay(claim)
                continue
            except WriteConflict as error:
                conflicts += 1
                if conflicts == CONFLICTS_MAX:
                    raise Unavailable("tikv: others change the same all the time") from error
                if conflicts % PATIENCE == 0 and claim.wanted:
                    await self._claims.lay(claim)
                    continue
                longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * (1 << conflicts))
                await asyncio.sleep(longest * self._runtime.random())
                continue
            except _TooLong as found:
                await self._shorten(jobs, found)
                continue
            for job, why in zip(jobs, refused, strict=True):
                if why is None:
                    self._remember(job.commit)
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
            plan = Plan(commits, part, self._blind(commits), self._tight)
            image, refused = await self._judge(transaction.inner, plan)
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
                self._doubt(commit)
            raise
        claim.laid.clear()  # what was laid has been lifted
        return refused

    def _give_way(self, image: Image, claim: Claim) -> None:
        """Raises: Claimed."""
        found = image.claims()
        if found and self._claims.must_wait(found, claim):
            raise Claimed("tikv: somebody waits for this counter")

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

    async def _judge(self, reader: Snapshot, plan: Plan) -> tuple[Image, list[StoreError | None]]:
        """Read what the plan asks for, and what proves to be wanted besides. Raises: _TooLong."""
        image = await self._load(reader, plan)
        while True:
            try:
                refused = image.judge()
                break
            except PartsWanted as wanted:
                await self._load_counters(reader, image, wanted.counters)
        for counter in plan.counters:
            self._tight.pop(counter, None)
        self._tight.update(dict.fromkeys(image.tight()))
        while len(self._tight) > TIGHT_MAX:
            self._tight.popitem(last=False)
        return image, refused

    async def _load(self, reader: Snapshot, plan: Plan) -> Image:
        """Read what the plan asks for. Raises: _TooLong."""
        image = Image(plan)
        space = self._space
        where = {space.key(row, field): (row, field) for row, field in plan.keys}
        work = [self._load_counters(reader, image, plan.counters)] if plan.counters else []
        work += [self._load_fields(reader, image, row, ROW_FIELDS_MAX + 1) for row in plan.whole]
        work += [self._load_fields(reader, image, row, n) for row, n in plan.empties.items()]
        if where:
            work.append(self._load_values(reader, image, where))
        await asyncio.gather(*work)
        for row in plan.whole:
            fields = image.fields(row)
            if len(fields) > ROW_FIELDS_MAX:
                raise _TooLong(row, fields)
        return image

    async def _load_values(self, reader: Snapshot, image: Image, where: dict[bytes, Key]) -> None:
        found = await self._link.get(reader, list(where))
        image.learn({where[key]: value for key, value in found.items()})

    async def _load_counters(
        self, reader: Snapshot, image: Image, counters: Collection[Key]
    ) -> None:
        found = await load(self._link, self._space, reader, counters)
        for counter, stored in found.items():
            image.learn_counter(counter, stored)

    async def _load_fields(self, reader: Snapshot, image: Image, row: bytes, at_most: int) -> None:
        image.learn_fields(row, await self._fields(reader, row, at_most))

    async def _fields(
        self, reader: Snapshot, row: bytes, at_most: int, first: bytes = b""
    ) -> list[bytes]:
        """The fields of a row from `first` on, no more than `at_most`."""
        begin, end = self._space.begin(row), self._space.end(row)
        fields: list[bytes] = []
        cursor = begin + first
        while len(fields) < at_most:
            limit = min(SCAN_MAX, at_most - len(fields))
            keys = await self._link.scan_keys(reader, cursor, end, limit)
            fields += [key[len(begin) :] for key in keys]
            if len(keys) < limit:
                break
            cursor = keys[-1] + b"\0"
        return fields

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

    async def _shorten(self, jobs: list[_Job], found: _TooLong) -> None:
        """Delete all but the end of a row that is too long for one transaction, from the front.

        If its job would pass; it is answered here if not. Behind what was deleted a scan meets none
        of the locks that are still being turned into deletions.
        """
        job = next(j for j in jobs if (DELETE_ROW, found.row) in j.commit.writes)
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
            fields = await self._fields(snapshot, found.row, ROW_FIELDS_MAX + 1, cursor)

    async def _delete(self, row: bytes, fields: list[bytes]) -> None:
        """Delete some fields, unless somebody changes them just now."""
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

    # --- who has committed what ------------------------------------------------------------------

    def _blind(self, commits: Sequence[Commit]) -> frozenset[Key]:
        """Records that need not be read: we know that they are there, and older.

        They would be the very keys that the worker's last commit has left locked for a moment.
        """
        return frozenset(
            (commit.fence, commit.worker)
            for commit in commits
            if commit.fence is not None
            and 0 <= self._known.get((commit.fence, commit.worker), -1) < commit.sequence
        )

    def _remember(self, commit: Commit) -> None:
        if commit.fence is None:
            return
        key = (commit.fence, commit.worker)
        self._known[key] = max(commit.sequence, self._known.get(key, 0))
        self._known.move_to_end(key)
        while len(self._known) > WORKERS_MAX:
            self._known.popitem(last=False)

    def _doubt(self, commit: Commit) -> None:
        if commit.fence is not None:
            self._known.pop((commit.fence, commit.worker), None)
