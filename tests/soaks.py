"""Which tests run with `--soak` only: others show as much of the same in less time.

The suite has to end in 40 minutes on two slow processors. What is left out here waits for timeouts,
repeats with kills what another test does without, or repeats, on another engine, code that is the
same for all engines. Tests that take minutes by themselves say so with `pytest.mark.soak`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent

# Engines differ below `fsmeta/store`. These run on TiKV and on a cluster of Redis, too.
ALL_ENGINES: Final = (
    "fsmeta/store/",
    "fsmeta/txn/",
    "fsmeta/meta/test_batches.py",
    "fsmeta/meta/test_round_trips_tikv.py",
    "posix/test_snapshots.py",
    "posix/two_mounts/test_two_mounts.py",
)
_ENGINE: Final = re.compile(r"\[(.*-)?(tikv|cluster)(-.*)?\]$")

MORE_OF_THE_SAME: Final[Mapping[str, tuple[str, ...]]] = {
    "csi/clients/test_confined.py": (
        "test_one_handle_for_two_stores",
        "test_root_of_a_pod_takes_no_snapshots",
    ),
    "csi/clients/test_local_stores.py": ("test_killed_before_it_has_looked",),
    "csi/services/test_nodes.py": (
        "test_a_damaged_record_harms_no_other_volume",
        "test_a_pod_of_its_own_after_a_reboot",
    ),
    "csi/test_mount_pods.py": (
        "test_a_client_moves_to_a_new_pod",
        "test_no_api_server",
    ),
    "csi/test_trouble.py": ("test_wrong_keys_of_s3",),
    "faults/disks/test_cache.py": ("test_a_cache_disk_is_lost_and_comes_back",),
    "faults/disks/test_full_kept.py": (
        "test_two_mounts_keep_what_fits",
        "test_two_programs_on_one_mount_keep_what_fits",
    ),
    "faults/disks/test_warmup.py": (
        "test_a_full_cache_says_so",
        "test_interrupted_it_goes_on",
        "test_the_store_is_away",
    ),
    "faults/redis/test_locks.py": (
        "test_500_waiters",
        "test_counters_on_two_mounts",
    ),
    "faults/stores/test_sick_store.py": (
        "test_o1_mount_tries_options_of_its_own",
        "test_r3_a_store_that_hangs_is_named_with_a_remedy",
        "test_r3_many_files_wait_for_a_store_that_hangs_as_long_as_one",
    ),
    "faults/stores/test_stores_away.py": (
        "test_a_killed_gateway",
        "test_a_killed_osd",
    ),
    "faults/test_kill.py": ("test_kill_with_sqlite",),
    "faults/test_memory.py": ("test_writes_that_are_kept_for_the_next_client",),
    "faults/test_packing.py": ("test_an_epoch_of_small_files_takes_few_requests",),
    "faults/test_quota.py": ("test_counters_after_kills_with_redis",),
    "faults/writeback/test_staged_snapshots.py": ("test_t2_w2_killed_while_it_takes_a_snapshot",),
    "faults/writeback/test_writeback.py": (
        "test_w1_killed_and_mounted_again",
        "test_w1_killed_with_sqlite",
        "test_w2_killed_and_its_disk_lost",
    ),
    "fsclient/cli/test_every_command.py": ("test_commands_on_guarded_volumes_tell_scripts_alike",),
    "fsclient/cli/test_store_away.py": ("test_the_object_store_of_a_mount_goes_away",),
    "fsclient/cli/upkeep/test_gc_pack.py": (
        "test_o6_packing_with_a_cursor_goes_on_where_it_was_killed",
    ),
    "fsclient/cli/upkeep/test_scrub.py": ("test_a_scrub_that_was_killed_goes_on",),
    "fsclient/cli/upkeep/test_sync.py": ("test_to_s3_and_back_through_a_storm_of_503",),
    "fsclient/cli/volume/test_encryption.py": ("test_on_real_stores",),
    "fsclient/cli/volume/test_tikv.py": (
        "test_a_killed_mount_leaves_nothing_in_the_way",
        "test_timestamps_that_do_not_come",
    ),
    "fsclient/survival/test_handover.py": (
        "test_root_of_a_container_upgrades_nothing",
        "test_supervisors_follow_each_other",
    ),
    "fsclient/survival/test_killed.py": ("test_killed_with_redis",),
    "fsclient/survival/test_takeover.py": (
        "test_a_client_waits_for_its_turn",
        "test_kills_that_follow_each_other",
    ),
    "fsclient/survival/test_trouble.py": ("test_killed_while_the_kernel_waits_for_it",),
    "fsclient/tracing/test_traces.py": ("test_a_collector_that_is_away",),
    "fsclient/upkeep/test_objbench.py": ("test_the_command_on_s3",),
    "fsdata/disk_cache/test_disk_cache_size.py": ("test_c1_many_copies_need_no_memory",),
    "fsdata/disk_cache/test_eviction.py": ("test_the_oldest_files_of_a_shard_go_for_room",),
    "fsmeta/meta/test_batches.py": ("test_q1_quotas_above_very_deep_directories",),
    "fsmeta/ops/names/test_many_names.py": (
        "test_a_large_directory_of_a_dead_clone_is_removed",
        "test_a_large_hour_of_the_trash_is_emptied",
    ),
    "fsmeta/store/redis/test_redis_sets.py": ("test_a_node_dies_under_load",),
    "fsmeta/store/tikv/test_tikv.py": ("test_a_large_row_in_bounded_memory",),
    "fsmeta/store/tikv/test_tikv_faults.py": ("test_no_answer_is_waited_for_without_end",),
    "posix/test_atime.py": ("test_p1_reading_moves_atime_as_on_tmpfs",),
    "posix/test_ranges.py": ("test_p4_a_file_without_a_name_stays_and_goes",),
    "slicefs/test_attached_caches.py": ("test_warmup_fills_attached_files",),
    "slicefs/test_copy_up.py": (
        "test_maps_are_written_and_read_on_both_mounts",
        "test_mounts_that_open_without_asking_follow",
    ),
    "slicefs/test_trees.py": ("test_a_listing_has_more_than_a_page_of_names",),
}


def is_more_of_the_same(path: Path, name: str) -> bool:
    """Whether a test, by its file and its name with parameters, is left out without `--soak`."""
    file = path.relative_to(HERE).as_posix()
    if name.split("[")[0] in MORE_OF_THE_SAME.get(file, ()):
        return True
    engines = file.startswith(("fsmeta/", "posix/", "faults/")) and not file.startswith(ALL_ENGINES)
    return engines and _ENGINE.search(name) is not None
