"""Known faults of the backends: changelogs, snapshots and segments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import examples.plug_ins.shared_directory as shared_directory
import statemgr.backends.blobs.local_notes as local_notes
import statemgr.backends.blobs.restore as blob_restore
import statemgr.backends.blobs.snapshots as snapshots
import statemgr.backends.blobs.writer_state as writer_state
import statemgr.backends.changelog.backup as changelog_backup
import statemgr.backends.changelog.integrity as integrity
import statemgr.backends.changelog.restore as changelog_restore
import statemgr.flows.committing.publish as publishing
import statemgr.flows.offers as offers
import statemgr.flows.opening.open_job as opening
import statemgr.flows.opening.repair as repair
import statemgr.local.change_buffer as change_buffer
import statemgr.local.directories as local_directories
from statemgr.local.committed import CommittedDirectories
from statemgr.model.chain import Way
from statemgr.stores.open_store import OpenStore
from tests.simulation.known_faults.registry import Patches, imported, known, patch

# --- changelogs ------------------------------------------------------------------------------------------------------


@known
def replay_beyond_the_checkpoint() -> Patches:
    """A restore replays the changelog to its end, not to the offset of its checkpoint."""
    real = changelog_restore.ChangelogRestore._apply

    def apply(self: Any, request: Any, marker: Any, start: int, writer: Any) -> Any:
        end = self._services.changelog().settled_end(marker.topic, marker.partition)
        return real(self, request, replace(marker, offset=max(end, marker.offset)), start, writer)

    return [patch(changelog_restore.ChangelogRestore, "_apply", apply)]


@known
def offset_of_the_last_record() -> Patches:
    """A marker has the offset of the last record, not the one after it."""
    real = changelog_backup._Staged.marker

    def marker(self: Any, delivered: Any) -> Any:
        made: Any = real(self, delivered)
        return made if made.offset <= made.start else replace(made, offset=made.offset - 1, newest_ms=None)

    return [patch(changelog_backup._Staged, "marker", marker)]


@known
def old_directory_is_continued() -> Patches:
    """A replay continues an old local directory, although compaction may have removed deletes since."""
    return [patch(changelog_restore.ReplayBase, "is_usable", lambda self, now: True)]


@known
def a_tail_stays_in_the_changelog() -> Patches:
    """The next commits follow records after the checkpoint's offset, and nothing fills the changelog again."""
    return [patch(opening, "_has_tail", lambda *args: False)]


@known
def fill_without_tombstones() -> Patches:
    """A backend that is switched on again is filled without deletes of the keys that it still has."""
    return [patch(changelog_backup, "deletes_of", lambda *args: iter(()))]


@known
def switched_on_without_a_fill() -> Patches:
    """A backend that is switched on gets only the changes of the next commits."""
    real = changelog_backup.ChangelogBackup.prepare

    def prepare(self: Any, snapshot: Any, base: Any, *, portable: bool) -> Any:
        return real(self, replace(snapshot, whole=snapshot.changes), base, portable=portable)

    return [patch(changelog_backup.ChangelogBackup, "prepare", prepare)]


@known
def dead_markers_are_carried() -> Patches:
    """Markers of a backend that was switched off are carried forward, and switching it on again does not fill it."""
    real = publishing._Publish._record

    def record(self: Any, commit: Any, *args: Any) -> Any:
        made = real(self, commit, *args)
        base = self.published.checkpoint(commit.task)
        markers = {**(base.state_checkpoint_markers if base else {}), **made.current.state_checkpoint_markers}
        new = replace(made.current, state_checkpoint_markers=markers)
        return replace(made, checkpoints=(new, *made.checkpoints[1:]))

    return [patch(publishing._Publish, "_record", record)]


@known
def oldest_change_of_a_key_wins() -> Patches:
    """Of several changes of a key in one commit, the oldest one is sent."""

    class Net(change_buffer.NetChanges):
        def __iter__(self) -> Iterator[Any]:
            found: dict[bytes, bytes | None] = {}
            for generation in self._generations:
                for key, value in generation:
                    found.setdefault(key, value)
            yield from found.items()

    return [patch(change_buffer, "NetChanges", Net)]


@known
def a_plug_in_deletes_what_is_carried() -> Patches:
    """The backend of another package deletes the copies of evicted checkpoints, also those that newer ones refer to."""
    real = shared_directory.SharedBackup.clean_up
    return [
        patch(
            shared_directory.SharedBackup, "clean_up", lambda self, at, evicted, retained: real(self, at, evicted, ())
        )
    ]


# --- snapshots and segments ------------------------------------------------------------------------------------------


@known
def diff_by_name_and_size() -> Patches:
    """A file counts as stored if the last snapshot has one of its name and size (Samza's blob store backend)."""
    real = imported(snapshots, "diff")

    def diff(local: Any, base: Any) -> Any:
        known = {(path, file.size): file for path, file in base.walk()} if base else {}
        new, kept = real(local, base)
        added = []
        for file in new:
            same = known.get((file.path, file.size))
            if same is None:
                added.append(file)
            else:
                kept[file.path] = same
        return tuple(added), kept

    return [patch(snapshots, "diff", diff)]


@known
def files_of_an_unpublished_snapshot_are_reused() -> Patches:
    """A snapshot refers to files of a snapshot that was not published, which expire (Spark's RocksDB file mapping)."""
    real = snapshots.Snapshots.store
    last: dict[str, Any] = {}

    def store(self: Any, snapshot: Any, base: Any, notes: Any = None) -> Any:
        stored = real(self, snapshot, last.get(str(snapshot.identity), base), notes)
        last[str(snapshot.identity)] = stored.index
        return stored

    return [patch(snapshots.Snapshots, "store", store)]


@known
def a_segment_is_missing() -> Patches:
    """A restore leaves out one segment of a chain."""
    real = imported(blob_restore, "own_way")

    def own_way(chain: Any) -> Any:
        way = real(chain)
        return Way(way.snapshot, way.segments[:1] + way.segments[2:])

    return [patch(blob_restore, "own_way", own_way)]


@known
def segments_in_the_wrong_order() -> Patches:
    """A restore applies the newest segment first."""
    real = imported(blob_restore, "own_way")

    def own_way(chain: Any) -> Any:
        way = real(chain)
        return Way(way.snapshot, tuple(reversed(way.segments)))

    def apply(self: Any, local: Any, after: int) -> None:
        real_apply(self, local, local.segment.first)

    real_apply = imported(blob_restore, "SegmentReplay").apply
    return [patch(blob_restore, "own_way", own_way), patch(imported(blob_restore, "SegmentReplay"), "apply", apply)]


@known
def snapshot_claims_a_later_commit() -> Patches:
    """A background snapshot claims to have the changes that were made while it was taken."""
    real = OpenStore.concurrent_snapshot

    def concurrent(self: Any) -> Any:
        staging, _, number = real(self)
        self._clock.sleep(0.3)
        end = self._buffer.seal()
        return staging, self._buffer.nothing_until(end), number

    return [patch(OpenStore, "concurrent_snapshot", concurrent)]


@known
def chain_skips_to_a_later_snapshot() -> Patches:
    """A background snapshot counts as having all changes of the commit that begins with it."""

    def snapshot_for(self: Any, changes: Any, now: Any) -> Any:
        if self.pending is None or not self.pending.fits(self.chain, now):
            return None
        return replace(self.pending.snapshot, end=self.numberimported(changes.end)), self.pending.blobs

    return [patch(writer_state.WriterState, "snapshot_for", snapshot_for)]


@known
def histories_are_told_apart_by_numbers() -> Patches:
    """A local directory continues a chain if the numbers of its changes fit (Spark before lineages)."""
    return [patch(local_notes.Position, "fits", _fits_by_number)]


def _fits_by_number(self: Any, chain: Any) -> bool:
    return bool(self.end <= chain.end)


@known
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

    return [patch(SegmentCache, "_path", path), patch(SegmentCache, "_linked", linked)]


@known
def snapshot_of_another_branch() -> Patches:
    """A commit begins with a background snapshot that was made of changes that were never published."""
    return [patch(writer_state.PendingSnapshot, "fits", lambda self, chain, now: True)]


@known
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
        with suppress(OSError):  # an error of the disk is none of this fault
            half.mkdir()
            announce(Phase.SWAP, state_id, "")
            half.rmdir()
        return adopt(self, staging, state_id, *args, **more)

    adopt = local_directories.StoreDirectories._adopt
    return [
        patch(CommittedDirectories, "verified", trusting),
        patch(local_directories.StoreDirectories, "_adopt", finished),
    ]


# --- repeated checkpoints --------------------------------------------------------------------------------------------


@known
def a_repeated_checkpoint_has_no_backup_of_a_store() -> Patches:
    """An owner adopts the offer of one store, or repairs its backup. Only a backend that the configuration has left has
    another store, and the repeated checkpoint drops that marker."""
    real = repair.carried_stores

    class Markers(dict[str, Any]):
        def __bool__(self) -> bool:
            return True

    def carried(*arguments: Any) -> Any:
        found, refill = real(*arguments)
        return {name: replace(one, markers=Markers(one.markers)) for name, one in found.items()}, refill

    return [patch(module, "carried_stores", carried) for module in (offers, repair)]


# --- what somebody else has deleted ----------------------------------------------------------------------------------


@known
def cut_changelogs_count_as_whole() -> Patches:
    """A changelog that was cut, or deleted and created again, counts as whole, and nothing fills it again."""
    modules = (integrity, changelog_backup, changelog_restore)
    return [patch(module, "loss_of", lambda marker, found: None) for module in modules]


@known
def long_changelogs_count_as_whole() -> Patches:
    """A changelog that lost its newest records counts as whole when others have taken their offsets."""
    real = integrity.read_tail

    def read_tail(changelog: Any, marker: Any, end: int, **more: Any) -> Any:
        return real(changelog, replace(marker, newest_ms=None), end, **more)

    modules = (integrity, changelog_backup, changelog_restore)
    return [patch(module, "read_tail", read_tail) for module in modules]
