"""Where the numbers of a mount come from: each part's counters under the names that users see.

Called by the registry through `fsclient/mount`. Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsclient.fuse.session.stats import OpStats
from fsclient.observe.registry import MetricSample, Numbers, Series
from fsdata.blocks.blocks import BlockStore
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.latency import HistogramReading
from fsmeta.meta.meta import Meta


def operation_sample(operations: Mapping[str, OpStats]) -> MetricSample:
    """Kernel requests by name: what they add up to, and how long they took."""
    return MetricSample(operation_numbers(operations), operation_latencies(operations))


def operation_numbers(operations: Mapping[str, OpStats]) -> Numbers:
    """Kernel requests by name: how many, how many failed, their seconds and bytes together."""
    out: dict[str, float] = {}
    for name, each in operations.items():
        out[f'operations_total{{op="{name}"}}'] = each.calls
        out[f'operation_errors_total{{op="{name}"}}'] = each.errors
        out[f'operation_seconds_total{{op="{name}"}}'] = each.total_ns / 1e9
    for name in ("read", "write"):
        moved = operations[name].bytes if name in operations else 0
        out[f'operation_bytes_total{{op="{name}"}}'] = moved
    return out


def operation_latencies(operations: Mapping[str, OpStats]) -> Iterator[Series]:
    """How long kernel requests took, by name."""
    for name, each in operations.items():
        yield Series("operation_duration_seconds", f'op="{name}"', each.latency)


def request_latencies(
    name: str, readings: Mapping[tuple[str, str], HistogramReading]
) -> Iterator[Series]:
    """How long requests to a store took, by verb and outcome."""
    for (verb, outcome), reading in readings.items():
        yield Series(name, f'verb="{verb}",outcome="{outcome}"', reading)


def cache_levels(
    cache: BlockCache, disk: Mapping[str, float], objects: Mapping[str, float]
) -> Numbers:
    """Which level has answered reads; what the kernel answers itself is never seen here."""
    hits = {
        "memory": cache.stats().hits,
        "disk": disk.get("disk_cache_hits_total", 0),
        "store": objects["get_count"],
    }
    return {f'cache_level_hits_total{{level="{level}"}}': n for level, n in hits.items()}


def metadata_numbers(meta: Meta) -> Numbers:
    """What the metadata engine was asked, and how often in vain."""
    counters = meta.transactor.counters
    return {
        "meta_round_trips_total": meta.store.round_trips,
        "meta_commits_total": counters.commits,
        "meta_conflicts_total": counters.conflicts,
        "meta_repeats_total": counters.repeats,
        "meta_unavailable_total": counters.unavailable,
        "meta_vouched": float(meta.store.has_leases()),
    }


def data_numbers(budget: MemoryBudget, cache: BlockCache, blocks: BlockStore) -> Numbers:
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
