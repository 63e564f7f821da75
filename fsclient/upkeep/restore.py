"""Out of the trash, back to where it was: what `slicefs restore` does.

Things in the trash know the directory that they were in, by its number. One that is in the trash
itself comes back first, then all that was in it at once. A name that exists is never replaced. A
user other than root may restore files of their own to directories that they may write to.

Threading: one thread, which starts workers to put things back; `Restorer` needs a session of its
own. Several, anywhere, may restore the same things.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsclient.volume.paths import path_of
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.admin.trash_expiry import hours, whole_name
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import NOREPLACE, DentryLocation
from fsmeta.rules import access
from fsmeta.runtime import Runtime
from fsmeta.schema.trash import Origin, hour_name, hour_of_name, is_trash, origin_of
from fsmeta.types import NAME_MAX, ROOT_CALLER, ROOT_INO, Attr, Caller, Dentry, FileType, Ino

BEAT_S: Final = 5.0  # as mounts do, so that no client takes us for dead
_PATHS_MAX: Final = 1000  # directories that are looked for: each costs a listing of those above it
_AT_ONCE: Final = 1000  # jobs that wait for a thread
_GONE: Final = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)  # of the directory it was in
_WHY: Final = {
    errno.EEXIST: "the name exists: it stays in the trash",
    errno.EDQUOT: "a quota is used up: it stays in the trash",
    errno.EACCES: "not yours, or you may not write to its directory",
    errno.ENODATA: "it is in the trash no more",
}


class NotInTrash(ConfigError):
    """Nothing of that name is in the trash."""


class Trashed(NamedTuple):
    """Something in the trash."""

    hour: Ino
    entry: bytes  # its name there
    origin: Origin  # with the whole name
    attr: Attr
    path: str = ""  # where it was, as far as that can be found


class RestoreOutcome(NamedTuple):
    """What became of it; no `error`: it is back."""

    thing: Trashed
    error: str


class Restorer:
    """Restores in the name of one caller."""

    def __init__(self, meta: Meta, runtime: Runtime, caller: Caller) -> None:
        self._meta = meta
        self._runtime = runtime
        self._caller = caller
        self._lock = runtime.lock()  # held while progress is reported
        self._stopped = False  # by Ctrl-C, or an error
        self._beaten = runtime.monotonic()  # guarded by _lock

    def hours(self) -> list[tuple[str, int]]:
        """The hours of the trash and how much is in each."""
        found = ((hour_name(ino).decode(), self._count(ino)) for ino in hours(self._meta))
        return [(name, count) for name, count in found if count]

    def _count(self, hour: Ino) -> int:
        return sum(len(names) for names in self._pages(hour))

    def _pages(self, hour: Ino) -> Iterator[list[Dentry]]:
        cursor: bytes | None = b""
        seen: set[bytes] = set()
        while cursor is not None:
            names, cursor = self._meta.names(hour, cursor)
            self._beat()  # an hour may have millions
            fresh = [each for each in names if each.name not in seen]
            seen.update(each.name for each in fresh)
            yield fresh

    def of_hour(self, name: str) -> list[Trashed]:
        """Everything in one hour. Raises: ConfigError."""
        hour = hour_of_name(name.encode(errors="replace"))
        if hour is None:
            raise ConfigError(f"{name!r} is no hour of the trash: write it like 2026-11-21-19")
        found = [each for page in self._pages(hour) for each in self._look(hour, page)]
        if not found:
            raise ConfigError(f"{name}: the trash has nothing of that hour")
        return self._with_paths(found)

    def _look(self, hour: Ino, page: Sequence[Dentry]) -> Iterator[Trashed]:
        attrs = self._meta.attrs([each.ino for each in page])
        for entry, ino, _ in page:
            origin = origin_of(entry)
            if origin is None or ino not in attrs:
                continue  # it has just gone
            if len(entry) == NAME_MAX:
                name = whole_name(self._meta, ino, origin.name)
                origin = origin._replace(name=name)
            yield Trashed(hour, entry, origin, attrs[ino])

    def of_path(self, path: str) -> Trashed:
        """What was deleted last under a path of the volume. Raises: ConfigError."""
        parts = [part.encode(errors="surrogateescape") for part in path.split("/") if part]
        if not parts:
            raise NotInTrash(f"{path}: the root is never in the trash")
        *parents, name = parts
        ino = ROOT_INO
        for each in parents:
            try:
                ino = self._meta.lookup(ROOT_CALLER, ino, each).ino
            except OSError as error:
                raise ConfigError(
                    f"{path}: the directory {each.decode(errors='replace')!r} is not there: "
                    "restore it first"
                ) from error
        for hour in reversed(hours(self._meta)):
            found = [
                each
                for page in self._pages(hour)
                for each in self._look(hour, [one for one in page if _is_of(one.name, ino, name)])
                if each.origin.name == name
            ]
            if found:
                return max(found, key=lambda each: each.attr.ctime_ns)
        raise NotInTrash(f"{path}: nothing of that name is in the trash")

    def tree(self, path: str) -> list[Trashed]:
        """`of_path`, and if that is a directory what was in it and is in the trash, by path.

        Where nothing of that name is, but a directory is there: what was in it. Of several things
        that had one name only the last one. Raises: ConfigError.
        """
        tops: list[Trashed] = []
        missing: NotInTrash | None = None
        wanted: set[Ino] = set()
        try:
            tops.append(self.of_path(path))
            wanted.update(each.attr.ino for each in tops if each.attr.is_dir)
        except NotInTrash as error:
            missing = error
            wanted.update(self._emptied(path))
        found, roots = {each.attr.ino: each for each in tops}, frozenset(wanted)
        known = -1
        while wanted and known != len(found):  # mostly once: removal begins below
            known = len(found)
            for hour in reversed(hours(self._meta)):
                for page in self._pages(hour):
                    inside = [each for each in page if _is_below(each, wanted, found)]
                    wanted.update(each.ino for each in inside if each.type is FileType.DIR)
                    found.update((each.attr.ino, each) for each in self._look(hour, inside))
        reached = _reached(tops, roots, list(found.values()))
        if missing is not None and not reached:
            raise missing
        return self._with_paths(reached)

    def _emptied(self, path: str) -> Iterator[Ino]:
        """Directories that are there, at `path` or below it, and that something in the trash was
        in: an interrupted restore leaves such."""
        top = ROOT_INO
        try:
            for part in filter(None, path.split("/")):
                name = part.encode(errors="surrogateescape")
                top = self._meta.lookup(ROOT_CALLER, top, name).ino
        except OSError:
            return
        within = {top: True}
        for hour in hours(self._meta):
            for page in self._pages(hour):
                for origin in filter(None, (origin_of(each.name) for each in page)):
                    self._climb(origin.parent, within)
        yield from (ino for ino, is_within in within.items() if is_within)

    def _climb(self, ino: Ino, within: dict[Ino, bool]) -> None:
        """Note in `within` whether directory `ino` is below one that is there."""
        way: list[Ino] = []
        while ino not in within:
            way.append(ino)
            try:
                above = self._meta.getattr(ROOT_CALLER, ino).parent
            except OSError:
                break
            if ino == ROOT_INO or is_trash(above):
                break
            ino = above
        within.update(dict.fromkeys(way, within.get(ino, False)))

    def _with_paths(self, things: Sequence[Trashed]) -> list[Trashed]:
        """These, sorted by where they were."""
        by_ino = {each.attr.ino: each for each in things}
        known: dict[Ino, str] = {}

        def directory(ino: Ino) -> str:
            way: list[Ino] = []
            while ino in by_ino and ino not in known and ino not in way:
                way.append(ino)
                ino = by_ino[ino].origin.parent
            if ino not in known:
                named = len(known) < _PATHS_MAX
                path = path_of(self._meta.store, ino) if named else f"inode {ino}"
                known[ino] = "" if ino == ROOT_INO else path
            for each in reversed(way):
                above = known[by_ino[each].origin.parent]
                known[each] = f"{above}/{by_ino[each].origin.name.decode(errors='replace')}"
            return known[way[0] if way else ino]

        placed = [
            each._replace(
                path=f"{directory(each.origin.parent)}/{each.origin.name.decode(errors='replace')}"
            )
            for each in things
        ]
        return sorted(placed, key=lambda each: (each.path, each.attr.ctime_ns))

    # --- putting back ----------------------------------------------------------------------------

    def put_back(
        self, things: Iterable[Trashed], told: Callable[[RestoreOutcome], None], threads: int = 1
    ) -> int:
        """Restore what can be, `threads` at a time; `told` is told of each, by one thread at a
        time. How many could not be. Other commands may restore the same meanwhile. Raises:
        StoreError.
        """
        failed = 0

        def tell(thing: Trashed, why: str) -> None:
            nonlocal failed
            with self._lock:
                failed += bool(why)
                told(RestoreOutcome(thing, why))

        pool = WorkerPool(self._runtime, "restore", threads)
        self._stopped = False
        try:
            left = list(things)
            while left:
                left = self._turn(pool, left, tell)
        except BaseException:
            self._stopped = True  # what has not begun is left out
            raise
        finally:
            pool.close()
        return failed

    def _turn(
        self, pool: WorkerPool, left: list[Trashed], tell: Callable[[Trashed, str], None]
    ) -> list[Trashed]:
        """Restore those whose directory is not to be restored first; what is left then."""
        directories = {each.attr.ino for each in left if each.attr.is_dir}
        first = [each for each in left if each.origin.parent not in directories]
        later = [each for each in left if each.origin.parent in directories]
        waiting: list[Trashed] = []  # one thread appends at a time: it is under the lock of Python

        def work(thing: Trashed) -> None:
            if self._stopped:
                return
            error = self._put_back(thing)
            if error in _GONE:
                waiting.append(thing)
            else:
                tell(thing, _why(error))

        ready = first or later  # a ring there is only by damage
        for begin in range(0, len(ready), _AT_ONCE):
            pool.run_all([partial(work, each) for each in ready[begin : begin + _AT_ONCE]])
        if len(waiting) < len(ready):
            return waiting + (later if first else [])
        for each in waiting:
            tell(each, f"its directory, inode {each.origin.parent}, is gone")
        return later if first else []

    def _put_back(self, thing: Trashed) -> int:
        """The errno, or 0."""
        self._beat()
        parent, _, name = thing.origin
        try:
            if is_trash(self._meta.getattr(ROOT_CALLER, parent).parent):
                return errno.ENOENT
            if self._caller.uid not in (0, thing.attr.uid):
                return errno.EACCES
            self._meta.access(self._caller, parent, access.WRITE | access.EXECUTE)
            old, new = DentryLocation(thing.hour, thing.entry), DentryLocation(parent, name)
            self._meta.rename(ROOT_CALLER, old, new, NOREPLACE)
        except OSError as error:
            return self._by_others(thing, error.errno or errno.EIO)
        return 0

    def _by_others(self, thing: Trashed, error: int) -> int:
        """What an error means where another command restores the same things: 0 if it is back."""
        if error not in (errno.EEXIST, *_GONE):
            return error
        if self._leads_to(thing.origin.parent, thing.origin.name, thing):
            return 0
        return error if self._leads_to(thing.hour, thing.entry, thing) else errno.ENODATA

    def _leads_to(self, parent: Ino, name: bytes, thing: Trashed) -> bool:
        try:
            return self._meta.lookup(ROOT_CALLER, parent, name).ino == thing.attr.ino
        except OSError:
            return False

    def _beat(self) -> None:
        """Agree to every deletion round: nothing is open here."""
        now = self._runtime.monotonic()
        with self._lock:
            due = now - self._beaten > BEAT_S
            self._beaten = now if due else self._beaten
        if due:
            self._meta.sessions.beat(*self._meta.sessions.round_and_floor())


def _is_below(each: Dentry, directories: set[Ino], found: Container[Ino]) -> bool:
    """Whether something in the trash was in one of some directories, and was not found yet."""
    origin = origin_of(each.name)
    return origin is not None and origin.parent in directories and each.ino not in found


def _reached(
    tops: Sequence[Trashed], roots: Collection[Ino], things: Sequence[Trashed]
) -> list[Trashed]:
    """`tops` and what of `things` was below them, and below the directories `roots`; of those with
    one name the last one."""
    last: dict[Ino, dict[bytes, Trashed]] = {}
    for each in sorted(things, key=lambda each: each.attr.ctime_ns):
        last.setdefault(each.origin.parent, {})[each.origin.name] = each
    made = {each.attr.ino for each in tops}
    out = list(tops)
    for ino in roots:
        out += [] if ino in made else last.get(ino, {}).values()
    for each in out:
        if each.attr.is_dir:
            out += last.get(each.attr.ino, {}).values()
    return out


def _is_of(entry: bytes, parent: Ino, name: bytes) -> bool:
    """Whether a name in the trash may be that of `name` in `parent`."""
    origin = origin_of(entry)
    return origin is not None and origin.parent == parent and name.startswith(origin.name)


def _why(error: int) -> str:
    return "" if error == 0 else _WHY.get(error, errno.errorcode.get(error, str(error)))
