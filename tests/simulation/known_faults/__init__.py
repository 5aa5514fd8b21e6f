"""Faults that the project once had, or that others have, and that the simulation must find when they are put back.

A function makes the patches of one fault. Its docstring says in one sentence what the fault is, and where it is from.
:data:`FOUND_BY` has a seed of each that fails with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.known_faults import backends, clean_up, local, owners  # each adds its own
from tests.simulation.known_faults.registry import KNOWN, put_back

__all__ = ["FOUND_BY", "KNOWN", "NOT_FOUND", "backends", "clean_up", "local", "owners", "put_back"]

#: Fault → a seed that fails with it, the first one where all before it were tried.
FOUND_BY: Mapping[str, int] = {
    "replay_beyond_the_checkpoint": 5,
    "offset_of_the_last_record": 0,
    "fill_without_tombstones": 18,
    "cut_changelogs_count_as_whole": 8,
    "switched_on_without_a_fill": 0,
    "dead_markers_are_carried": 51,
    "oldest_change_of_a_key_wins": 50,
    "diff_by_name_and_size": 11,
    "a_segment_is_missing": 0,
    "segments_in_the_wrong_order": 0,
    "snapshot_claims_a_later_commit": 50,
    "chain_skips_to_a_later_snapshot": 5,
    "histories_are_told_apart_by_numbers": 43,
    "snapshot_of_another_branch": 19,
    "half_a_directory": 51,
    "deletes_before_the_acknowledgement": 51,
    "fenced_owner_cleans_up": 8,
    "retained_checkpoints_lose_blobs": 5,
    "ttl_is_never_removed": 0,
    "ttl_of_a_dead_owner_stays": 19,
    "segments_of_retained_chains_are_deleted": 43,
    "a_dropped_checkpoint_counts_as_kept": 100,
    "gc_keeps_only_current_checkpoints": 5,
    "retention_deletes_the_current_record": 0,
    "job_record_is_deleted_too_early": 61,
    "retention_keeps_one_too_few": 0,
    "offsets_of_the_commit_before": 0,
    "offsets_of_the_moment_of_the_publish": 0,
    "sequence_number_is_used_again": 0,
    "state_id_is_not_new": 0,
    "state_id_by_number": 30,
    "buffered_changes_do_not_count": 0,
    "unchanged_stores_get_new_ids": 1,
    "local_directory_of_another_state": 0,
    "live_directory_is_continued": 5,
    "lock_is_not_released": 0,
    "directories_in_use_are_removed": 6,
    "missing_state_starts_empty": 22,
    "fence_after_the_read": 9,
    "no_fence": 2,
    "only_own_kind_is_fenced": 43,
    "zombie_takes_its_id_again": 16,
    "one_epoch_for_two_owners": 16,
    "epoch_is_not_checked": 0,
    "read_to_the_last_stable_offset": 16,
    "uncommitted_records_are_read": 11,
    "waits_for_a_last_record": 0,
    "newest_record_loses": 0,
    "unknown_is_success": 1,
    "failed_commit_drops_its_changes": 50,
    "changes_during_a_commit_are_dropped": 2,
    "success_before_the_commit": 0,
    "upload_that_failed_counts": 29,
}

#: Faults that no seed has found so far.
NOT_FOUND: frozenset[str] = frozenset(
    {
        "old_directory_is_continued",
        "files_of_an_unpublished_snapshot_are_reused",
        "segments_are_cached_by_number",
        "deletes_after_an_unknown_outcome",
        "failed_ttl_removal_is_forgotten",
        "gc_without_a_grace_period",
        "a_full_disk_has_no_type",
        "unknown_is_failed",
    }
)
