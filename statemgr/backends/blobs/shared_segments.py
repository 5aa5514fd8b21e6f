"""Blobs of segments that several tasks of this process share: who is in each, and when nobody needs one any more.

A task's own clean-up cannot tell whether another task still needs such a blob. Those that some task has let go of are
looked at together, now and then, by a fresh read of the topic: one is deleted when no checkpoint that any task in it
retains refers to it, and when each of them stands on a snapshot that covers what it has there. All others, and those
of which this process does not know who is in them, are left to a collection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import BlobMarker, CheckpointRecord
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

#: What is let go of is looked at when it is so many blobs, or so many seconds old.
_MANY = 32
_SECONDS = 60.0
#: Blobs that are remembered; beyond that the oldest are left to a collection.
_REMEMBERED = 100_000

Read = Callable[[Collection[str]], Mapping[str, CheckpointRecord]]


@dataclass
class _Members:
    """Whose segments a blob has: owner → the sequence number after its last change there."""

    ends: dict[StoreIdentity, int] = field(default_factory=dict)


class SharedSegments:
    """Safe to use from many threads."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._members: dict[str, _Members] = {}
        self._let_go: dict[str, float] = {}

    def stored(self, blob_id: str, owner: StoreIdentity, end: int) -> None:
        """A store's changes below ``end`` (and after its earlier segments) are in a blob."""
        with self._lock:
            self._members.setdefault(blob_id, _Members()).ends[owner] = end
            while len(self._members) > _REMEMBERED:
                oldest = next(iter(self._members))
                del self._members[oldest]
                self._let_go.pop(oldest, None)

    def let_go(self, blob_ids: Collection[str]) -> None:
        """A task does not need these any more."""
        now = self._monotonic()
        with self._lock:
            for blob_id in blob_ids:
                if blob_id in self._members:
                    self._let_go.setdefault(blob_id, now)

    def release(self, read: Read, catalogue: Catalogue, transfer: Transfer) -> None:
        """Delete what nobody needs, if it is time to look.

        Raises: UnavailableError, AccessDenied, CorruptRecord, MissingError; then it is looked at again.
        """
        due = self._due()
        if not due:
            return
        records = read({owner.task for members in due.values() for owner in members.ends})
        garbage = [blob for blob, members in due.items() if _is_garbage(blob, members, records, catalogue)]
        failed = transfer.delete_all(garbage)
        with self._lock:
            for blob in garbage:
                if blob not in failed:
                    self._members.pop(blob, None)
            for blob in due:
                self._let_go.pop(blob, None)
                if blob in failed or blob in self._members:
                    self._let_go[blob] = self._monotonic()

    def _due(self) -> dict[str, _Members]:
        with self._lock:
            oldest = next(iter(self._let_go.values()), None)
            if oldest is None or (len(self._let_go) < _MANY and self._monotonic() - oldest < _SECONDS):
                return {}
            return {blob: _Members(dict(self._members[blob].ends)) for blob in self._let_go}


def _is_garbage(blob_id: str, members: _Members, records: Mapping[str, CheckpointRecord], catalogue: Catalogue) -> bool:
    for owner, end in members.ends.items():
        record = records.get(owner.task)
        if record is None:
            return False
        for number, checkpoint in enumerate(record.checkpoints):
            for of_store in checkpoint.state_checkpoint_markers.values():
                marker = of_store.get(owner.store)
                if not isinstance(marker, BlobMarker):
                    continue
                chain = catalogue.chain(owner, marker)
                if _refers(marker, chain, blob_id) or (number == 0 and chain.start < end):
                    return False
    return True


def _refers(marker: BlobMarker, chain: SegmentChain, blob_id: str) -> bool:
    if marker.blob is not None and marker.blob.blob_id == blob_id:
        return True
    return any(segment.blob is not None and segment.blob.blob_id == blob_id for segment in chain.segments)
