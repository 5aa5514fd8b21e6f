"""Clean-up: deletes the blobs that no retained checkpoint of the task references, and nothing else.

Steps of :class:`Cleaner`:

1. read the chains of the retained and the evicted checkpoints, of all stores of the task
2. delete blobs of segments to which no retained chain of any store refers. Blobs that other tasks may share are
   returned instead, and :class:`SharedSegments` deletes them
3. delete snapshots that no retained chain begins with, store by store

Step 3 considers the evicted indexes, and follows ``previous`` from them and from the retained ones to all older
indexes. So it finishes a clean-up that a crashed owner left incomplete. It deletes older indexes first, each after its
blobs, so that ``previous`` always leads to the remaining ones. Garbage collection deletes blobs of segments that a
crash leaves between a publish and their deletion. Only blobs below the task's own prefix are deleted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.names import segments_prefix, store_prefix
from statemgr.errors import CorruptBlob, MissingBlob, StatemgrError
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef, CheckpointRecord, Marker
from statemgr.model.snapshot import SnapshotIndex
from statemgr.phases import Phase, announce
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

log = logging.getLogger(__name__)
#: Most older indexes that one clean-up follows.
_LONGEST_WALK = 1000
_REMEMBERED = 10_000
#: Shared blobs are checked when a task no longer needs this many of them, or has not needed one for this many seconds.
_MANY = 32
_SECONDS = 60.0
#: Shared blobs that are remembered. Garbage collection deletes older ones.
_MOST_SHARED = 100_000

#: Reads the newest records of some tasks from the topic.
Read = Callable[[Collection[str]], Mapping[str, CheckpointRecord]]


class Cleaner:
    """Deletes blobs of evicted checkpoints. Idempotent; several owners may run it at the same time."""

    def __init__(self, transfer: Callable[[], Transfer], catalogue: Catalogue) -> None:
        self._transfer = transfer
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._gone: dict[str, None] = {}

    def clean_up(
        self,
        task: StoreIdentity,
        evicted: Mapping[str, Sequence[Marker]],
        retained: Mapping[str, Sequence[Marker]],
        undeleted: set[str],
    ) -> list[str]:
        """Delete what only evicted markers (store → markers, newest first) reference.

        Args:
            undeleted: blobs of segments of the task that earlier calls could not delete; updated.

        Returns: blobs of segments that the task no longer needs, and that other tasks may share.
        Raises: UnavailableError, AccessDenied; then the next call tries the rest again. MissingBlob, CorruptBlob: the
            newest chain or index of a store is damaged, and nothing more was deleted.
        """
        live: set[str] = set()
        gone: dict[str, None] = {}
        of_snapshots: list[tuple[StoreIdentity, list[BlobRef], list[BlobRef]]] = []
        at_open = not any(evicted.values())
        for store in dict.fromkeys((*retained, *evicted)):  # 1
            identity = replace(task, store=store)
            kept = self._chains(identity, retained.get(store, ()))
            if kept is None:
                return []
            live.update(blob for marker, chain in kept.items() for blob in _segment_blobs(marker, chain))
            unneeded = [marker for marker in evicted.get(store, ()) if marker not in kept]
            if unneeded or at_open:
                old = self._chains(identity, unneeded, missing_is_gone=True) or {}
                gone |= {blob: None for marker, chain in old.items() for blob in _segment_blobs(marker, chain)}
                of_snapshots.append((identity, _indexes(old), _indexes(kept)))
        own = segments_prefix(task)
        undeleted |= {blob for blob in gone if blob.startswith(own)}
        undeleted -= live
        self._delete_segments(task, undeleted)  # 2
        for identity, starts, stays in of_snapshots:
            self._clean_up_snapshots(identity, starts, stays)  # 3
        return [blob for blob in gone if blob not in live and not blob.startswith(own)]

    def _chains(
        self, identity: StoreIdentity, markers: Sequence[Marker], *, missing_is_gone: bool = False
    ) -> dict[BlobMarker, SegmentChain] | None:
        """The chains of markers. None if one after the first cannot be read; with ``missing_is_gone`` a missing one is
        skipped."""
        found = {}
        for marker in markers:
            if not isinstance(marker, BlobMarker):
                continue
            try:
                found[marker] = self._catalogue.chain(identity, marker)
            except (MissingBlob, CorruptBlob) as error:
                if missing_is_gone:
                    continue
                if marker is markers[0]:
                    raise
                _nothing_is_deleted(identity, error)
                return None
        return found

    def _delete_segments(self, task: StoreIdentity, garbage: set[str]) -> None:
        if not garbage:
            return
        announce(Phase.DELETE_BLOBS, task.task, task.job_key)
        failed = self._transfer().delete_all(sorted(garbage))
        garbage.intersection_update(failed)
        _raise_first(failed.values())

    # --- step 3 ---------------------------------------------------------------------------------------------------

    def _clean_up_snapshots(self, identity: StoreIdentity, evicted: Sequence[BlobRef], kept: Sequence[BlobRef]) -> None:
        kept_ids = {ref.blob_id for ref in kept}
        starts = [ref for ref in evicted if ref.blob_id not in kept_ids]
        live = set(kept_ids)
        for ref in kept:
            try:
                index = self._catalogue.index(identity, ref)
            except (MissingBlob, CorruptBlob) as error:
                if ref is kept[0]:
                    raise
                _nothing_is_deleted(identity, error)
                return
            live.update(blob.blob_id for blob in index.blobs())
            if index.previous and index.previous.blob_id not in kept_ids:
                starts.append(index.previous)
        for ref, index in self._oldest_first(identity, starts, kept_ids):
            self._delete_snapshot(identity, ref, index, live)

    def _oldest_first(
        self, identity: StoreIdentity, starts: Sequence[BlobRef], kept: Collection[str]
    ) -> list[tuple[BlobRef, SnapshotIndex]]:
        """The unretained indexes that the starts lead to, each after those that its ``previous`` leads to."""
        found: list[tuple[BlobRef, SnapshotIndex]] = []
        seen = set(kept)
        for start in starts:
            walk: list[tuple[BlobRef, SnapshotIndex]] = []
            ref: BlobRef | None = start
            while ref and ref.blob_id not in seen and not self._is_gone(ref.blob_id) and len(walk) < _LONGEST_WALK:
                seen.add(ref.blob_id)
                try:
                    index = self._catalogue.index(identity, ref)
                except MissingBlob:
                    self._note_gone(ref.blob_id)
                    break
                except CorruptBlob as error:
                    log.warning("%s: old blobs were not deleted: %s", identity, error)
                    break
                walk.append((ref, index))
                ref = index.previous
            found += reversed(walk)
        return found

    def _delete_snapshot(
        self, identity: StoreIdentity, ref: BlobRef, index: SnapshotIndex, live: Collection[str]
    ) -> None:
        own = store_prefix(identity)
        blobs = [b.blob_id for b in index.blobs() if b.blob_id not in live and b.blob_id.startswith(own)]
        identity.announce(Phase.DELETE_BLOBS)
        _raise_first(self._transfer().delete_all(blobs).values())
        identity.announce(Phase.DELETE_INDEX)
        if ref.blob_id.startswith(own):
            _raise_first(self._transfer().delete_all([ref.blob_id]).values())
        self._catalogue.forget_index(ref.blob_id)
        self._note_gone(ref.blob_id)

    def _is_gone(self, blob_id: str) -> bool:
        with self._lock:
            return blob_id in self._gone

    def _note_gone(self, blob_id: str) -> None:
        """Remember a deleted index, so that the next clean-ups do not ask for it."""
        with self._lock:
            self._gone[blob_id] = None
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]


def _raise_first(errors: Collection[StatemgrError]) -> None:
    for error in errors:
        raise error


def _nothing_is_deleted(identity: StoreIdentity, error: StatemgrError) -> None:
    log.warning("%s: nothing was deleted, because a retained checkpoint cannot be read: %s", identity, error)


def _segment_blobs(marker: BlobMarker, chain: SegmentChain) -> list[str]:
    found = [segment.blob.blob_id for segment in chain.segments if segment.blob]
    return [*found, marker.blob.blob_id] if marker.blob else found


def _indexes(found: Mapping[BlobMarker, SegmentChain]) -> list[BlobRef]:
    return list(dict.fromkeys(chain.snapshot.index for chain in found.values()))


class SharedSegments:
    """Blobs of segments that several tasks of this process share: which tasks are in each, and when it can be deleted.

    A task's own clean-up cannot know whether another task still needs such a blob. Blobs that a task no longer needs
    are checked together, now and then, by a fresh read of the topic. One is deleted when no checkpoint that any of its
    tasks retains refers to it, and when each of these tasks has a snapshot that covers its changes in the blob. Garbage
    collection deletes the others, and those whose tasks this process does not know. Safe to use from many threads.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: blob → store → the sequence number after its last change there
        self._members: dict[str, dict[StoreIdentity, int]] = {}
        #: blob that some task no longer needs → since when
        self._unneeded: dict[str, float] = {}

    def stored(self, blob_id: str, owner: StoreIdentity, end: int) -> None:
        """Note that a blob has a store's changes below ``end`` (and after its earlier segments)."""
        with self._lock:
            self._members.setdefault(blob_id, {})[owner] = end
            while len(self._members) > _MOST_SHARED:
                oldest = next(iter(self._members))
                del self._members[oldest]
                self._unneeded.pop(oldest, None)

    def no_longer_needed(self, blob_ids: Collection[str]) -> None:
        """Note blobs that one task no longer needs."""
        now = self._monotonic()
        with self._lock:
            for blob_id in blob_ids:
                if blob_id in self._members:
                    self._unneeded.setdefault(blob_id, now)

    def release(self, read: Read, catalogue: Catalogue, transfer: Transfer) -> None:
        """If it is time to check, delete the blobs that no task needs.

        Raises: UnavailableError, AccessDenied, CorruptRecord, MissingError; then they are checked again later.
        """
        due = self._due()
        if not due:
            return
        records = read({owner.task for members in due.values() for owner in members})
        garbage = [blob for blob, members in due.items() if _is_garbage(blob, members, records, catalogue)]
        failed = transfer.delete_all(garbage)
        with self._lock:
            for blob in garbage:
                if blob not in failed:
                    self._members.pop(blob, None)
            for blob in due:
                self._unneeded.pop(blob, None)
                if blob in self._members:  # another task's clean-up may have deleted it meanwhile
                    self._unneeded[blob] = self._monotonic()

    def _due(self) -> dict[str, dict[StoreIdentity, int]]:
        with self._lock:
            oldest = next(iter(self._unneeded.values()), None)
            if oldest is None or (len(self._unneeded) < _MANY and self._monotonic() - oldest < _SECONDS):
                return {}
            return {blob: dict(self._members[blob]) for blob in self._unneeded}


def _is_garbage(
    blob_id: str, members: Mapping[StoreIdentity, int], records: Mapping[str, CheckpointRecord], catalogue: Catalogue
) -> bool:
    for owner, end in members.items():
        record = records.get(owner.task)
        if record is None:
            return False
        for number, checkpoint in enumerate(record.checkpoints):
            for of_store in checkpoint.state_checkpoint_markers.values():
                marker = of_store.get(owner.store)
                if isinstance(marker, BlobMarker):
                    chain = catalogue.chain(owner, marker)
                    if blob_id in _segment_blobs(marker, chain) or (number == 0 and chain.start < end):
                        return False
    return True
