"""Faults that the project once had, or that others have, and that the simulation must find when they are put back.

A function makes the patches of one fault. Its docstring says in one sentence what the fault is, and where it is from.
:data:`FOUND_BY` has the first seed of each that fails with it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import statemgr.backends.blobs.clean_up as blob_clean_up
import statemgr.backends.blobs.local_notes as local_notes
import statemgr.backends.blobs.restore as blob_restore
import statemgr.backends.blobs.snapshots as snapshots
import statemgr.backends.blobs.writer_state as writer_state
import statemgr.backends.changelog.backup as changelog_backup
import statemgr.backends.changelog.restore as changelog_restore
import statemgr.engine.task as engine_task
import statemgr.flows.committing.checkpoint_records as checkpoint_records
import statemgr.flows.committing.publish as publishing
import statemgr.flows.opening.restore as restoring
import statemgr.flows.owner as owning
import statemgr.kafka.reader as reading
import statemgr.local.change_buffer as change_buffer
import statemgr.local.directories as local_directories
import statemgr.local.shared_directories as shared_directories
import statemgr.operations.gc.gc as collecting
from statemgr.engine.task_coordinator import TaskCoordinator
from statemgr.errors import (
    FencedError,
    MissingError,
    OutcomeUnknownError,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.flows.committing.clean_up import CleanUp
from statemgr.flows.published import Published
from statemgr.ids import IdSource
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.transactions.producer import TransactionalProducer
from statemgr.local.committed import CommittedDirectories
from statemgr.model.chain import Way
from statemgr.stores.open_store import OpenStore

Patches = list[Any]
KNOWN: dict[str, Callable[[], Patches]] = {}


def _known(make: Callable[[], Patches]) -> Callable[[], Patches]:
    KNOWN[make.__name__] = make
    return make


def _patch(target: object, name: str, value: object) -> Any:
    return mock.patch.object(target, name, value)


def _of(target: object, name: str) -> Any:
    """What a module has imported."""
    return getattr(target, name)


@contextmanager
def put_back(name: str | None) -> Iterator[None]:
    """In this block the product has the fault of this name."""
    with ExitStack() as stack:
        for patch in KNOWN[name]() if name is not None else ():
            stack.enter_context(patch)
        yield


# --- fencing ---------------------------------------------------------------------------------------------------------


@_known
def fence_after_the_read() -> Patches:
    """An opening reads the topic and then fences, so that it misses what the older owner publishes in between."""
    take = owning.Owner.take.__func__  # type: ignore[attr-defined]

    class Stale:
        def __init__(self, log: Any, found: Any) -> None:
            self._log, self._found = log, [found]

        def read(self, *args: Any, **more: Any) -> Any:
            return self._found.pop() if self._found and not args else self._log.read(*args, **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._log, name)

    def early(cls: Any, services: Any, log: Any, *args: Any, **more: Any) -> Any:
        with suppress(MissingError):
            log = Stale(log, log.read())
        services.clock.sleep(1.0)
        return take(cls, services, log, *args, **more)

    return [_patch(owning.Owner, "take", classmethod(early))]


@_known
def no_fence() -> Patches:
    """Every owner has a transactional ID of its own, so nobody is fenced."""
    real, numbers = _of(owning, "task_transactional_id"), itertools.count()
    return [_patch(owning, "task_transactional_id", lambda config, task: f"{real(config, task)}-{next(numbers)}")]


@_known
def only_own_kind_is_fenced() -> Patches:
    """A task's owner does not fence the owner of the whole job, and the other way round."""
    return [_patch(owning.Owner, "fence_others", lambda self: None)]


@_known
def zombie_takes_its_id_again() -> Patches:
    """An owner whose ID was forgotten, or whose transaction timed out, takes the ID again without reading the topic."""

    def regain(self: Any, expected: Any) -> None:
        self.publisher.regain()

    return [_patch(owning.Owner, "_regain", regain), _patch(owning.Owner, "confirm", lambda self: None)]


@_known
def one_epoch_for_two_owners() -> Patches:
    """The epoch is the newest published one plus one, so two owners that read the same topic have the same."""
    return [_patch(IdSource, "epoch", lambda self, newest: newest + 1)]


@_known
def epoch_is_not_checked() -> Patches:
    """A driver publishes a commit that was prepared for an older owner."""
    real = publishing._Publish._check_base

    def check(self: Any, commit: Any) -> None:
        real(self, replace(commit, epoch=self.published.epoch))

    return [_patch(publishing._Publish, "_check_base", check)]


# --- reading the topic -----------------------------------------------------------------------------------------------


@_known
def read_to_the_last_stable_offset() -> Patches:
    """An opening reads only up to the first open transaction, which hides newer records of its own task."""
    real = CheckpointTopic._bounds
    return [_patch(CheckpointTopic, "_bounds", lambda self, only_settled=False: real(self, True))]


@_known
def uncommitted_records_are_read() -> Patches:
    """Readers take records of open and aborted transactions too, which is Kafka's default isolation.level."""
    real = _of(reading, "consumer")

    def consumer(*args: Any, **more: Any) -> Any:
        return real(*args, **{**more, "isolation_level": "read_uncommitted"})

    return [_patch(reading, "consumer", consumer)]


@_known
def waits_for_a_last_record() -> Patches:
    """A read waits for a record at the last offset, where a transaction's marker is (Quix Streams)."""

    def after(self: Any, event: Any) -> int:
        return 0

    return [_patch(reading._Reading, "_after", after)]


@_known
def newest_record_loses() -> Patches:
    """Of several records the one with the highest sequence number counts, even if an older owner wrote it later."""
    from statemgr.kafka.checkpoint_assembly import Track

    real = Track.newest_first
    return [_patch(Track, "newest_first", lambda self: list(reversed(real(self))))]


# --- outcomes --------------------------------------------------------------------------------------------------------


def _settled(was_published: bool) -> Callable[[Any], bool]:
    def settle(self: Any) -> bool:
        pending, self.published.pending = self.published.pending, {}
        with suppress(StatemgrError):
            self.publisher.settle()
        if self.publisher.regained:
            self.publisher.regain()
        self.publisher.confirmed()
        if was_published:
            self.published.acknowledge(pending)
        return was_published

    return settle


@_known
def unknown_is_failed() -> Patches:
    """A commit that was not answered counts as failed, and is not looked for on the topic."""
    return [_patch(owning.Owner, "settle", _settled(False))]


@_known
def unknown_is_success() -> Patches:
    """A commit that was not answered counts as published."""
    return [_patch(owning.Owner, "settle", _settled(True))]


@_known
def failed_commit_drops_its_changes() -> Patches:
    """Changes count as stored when they are taken for a commit, so a failed commit loses them."""
    real = change_buffer.ChangeBuffer.freeze

    def freeze(self: Any) -> Any:
        frozen = real(self)
        kept = tuple(frozen._generations)
        self._sealed = []
        return change_buffer.FrozenChanges(frozen.session, frozen.freeze, frozen.end, kept)

    return [_patch(change_buffer.ChangeBuffer, "freeze", freeze)]


@_known
def changes_during_a_commit_are_dropped() -> Patches:
    """An acknowledgement drops the changes that were made while the commit was in progress."""

    def acknowledge(self: Any, frozen: Any) -> None:
        self._sealed = []
        self._growing = change_buffer._Generation(self._growing.end)

    return [_patch(change_buffer.ChangeBuffer, "acknowledge", acknowledge)]


@_known
def success_before_the_commit() -> Patches:
    """The commit request of the transaction is not sent, and the publish counts as a success."""
    return [_patch(TransactionalProducer, "commit", lambda self, deadline: None)]


@_known
def upload_that_failed_counts() -> Patches:
    """A blob whose upload was not answered counts as stored."""
    from statemgr.blobs.retrying import RetryingBlobStore

    def put(self: Any, *args: Any, **more: Any) -> None:
        with suppress(RetryableError):
            self.inner.put(*args, **more)

    return [_patch(RetryingBlobStore, "put", put)]


# --- clean-up --------------------------------------------------------------------------------------------------------


@_known
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

    return [_patch(TaskCoordinator, "publish", publish)]


def _cleaning_after(*kinds: type[BaseException]) -> Patches:
    real, sending = TaskCoordinator.publish, _of(publishing, "send_records")
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

    return [_patch(TaskCoordinator, "publish", publish), _patch(publishing, "send_records", send_records)]


@_known
def deletes_after_an_unknown_outcome() -> Patches:
    """A commit that was not answered is cleaned up after, although the older checkpoint may be the current one."""
    return _cleaning_after(OutcomeUnknownError, RetryableError)


@_known
def fenced_owner_cleans_up() -> Patches:
    """An owner that was fenced still deletes what its own commit would have evicted, and a newer owner needs it."""
    return _cleaning_after(FencedError)


@_known
def retained_checkpoints_lose_blobs() -> Patches:
    """A clean-up keeps only what the current checkpoint needs, and the other retained ones lose blobs."""
    real = CleanUp._delete_evicted

    def delete(self: Any, evicted: Any, record: Any) -> None:
        older = record.checkpoints[1:]
        kept: Any = SimpleNamespace(checkpoints=record.checkpoints[:1], task=record.task)
        real(self, (*evicted, *older), kept)

    return [_patch(CleanUp, "_delete_evicted", delete)]


@_known
def ttl_is_never_removed() -> Patches:
    """The TTL of published blobs stays, and they expire."""
    return [_patch(CleanUp, "_remove_ttls", lambda self, added: set())]


@_known
def ttl_of_a_dead_owner_stays() -> Patches:
    """An opening does not finish the clean-up of an owner that died after its publish."""
    real = CleanUp.at_open

    def at_open(self: Any, record: Any, *, delete: bool = True) -> None:
        real(self, None, delete=delete)

    return [_patch(CleanUp, "at_open", at_open)]


@_known
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
    return [_patch(CleanUp, "_remove_ttls", remove), _patch(CleanUp, "after_publish", after)]


@_known
def segments_of_retained_chains_are_deleted() -> Patches:
    """A clean-up deletes the segments that an evicted chain has, although a retained chain goes on with them."""
    real = blob_clean_up.Cleaner._chains

    def chains(self: Any, identity: Any, markers: Any, *, missing_is_gone: bool = False) -> Any:
        found = real(self, identity, markers, missing_is_gone=missing_is_gone)
        if missing_is_gone or not found:
            return found
        return {marker: replace(chain, segments=()) for marker, chain in found.items()}

    return [_patch(blob_clean_up.Cleaner, "_chains", chains)]


# --- garbage collection ----------------------------------------------------------------------------------------------


@_known
def gc_without_a_grace_period() -> Patches:
    """Garbage collection deletes young blobs, which a commit in progress is about to publish."""
    return [_patch(collecting, "chosen_grace_ms", lambda config, wanted_ms: 0)]


@_known
def gc_keeps_only_current_checkpoints() -> Patches:
    """Garbage collection keeps what the current checkpoint needs, and not what the retained ones need."""
    import statemgr.operations.gc.needed_blobs as needed

    real = needed._needs

    def needs(record: Any, found: Any, **more: Any) -> Any:
        return real(replace(record, checkpoints=record.checkpoints[:1]), found, **more)

    return [_patch(needed, "_needs", needs)]


# --- retention and records -------------------------------------------------------------------------------------------


@_known
def retention_deletes_the_current_record() -> Patches:
    """A publish deletes one record too many: that of the checkpoint it has just published."""
    real = checkpoint_records._dropped
    return [
        _patch(
            checkpoint_records,
            "_dropped",
            lambda before, after: [*real(before, after), *([after.current] if len(real(before, after)) else [])],
        )
    ]


@_known
def job_record_is_deleted_too_early() -> Patches:
    """A publish deletes the older job records although records of retained checkpoints refer to them."""
    real = checkpoint_records.sequences

    def sequences(records: Any) -> set[int]:
        return set(sorted(real(records))[-1:])

    return [_patch(checkpoint_records, "sequences", sequences)]


@_known
def retention_keeps_one_too_few() -> Patches:
    """A publish evicts one checkpoint more than task.checkpoint.retained says."""
    from statemgr.model.checkpoint import CheckpointRecord

    real = CheckpointRecord.followed_by
    return [_patch(CheckpointRecord, "followed_by", lambda self, new, retained: real(self, new, max(retained - 1, 1)))]


@_known
def offsets_of_the_commit_before() -> Patches:
    """A record has the input offsets of the commit before it, so that input is processed twice."""
    real = publishing._Publish._record

    def record(self: Any, commit: Any, *args: Any) -> Any:
        before = self.published.records[commit.task]
        if before is not None:
            commit = replace(commit, input_offsets=before.current.input_offsets)
        return real(self, commit, *args)

    return [_patch(publishing._Publish, "_record", record)]


@_known
def offsets_of_the_moment_of_the_publish() -> Patches:
    """A commit publishes the input offsets that the task has reached by then, not those of the frozen state."""
    real = publishing._Publish._record

    def record(self: Any, commit: Any, *args: Any) -> Any:
        offsets = {source: at + 1 for source, at in commit.input_offsets.items()}
        return real(self, replace(commit, input_offsets=offsets), *args)

    return [_patch(publishing._Publish, "_record", record)]


@_known
def sequence_number_is_used_again() -> Patches:
    """Two checkpoints have one sequence number, so the newer record replaces the older one."""
    real = Published.newest_sequence.fget  # type: ignore[attr-defined]
    return [_patch(Published, "newest_sequence", property(lambda self: max(real(self) // 2 * 2 - 1, 0)))]


# --- state IDs and local directories ---------------------------------------------------------------------------------


@_known
def state_id_is_not_new() -> Patches:
    """Changed content keeps its state ID, and counts as unchanged."""
    real = OpenStore.freeze

    def freeze(self: Any, state_id: str, *, snapshot: bool) -> Any:
        return real(self, self.state_id or state_id, snapshot=snapshot)

    return [_patch(OpenStore, "freeze", freeze)]


@_known
def state_id_by_number() -> Patches:
    """State IDs are numbers of commits, so that two owners' different states have the same (Spark's versions)."""
    real = _of(engine_task, "freeze")

    def freeze(services: Any, stores: Any, base: Any, *args: Any, **more: Any) -> Any:
        frozen = real(services, stores, base, *args, **more)
        number = base.checkpoint.sequence + 1 if base.checkpoint else 1
        parts = {
            name: replace(part, state_id=f"{number}-{0:016x}-{name}") if stores[name].changed else part
            for name, part in frozen.stores.items()
        }
        return replace(frozen, stores=parts)

    return [_patch(engine_task, "freeze", freeze)]


@_known
def buffered_changes_do_not_count() -> Patches:
    """A store whose changes are still in the write buffer counts as unchanged."""
    return [
        _patch(
            OpenStore,
            "changed",
            property(lambda self: self.state_id is None or self.local.sequence_number != self._committed_at),
        )
    ]


@_known
def unchanged_stores_get_new_ids() -> Patches:
    """Every commit stores every store again, changed or not."""
    return [_patch(OpenStore, "changed", property(lambda self: True))]


@_known
def local_directory_of_another_state() -> Patches:
    """An opening uses whatever local directory there is."""
    real = local_directories.StoreDirectories.find

    def find(self: Any, state_id: str) -> Any:
        found = real(self, state_id)
        for other in self.reusable() if found is None else ():
            return replace(other, state_id=state_id)
        return found

    return [_patch(local_directories.StoreDirectories, "find", find)]


@_known
def live_directory_is_continued() -> Patches:
    """After a crash the live database is continued (Kafka Streams: a checkpoint file survived under EOS)."""
    real = local_directories.StoreDirectories.clone

    def clone(self: Any, committed: Any) -> Any:
        live = real(self, committed)
        left = sorted(self._root.joinpath("live").iterdir(), key=lambda path: path.name)
        for other in reversed(left):
            if other != live and committed is not None and any(other.iterdir()):
                import shutil

                for name in os.listdir(other):
                    with suppress(FileNotFoundError):
                        os.unlink(live / name)
                    shutil.copy(other / name, live / name)
                break
        return live

    return [_patch(local_directories.StoreDirectories, "clone", clone)]


@_known
def lock_is_not_released() -> Patches:
    """A lock of the local directories is held until its process ends."""

    @contextmanager
    def exclusive(lock: Any, clock: Any) -> Iterator[bool]:
        descriptor = _of(shared_directories, "durable").open_regular(lock, shared_directories._FLAGS)
        deadline = clock.monotonic() + 60
        while not shared_directories._locked(descriptor):
            if clock.monotonic() >= deadline:
                raise UnavailableError("locked")
            clock.sleep(1)
        yield True

    return [_patch(shared_directories, "exclusive", exclusive)]


@_known
def directories_in_use_are_removed() -> Patches:
    """Tidying removes the live and staging directories of processes that still run."""
    return [_patch(local_directories.StoreDirectories, "_alive", lambda self: set())]


@_known
def missing_state_starts_empty() -> Patches:
    """A state that nothing can supply is an empty start."""
    real = restoring._Restore.restore

    def restore(self: Any) -> Any:
        try:
            return real(self)
        except (MissingError, RetryableError):
            return None, restoring.StoreRestore(self.plan.store, "empty")

    return [_patch(restoring._Restore, "restore", restore)]


# --- changelogs ------------------------------------------------------------------------------------------------------


@_known
def replay_beyond_the_checkpoint() -> Patches:
    """A restore replays the changelog to its end, not to the offset of its checkpoint."""
    real = changelog_restore.ChangelogRestore._apply

    def apply(self: Any, request: Any, marker: Any, start: int, writer: Any) -> Any:
        end = self._services.changelog().settled_end(marker.topic, marker.partition)
        return real(self, request, replace(marker, offset=max(end, marker.offset)), start, writer)

    return [_patch(changelog_restore.ChangelogRestore, "_apply", apply)]


@_known
def offset_of_the_last_record() -> Patches:
    """A marker has the offset of the last record, not the one after it."""
    real = changelog_backup._Staged.marker

    def marker(self: Any, delivered: Any) -> Any:
        made: Any = real(self, delivered)
        return made if made.offset <= made.start else replace(made, offset=made.offset - 1)

    return [_patch(changelog_backup._Staged, "marker", marker)]


@_known
def old_directory_is_continued() -> Patches:
    """A replay continues an old local directory, although compaction may have removed deletes since."""
    return [_patch(changelog_restore.ReplayBase, "is_usable", lambda self, now: True)]


@_known
def fill_without_tombstones() -> Patches:
    """A backend that is switched on again is filled without deletes of the keys that it still has."""
    return [_patch(changelog_backup, "deletes_of", lambda *args: iter(()))]


@_known
def switched_on_without_a_fill() -> Patches:
    """A backend that is switched on gets only the changes of the next commits."""
    real = changelog_backup.ChangelogBackup.prepare

    def prepare(self: Any, snapshot: Any, base: Any, *, portable: bool) -> Any:
        return real(self, replace(snapshot, whole=snapshot.changes), base, portable=portable)

    return [_patch(changelog_backup.ChangelogBackup, "prepare", prepare)]


@_known
def dead_markers_are_carried() -> Patches:
    """Markers of a backend that was switched off are carried forward, and switching it on again does not fill it."""
    real = publishing._Publish._record

    def record(self: Any, commit: Any, *args: Any) -> Any:
        made = real(self, commit, *args)
        base = self.published.checkpoint(commit.task)
        markers = {**(base.state_checkpoint_markers if base else {}), **made.current.state_checkpoint_markers}
        new = replace(made.current, state_checkpoint_markers=markers)
        return replace(made, checkpoints=(new, *made.checkpoints[1:]))

    return [_patch(publishing._Publish, "_record", record)]


@_known
def oldest_change_of_a_key_wins() -> Patches:
    """Of several changes of a key in one commit, the oldest one is sent."""

    class Net(change_buffer.NetChanges):
        def __iter__(self) -> Iterator[Any]:
            found: dict[bytes, bytes | None] = {}
            for generation in self._generations:
                for key, value in generation:
                    found.setdefault(key, value)
            yield from found.items()

    return [_patch(change_buffer, "NetChanges", Net)]


# --- snapshots and segments ------------------------------------------------------------------------------------------


@_known
def diff_by_name_and_size() -> Patches:
    """A file counts as stored if the last snapshot has one of its name and size (Samza's blob store backend)."""
    real = _of(snapshots, "diff")

    def diff(local: Any, base: Any) -> Any:
        known = {(path, file.size): file for path, file in base.walk()} if base else {}
        found = real(local, base)
        kept = dict(found.kept)
        added = []
        for file in found.added:
            same = known.get((file.path, file.size))
            if same is None:
                added.append(file)
            else:
                kept[file.path] = same
        return replace(found, added=tuple(added), kept=kept)

    return [_patch(snapshots, "diff", diff)]


@_known
def files_of_an_unpublished_snapshot_are_reused() -> Patches:
    """A snapshot refers to files of a snapshot that was not published, which expire (Spark's RocksDB file mapping)."""
    real = snapshots.Snapshots.store
    last: dict[str, Any] = {}

    def store(self: Any, snapshot: Any, base: Any, notes: Any = None) -> Any:
        stored = real(self, snapshot, last.get(str(snapshot.identity), base), notes)
        last[str(snapshot.identity)] = stored.index
        return stored

    return [_patch(snapshots.Snapshots, "store", store)]


@_known
def a_segment_is_missing() -> Patches:
    """A restore leaves out one segment of a chain."""
    real = _of(blob_restore, "own_way")

    def own_way(chain: Any) -> Any:
        way = real(chain)
        return Way(way.snapshot, way.segments[:1] + way.segments[2:])

    return [_patch(blob_restore, "own_way", own_way)]


@_known
def segments_in_the_wrong_order() -> Patches:
    """A restore applies the newest segment first."""
    real = _of(blob_restore, "own_way")

    def own_way(chain: Any) -> Any:
        way = real(chain)
        return Way(way.snapshot, tuple(reversed(way.segments)))

    def apply(self: Any, local: Any, after: int) -> None:
        real_apply(self, local, local.segment.first)

    real_apply = _of(blob_restore, "SegmentReplay").apply
    return [_patch(blob_restore, "own_way", own_way), _patch(_of(blob_restore, "SegmentReplay"), "apply", apply)]


@_known
def snapshot_claims_a_later_commit() -> Patches:
    """A background snapshot claims to have the changes that were made while it was taken."""
    real = OpenStore.concurrent_snapshot

    def concurrent(self: Any) -> Any:
        staging, _, number = real(self)
        self._clock.sleep(0.3)
        end = self._buffer.seal()
        return staging, self._buffer.nothing_until(end), number

    return [_patch(OpenStore, "concurrent_snapshot", concurrent)]


@_known
def chain_skips_to_a_later_snapshot() -> Patches:
    """A background snapshot counts as having all changes of the commit that begins with it."""

    def snapshot_for(self: Any, changes: Any, now: Any) -> Any:
        if self.pending is None or not self.pending.fits(self.chain, now):
            return None
        return replace(self.pending.snapshot, end=self.number_of(changes.end)), self.pending.blobs

    return [_patch(writer_state.WriterState, "snapshot_for", snapshot_for)]


@_known
def histories_are_told_apart_by_numbers() -> Patches:
    """A local directory continues a chain if the numbers of its changes fit (Spark before lineages)."""
    return [_patch(local_notes.Position, "fits", _fits_by_number)]


def _fits_by_number(self: Any, chain: Any) -> bool:
    return bool(self.end <= chain.end)


@_known
def segments_are_cached_by_number() -> Patches:
    """A cached segment is found by the numbers of its changes, which another owner's segment may have too."""
    from statemgr.backends.blobs.segment_cache import SegmentCache

    def path(self: Any, segment: Any) -> Any:
        return self._directory / f"{segment.first:016x}{segment.end:016x}.segment"

    def linked(self: Any, segment: Any, target: Any) -> bool:
        try:
            os.link(self._path(segment), target, follow_symlinks=False)
        except OSError:
            return False
        return True

    return [_patch(SegmentCache, "_path", path), _patch(SegmentCache, "_linked", linked)]


@_known
def snapshot_of_another_branch() -> Patches:
    """A commit begins with a background snapshot that was made of changes that were never published."""
    return [_patch(writer_state.PendingSnapshot, "fits", lambda self, chain, now: True)]


@_known
def half_a_directory() -> Patches:
    """A restored directory counts as complete before all of it is there, and is not verified."""
    verified = CommittedDirectories.verified

    def trusting(self: Any, state_id: str) -> Any:
        found = verified(self, state_id)
        path = self.root / state_id
        if isinstance(found, str) and path.is_dir():
            from statemgr.ports import CommittedDirectory

            files = {name: (os.stat(path / name).st_size, b"\0" * 16) for name in os.listdir(path)}
            return CommittedDirectory(state_id, path, files, None)
        return found

    def finished(self: Any, staging: Any, state_id: str, *args: Any, **more: Any) -> Any:
        from statemgr.phases import Phase, announce

        half = self._committed.root / state_id
        if not half.exists():
            half.mkdir()
            announce(Phase.SWAP, state_id, "")
            half.rmdir()
        return adopt(self, staging, state_id, *args, **more)

    adopt = local_directories.StoreDirectories._adopt
    return [
        _patch(CommittedDirectories, "verified", trusting),
        _patch(local_directories.StoreDirectories, "_adopt", finished),
    ]


#: Fault → the first seed that fails with it.
FOUND_BY: Mapping[str, int] = {
    "fence_after_the_read": 9,
    "no_fence": 2,
    "only_own_kind_is_fenced": 42,
    "zombie_takes_its_id_again": 4,
    "one_epoch_for_two_owners": 16,
    "epoch_is_not_checked": 0,
    "read_to_the_last_stable_offset": 24,
    "uncommitted_records_are_read": 5,
    "waits_for_a_last_record": 0,
    "newest_record_loses": 0,
    "unknown_is_failed": 35,
    "unknown_is_success": 11,
    "failed_commit_drops_its_changes": 50,
    "changes_during_a_commit_are_dropped": 7,
    "success_before_the_commit": 0,
    "upload_that_failed_counts": 62,
    "deletes_before_the_acknowledgement": 20,
    "fenced_owner_cleans_up": 8,
    "retained_checkpoints_lose_blobs": 3,
    "ttl_is_never_removed": 0,
    "ttl_of_a_dead_owner_stays": 19,
    "segments_of_retained_chains_are_deleted": 21,
    "gc_keeps_only_current_checkpoints": 19,
    "retention_deletes_the_current_record": 0,
    "job_record_is_deleted_too_early": 36,
    "retention_keeps_one_too_few": 0,
    "offsets_of_the_commit_before": 0,
    "offsets_of_the_moment_of_the_publish": 0,
    "sequence_number_is_used_again": 0,
    "state_id_is_not_new": 0,
    "state_id_by_number": 4,
    "buffered_changes_do_not_count": 0,
    "unchanged_stores_get_new_ids": 1,
    "local_directory_of_another_state": 0,
    "live_directory_is_continued": 5,
    "lock_is_not_released": 0,
    "directories_in_use_are_removed": 3,
    "missing_state_starts_empty": 22,
    "replay_beyond_the_checkpoint": 2,
    "offset_of_the_last_record": 0,
    "fill_without_tombstones": 17,
    "switched_on_without_a_fill": 0,
    "dead_markers_are_carried": 16,
    "oldest_change_of_a_key_wins": 8,
    "diff_by_name_and_size": 11,
    "a_segment_is_missing": 0,
    "segments_in_the_wrong_order": 0,
    "snapshot_claims_a_later_commit": 90,
    "chain_skips_to_a_later_snapshot": 5,
    "histories_are_told_apart_by_numbers": 43,
    "snapshot_of_another_branch": 5,
    "half_a_directory": 51,
}

#: Faults that no seed has found so far.
NOT_FOUND: frozenset[str] = frozenset(
    {
        "deletes_after_an_unknown_outcome",
        "failed_ttl_removal_is_forgotten",
        "files_of_an_unpublished_snapshot_are_reused",
        "old_directory_is_continued",
        "gc_without_a_grace_period",
        "segments_are_cached_by_number",
    }
)
