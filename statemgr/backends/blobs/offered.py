"""Makes the chain with which the owner of a job continues a first snapshot that ``statemgr materialize`` has stored.

The owner's chain begins with the offered snapshot. Its segments are the changes that the changelog has had since. Each
is one table or a run of records with the last value of each key. The chain has a lineage of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

from statemgr.backends.blobs.branches import put_chain
from statemgr.backends.blobs.catalogue import Catalogue, validate_for
from statemgr.backends.blobs.names import segments_blob
from statemgr.backends.blobs.tables import put_segment
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobRef
from statemgr.model.commit import Change, size_of
from statemgr.ports import ChangelogBatch, PreparedBackup, StoreIdentity
from statemgr.services import Services
from statemgr.transfer.packs import PackedBlob

#: Most changes and bytes in one segment, so that it can be a table.
_CHANGES, _BYTES = 400_000, 48 * 1024 * 1024


class OfferedSnapshots:
    """Continues offered snapshots. Safe to use from many threads."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._catalogue = Catalogue(services.transfer)

    def blobs_of(self, identity: StoreIdentity, index: BlobRef) -> list[str]:
        """Every blob of an offered snapshot, its index last. Raises: MissingBlob, CorruptBlob, UnavailableError."""
        found = self._catalogue.index(identity, index)
        return [*dict.fromkeys(blob.blob_id for blob in found.blobs()), index.blob_id]

    def whole(self, identity: StoreIdentity, index: BlobRef) -> list[str]:
        """:meth:`blobs_of`, after a check that each of them exists. Raises: as :meth:`blobs_of`."""
        blobs = self.blobs_of(identity, index)
        for error in self._services.transfer().absent(blobs).values():
            raise error
        return blobs

    def continued(
        self,
        identity: StoreIdentity,
        state_id: str,
        offered: ChainSnapshot,
        batches: Iterable[ChangelogBatch],
        *,
        together: bool,
    ) -> PreparedBackup:
        """The chain of a state: an offered snapshot, and the changes after it.

        Args:
            batches: the changes, oldest first.
            together: whether all tasks of the job are published together.

        Raises: MissingBlob if the snapshot has lost a blob; CorruptBlob, UnavailableError, AccessDenied, DiskFull.
        """
        services, attempt = self._services, self._services.ids.attempt_id()
        index = self._catalogue.index(identity, offered.index)
        blobs = self.whole(identity, offered.index)
        segments, number = list[ChainSegment](), offered.end
        for tail in _tails(batches):
            segments.append(self._segment(identity, f"{attempt}.{len(segments)}", tail, number))
            number = segments[-1].end
        # an opening finds the blobs of the index's own attempt through the index
        of_index = {blob.blob_id for blob in index.added()}
        stored = [segment.blob.blob_id for segment in segments if segment.blob is not None]
        added = (*(blob for blob in blobs if blob not in of_index), *stored)
        now_ms = services.clock.time_ns() // 1_000_000
        chain = SegmentChain(
            identity.job_name, identity.job_id, identity.task, identity.store, state_id, attempt, attempt, now_ms,
            offered, tuple(segments), added,
        )  # fmt: skip
        validate_for(chain, identity, offered.index.blob_id)
        made = put_chain(services, identity, chain, together=together)
        size = sum(segment.size for segment in segments)
        return PreparedBackup(made.marker, added_blobs=(*blobs, *stored, *made.added_blobs), added_bytes=size)

    def _segment(self, identity: StoreIdentity, name: str, tail: _Tail, first: int) -> ChainSegment:
        with closing(PackedBlob(self._services.scratch_file("segments"))) as packed:
            ref = put_segment(self._services, identity, tail, first, packed)
            blob_id = segments_blob(identity, name)
            self._services.transfer().put(blob_id, packed.body())
        return ChainSegment(first, first + tail.count, replace(ref, blob_id=blob_id))


class _Tail:
    """Implements ``ChangeSet``: the last value of each key in a part of a changelog."""

    def __init__(self, changes: Mapping[bytes, bytes | None]) -> None:
        self._changes = changes
        self.count, self.size = len(changes), size_of(changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes.items())


def _tails(batches: Iterable[ChangelogBatch]) -> Iterator[_Tail]:
    changes: dict[bytes, bytes | None] = {}
    size = 0
    for batch in batches:
        changes.update(batch.changes)
        size += batch.size
        if len(changes) >= _CHANGES or size >= _BYTES:
            yield _Tail(changes)
            changes, size = {}, 0
    if changes:
        yield _Tail(changes)
