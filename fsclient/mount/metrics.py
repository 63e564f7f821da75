"""The numbers of a mount, as `.stats` shows them.

One `name value` a line, with the names and units Prometheus users expect: `_total` counts,
`_seconds` are sums of seconds, `_bytes` are bytes. Every part keeps its own counters; this page
only collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from fsdata.blocks.blocks import BlockStore
from fsdata.resources.block_cache import MemCache
from fsdata.resources.memory_budget import Budget
from fsmeta.meta.meta import Meta

Numbers: TypeAlias = Mapping[str, float]
PREFIX: Final = "slicefs_"


class Metrics:
    """Collects from whoever registered."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Numbers]] = []

    def add(self, source: Callable[[], Numbers]) -> None:
        """Have `source` asked whenever the numbers are wanted."""
        self._sources.append(source)

    def collect(self) -> dict[str, float]:
        """Every number, by name."""
        return {name: value for source in self._sources for name, value in source().items()}

    def text(self) -> bytes:
        """The content of `.stats`."""
        lines = (f"{PREFIX}{name} {value:.15g}\n" for name, value in self.collect().items())
        return "".join(lines).encode()


def operation_numbers(operations: Mapping[str, tuple[int, int, int]]) -> Numbers:
    """Kernel requests by name: how many, how many failed, and their nanoseconds together."""
    out: dict[str, float] = {}
    for name, (count, errors, total_ns) in operations.items():
        out[f'operations_total{{op="{name}"}}'] = count
        out[f'operation_errors_total{{op="{name}"}}'] = errors
        out[f'operation_seconds_total{{op="{name}"}}'] = total_ns / 1e9
    return out


def metadata_numbers(meta: Meta) -> Numbers:
    """What the metadata engine was asked, and how often in vain."""
    counters = meta.transactor.counters
    return {
        "meta_round_trips_total": meta.store.round_trips,
        "meta_commits_total": counters.commits,
        "meta_conflicts_total": counters.conflicts,
        "meta_repeats_total": counters.repeats,
        "meta_unavailable_total": counters.unavailable,
        "meta_vouched": float(meta.store.vouches()),
    }


def data_numbers(budget: Budget, cache: MemCache, blocks: BlockStore) -> Numbers:
    """Memory in use, and what the caches were good for."""
    gauges = budget.gauges()
    hits = cache.stats()
    fetched = blocks.stats()
    return {
        "buffer_limit_bytes": gauges.limit,
        "buffer_writing_bytes": gauges.writing,
        "buffer_cached_bytes": gauges.cached,
        "buffer_readahead_bytes": gauges.ahead,
        "cache_hits_total": hits.hits,
        "cache_misses_total": hits.misses,
        "blocks_fetched_total": fetched.whole,
        "block_ranges_fetched_total": fetched.ranges,
        "blocks_damaged_total": fetched.damaged,
        "blocks_missing_total": fetched.missing,
        "blocks_asked_again_total": fetched.repeated,
    }
