"""How the layers of a client are made: plainly, or so that each tells of its spans.

A choice at construction, so a mount without traces runs the code that it ran before there were any.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fsdata.objects.contract import ObjectStore
from fsdata.objects.wrappers import Metered, TracedObjects
from fsdata.resources.worker_pool import TracedPool, WorkerPool
from fsmeta.meta.meta import Meta
from fsmeta.meta.traced import TracedMeta
from fsmeta.runtime import Runtime
from fsmeta.spans import Spans
from fsmeta.store.contract import Store
from fsmeta.store.metered import MeteredStore, TracedStore


class Layers(NamedTuple):
    """What makes each of them."""

    meta: Callable[..., Meta] = Meta
    store: Callable[[Store, Runtime], MeteredStore] = MeteredStore
    objects: Callable[[Runtime, ObjectStore], Metered] = Metered
    pool: Callable[[Runtime, str, int], WorkerPool] = WorkerPool


def traced_layers(spans: Spans) -> Layers:
    """Layers whose work is recorded in `spans`."""
    return Layers(
        partial(TracedMeta, spans),
        partial(TracedStore, spans),
        partial(TracedObjects, spans),
        partial(TracedPool, spans),
    )
