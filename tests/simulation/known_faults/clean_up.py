"""Known faults of clean-up, garbage collection, retention and records."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import statemgr.backends.blobs.clean_up as blob_clean_up
import statemgr.flows.committing.publish as publishing
import statemgr.flows.published as checkpoint_records
import statemgr.operations.gc.gc as collecting
import statemgr.operations.rescale.rescale as rescaling
import statemgr.operations.rescale.undo as undoing
import statemgr.operations.rollback.owner as rolling_back
from statemgr.engine.task_coordinator import TaskCoordinator
from statemgr.errors import FencedError, OutcomeUnknownError, RetryableError
from statemgr.flows.committing.clean_up import CleanUp, taken_over
from statemgr.flows.published import Published
from tests.simulation.known_faults.registry import Patches, imported, known, patch

# --- clean-up --------------------------------------------------------------------------------------------------------


@known
def deletes_before_the_acknowledgement() -> Patches:
    """Blobs of the checkpoint that a commit will evict are deleted before the commit is published."""
    real = TaskCoordinator.publish

    def publish(self: Any, frozen: Any, prepared: Any, input_ids: Any) -> Any:
        record = self.published.records[self._task]
        if record is not None:
            markers: dict[str, dict[str, Any]] = {}
            for store, part in prepared.stores.items():
                for factory, marker in part.markers.items():
                    markers.setdefault(factory, {})[store] = marker
            new = replace(record.current, state_checkpoint_markers=markers)
            kept = record.checkpoints[: self._services.config.retained - 1]
            after: Any = SimpleNamespace(checkpoints=(new, *kept), task=self._task)
            self._clean_up._delete_evicted(record.checkpoints[len(kept) :], after)
        return real(self, frozen, prepared, input_ids)

    return [patch(TaskCoordinator, "publish", publish)]


def _cleaning_after(*kinds: type[BaseException]) -> Patches:
    real, sending = TaskCoordinator.publish, imported(publishing, "send_records")
    sent: dict[str, Any] = {}

    def send_records(config: Any, send: Any, layout: Any, before: Any, after: Any, job_records: Any) -> None:
        sent.update(after)
        sending(config, send, layout, before, after, job_records)

    def publish(self: Any, frozen: Any, prepared: Any, input_ids: Any) -> Any:
        before = self.published.records[self._task]
        sent.clear()
        try:
            return real(self, frozen, prepared, input_ids)
        except kinds:
            if self._task in sent:
                self._clean_up.after_publish(before, sent[self._task], prepared)
            raise

    return [patch(TaskCoordinator, "publish", publish), patch(publishing, "send_records", send_records)]


@known
def deletes_after_an_unknown_outcome() -> Patches:
    """A commit that was not answered is cleaned up after, although the older checkpoint may be the current one."""
    return _cleaning_after(OutcomeUnknownError, RetryableError)


@known
def fenced_owner_cleans_up() -> Patches:
    """An owner that was fenced still deletes what its own commit would have evicted, and a newer owner needs it."""
    return _cleaning_after(FencedError)


@known
def retained_checkpoints_lose_blobs() -> Patches:
    """A clean-up keeps only what the current checkpoint needs, and the other retained ones lose blobs."""
    real = CleanUp._delete_evicted

    def delete(self: Any, evicted: Any, record: Any) -> None:
        older = record.checkpoints[1:]
        kept: Any = SimpleNamespace(checkpoints=record.checkpoints[:1], task=record.task)
        real(self, (*evicted, *older), kept)

    return [patch(CleanUp, "_delete_evicted", delete)]


@known
def ttl_is_never_removed() -> Patches:
    """The TTL of published blobs stays, and they expire."""
    return [patch(CleanUp, "_remove_ttls", lambda self, added: set())]


@known
def ttl_of_a_dead_owner_stays() -> Patches:
    """An opening does not finish the clean-up of an owner that died after its publish."""
    real = CleanUp.at_open

    def at_open(self: Any, record: Any, *, delete: bool = True) -> None:
        real(self, None, delete=delete)

    return [patch(CleanUp, "at_open", at_open)]


@known
def failed_ttl_removal_is_forgotten() -> Patches:
    """A TTL that could not be removed at the first try is not tried again."""
    real = CleanUp._remove_ttls

    def remove(self: Any, added: Any) -> set[str]:
        found = real(self, added)
        self._outstanding = {}
        return found

    def after(self: Any, before: Any, record: Any, commit: Any) -> None:
        real_after(self, before, record, commit)
        self._outstanding = {}

    real_after = CleanUp.after_publish
    return [patch(CleanUp, "_remove_ttls", remove), patch(CleanUp, "after_publish", after)]


@known
def segments_of_retained_chains_are_deleted() -> Patches:
    """A clean-up deletes the segments that an evicted chain has, although a retained chain goes on with them."""
    real = blob_clean_up.Cleaner.clean_up

    class Grows(set[str]):
        def __isub__(self, others: Any) -> Any:
            return self

    def clean_up(self: Any, task: Any, evicted: Any, retained: Any, undeleted: Any) -> Any:
        return real(self, task, evicted, retained, Grows(undeleted))

    return [patch(blob_clean_up.Cleaner, "clean_up", clean_up)]


@known
def a_shared_blob_belongs_to_one_task() -> Patches:
    """A blob that several tasks share is deleted as soon as one of them does not need it any more."""

    def no_longer(self: Any, blob_id: str, owner: Any) -> None:
        for each in self._needed.pop(blob_id):
            self._of_store.get(each, {}).pop(blob_id, None)
        self._unneeded[blob_id] = self._monotonic()

    return [patch(blob_clean_up.SharedSegments, "_no_longer", no_longer)]


@known
def a_dropped_checkpoint_counts_as_kept() -> Patches:
    """A checkpoint that the job drops while it is about to be kept counts as kept."""

    def targets(self: Any, records: Any) -> Any:
        return {task: record.current for task, record in records.items() if self.task in (None, task)}

    return [patch(rolling_back._Keep, "targets", targets)]


@known
def a_rescale_goes_on_in_another_layout() -> Patches:
    """A rescale that another one has overtaken takes the new layout's tasks for those that it has begun with."""
    return [patch(rescaling, "_refuse_other_layout", lambda *args: None)]


@known
def a_layout_is_left_with_ttls() -> Patches:
    """A rescale leaves a layout although its blobs still have a TTL, and its tasks are not opened again."""

    def keep(services: Any, left: Any) -> None:
        for record in left.values():
            taken_over(services, record)

    return [patch(rescaling, "keep_blobs", keep), patch(undoing, "keep_blobs", keep)]


@known
def a_part_of_the_tasks_goes_back() -> Patches:
    """A rollback goes back with the tasks of its configuration, although the job was rescaled to more."""
    return [patch(rolling_back, "_check_tasks", lambda services, records: None)]


@known
def rows_that_are_left_reach_another_task() -> Patches:
    """A rescale does not look at the rows that are left, of which some have keys of another task."""
    return [patch(rescaling, "_check_input", lambda *args: None)]


@known
def an_undo_goes_to_the_layout_before() -> Patches:
    """An undo with the name of a checkpoint makes the newest layout current again, and not the one that retains it."""
    find = imported(undoing, "find_layout")
    return [patch(undoing, "find_layout", lambda log, checkpoint_id: find(log, None))]


@known
def an_undo_takes_back_all_rescales() -> Patches:
    """After two rescales, an undo makes the layout before both current again."""

    def oldest(log: Any, checkpoint_id: Any) -> Any:
        log.read(())
        found = ((one, log.read(generation=one.layout.generation)) for one in log.retired())
        return next((one for one in found if one[1]), None)

    return [patch(undoing, "find_layout", oldest)]


# --- garbage collection ----------------------------------------------------------------------------------------------


@known
def gc_without_a_grace_period() -> Patches:
    """Garbage collection deletes young blobs, which a commit in progress is about to publish."""
    return [patch(collecting, "chosen_grace_ms", lambda config, wanted_ms: 0)]


@known
def gc_keeps_only_current_checkpoints() -> Patches:
    """Garbage collection keeps what the current checkpoint needs, and not what the retained ones need."""
    import statemgr.operations.gc.needed_blobs as needed

    real = needed._needs

    def needs(record: Any, found: Any, **more: Any) -> Any:
        return real(replace(record, checkpoints=record.checkpoints[:1]), found, **more)

    return [patch(needed, "_needs", needs)]


# --- retention and records -------------------------------------------------------------------------------------------


@known
def retention_deletes_the_current_record() -> Patches:
    """A publish deletes one record too many: that of the checkpoint it has just published."""
    real = checkpoint_records._dropped
    return [
        patch(
            checkpoint_records,
            "_dropped",
            lambda before, after: [*real(before, after), *([after.current] if len(real(before, after)) else [])],
        )
    ]


@known
def job_record_is_deleted_too_early() -> Patches:
    """A publish deletes the older job records although records of retained checkpoints refer to them."""
    real = checkpoint_records.sequences

    def sequences(records: Any) -> set[int]:
        return set(sorted(real(records))[-1:])

    return [patch(checkpoint_records, "sequences", sequences)]


@known
def retention_keeps_one_too_few() -> Patches:
    """A publish evicts one checkpoint more than task.checkpoint.retained says."""
    from statemgr.model.checkpoint import CheckpointRecord

    real = CheckpointRecord.followed_by

    def followed_by(self: Any, new: Any, retention: Any = None) -> Any:
        fewer = retention and replace(retention, newest=max(retention.newest - 1, 1))
        return real(self, new, fewer)

    return [patch(CheckpointRecord, "followed_by", followed_by)]


@known
def offsets_of_the_commit_before() -> Patches:
    """A record has the input offsets of the commit before it, so that input is processed twice."""
    real = publishing._Publish._record

    def record(self: Any, commit: Any, *args: Any) -> Any:
        before = self.published.records[commit.task]
        if before is not None:
            commit = replace(commit, input_offsets=before.current.input_offsets)
        return real(self, commit, *args)

    return [patch(publishing._Publish, "_record", record)]


@known
def offsets_of_the_moment_of_the_publish() -> Patches:
    """A commit publishes the input offsets that the task has reached by then, not those of the frozen state."""
    real = publishing._Publish._record

    def record(self: Any, commit: Any, *args: Any) -> Any:
        offsets = {source: at + 1 for source, at in commit.input_offsets.items()}
        return real(self, replace(commit, input_offsets=offsets), *args)

    return [patch(publishing._Publish, "_record", record)]


@known
def sequence_number_is_used_again() -> Patches:
    """Two checkpoints have one sequence number, so the newer record replaces the older one."""
    real = Published.newest_sequence.fget  # type: ignore[attr-defined]
    return [patch(Published, "newest_sequence", property(lambda self: max(real(self) // 2 * 2 - 1, 0)))]
