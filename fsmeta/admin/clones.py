"""Building and removing clones step by step, over the verbs of `ops.clone`.

Called by `fsclient.control.clone_jobs` and by the leader. A step is a commit; a builder that dies
leaves its tree to `discard`, which works from the leaves up. Memory: the directories that wait, and
a number for each file with several names.

Threading: one thread for each build.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import Span
from fsmeta.ops.names import remove
from fsmeta.ops.trees import clone
from fsmeta.ops.trees.clone import Building, Child
from fsmeta.schema.sessions import SessionRecord
from fsmeta.schema.snapshot_inos import sealed
from fsmeta.store.contract import Store
from fsmeta.txn.retry import Transactor
from fsmeta.types import ROOT_CALLER, Attr, Caller, Dentry, FileType, Ino

_DISCARD_BATCH: Final = 100  # inodes a commit

T = TypeVar("T")


class CloneTree(Protocol):
    """What clones are made from and in: `Meta`, or `Published` on a mount that writes back."""

    @property
    def store(self) -> Store:
        """What is read without a verb."""

    @property
    def transactor(self) -> Transactor:
        """What repeats such reads."""

    @property
    def session(self) -> SessionRecord | None:
        """Ours."""

    def new_ino(self) -> Ino:
        """The number of an inode."""

    def run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        """Run a verb of `ops`."""

    def names(self, ino: Ino, cursor: bytes | None = None) -> tuple[list[Dentry], bytes | None]:
        """A page of names, see `Meta`."""


class CloneBuilder:
    """Builds one clone in the name of `caller`."""

    def __init__(
        self,
        meta: CloneTree,
        caller: Caller,
        preserve: bool,
        stopped: Callable[[], bool],
        sealing: bool = False,
    ) -> None:
        """`preserve`: everything keeps its owner, else it is the caller's. `sealing`: it
        becomes a snapshot.
        """
        assert meta.session is not None
        self._meta = meta
        self._caller = caller
        self._stopped = stopped
        self._sealing = sealing
        owner = None if preserve else (caller.uid, caller.gid)
        self.building = Building(self._new_ino(), meta.session.id, owner)
        self._links: dict[Ino, Ino] = {}  # clones of files with several names
        self.inodes = 0
        self.space = 0

    def _new_ino(self) -> Ino:
        ino = self._meta.new_ino()
        return sealed(ino) if self._sealing else ino

    def build(self, source: Ino, parent: Ino, name: bytes) -> Attr:
        """Clone the directory `source` as `name` in `parent`; nothing is left where that fails.

        Raises: OSError, StoreError; ECANCELED where it was stopped.
        """
        with self.begun(source):
            self.copy([(source, self.building.root)])
            return self._meta.run(clone.finish, self._caller, self.building, parent, name)

    @contextmanager
    def begun(self, source: Ino) -> Iterator[None]:
        """With a root that is like `source`; where the block fails, what was built is removed."""
        self._meta.run(clone.begin, self._caller, self.building, source)
        self.inodes += 1
        try:
            yield
        except Exception:  # whatever it was; what it means is for the caller
            discard(self._meta, self.building)
            raise

    def copy(self, directories: Iterable[tuple[Ino, Ino]]) -> None:
        """Clone what is below each of some directories into the second one."""
        waiting = deque(directories)
        while waiting:
            old, new = waiting.popleft()
            for page in pages(self._meta, old):
                waiting.extend(self.clone_page(new, page))

    def clone_page(self, parent: Ino, page: list[Dentry]) -> Iterator[tuple[Ino, Ino]]:
        """Clone some names of a directory; the directories among them, with their clones."""
        left = [Child(name, ino, self._new_ino()) for name, ino, _ in page]
        while left:
            if self._stopped():
                raise OSError(errno.ECANCELED, "stopped")
            known = self._links.get(left[0].source)
            if known is not None:
                args = (self.building, parent, left.pop(0).name, known)
                self._meta.run(clone.link_child, self._caller, *args)
                continue
            wanted = self._fresh(left[: clone.CHILDREN_MAX])
            taken, done = self._meta.run(
                clone.children, self._caller, self.building, parent, wanted
            )
            left = left[taken:]
            for child, attr, filled in done:
                self.inodes += 1
                self.space += attr.space
                if attr.is_dir:
                    yield child.source, child.ino
                    continue
                if not filled:
                    self._fill(child, attr)
                if attr.nlink > 1:
                    self._links[child.source] = child.ino

    def _fresh(self, children: list[Child]) -> list[Child]:
        """The first of them, up to a further name of what has been cloned by then."""
        seen: set[Ino] = set()
        for count, child in enumerate(children):
            if child.source in seen or child.source in self._links:
                return children[:count]
            seen.add(child.source)
        return children

    def _fill(self, child: Child, attr: Attr) -> None:
        """Share the content of a large file, a part at a time."""
        at = 0
        while at < attr.size:
            span = Span(child.source, at, attr.size)
            args = (self.building, span, child.ino, at)
            end = self._meta.run(clone.fill, self._caller, *args).end
            if end == at:
                break  # it has become shorter
            at = end
        self._meta.run(clone.settle, self._caller, self.building, child.ino, attr)


def pages(meta: CloneTree, directory: Ino) -> Iterator[list[Dentry]]:
    """The names of a directory, none twice."""
    cursor: bytes | None = b""
    seen: set[bytes] = set()
    while cursor is not None:
        names, cursor = meta.names(directory, cursor)
        if seen or cursor is not None:
            names = [each for each in names if each.name not in seen]
            seen.update(each.name for each in names)
        yield names


def abandoned(meta: Meta) -> list[Building]:
    """Clones whose builders have died."""
    alive = {each.id for each in meta.sessions.all()}
    return meta.run(clone.abandoned, ROOT_CALLER, alive)


def discard(
    meta: CloneTree, building: Building, enough: Callable[[], bool] = lambda: False
) -> bool:
    """Remove a clone that will not be seen; False where there was `enough` to do for now.

    Raises: ECANCELED where another client does, StoreError.
    """
    assert meta.session is not None
    building = meta.run(clone.take_over, ROOT_CALLER, building, meta.session.id)
    way = [_Emptied(building.root)]
    while way:
        if enough():
            meta.run(clone.leave_behind, ROOT_CALLER, building)
            return False
        here = way[-1]
        if here.directories:
            way.append(_Emptied(here.directories.pop()))
        elif here.names:
            batch, here.names = here.names[:_DISCARD_BATCH], here.names[_DISCARD_BATCH:]
            here.gone += meta.run(remove.expire, ROOT_CALLER, here.ino, batch)
        elif not here.fill(meta):
            way.pop()
    meta.run(clone.discard_root, ROOT_CALLER, building)
    return True


class _Emptied:
    """A directory that is being emptied, and a page of what it has."""

    def __init__(self, ino: Ino) -> None:
        self.ino = ino
        self.names: list[Dentry] = []
        self.directories: list[Ino] = []  # among the names, and not empty yet
        self.gone = 0  # names that have gone in this pass
        self._cursor: bytes | None = b""  # None: the pass is over

    def fill(self, meta: CloneTree) -> bool:
        """Read a page with names; False after a pass by which none went."""
        while True:
            if self._cursor is None:
                if not self.gone:
                    return False
                self._cursor, self.gone = b"", 0
            self.names, self._cursor = meta.names(self.ino, self._cursor)
            if self.names:
                break
        self.directories = [each.ino for each in self.names if each.type is FileType.DIR]
        return True
