"""How `Meta` runs verbs of `ops`: with the time, the volume's limits and fresh ids.

The verbs of `Meta` are in classes by theme, `NameVerbs`, `FileDataVerbs` and `Meta` itself, which
have this one as their base: a verb is called for each request, and no frame stands in between.
`TracedMeta` overrides `_run`, `_view` and `_remove`. Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from fsmeta.meta.file_turns import FileTurns
from fsmeta.meta.ids.id_allocator import INO_BATCH, SLICE_BATCH, IdAllocator
from fsmeta.meta.ids.slice_allocator import SliceAllocator
from fsmeta.meta.prefetch import MetadataPrefetch
from fsmeta.meta.trash import TrashBucket
from fsmeta.rules.context import Env
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime
from fsmeta.schema import keys
from fsmeta.store.contract import Call, Store
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn
from fsmeta.types import NO_PARENT, Caller

T = TypeVar("T")
_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor


class VerbRunner:
    """See the module."""

    format: VolumeFormat
    has_quotas: bool

    def __init__(
        self, store: Store, runtime: Runtime, cache: RowCache, transactor: Transactor
    ) -> None:
        """No verb runs before `_obey` is told the settings of the volume."""
        self.store = store
        self.cache = cache
        self.transactor = transactor
        self._now_ns = runtime.now_ns
        self._bin = TrashBucket(runtime.monotonic)
        self._inos = IdAllocator(transactor, runtime, keys.NEXT_INO, INO_BATCH)
        slices = IdAllocator(transactor, runtime, keys.NEXT_SLICE, SLICE_BATCH)
        self.slices = SliceAllocator(runtime, slices)
        self._neighbours = MetadataPrefetch(transactor)
        self._turns = FileTurns(runtime)

    def _obey(self, settings: VolumeFormat) -> None:
        """Verbs follow `settings` from here on; their commits say so."""
        self.format = settings
        self._rules = (settings.limits, settings.charged, settings.born, NO_PARENT, False)
        self.has_quotas = settings.charged != 0
        self.transactor.edition = settings.edition  # last: a verb reads it first

    def _run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        now_ns = self._now_ns()
        body = lambda txn: verb(txn, _new(Env, (caller, now_ns, *self._rules)), *args)  # noqa: E731
        return self.transactor.run(body, _new(Call, (verb, caller, now_ns, args)))

    def run(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        """Run a verb of `ops` that has no method here: clones."""
        return self._run(verb, caller, *args)

    def _view(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        env = _new(Env, (caller, self._now_ns(), *self._rules))
        return self.transactor.view(lambda txn: verb(txn, env, *args))

    def _looked_up(self, find: Callable[[], T]) -> T:
        """What `find` finds without a transaction; again where the store was away."""
        return self.transactor.view(lambda _txn: find())

    def _remove(self, verb: Callable[..., T], caller: Caller, *args: object) -> T:
        """`_run` of a verb by which something may lose its last name."""
        now_ns, placed = self._now_ns(), None

        def removal(txn: Txn) -> T:
            nonlocal placed
            env = _new(Env, (caller, now_ns, *self._rules))
            if self.format.trash_days:
                placed = placed or self._bin.place(now_ns)
                env = env._replace(trash=placed.hour, trash_is_new=placed.is_new)
            return verb(txn, env, *args)

        result = self.transactor.run(removal, Call(verb, caller, now_ns, args))
        self._bin.committed(placed, result)
        return result
