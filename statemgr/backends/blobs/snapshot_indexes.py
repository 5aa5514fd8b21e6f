"""Reading index blobs: verified, validated, and the last few remembered. I/O through the transfer engine."""

from __future__ import annotations

import threading
from collections import OrderedDict

from statemgr.errors import CorruptBlob, MissingState
from statemgr.model.checkpoint import BlobRef, IndexMarker, Marker
from statemgr.model.codecs import decode_index
from statemgr.model.snapshot import MAX_INDEX_SIZE, SnapshotIndex, blob_id_problem, validate
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

#: Indexes that are remembered whatever their size, and bytes of all of them as encoded.
_REMEMBERED = 16
_REMEMBERED_BYTES = 8 * 1024 * 1024


class SnapshotIndexes:
    """The indexes of a job's stores, by their blobs. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[BlobRef, SnapshotIndex]] = OrderedDict()
        self._size = 0

    def get(self, transfer: Transfer, identity: StoreIdentity, ref: BlobRef) -> SnapshotIndex:
        """The index in a blob, which must be of this store.

        Raises: MissingBlob, CorruptBlob (wrong bytes, hostile or of another store), UnavailableError, AccessDenied.
        """
        with self._lock:
            known = self._known.get(ref.blob_id)
        if known is not None and known[0] == ref:
            index = known[1]
        else:
            index = decode_index(transfer.get_bytes(ref, MAX_INDEX_SIZE), ref.blob_id)
        validate_for(index, identity, ref.blob_id)
        self.remember(ref, index)
        return index

    def remember(self, ref: BlobRef, index: SnapshotIndex) -> None:
        """Keep an index that was just written or read."""
        with self._lock:
            if ref.blob_id not in self._known:
                self._size += ref.size
            self._known[ref.blob_id] = ref, index
            self._known.move_to_end(ref.blob_id)
            while len(self._known) > _REMEMBERED and self._size > _REMEMBERED_BYTES:
                self._size -= self._known.popitem(last=False)[1][0].size

    def forget(self, blob_id: str) -> None:
        """The blob is to be deleted."""
        with self._lock:
            forgotten = self._known.pop(blob_id, None)
            if forgotten is not None:
                self._size -= forgotten[0].size


def validate_for(index: SnapshotIndex, identity: StoreIdentity, blob_id: str) -> None:
    """Refuse an index that is hostile or of another store. Raises: CorruptBlob."""
    validate(
        index,
        blob_id,
        job_name=identity.job_name,
        job_id=identity.job_id,
        task=identity.task,
        store=identity.store,
    )


def index_of(identity: StoreIdentity, marker: Marker) -> BlobRef:
    """The index blob that a marker names. Raises: MissingState, CorruptBlob for one that is not this job's."""
    where = {"job": identity.job_name, "task": identity.task, "store": identity.store}
    if not isinstance(marker, IndexMarker):
        raise MissingState(
            f"a marker of {type(marker).__name__} names no snapshot",
            hint="restore from the factory that wrote it",
            **where,
        )
    blob_id = marker.index.blob_id
    if problem := blob_id_problem(blob_id, identity.job_name, identity.job_id):
        raise CorruptBlob(f"the marker {problem}", blob=blob_id, **where)
    return marker.index
