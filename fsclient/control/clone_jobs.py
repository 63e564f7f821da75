"""`slicefs clone` and `snapshot` in a mount: jobs begun, watched and stopped through an xattr.

The name is `user.slicefs.clone.` and a word of the asker's choice, on the directory that the clone
is to be in, or that a snapshot is to be taken of. Setting it begins a job, or stops it; getting it
tells how far the job is. It is answered by the VFS, not stored and not listed. The kernel lets only
callers set it that may write there; whether a caller may reach the source, and what it may read of
it, is checked here, with the caller's groups from /proc.

A job belongs to the user that began it: the same word of another user names another job, and each
user has a limit of its own. A finished job is forgotten when the user has read its result, or has
had MANY since.

Threading: a thread for each job; the table is guarded by its lock.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fsclient.files.file_io import FileIO
from fsclient.files.setid_bits import groups_of
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.volume.mount_root import require_way
from fsmeta.admin.clones import CloneBuilder, CloneTree
from fsmeta.admin.snapshots import Taker
from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.rules.context import check_name
from fsmeta.runtime import Runtime, Thread
from fsmeta.schema import keys
from fsmeta.schema.snapshot_inos import snapshot_dir_of
from fsmeta.types import Caller, Ino

log = logging.getLogger(__name__)

CLONE_XATTR: Final = b"user.slicefs.clone."
MANY: Final = 64  # jobs of a user that are over and remembered
AT_ONCE: Final = 4  # jobs of a user that run; each has a thread and a commit under way
ALL_AT_ONCE: Final = 16  # of all users but root, whose jobs find a place always


class _CloneJob:
    """One clone under way, or over."""

    def __init__(self) -> None:
        self.builder: CloneBuilder | Taker | None = None
        self.changed = 0  # what a snapshot has from another moment
        self.stopped = False
        self.done = False
        self.error = 0
        self.thread: Thread | None = None

    def report(self) -> bytes:
        inodes = self.builder.inodes if self.builder is not None else 0
        report = {"done": self.done, "errno": self.error, "inodes": inodes, "changed": self.changed}
        return json.dumps(report).encode()


class _Wish(NamedTuple):
    """What is to be made: a clone of `source` in `parent`, or a snapshot of it; below `root`."""

    root: Ino
    source: Ino
    parent: Ino
    name: bytes
    preserve: bool
    snapshot: bool


class Cloner:
    """The clone jobs of a mount."""

    def __init__(self, meta: Meta, io: FileIO, coherence: CacheLeases, runtime: Runtime) -> None:
        self._meta = meta
        self._coherence = coherence
        self.confined = False  # no snapshots are taken
        # where what is made of an inode is made, once all is there that was done before; told
        # whether to give up
        self.tree: Callable[[Ino, Callable[[], bool]], CloneTree] = lambda _source, _stopped: meta
        self._io = io
        self._runtime = runtime
        self._lock = runtime.lock()
        # by user and word, the first begun first; guarded by _lock
        self._jobs: OrderedDict[tuple[int, bytes], _CloneJob] = OrderedDict()

    def ask(self, caller: Caller, root: Ino, parent: Ino, name: bytes, value: bytes) -> None:
        """Begin the job `name` in a mount of `root`, or stop it.

        Raises: EINVAL, EAGAIN where too many run, EPERM.
        """
        try:
            wish = json.loads(value)
            stop = bool(wish.get("stop"))
            source, new_name = Ino(int(wish["source"])), os.fsencode(wish["name"])
            what = bool(wish["preserve"]), bool(wish.get("snapshot"))
            wanted = _Wish(root, source, parent, new_name, *what)
            if not stop and not wanted.snapshot:  # a snapshot's is checked with its place
                check_name(new_name)
            keys.inode_row(source)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise OSError(errno.EINVAL, f"not a request for a clone: {value!r}") from error
        except struct.error as error:
            raise OSError(errno.EINVAL, f"no inode has the number {source}") from error
        if (wanted.preserve or wanted.snapshot) and caller.uid != 0:
            raise OSError(errno.EPERM, "only root takes snapshots, and gives files to others")
        if wanted.snapshot and self.confined:
            raise OSError(errno.EPERM, "no snapshots are taken through this mount")
        with self._lock:
            known = self._jobs.get((caller.uid, name))
            if stop or known is not None:
                if known is not None and stop:
                    known.stopped = True
                return
            job = self._enter(caller.uid, name)
        groups = groups_of(caller.pid) or ()  # it has ended, or is in another namespace
        who = Caller(caller.uid, caller.gid, tuple(groups), caller.pid)

        def work() -> None:
            self._run(job, who, wanted)

        job.thread = self._runtime.spawn("clone", work)

    def _enter(self, uid: int, name: bytes) -> _CloneJob:
        """A place for a new job; `_lock` is held. Raises: EAGAIN."""
        running = [owner for (owner, _), each in self._jobs.items() if not each.done]
        others = sum(owner != 0 for owner in running)
        if running.count(uid) >= AT_ONCE or (uid and others >= ALL_AT_ONCE):
            raise OSError(errno.EAGAIN, "too many clones are under way")
        over = [key for key, each in self._jobs.items() if key[0] == uid and each.done]
        for key in over[: max(0, len(over) - MANY + 1)]:
            del self._jobs[key]
        job = self._jobs[uid, name] = _CloneJob()
        return job

    def _run(self, job: _CloneJob, caller: Caller, wanted: _Wish) -> None:
        try:
            for ino, error in self._io.flush_all():
                log.warning("clone: inode %d is cloned as it was stored: %s", ino, error)
            require_way(self._meta, caller, wanted.root, wanted.source)
            tree = self.tree(wanted.source, lambda: job.stopped)
            if wanted.snapshot:
                self._take(job, tree, caller, wanted)
                return
            job.builder = CloneBuilder(tree, caller, wanted.preserve, lambda: job.stopped)
            job.builder.build(wanted.source, wanted.parent, wanted.name)
            self._coherence.named(wanted.parent)
        except OSError as error:
            job.error = error.errno or errno.EIO
        except Exception as error:
            unforeseen = None if isinstance(error, StoreError) else error
            log.warning("clone of inode %d: %s", wanted.source, error, exc_info=unforeseen)
            job.error = errno.EIO
        finally:
            job.done = True

    def _take(self, job: _CloneJob, tree: CloneTree, caller: Caller, wanted: _Wish) -> None:
        job.builder = taker = Taker(tree, caller, self._runtime.now_ns, lambda: job.stopped)
        job.changed = taker.take(wanted.source, wanted.name).changed
        self._coherence.named(snapshot_dir_of(wanted.source))

    def tell(self, caller: Caller, name: bytes) -> bytes:
        """How far a job of the caller is, as JSON. Raises: ENODATA."""
        with self._lock:
            job = self._jobs.get((caller.uid, name))
            if job is None:
                raise OSError(errno.ENODATA, "no such clone")
            if job.done:
                del self._jobs[caller.uid, name]
            return job.report()

    def close(self) -> None:
        """Stop what is under way; what it has built is removed."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.stopped = True
        for job in jobs:
            if job.thread is not None:
                job.thread.join()


def ask_for_clone(parent: str, word: str, wish: dict[str, Any]) -> None:
    """What `slicefs clone` sends. Raises: OSError."""
    os.setxattr(parent, CLONE_XATTR + word.encode(), json.dumps(wish).encode())


def progress_of_clone(parent: str, word: str) -> dict[str, Any]:
    """What it is told. Raises: OSError."""
    answer: dict[str, Any] = json.loads(os.getxattr(parent, CLONE_XATTR + word.encode()))
    return answer
