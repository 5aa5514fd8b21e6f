"""Clean-up: deletes the blobs that no retained checkpoint of the task references, and nothing else.

Steps of :class:`Cleaner`:

1. read the chains of the retained and the evicted checkpoints, of all stores of the task, unless they were read before
2. delete blobs of segments to which no retained chain of any store refers. :class:`SharedSegments` deletes those that
   other tasks may share
3. delete snapshots that no retained chain begins with, store by store

Step 3 considers the evicted indexes. At an opening, and after a clean-up that failed, it also follows ``previous`` from
the retained ones to all older indexes, and so finishes what a crashed owner left incomplete. It deletes older indexes
first, each after its blobs, so that ``previous`` always leads to the remaining ones. Garbage collection deletes blobs
of segments that a crash leaves between a publish and their deletion. Only blobs below the task's own prefix are
deleted.

A blob that cannot be deleted does not stop the other deletes. Up to a thousand blobs of segments are tried again, once
a minute. Blobs of snapshots are tried again if a retry can help. Garbage collection deletes the rest.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.names import segments_prefix, store_prefix
from statemgr.errors import CorruptBlob, MissingBlob, RetryableError, StatemgrError
from statemgr.logs import counted
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef, Marker
from statemgr.model.snapshot import SnapshotIndex
from statemgr.phases import Phase, announce
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

log = logging.getLogger(__name__)
#: Most older indexes that one clean-up follows.
_LONGEST_WALK = 1000
_REMEMBERED = 10_000
#: Shared blobs are deleted when so many can be, or when one could be for so many seconds. Blobs that could not be
#: deleted are tried again at most as often, and only so many.
_MANY = 32
_SECONDS = 60.0
_MOST_UNDELETED = 1000
#: Shared blobs that are remembered. Garbage collection deletes older ones.
_MOST_SHARED = 100_000


@dataclass(frozen=True, slots=True)
class Needs:
    """What a restore from one marker needs: blobs of segments, and an index, whose snapshot has the changes below
    ``start``."""

    blobs: tuple[str, ...]
    index: BlobRef
    start: int


class Cleaner:
    """Deletes blobs of evicted checkpoints. Idempotent; several owners may run it at the same time."""

    def __init__(self, transfer: Callable[[], Transfer], catalogue: Catalogue, monotonic: Callable[[], float]) -> None:
        self._transfer = transfer
        self._catalogue = catalogue
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._gone: dict[str, None] = {}
        #: store → its retained markers when it was cleaned up last
        self._retained: dict[StoreIdentity, dict[BlobMarker, Needs]] = {}
        #: store → its retained snapshots when it was cleaned up last: their blobs, and the index before
        self._snapshots: dict[StoreIdentity, dict[BlobRef, tuple[frozenset[str], BlobRef | None]]] = {}
        #: stores whose last clean-up did all of its steps
        self._done: set[StoreIdentity] = set()
        #: task → when all its undeleted blobs of segments were tried last
        self._tried: dict[StoreIdentity, float] = {}

    def clean_up(
        self,
        task: StoreIdentity,
        evicted: Mapping[str, Sequence[Marker]],
        retained: Mapping[str, Sequence[Marker]],
        undeleted: set[str],
    ) -> dict[StoreIdentity, list[Needs]]:
        """Delete what only evicted markers (store → markers, newest first) reference.

        Args:
            undeleted: blobs of segments of the task that earlier calls could not delete; updated.

        Returns: what each store's retained markers need, newest first. Empty if one of them cannot be read.
        Raises: UnavailableError, AccessDenied: some blobs could not be deleted. MissingBlob, CorruptBlob: the newest
            chain or index of a store is damaged, and nothing more was deleted.
        """
        gone: dict[str, None] = {}
        needs: dict[StoreIdentity, list[Needs]] = {}
        of_snapshots: list[tuple[StoreIdentity, list[BlobRef], list[BlobRef], bool]] = []
        identities = {store: replace(task, store=store) for store in dict.fromkeys((*retained, *evicted))}
        done = set() if not any(evicted.values()) else self._done.intersection(identities.values())
        self._done.difference_update(identities.values())
        known = [one for identity in identities.values() for one in self._retained.get(identity, {}).values()]
        names = {blob: blob for one in known for blob in one.blobs}
        for store, identity in identities.items():  # 1
            kept = self._needs(identity, retained.get(store, ()), names)
            if kept is None:
                return {}
            needs[identity] = list(kept.values())
            unneeded = [marker for marker in evicted.get(store, ()) if marker not in kept]
            old = self._needs(identity, unneeded, names, missing_is_gone=True) or {}
            self._retained[identity] = kept
            gone |= dict.fromkeys(blob for one in old.values() for blob in one.blobs)
            of_snapshots.append((identity, _indexes(old), _indexes(kept), identity in done))
        live = {blob for of_store in needs.values() for one in of_store for blob in one.blobs}
        new = {blob for blob in gone if blob.startswith(segments_prefix(task))}
        undeleted |= new
        undeleted -= live
        problems = self._delete_segments(task, undeleted, new)  # 2
        for identity, starts, stays, was_done in of_snapshots:
            problems += self._clean_up_snapshots(identity, starts, stays, only_evicted=was_done)  # 3
            self._done.add(identity)
        for problem in problems:
            raise problem
        return needs

    def _needs(
        self,
        identity: StoreIdentity,
        markers: Sequence[Marker],
        names: dict[str, str],
        *,
        missing_is_gone: bool = False,
    ) -> dict[BlobMarker, Needs] | None:
        """What markers need. None if one after the first cannot be read; with ``missing_is_gone`` a missing one is
        skipped. ``names``: each name of a blob, so that equal ones are kept once; updated."""
        known, found = self._retained.get(identity, {}), {}
        for marker in markers:
            if not isinstance(marker, BlobMarker):
                continue
            try:
                found[marker] = known.get(marker) or _needs_of(marker, self._catalogue.chain(identity, marker), names)
            except (MissingBlob, CorruptBlob) as error:
                if missing_is_gone:
                    continue
                if marker is markers[0]:
                    raise
                _nothing_is_deleted(identity, error)
                return None
        return found

    def _delete_segments(self, task: StoreIdentity, garbage: set[str], new: set[str]) -> list[StatemgrError]:
        """Delete the new garbage, and the older if it is time. Returns: why some was not deleted."""
        now, wanted = self._monotonic(), garbage & new
        if now - self._tried.get(task, -math.inf) >= _SECONDS:
            self._tried[task], wanted = now, set(garbage)
        if not wanted:
            return []
        announce(Phase.DELETE_BLOBS, task.task, task.job_key)
        failed = self._transfer().delete_all(sorted(wanted))
        left = sorted((garbage - wanted) | failed.keys())
        garbage.intersection_update(left[-_MOST_UNDELETED:])
        return [*failed.values()]

    # --- step 3 ---------------------------------------------------------------------------------------------------

    def _clean_up_snapshots(
        self, identity: StoreIdentity, evicted: Sequence[BlobRef], kept: Sequence[BlobRef], *, only_evicted: bool
    ) -> list[StatemgrError]:
        """Returns: why some blobs were not deleted. Raises: RetryableError; then the next clean-up does the rest."""
        kept_ids = {ref.blob_id for ref in kept}
        starts = [ref for ref in evicted if ref.blob_id not in kept_ids]
        if only_evicted and not starts:
            return []
        live = set(kept_ids)
        known = self._snapshots.get(identity, {})
        names = {blob: blob for blobs, _ in known.values() for blob in blobs}  # snapshots share most of their blobs
        self._snapshots[identity] = found = {ref: known[ref] for ref in kept if ref in known}

        def read(ref: BlobRef) -> None:
            index = self._catalogue.index(identity, ref)
            blobs = frozenset(names.setdefault(blob.blob_id, blob.blob_id) for blob in index.blobs())
            found[ref] = blobs, index.previous

        unknown = [ref for ref in kept if ref not in found]
        problems = self._transfer().for_each(unknown, read) if unknown else {}
        if problems:
            newest = next(ref for ref in unknown if ref in problems)
            if newest is kept[0] or not isinstance(problems[newest], MissingBlob | CorruptBlob):
                raise problems[newest]
            _nothing_is_deleted(identity, problems[newest])
            return []
        for ref in kept:
            blobs, previous = found[ref]
            live |= blobs
            if previous and previous.blob_id not in kept_ids:
                starts.append(previous)
        garbage = self._oldest_first(identity, starts, kept_ids)
        return [error for found in garbage for error in self._delete_snapshot(identity, *found, live)]

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
    ) -> list[StatemgrError]:
        own = store_prefix(identity)
        blobs = [b.blob_id for b in index.blobs() if b.blob_id not in live and b.blob_id.startswith(own)]
        identity.announce(Phase.DELETE_BLOBS)
        refused = _refused(self._transfer().delete_all(blobs))
        identity.announce(Phase.DELETE_INDEX)
        if ref.blob_id.startswith(own):
            refused += _refused(self._transfer().delete_all([ref.blob_id]))
        self._catalogue.forget_index(ref.blob_id)
        self._note_gone(ref.blob_id)
        return refused

    def _is_gone(self, blob_id: str) -> bool:
        with self._lock:
            return blob_id in self._gone

    def _note_gone(self, blob_id: str) -> None:
        """Remember an index that is deleted, or left to garbage collection: the next clean-ups do not ask for it."""
        with self._lock:
            self._gone[blob_id] = None
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]


def _refused(failed: Mapping[str, StatemgrError]) -> list[StatemgrError]:
    """Why deletes failed that no retry helps. Raises: RetryableError, if there is another one."""
    for error in failed.values():
        if isinstance(error, RetryableError):
            raise error
    return [*failed.values()]


def _nothing_is_deleted(identity: StoreIdentity, error: StatemgrError) -> None:
    log.warning("%s: nothing was deleted, because a retained checkpoint cannot be read: %s", identity, error)


def _needs_of(marker: BlobMarker, found: SegmentChain, names: dict[str, str]) -> Needs:
    # chains that are read one by one have each name for itself
    refs = (*(segment.blob for segment in found.segments), marker.blob)
    blobs = dict.fromkeys(names.setdefault(ref.blob_id, ref.blob_id) for ref in refs if ref is not None)
    return Needs(tuple(blobs), found.snapshot.index, found.start)


def _indexes(found: Mapping[BlobMarker, Needs]) -> list[BlobRef]:
    return list(dict.fromkeys(needs.index for needs in found.values()))


class SharedSegments:
    """Blobs of segments that several tasks of this process share, and which of them may still need each.

    A task's own clean-up cannot know whether another task needs such a blob. A task stops needing it when no checkpoint
    that the task retains refers to it, and when its newest one has a snapshot that covers the task's changes there:
    until then, a commit that is under way may refer to it. That stays true for a task that another process has taken
    over, because new checkpoints refer to new blobs and to those of retained checkpoints; and a task is opened again
    here only after its last commit has ended. Garbage collection deletes blobs that such a task needed when it left,
    and those of earlier processes. Safe to use from many threads.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: blob → store that may need it → the sequence number after its last change there; oldest first. A task that
        #: has not said which stores has an empty name of a store
        self._needed: dict[str, dict[StoreIdentity, int]] = {}
        #: store → the blobs that it may need
        self._of_store: dict[StoreIdentity, dict[str, None]] = {}
        #: blob that no store needs → since when
        self._unneeded: dict[str, float] = {}
        self._failed = False

    def stored(self, blob_id: str, owner: StoreIdentity, end: int, tasks: Collection[str]) -> None:
        """Note that a blob has a store's changes below ``end`` (and after its earlier segments).

        Args:
            tasks: all that share the blob. Until each of them has said what it has there, it may need the blob.
        """
        with self._lock:
            if blob_id not in self._needed:
                self._needed[blob_id] = {replace(owner, task=task, store=""): 0 for task in tasks}
            self._needed[blob_id].pop(replace(owner, store=""), None)
            self._needed[blob_id][owner] = end
            self._of_store.setdefault(owner, {})[blob_id] = None
            while len(self._needed) > _MOST_SHARED:
                oldest = next(iter(self._needed))
                for store in self._needed.pop(oldest):
                    self._of_store.get(store, {}).pop(oldest, None)

    def retained(self, needs: Mapping[StoreIdentity, Sequence[Needs]]) -> None:
        """Note what the retained markers of some stores need (newest first). A store without any may have its first
        commit under way."""
        with self._lock:
            for owner, of_store in needs.items():
                live = {blob for one in of_store for blob in one.blobs}
                for blob_id in [*self._of_store.get(owner, ())] if of_store else ():
                    if blob_id not in live and self._needed[blob_id][owner] <= of_store[0].start:
                        self._no_longer(blob_id, owner)

    def _no_longer(self, blob_id: str, owner: StoreIdentity) -> None:
        del self._of_store[owner][blob_id]
        del self._needed[blob_id][owner]
        if not self._needed[blob_id]:
            del self._needed[blob_id]
            self._unneeded[blob_id] = self._monotonic()

    def delete(self, transfer: Callable[[], Transfer]) -> None:
        """If it is time, delete the blobs that no store needs. Some of those that fail are tried again."""
        with self._lock:
            now, oldest = self._monotonic(), next(iter(self._unneeded.values()), None)
            is_many = len(self._unneeded) >= _MANY and not self._failed
            if oldest is None or not (is_many or now - oldest >= _SECONDS):
                return
            unneeded, self._unneeded = self._unneeded, {}
        failed: Collection[str] = unneeded
        try:
            errors = transfer().delete_all(unneeded)
            for error in [*errors.values()][:1]:
                log.warning("%s were not deleted: %s", counted(len(errors), "blob"), error)
            failed = errors
        finally:
            with self._lock:
                self._failed = bool(failed)
                self._unneeded = {**dict.fromkeys([*failed][-_MOST_UNDELETED:], now), **self._unneeded}
