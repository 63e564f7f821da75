"""The volume as other clients see it, for parts of a write-back mount that must not see more.

Clones and snapshots list slices that other clients can read already: they are made from what is
published, whatever the mount's programs do to their source meanwhile. Reads skip what is held back;
commits pass, and wait for held ones that they would be in the way of.

Threading: any method from any thread. One a mount, because of the workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from fsmeta.meta.meta import Meta
from fsmeta.ops.names import directory
from fsmeta.rules.context import Env
from fsmeta.runtime import Runtime
from fsmeta.schema import keys
from fsmeta.schema.sessions import SessionRecord
from fsmeta.store.contract import Commit, Listener, Store
from fsmeta.txn.retry import CommitNumbers, Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import Caller, Dentry, Ino
from fsmeta.writeback.staged_store import StagedStore

T = TypeVar("T")

NUMBERS: Final = CommitNumbers(worker=0xC000)  # of the session's: behind the publisher's
_CACHE_ROWS: Final = 1000  # the directory that is built, and a step's inodes


class _Beneath:
    """The store below a `StagedStore`, which it informs of what it writes."""

    def __init__(self, inner: Store, staged: StagedStore) -> None:
        self._inner = inner
        self._staged = staged
        self.name = inner.name
        self.history = inner.history
        self.read, self.read_many, self.read_linked = inner.read, inner.read_many, inner.read_linked
        self.read_rows, self.scan, self.scan_rows = inner.read_rows, inner.scan, inner.scan_rows
        self.read_short_rows = inner.read_short_rows
        self.everything, self.sync, self.now_ns = inner.everything, inner.sync, inner.now_ns

    @property
    def round_trips(self) -> int:
        return self._inner.round_trips

    def commit(self, commit: Commit) -> None:
        """See `Store`; never held back."""
        self._staged.commit_beneath(commit)

    def watch(self, listener: Listener) -> None:
        """No listener is called: each commit proves what is cached."""

    def poll_invalidations(self) -> None:
        """There are no invalidations."""

    def has_leases(self) -> bool:
        """Rows that are read here are not leased."""
        return False

    def tidy(self) -> None:
        """The leader asks the store itself."""

    def close(self) -> None:
        """The owner of the store closes it."""


class Published:
    """What `CloneBuilder` and `Taker` need of `Meta`, over what is published."""

    def __init__(self, meta: Meta, inner: Store, staged: StagedStore, runtime: Runtime) -> None:
        self._meta = meta
        self._runtime = runtime
        self.store = _Beneath(inner, staged)
        self._cache = RowCache(runtime, _CACHE_ROWS)
        self.transactor = Transactor(
            self.store, runtime, self._cache, numbers=NUMBERS, beside=meta.transactor
        )
        self.transactor.follow = self._follow

    @property
    def session(self) -> SessionRecord | None:
        """Ours."""
        return self._meta.session

    def new_ino(self) -> Ino:
        """See `Meta`."""
        return self._meta.new_ino()

    def run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        """See `Meta`."""
        settings, now_ns = self._meta.format, self._runtime.now_ns()
        env = Env(caller, now_ns, settings.limits, settings.charged, settings.born)
        self.transactor.fence = self._meta.transactor.fence
        self.transactor.edition = settings.edition
        return self.transactor.run(lambda txn: verb(txn, env, *args))

    def names(self, ino: Ino, cursor: bytes | None = None) -> tuple[list[Dentry], bytes | None]:
        """See `Meta`."""
        row, begin = keys.dir_row(ino), cursor or b""
        page = self.transactor.view(
            lambda _txn: directory.page(self.store, self._cache, row, begin)
        )
        return list(keys.unpack_dentries(row, page.fields)), page.cursor

    def _follow(self) -> None:
        """The volume's settings have changed: follow the new ones. Raises: StoreError."""
        assert self._meta.transactor.follow is not None, "set when the settings were read first"
        if self.transactor.edition == self._meta.transactor.edition:
            self._meta.transactor.follow()
        self.transactor.edition = self._meta.transactor.edition


def _conforms(store: _Beneath) -> Store:
    return store
