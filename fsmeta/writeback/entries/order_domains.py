"""Order domains: the part of the tree within which other clients see changes in order.

A directory `depth` levels below the root is a domain with all that is in it; the directories above
are a domain each, of what is directly in them. Domains are named by the inode of the directory, so
a rename does not change them.

Threading: any method from any thread; what is remembered is replaced entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from fsmeta.schema import keys
from fsmeta.schema.inode import unpack_stable
from fsmeta.store.contract import Key
from fsmeta.types import NO_PARENT, ROOT_INO, FileType, Ino
from fsmeta.writeback.entries.intents import CreateIntent, Intent, subjects
from fsmeta.writeback.entries.log_entry import EVERY

HOMES_MAX: Final = 100_000  # directories remembered; about 15 MB
Get: TypeAlias = Callable[[Key], bytes | None]
_DEPTH_MAX: Final = 10_000  # what is deeper has no domain: it may be in the way of all


class OrderDomains:
    """Finds domains, and remembers them."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._homes: dict[
            int, tuple[int, int]
        ] = {}  # directory → its domain, levels below the root

    def forget(self, rows: Iterable[bytes] | None) -> None:
        """Directories may have moved: those of these rows, or any."""
        homes = self._homes
        if homes and (rows is None or any(_ino_of(row) in homes for row in rows)):
            self._homes = {}

    def of(self, get: Get, intent: Intent) -> frozenset[int]:
        """The domains of a verb; `get` reads a value as this mount sees it. Raises: StoreError."""
        what = subjects(intent)
        found = {self._home(get, ino)[0] for ino in what.parents}
        found.update(self._of_inode(get, ino) for ino in what.inos)
        for place in what.names:
            dentry = get((keys.dir_row(place.parent), place.name))
            if dentry is not None and dentry[0] == FileType.DIR:
                ino = keys.unpack_dentry(b"", place.name, dentry)[1]
                domain, level = self._home(get, ino)
                found.add(domain if level >= self._depth else EVERY)  # all that is in it
                self._homes = {}  # it may be on its way to another place
        if isinstance(intent, CreateIntent) and intent.makes_dir:
            above, level = self._home(get, intent.parent)
            found.add(above if level >= self._depth else intent.node.ino)
        return frozenset((EVERY,) if EVERY in found else found)

    def home(self, get: Get, ino: Ino) -> int:
        """The domain of a file or a directory's contents; EVERY where that is more than one.

        Raises: StoreError.
        """
        if self._is_dir(get, ino) and self._home(get, ino)[1] < self._depth:
            return EVERY
        return self._of_inode(get, ino)

    def _is_dir(self, get: Get, ino: Ino) -> bool:
        a = get((keys.inode_row(ino), keys.ATTR_FIELD))
        return a is not None and FileType.of_mode(unpack_stable(ino, a).mode) is FileType.DIR

    def _of_inode(self, get: Get, ino: Ino) -> int:
        a = get((keys.inode_row(ino), keys.ATTR_FIELD))
        if a is None:
            return EVERY
        stable = unpack_stable(ino, a)
        if FileType.of_mode(stable.mode) is FileType.DIR:
            return self._home(get, ino)[0]
        if stable.parent != NO_PARENT:
            return self._home(get, stable.parent)[0]
        # O_TMPFILE: it is not seen before it has a name, so it waits for no other entry
        return EVERY if get((keys.inode_row(ino), keys.NAMELESS_FIELD)) is None else ino

    def _home(self, get: Get, ino: Ino) -> tuple[int, int]:
        """The domain of what is directly in a directory, and how far below the root that is."""
        homes = self._homes
        known = homes.get(ino)
        if known is not None:
            return known
        chain = [ino]
        while chain[-1] != ROOT_INO:
            a = get((keys.inode_row(chain[-1]), keys.ATTR_FIELD))
            parent = NO_PARENT if a is None else unpack_stable(chain[-1], a).parent
            if parent == NO_PARENT or len(chain) > _DEPTH_MAX:
                return EVERY, 0
            chain.append(parent)
        level = len(chain) - 1
        home = (chain[level - self._depth] if level > self._depth else ino), level
        if len(homes) >= HOMES_MAX:
            self._homes = homes = {}
        homes[ino] = home
        return home


def _ino_of(row: bytes) -> int:
    return keys.id_of(row) if row[:1] == keys.INODE_PREFIX else 0


def reading(
    known: dict[Key, bytes | None], read: Callable[[Sequence[Key]], list[bytes | None]]
) -> Get:
    """Reads of single values, most of which are known."""

    def get(key: Key) -> bytes | None:
        return known[key] if key in known else read([key])[0]

    return get
