"""Taking and deleting snapshots, over the verbs of `ops.snapshot` and `ops.clone`.

A snapshot is a sealed clone that is compared with its source once it is whole. An inode that is the
same when it is copied and when it is compared was the same all the time in between. So if nothing
differs, the snapshot shows the tree as it was at the one moment between copying and comparing.
Every change of an inode or of its names moves ctime, so the two readings are enough. Inodes that
differ are counted, and the count is kept.

Called by `fsclient.control.clone_jobs`, by the VFS and by tests. Memory: as `clones`.
Threading: one thread for each snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from fsmeta.admin.clones import CloneBuilder, CloneTree, pages
from fsmeta.meta.meta import Meta
from fsmeta.ops.trees import snapshot as verbs
from fsmeta.schema import keys as schema
from fsmeta.schema.inode_rows import read_inodes
from fsmeta.schema.snapshot_inos import source_of
from fsmeta.schema.snapshots import Snapshot
from fsmeta.types import ROOT_CALLER, Caller, Dentry, FileType, Ino

_ROWS_AT_ONCE: Final = 300  # pairs of rows in one request


class Taker:
    """Takes one snapshot in the name of `caller`."""

    def __init__(
        self,
        meta: CloneTree,
        caller: Caller,
        now_ns: Callable[[], int],
        stopped: Callable[[], bool],
    ) -> None:
        self._meta = meta
        self._caller = caller
        self._now_ns = now_ns
        self._builder = CloneBuilder(meta, caller, True, stopped, sealing=True)

    @property
    def inodes(self) -> int:
        """How many have been copied."""
        return self._builder.inodes

    def take(self, source: Ino, name: bytes) -> Snapshot:
        """Make `name` a snapshot of the directory `source`; nothing is left where that fails.

        Raises: OSError, StoreError; ECANCELED where it was stopped.
        """
        run, builder = self._meta.run, self._builder
        run(verbs.require_new, self._caller, source, name)
        with builder.begun(source):
            root = builder.building.root
            builder.copy([(source, root)])
            at_ns = self._now_ns()
            changed = sum(_changes(self._meta, source, root))
            made = Snapshot(root, source, name, at_ns, changed, builder.inodes, builder.space)
            run(verbs.publish, self._caller, builder.building, made)
        return made


def _changes(meta: CloneTree, source: Ino, root: Ino) -> Iterator[int]:
    """How many inodes are not what their copies say, in parts."""
    yield _differing(meta, [(source, root)])
    waiting = deque([(source, root)])
    while waiting:
        directory, copied = waiting.popleft()
        for page in pages(meta, copied):
            for begin in range(0, len(page), _ROWS_AT_ONCE):
                part = page[begin : begin + _ROWS_AT_ONCE]
                pairs = _pairs(meta, directory, part)
                yield len(part) - len(pairs) + _differing(meta, [pair[:2] for pair in pairs])
                waiting += [(ino, copy) for ino, copy, kind in pairs if kind is FileType.DIR]


def _pairs(
    meta: CloneTree, directory: Ino, copied: list[Dentry]
) -> list[tuple[Ino, Ino, FileType]]:
    """What names of a snapshot lead to in `directory`, where they still lead to the like."""
    row = schema.dir_row(directory)
    keys = [(row, each.name) for each in copied]
    values = meta.transactor.view(lambda _txn: meta.store.read(keys))
    found: list[tuple[Ino, Ino, FileType]] = []
    for each, value in zip(copied, values, strict=True):
        if value is not None:
            kind, ino = schema.unpack_dentry(row, each.name, value)
            if kind is each.type:
                found.append((ino, each.ino, kind))
    return found


def _differing(meta: CloneTree, pairs: list[tuple[Ino, Ino]]) -> int:
    """How many inodes are not what their copies say."""
    rows = [schema.inode_row(ino) for pair in pairs for ino in pair]
    if not rows:
        return 0
    found = meta.transactor.view(lambda _txn: read_inodes(meta.store, rows))
    fields = (each.fields for each in found)
    return sum(
        not verbs.same(ino, now, copy, then)
        for (ino, copy), now, then in zip(pairs, fields, fields, strict=False)
    )


def listing(meta: Meta) -> list[Snapshot]:
    """Every snapshot of the volume, the oldest first."""
    return meta.run(verbs.snapshots, ROOT_CALLER)


def snapshot_of(meta: Meta, root: Ino) -> Snapshot | None:
    """The snapshot that has this root."""
    return meta.transactor.view(partial(verbs.one, root=root))


def remove(meta: Meta, caller: Caller, snapshot_dir: Ino, name: bytes) -> None:
    """A snapshot is gone; what it holds is freed by the leader. Raises: EPERM, ENOENT."""
    meta.run(verbs.withdraw, caller, source_of(snapshot_dir), name)
