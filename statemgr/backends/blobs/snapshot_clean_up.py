"""Clean-up of a store's snapshots: deletes what no retained checkpoint references, and nothing else.

Candidates are the evicted indexes, and whatever their and the retained ones' ``previous`` lead to: a clean-up that
a crashed owner left half done is finished by walking that chain. Older indexes go first, each after its blobs, so
that the chain always leads to what is left. Only blobs below the store's own prefix are deleted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence

from statemgr.backends.blobs.names import store_prefix
from statemgr.backends.blobs.snapshot_indexes import SnapshotIndexes, index_of
from statemgr.errors import CorruptBlob, MissingBlob, StatemgrError
from statemgr.model.checkpoint import BlobRef, IndexMarker, Marker
from statemgr.model.snapshot import SnapshotIndex
from statemgr.phases import Phase, announce
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

log = logging.getLogger(__name__)
#: Most indexes that one clean-up walks back.
_LONGEST_WALK = 1000
_REMEMBERED = 10_000


class Collector:
    """Deletes snapshots that nothing retained needs. Idempotent; may run in several owners at once."""

    def __init__(self, transfer: Callable[[], Transfer], indexes: SnapshotIndexes) -> None:
        self._transfer = transfer
        self._indexes = indexes
        self._lock = threading.Lock()
        self._gone: dict[str, None] = {}

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """Delete. ``retained`` is newest first.

        Raises: UnavailableError, AccessDenied; then the next clean-up finds the rest. MissingBlob, CorruptBlob: the
        newest index is damaged, and nothing was deleted.
        """
        kept = [m.index for m in retained if isinstance(m, IndexMarker)]
        kept_ids = {ref.blob_id for ref in kept}
        starts = [m.index for m in evicted if isinstance(m, IndexMarker) and m.index.blob_id not in kept_ids]
        live = set(kept_ids)
        for ref in kept:
            try:
                index = self._get(identity, ref)
            except (MissingBlob, CorruptBlob) as error:
                if ref is kept[0]:
                    raise
                log.warning(
                    "%s/%s: nothing is deleted, since a retained index cannot be read: %s",
                    identity.task, identity.store, error,
                )  # fmt: skip
                return
            live.update(blob.blob_id for blob in index.blobs())
            if index.previous and index.previous.blob_id not in kept_ids:
                starts.append(index.previous)
        for ref, index in self._oldest_first(identity, starts, kept_ids):
            self._delete(identity, ref, index, live)

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
                    index = self._get(identity, ref)
                except MissingBlob:
                    self._note_gone(ref.blob_id)
                    break
                except CorruptBlob as error:
                    log.warning("%s/%s: not collected: %s", identity.task, identity.store, error)
                    break
                walk.append((ref, index))
                ref = index.previous
            found += reversed(walk)
        return found

    def _delete(self, identity: StoreIdentity, ref: BlobRef, index: SnapshotIndex, live: Collection[str]) -> None:
        own, subject = store_prefix(identity), f"{identity.task}/{identity.store}"
        blobs = [b.blob_id for b in index.blobs() if b.blob_id not in live and b.blob_id.startswith(own)]
        announce(Phase.DELETE_BLOBS, subject, identity.job_key)
        _raise_first(self._transfer().delete_all(blobs).values())
        announce(Phase.DELETE_INDEX, subject, identity.job_key)
        if ref.blob_id.startswith(own):
            _raise_first(self._transfer().delete_all([ref.blob_id]).values())
        self._indexes.forget(ref.blob_id)
        self._note_gone(ref.blob_id)

    def _get(self, identity: StoreIdentity, ref: BlobRef) -> SnapshotIndex:
        return self._indexes.get(self._transfer(), identity, index_of(identity, IndexMarker(ref)))

    def _is_gone(self, blob_id: str) -> bool:
        with self._lock:
            return blob_id in self._gone

    def _note_gone(self, blob_id: str) -> None:
        """Spare the next clean-ups the question for an index that is known to be deleted."""
        with self._lock:
            self._gone[blob_id] = None
            while len(self._gone) > _REMEMBERED:
                del self._gone[next(iter(self._gone))]


def _raise_first(errors: Collection[StatemgrError]) -> None:
    for error in errors:
        raise error
