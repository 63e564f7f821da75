"""Whether a commit that is to be held back is right: what it relies on, against overlay and store.

`StagedStore` asks. The overlay is compared under the lock, and so are cached rows of the store that
are leased (`recall`). Where that is not all, the store is asked for the rest in one request,
without the lock. So that no change in between is missed, all that passes meanwhile is noted:
commits that are on their way, and keys that they or a publication have changed.

Threading: `cond` guards everything; methods say whether the caller holds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from fsmeta.errors import Conflict, LimitExceeded, NotEmpty
from fsmeta.runtime import Condition
from fsmeta.schema import keys as schema
from fsmeta.store.contract import Commit, Key, Store, is_table
from fsmeta.store.writes import BESIDE, NO_LIMIT, Add, Append, Merge, Shift, limit_field
from fsmeta.txn.cached_fields import MISSING, Mark, Missing
from fsmeta.txn.row_cache import RowCache
from fsmeta.writeback.overlay.overlay import Over, Overlay

DISTURBED_S: Final = 0.05  # how long a commit waits for one that is in its way, then it runs anew
_CHANGES_REMEMBERED: Final = 8192  # while one commit is validated; more disturb it
_COMMUTING: Final = Merge | Add | Shift  # these may pass what they change in the overlay


class Base(dict[Key, "bytes | None"]):
    """What the store has, and what was about to be added to counters when it was asked."""

    def __init__(self, values: Iterable[tuple[Key, bytes | None]] = ()) -> None:
        super().__init__(values)
        self.sums: dict[Key, int] = {}


class _Changes:
    """A numbered log of the keys that changed beneath or under the overlay."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[int, Key]] = deque(maxlen=_CHANGES_REMEMBERED)

    def add(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.count += 1
            self._recent.append((self.count, key))

    def hit(self, mark: int, keys: Collection[Key], rows: Collection[bytes]) -> bool:
        """Whether one of `keys`, or anything in `rows`, changed after `mark`."""
        if self.count - mark > len(self._recent):
            return True
        for at, key in reversed(self._recent):
            if at <= mark:
                return False
            if key in keys or key[0] in rows:
                return True
        return False


class Validation:
    """Judges commits before they are held back."""

    def __init__(self, inner: Store, overlay: Overlay, cond: Condition, beneath: RowCache) -> None:
        self._inner = inner
        self._beneath = beneath
        self._overlay = overlay  # guarded by cond, as all below
        self._cond = cond
        self._flying: dict[Key, int] = {}  # what commits that pass through now write
        self._changes = _Changes()

    def mark(self) -> int:
        """The moment before the store is asked; lock held."""
        return self._changes.count

    def take_off(self, commit: Commit) -> None:
        """A commit is about to pass; lock held."""
        for key in written(commit):
            self._flying[key] = self._flying.get(key, 0) + 1

    def landed(self, commit: Commit) -> None:
        """It has passed, or may have; lock held."""
        keys = written(commit)
        self._changes.add(keys)
        for key in keys:
            self._flying[key] -= 1
            if not self._flying[key]:
                del self._flying[key]

    def changed(self, keys: Iterable[Key]) -> None:
        """The store has these keys now, and the overlay no more; lock held."""
        self._changes.add(keys)

    def blocks(self, commit: Commit) -> bool:
        """Whether what a commit changes is laid over, and not only added to; lock held."""
        get = self._overlay.get
        return any(
            get((write.row, write.field)) is not MISSING
            for write in commit.writes
            if not isinstance(write, _COMMUTING) and not is_table(write.row)
        )

    def over(self, commit: Commit) -> list[Over | None]:
        """What is laid over each of its checks; lock held."""
        return self._overlay.over([(row, field) for row, field, _ in commit.checks])

    def concerns(self, commit: Commit, over: Sequence[Over | None]) -> bool:
        """Whether it has to do with what is held, given what is `over` its checks; lock held."""
        return bool(self._overlay) and (
            any(over)
            or any(self._overlay.touches(row) for row in commit.empties)
            or self.blocks(commit)
        )

    def writers(self, commit: Commit, over: Sequence[Over | None]) -> set[int]:
        """The sequences of entries that wrote what a commit relies on or writes; lock held."""
        found = {laid[0] for laid in over if laid is not None}
        found.update([self._overlay.writer(key) for key in written(commit)])
        found.discard(0)
        return found

    def split(self, commit: Commit) -> tuple[list[tuple[bytes, bytes, bytes | None]], list[bytes]]:
        """Checks that are left to the store, and empties that can't be. Raises: Conflict."""
        with self._cond:
            known = [self._overlay.get((row, field)) for row, field, _ in commit.checks]
            empties = [row for row in commit.empties if self._overlay.touches(row)]
        rest = []
        for check, value in zip(commit.checks, known, strict=True):
            if isinstance(value, Missing):
                rest.append(check)
            elif value != check[2]:
                raise Conflict(f"{check[0]!r} {check[1]!r} has changed")
        return rest, empties

    def read_base(self, commit: Commit) -> Base:
        """What the store has of what a commit relies on or changes in part. Raises: Conflict."""
        expected = {(row, field): value for row, field, value in commit.checks}
        with self._cond:
            keys = dict.fromkeys((*expected, *_partly(commit)))
            wanted = [key for key in keys if self._overlay.get(key) is MISSING]
            sums = {key: self._overlay.sum(key) for key in wanted if is_table(key[0])}
        mark = self._beneath.mark()
        values = Base(zip(wanted, self._inner.read(wanted), strict=True))
        values.sums = sums
        self._learn(mark, values)
        for key, value in values.items():
            if key in expected and expected[key] != value:
                raise Conflict(f"{key!r} has changed")
        return values

    def _learn(self, mark: Mark, values: dict[Key, bytes | None]) -> None:
        """Remember what the store has just said."""
        rows: dict[bytes, dict[bytes, bytes | None]] = {}
        for (row, field), value in values.items():
            rows.setdefault(row, {})[field] = value
        leased = self._inner.has_leases()
        for row, fields in rows.items():
            self._beneath.fill(mark, row, fields, leased)

    def recall(self, commit: Commit, over: Sequence[Over | None]) -> Base | None:
        """`read_base` from cached, leased rows; None where the store is to be asked.

        The caller holds the lock.
        """
        if not self._inner.has_leases() or not all(is_fresh(row, commit) for row in commit.empties):
            return None
        beneath = self._beneath.get
        base = Base()
        for (row, field, value), laid in zip(commit.checks, over, strict=True):
            if laid is None:
                if beneath(row, field, need_vouched=True) != value:
                    return None
                base[row, field] = value
        for key in _partly(commit):
            if key not in base and self._overlay.get(key) is MISSING:
                known = beneath(key[0], key[1], need_vouched=True)
                if isinstance(known, Missing):
                    return None
                base[key] = known
        return base

    def require_undisturbed(
        self,
        commit: Commit,
        over: Sequence[Over | None],
        mark: int,
        base: dict[Key, bytes | None],
    ) -> None:
        """Raises: Conflict where anything it relies on may have changed since `mark`; lock held."""
        emptied = [row for row in commit.empties if not is_fresh(row, commit)]
        if self._flying or self._changes.count != mark:
            self._require_still(commit, mark, base, emptied)
        for (row, field, value), laid in zip(commit.checks, over, strict=True):
            if laid is None:
                if (row, field) not in base:
                    raise Conflict("what it relies on was published meanwhile")
            elif laid[1] != value:
                raise Conflict(f"{row!r} {field!r} has changed")
        for row in emptied:
            if any(value is not None for value in self._overlay.row(row).values()):
                raise NotEmpty(f"{row!r} is not empty")
        for write in commit.writes:
            if isinstance(write, Merge | Append) and not is_table(write.row):
                key = (write.row, write.field)
                if self._overlay.get(key) is MISSING and key not in base:
                    raise Conflict("what it changes was published meanwhile")

    def _require_still(
        self,
        commit: Commit,
        mark: int,
        base: dict[Key, bytes | None],
        emptied: Collection[bytes],
    ) -> None:
        """Raises: Conflict where this mount changes it, or has since `mark`; lock held."""
        keys = {(row, field) for row, field, _ in commit.checks}.union(base)
        keys.update(
            (write.row, write.field) for write in commit.writes if not isinstance(write, _COMMUTING)
        )
        if any(key in self._flying for key in keys):
            self._cond.wait(DISTURBED_S)
            raise Conflict("another commit is on its way")
        if self._changes.hit(mark, keys, emptied):
            raise Conflict("what it relies on was changed meanwhile")

    def require_limits(self, commit: Commit, base: Base) -> None:
        """Raises: LimitExceeded, Conflict. The caller holds the lock.

        What was published since the store was asked is in neither of what it said and what is laid
        over it now, but was laid over it then. What is being published may be in both: where that
        alone exceeds a limit, the commit waits for it and runs again.
        """
        for write in commit.writes:
            if not isinstance(write, Add | Shift):
                continue
            row, field = write.row, write.field
            limit, tag = write.limit, write.tag
            delta = write.delta if isinstance(write, Add) else self._shifted(write, base)
            if delta <= 0 or limit == NO_LIMIT:
                continue
            if limit == BESIDE:
                limit = base.get((row, limit_field(field))) or b"0"
            excess = self._count((row, field), base) + delta - int(limit) if int(limit) else 0
            if 0 < excess <= self._counted_twice((row, field)):
                self._cond.wait(DISTURBED_S)
                raise Conflict("what is being published may be counted twice")
            if excess > 0:
                raise LimitExceeded(tag)

    def _counted_twice(self, counter: Key) -> int:
        """How much of a counter is being published: the store may have it already; lock held."""
        return sum(delta for delta in self._overlay.published_soon(counter) if delta > 0)

    def _count(self, key: Key, base: Base) -> int:
        """What a counter will be when all that is held back is published; lock held."""
        return int(base.get(key) or b"0") + max(self._overlay.sum(key), base.sums.get(key, 0))

    def shifts(self, commit: Commit, base: Base) -> list[tuple[Key, int]]:
        """By how much each SHIFT of a commit moves its counter; lock held."""
        found = [write for write in commit.writes if isinstance(write, Shift)]
        return [((write.row, write.field), self._shifted(write, base)) for write in found]

    def _shifted(self, write: Shift, base: Base) -> int:
        """By how much a SHIFT moves its counter, as far as this mount knows; lock held."""
        return write.delta(self._count((write.row, write.source), base))


def is_fresh(row: bytes, commit: Commit) -> bool:
    """Whether a row that is to be empty is one of an inode that the commit makes."""
    inode = schema.INODE_PREFIX
    return row[:1] == inode or inode + row[1:] in commit.empties


def _partly(commit: Commit) -> list[Key]:
    """What a commit changes without saying all of what it will be."""
    found: list[Key] = []
    for write in commit.writes:
        if isinstance(write, Merge | Append) and not is_table(write.row):
            found.append((write.row, write.field))
        elif isinstance(write, Add | Shift) and _is_limited(write):
            found.append((write.row, write.field))
            if write.limit == BESIDE:
                found.append((write.row, limit_field(write.field)))
        if isinstance(write, Shift):
            found.append((write.row, write.source))
    return found


def _is_limited(write: Add | Shift) -> bool:
    """Whether a counter must not pass a limit by it."""
    grows = write.sign == b"+" if isinstance(write, Shift) else write.delta > 0
    return grows and write.limit != NO_LIMIT


def written(commit: Commit) -> list[Key]:
    """What a commit changes, but for tables."""
    return [(write.row, write.field) for write in commit.writes if not is_table(write.row)]
