"""Commits on TiKV: those that meet share a transaction, the others run side by side.

Used by `store_tikv`. A commit of the contract becomes one optimistic transaction: a timestamp, one
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
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from fsmeta.errors import Ambiguous, Conflict, Fenced, NotEmpty, StoreError, Unavailable
from fsmeta.runtime import Runtime
from fsmeta.store import COMMIT_OPS_MAX, DELETE_ROW, Commit, Key, is_table
from fsmeta.tikv_image import Image, Plan
from fsmeta.tikv_keys import KeySpace, is_sum
from fsmeta.tikv_link import SCAN_MAX, Snapshot, TikvLink, Transaction, WriteConflict

# A transaction is repeated while others win, then the caller's loop takes over: it knows deadlines.
CONFLICTS_MAX: Final = 30
_BACKOFF_FIRST_S: Final = 0.0005
_BACKOFF_MAX_S: Final = 0.1
ROW_FIELDS_MAX: Final = 4096  # deleted at once; of a row with more the front is deleted first
STEP_FIELDS: Final = 1024  # of it in one transaction, which takes a tenth of a second
HAND_OVER_TIMEOUT_S: Final = 30.0  # nothing is sent; only a busy machine takes seconds
WORKERS_MAX: Final = 4096  # whose last sequence we remember; a mount has as many as threads


class _TooLong(Exception):
    """A row that is to be deleted has more fields than one transaction takes."""

    def __init__(self, row: bytes, fields: list[bytes]) -> None:
        super().__init__(row)
        self.row = row
        self.fields = fields


class _Job:
    """A commit that somebody waits for."""

    def __init__(self, commit: Commit, done: asyncio.Future[None]) -> None:
        self.commit = commit
        self.done = done
        self.touched = _touched(commit)
        self.size = len(commit.checks) + len(commit.writes)

    def answer(self, error: StoreError | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


def _touched(commit: Commit) -> frozenset[object]:
    """What lets two commits meet: rows, and single fields of tables and sessions."""
    keys = [(row, field) for row, field, _ in commit.checks]
    keys += [(w[1], w[2]) for w in commit.writes if w[0] != DELETE_ROW]
    touched: set[object] = {
        key if is_table(key[0]) else key[0] for key in keys if not is_sum(key[0])
    }
    touched.update(commit.empties)
    touched.update(w[1] for w in commit.writes if w[0] == DELETE_ROW)
    if commit.fence is not None:
        touched.add((commit.fence, commit.worker))
    return frozenset(touched)


class Committer:
    """Runs commits against one volume."""

    def __init__(self, link: TikvLink, space: KeySpace, runtime: Runtime) -> None:
        self._link = link
        self._space = space
        self._runtime = runtime
        self._waiting: list[_Job] = []
        self._busy: set[object] = set()  # touched by transactions under way
        self._tasks: set[asyncio.Task[None]] = set()
        self._part = runtime.random_bits(16)  # of sums; each transaction takes the next
        # the last sequence of workers that nobody is in doubt about, the latest last
        self._known: OrderedDict[Key, int] = OrderedDict()

    async def commit(self, commit: Commit) -> None:
        """Raises: what `Store.commit` says."""
        if not commit.writes:
            await self._validate(commit)
            return
        job = _Job(commit, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._start()
        await job.done

    async def _validate(self, commit: Commit) -> None:
        """A commit of checks alone: one snapshot tells whether they all hold."""
        snapshot = await self._link.snapshot()
        image = await self._load(snapshot, Plan([commit], 0, frozenset()))
        error = image.judge()[0]
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
        try:
            await self._transact(jobs)
        except StoreError as error:
            for job in jobs:
                job.answer(error)
        except BaseException:
            for job in jobs:
                job.done.cancel()
            raise
        finally:
            self._busy -= touched
            self._start()

    async def _transact(self, jobs: list[_Job]) -> None:
        """Repeat the jobs' transaction until others let it through, and answer them."""
        attempt = 0
        while jobs:
            try:
                refused = await self._attempt([job.commit for job in jobs])
            except WriteConflict as error:
                attempt += 1
                if attempt == CONFLICTS_MAX:
                    raise Unavailable("tikv: others change the same all the time") from error
                longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * (1 << attempt))
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

    async def _attempt(self, commits: Sequence[Commit]) -> list[StoreError | None]:
        """Try once; why each commit was refused, or None.

        Raises: WriteConflict where others were faster, else as `TikvLink.commit`.
        """
        part = self._part = self._part + 1
        transaction = await self._link.begin()
        try:
            image = await self._load(transaction.inner, Plan(commits, part, self._blind(commits)))
            refused = image.judge()
            changes = image.changes()
            if changes:
                await self._write(transaction, image, changes)
        except BaseException:
            await self._link.abandon(transaction)
            raise
        if not changes:
            await self._link.abandon(transaction)
            return refused
        try:
            await self._link.commit(transaction)
        except Ambiguous:
            for commit in commits:
                self._doubt(commit)
            raise
        return refused

    async def _load(self, reader: Snapshot, plan: Plan) -> Image:
        """Read what the plan asks for. Raises: _TooLong."""
        image = Image(plan)
        space = self._space
        where = {space.key(row, field): (row, field) for row, field in plan.keys}
        work = [self._load_sum(reader, image, row) for row in plan.sums]
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

    async def _load_sum(self, reader: Snapshot, image: Image, row: bytes) -> None:
        begin, end = self._space.begin(row), self._space.end(row)
        pairs = await self._link.scan(reader, begin, end, SCAN_MAX)
        image.learn_sum(row, {key[len(begin) :]: value for key, value in pairs})

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
        await self._hand_over(transaction, {first: changes[first]})  # is then committed first
        locks = [self._space.key(*key) for key in image.locks()]
        rest = {key: value for key, value in changes.items() if key != first}
        await self._hand_over(transaction, rest, locks)

    async def _hand_over(
        self,
        transaction: Transaction,
        changes: dict[Key, bytes | None],
        locks: Sequence[bytes] = (),
    ) -> None:
        inner = transaction.inner
        places = [(self._space.key(*key), value) for key, value in changes.items()]

        def start() -> asyncio.Future[list[None]]:
            work = [inner.delete(p) if v is None else inner.put(p, v) for p, v in places]
            if locks:
                work.append(inner.lock_keys(list(locks)))
            return asyncio.gather(*work)

        await self._link.ask(start, trips=0, timeout_s=HAND_OVER_TIMEOUT_S)

    async def _shorten(self, jobs: list[_Job], found: _TooLong) -> None:
        """Delete all but the end of a row that is too long for one transaction, from the front.

        If its job would pass; it is answered here if not. Behind what was deleted a scan meets none
        of the locks that are still being turned into deletions.
        """
        job = next(j for j in jobs if (DELETE_ROW, found.row) in j.commit.writes)
        try:
            await self._validate(job.commit._replace(writes=()))
        except (Conflict, Fenced, NotEmpty) as error:
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
            await self._hand_over(transaction, {(row, field): None for field in fields})
        except BaseException:
            await self._link.abandon(transaction)
            raise
        try:
            await self._link.commit(transaction)
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
