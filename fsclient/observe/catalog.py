"""What each number of a mount means: the HELP and TYPE lines of the Prometheus text.

A test compares this table with what a real mount shows. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_OBJECT_VERBS: Final = ("put", "get", "delete", "head", "list", "sync")
_HELP: Final[Mapping[str, str]] = {
    "operations_total": "Kernel requests served.",
    "operation_errors_total": "Kernel requests answered with an errno.",
    "operation_seconds_total": "Total seconds of kernel requests.",
    "operation_bytes_total": "Bytes of file data that reads returned and writes accepted.",
    "operation_duration_seconds": "Latency of kernel requests.",
    "meta_round_trips_total": "Requests to the metadata store.",
    "meta_request_duration_seconds": "Latency of requests to the metadata store.",
    "meta_commits_total": "Commits of metadata.",
    "meta_conflicts_total": "Commits that ran again because what they had read changed.",
    "meta_repeats_total": "Commits sent again because their answer was lost.",
    "meta_unavailable_total": "Requests that found no metadata store.",
    "meta_vouched": "1 while the metadata store reports changes; 0: caches are trusted for 1 s.",
    "meta_silent_seconds": "Seconds since the metadata store last answered a heartbeat.",
    "meta_backups_total": "Backups of the metadata made.",
    "meta_backups_failed_total": "Backups of the metadata that failed.",
    "buffer_limit_bytes": "Memory that file data may take.",
    "buffer_writing_bytes": "Memory of write buffers.",
    "buffer_cached_bytes": "Memory of cached blocks.",
    "buffer_readahead_bytes": "Memory of read-ahead.",
    "cache_hits_total": "Reads of blocks that the memory cache answered.",
    "cache_misses_total": "Reads of blocks that the memory cache did not have.",
    "cache_level_hits_total": "Reads by the level that answered: memory, disk or store.",
    "kernel_leases": "Names and inodes that the kernel may answer for without a request.",
    "kernel_notifications_total": "Notifications that told the kernel to drop what it had cached.",
    "blocks_fetched_total": "Whole blocks fetched.",
    "block_ranges_fetched_total": "Parts of blocks fetched.",
    "blocks_damaged_total": "Blocks whose checksum was wrong.",
    "blocks_missing_total": "Blocks whose object was missing.",
    "blocks_asked_again_total": "Fetches that were repeated because the block was damaged.",
    "disk_cache_hits_total": "Reads that a cache disk answered.",
    "disk_cache_misses_total": "Reads that no cache disk answered.",
    "disk_cache_waits_total": "Misses that another process of this host was fetching already.",
    "disk_cache_hit_bytes_total": "Bytes read from cache disks.",
    "disk_cache_written_bytes_total": "Bytes of copies written to cache disks.",
    "disk_cache_drops_total": "Copies not made, for lack of space or time.",
    "disk_cache_bad_total": "Copies with wrong bytes.",
    "disk_cache_queue_bytes": "Copies that wait in memory for a cache disk.",
    "disk_cache_bytes": "Bytes on cache disks.",
    "disk_cache_limit_bytes": "Bytes allowed on cache disks.",
    "disk_cache_evictions_total": "Copies removed to make space, or because they expired.",
    "disk_cache_errors_total": "Errors of cache disks.",
    "disk_cache_disks": "Cache disks.",
    "disk_cache_disks_aside": "Cache disks that are in quarantine after errors.",
    "warmup_blocks_total": "Blocks that warmup put into a cache.",
    "warmup_bytes_total": "Bytes that warmup put into a cache.",
    "warmup_failures_total": "Blocks that warmup could not fetch.",
    "warmup_now_bytes": "Bytes that warmup is fetching now.",
    "object_request_duration_seconds": "Latency of requests to the object store, by outcome.",
    "object_repeats_total": "Requests to the object store that were sent again.",
    "object_throttled_total": "Requests that the object store refused because there were too many.",
    "object_window": "Limit of requests to the object store at a time.",
    "object_requests_now": "Requests to the object store in progress.",
    **{f"object_{verb}_count_total": f"Requests to the store: {verb}." for verb in _OBJECT_VERBS},
    **{f"object_{verb}_errors_total": f"Failed requests: {verb}." for verb in _OBJECT_VERBS},
    **{f"object_{verb}_bytes_total": f"Bytes moved by {verb}." for verb in _OBJECT_VERBS},
    **{f"object_{verb}_seconds_total": f"Total seconds of {verb}." for verb in _OBJECT_VERBS},
    "staging_changes": "Changes that are not published yet.",
    "staging_objects": "Objects that are not uploaded yet.",
    "staging_bytes": "Bytes that are not uploaded yet.",
    "staging_disk_bytes": "Bytes that write-back uses on its disk.",
    "staging_lag_seconds": "Age of the oldest change that is not published.",
    "staging_durable_through_seconds": "Unix time up to which all changes are published.",
    "staging_published_total": "Changes published.",
    "staging_conflicts_total": "Changes left out because another client was faster.",
    "staging_written_through_total": "Objects that bypassed a full or failed staging disk.",
    "staging_packed_total": "Small files packed before their upload.",
    "staging_segments_total": "Blocks made of packed small files.",
    "upload_threads": "Blocks that may be uploaded at a time.",
    "open_handles": "Files and directories that are open.",
    "passthrough_opens_total": "Opens of files that the kernel reads from a cache disk by itself.",
    "whole_files_made_total": "Whole files put on cache disks for such opens.",
    "inodes_purged_total": "Inodes deleted by this mount as the leader.",
    "trash_expired_total": "Names deleted from the trash.",
    "slices_deleted_total": "Slices deleted by this mount as the leader.",
    "atimes_moved_total": "Access times committed.",
    "chunks_compacted_total": "Chunks rewritten.",
    "files_packed_total": "Small files packed.",
    "segments_made_total": "Blocks made of packed files.",
    "quotas": "Quotas of the volume.",
    "quotas_near_full": "Quotas past 80 %.",
    "quotas_full": "Quotas past 100 %.",
    "qos_limits": "Rate limits that this mount keeps to.",
    "qos_requests_held": "Requests that wait for a rate limit.",
    "qos_requests_delayed_total": "Requests that had to wait for a rate limit.",
    "sessions": "Clients of the volume, when the HTTP endpoint last asked.",
    "read_only": "1 since corrupt metadata was found, or the store went back to an older state.",
    "idle_polling": "1 while idle processors poll for work.",
    "idle_polling_asked_total": "Times that polling was switched on.",
    "lock_owners": "Owners of file locks on this mount.",
    "lock_waits": "Requests that wait for a file lock.",
    "prefetched_blocks_total": "Blocks fetched whole after reads at random.",
    "prefetch_skipped_total": "Blocks not fetched whole, for lack of space or time.",
    "accesslog_readers": "Open handles of .accesslog, and the file of --access-log.",
    "accesslog_dropped_total": "Lines of access logs dropped because a reader was too slow.",
    "trace_spans_sent_total": "Spans of traces that the collector has accepted.",
    "trace_spans_dropped_total": "Spans dropped because the collector was away or too slow.",
    "slow_operations_total": "Requests that took at least --slow-op-log.",
}


def help_of(family: str) -> str:
    """One sentence about a family of series; its name in words where it has none of its own."""
    return _HELP.get(family) or f"{family.replace('_', ' ').capitalize()}."


def kind_of(family: str) -> str:
    """`counter` or `gauge`, by its name."""
    return "counter" if family.endswith("_total") else "gauge"


def families() -> list[str]:
    """All that have a sentence, in the order of their names."""
    return sorted(_HELP)


def is_known(family: str) -> bool:
    """Whether the table has a sentence about it."""
    return family in _HELP
