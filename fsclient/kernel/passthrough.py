"""Passthrough for reads: which open files the kernel reads from a cache disk by itself.

Files of snapshots, because nothing about them changes: the kernel decides at open(2) and stays with
it until the last close, and all opens of an inode name the same file. Where bytes could change, no
descriptor could be told.

The first open of an inode decides for all that come while it is open. An open that finds no whole
file is answered as ever, and from the second one on has it made, by a thread of its own. Without
root, before Linux 6.9, or on a disk on top of another one (overlayfs) the first try says so, and
there is no further one.

Called by `FileIO`. Threading: any method from any thread; the lock is a leaf.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

from fsclient.kernel.contract import Buffer
from fsdata.disk_cache.whole_files import WholeFiles
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.schema.snapshot_inos import SEALED_INO, SHELVES
from fsmeta.types import Attr, Ino

log = logging.getLogger(__name__)

LEAST_BYTES: Final = 1 << 20  # smaller files are a request or two, and stay in the kernel's pages
OPENED_MAX: Final = 100_000  # inodes that were opened once

Read: TypeAlias = Callable[[Attr], Iterator[Buffer]]
"""The verified bytes of a file, piece by piece."""


class Backings(Protocol):
    """The kernel's side: `fuse/session/backing`."""

    def open(self, fd: int) -> int:
        """An id for the file that `fd` is open on. Raises: OSError."""

    def close(self, backing: int) -> None: ...


@dataclass(slots=True)
class _Mode:
    """How an inode is open: `backing` 0 in the usual way."""

    backing: int
    opens: int = 1


class Passthrough:
    """Decides how files are opened, and has whole files made."""

    def __init__(self, runtime: Runtime, whole: WholeFiles | None, read: Read) -> None:
        """`whole` None: nothing is ever passed through."""
        self._whole = whole
        self._read = read
        self._backings: Backings | None = None
        self._refused = False  # the kernel has said no, and would again
        self._closed = False
        self._lock = runtime.lock()
        self._modes: dict[Ino, _Mode] = {}  # guarded by _lock
        self._opened: OrderedDict[Ino, None] = OrderedDict()  # guarded by _lock
        self._making: set[Ino] = set()  # guarded by _lock
        self._maker = None if whole is None else WorkerPool(runtime, "whole-files", 1)
        self._granted = self._made = 0  # about: threads may miss each other's

    def start(self, backings: Backings) -> None:
        """There is a kernel that can."""
        self._backings = backings

    def close(self) -> None:
        """End the thread; what it makes is dropped."""
        self._closed = True
        if self._maker is not None:
            self._maker.close()

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        return {"passthrough_opens_total": self._granted, "whole_files_made_total": self._made}

    def may_pass(self, attr: Attr) -> bool:
        """Whether opens of this file are to be counted: `opened`, and later `closed`."""
        sealed = SEALED_INO <= attr.ino < SHELVES
        return self._whole is not None and sealed and attr.size >= LEAST_BYTES

    def opened(self, attr: Attr) -> int:
        """A file is being opened: the id of what the kernel is to read, or 0."""
        mode = self._join(attr.ino)
        if mode is not None:
            return self._count(mode)
        backing = self._find(attr)
        with self._lock:
            mode = self._modes.get(attr.ino)
            if mode is None:
                mode = self._modes[attr.ino] = _Mode(backing)
                backing = 0
            else:
                mode.opens += 1  # another open was faster, and has decided
        self._give_back(backing)
        return self._count(mode)

    def restore(self, ino: Ino, backing: int) -> None:
        """An earlier process has `opened` a file so. Ids are the connection's, not a process's."""
        with self._lock:
            mode = self._modes.setdefault(ino, _Mode(backing, 0))
            mode.opens += 1

    def _count(self, mode: _Mode) -> int:
        self._granted += mode.backing != 0
        return mode.backing

    def _join(self, ino: Ino) -> _Mode | None:
        """The mode in which an inode is open already."""
        with self._lock:
            mode = self._modes.get(ino)
            if mode is not None:
                mode.opens += 1
            return mode

    def closed(self, ino: Ino) -> None:
        """A file that was `opened` is closed."""
        with self._lock:
            mode = self._modes[ino]
            mode.opens -= 1
            if mode.opens:
                return
            del self._modes[ino]
        self._give_back(mode.backing)

    def _give_back(self, backing: int) -> None:
        if not backing or self._backings is None:
            return
        try:
            self._backings.close(backing)
        except FileNotFoundError as error:  # an earlier process has done so, and died then
            log.debug("backing %d: %s", backing, error)

    def _find(self, attr: Attr) -> int:
        """An id for the whole file; where there is none, see to it that there will be."""
        backings, whole = self._backings, self._whole
        if backings is None or whole is None or self._refused:
            return 0
        fd = whole.open(attr.ino, attr.size)
        if fd is None:
            self._want(attr, whole)
            return 0
        try:
            return backings.open(fd)
        except OSError as error:
            log.info("files are not passed through: %s", error)
            self._refused = True
            return 0
        finally:
            os.close(fd)

    def _want(self, attr: Attr, whole: WholeFiles) -> None:
        """From the second open on a file is made whole."""
        with self._lock:
            again = attr.ino in self._opened
            self._opened[attr.ino] = None
            if len(self._opened) > OPENED_MAX:
                self._opened.popitem(last=False)
            if not again or attr.ino in self._making:
                return
            self._making.add(attr.ino)
        assert self._maker is not None, "whole files have a maker"
        self._maker.submit(partial(self._make, attr, whole))

    def _make(self, attr: Attr, whole: WholeFiles) -> None:
        try:
            if not whole.verify(attr.ino, attr.size):
                self._made += whole.make(attr.ino, attr.size, self._pieces(attr))
        except (OSError, StoreError) as error:
            log.info("inode %d is not made whole: %s", attr.ino, error)
        finally:
            with self._lock:
                self._making.discard(attr.ino)

    def _pieces(self, attr: Attr) -> Iterator[Buffer]:
        for piece in self._read(attr):
            if self._closed:
                return
            yield piece
