"""The backup manager of ``blob-store``: a snapshot, and the changes of the commits after it as segments.

Steps of :meth:`BlobBackup.prepare_all`, for all stores of a task at once:

1. draft each store's next chain, which may store a snapshot (:mod:`statemgr.backends.blobs.next_chain`)
2. add the changes that no stored segment has as one segment at the chain's end; many changes make a table
3. put a chain without segments, or a very small one, into the marker; write everything else into one blob
4. wait until that blob, which commits of other tasks may share, is stored; each marker says where in it its chain is
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from statemgr.backends.blobs.branches import branch
from statemgr.backends.blobs.catalogue import Catalogue, validate_for
from statemgr.backends.blobs.clean_up import Cleaner, SharedSegments
from statemgr.backends.blobs.local_notes import ChainPositions
from statemgr.backends.blobs.names import segments_blob
from statemgr.backends.blobs.next_chain import Draft, NextChains
from statemgr.backends.blobs.segment_batch import SegmentBatches, Stored
from statemgr.backends.blobs.segment_cache import SegmentCache
from statemgr.backends.blobs.tables import put_segment
from statemgr.model.chain import ChainSegment, SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef, Marker
from statemgr.model.codecs import encode_chain
from statemgr.model.commit import StoreSession
from statemgr.model.record_size import inline_chain_limit
from statemgr.model.segment import encode_segment
from statemgr.phases import Phase, announce
from statemgr.ports import Backlog, PreparedBackup, SegmentBackupManager, StoreIdentity, StoreSnapshot
from statemgr.services import Services
from statemgr.transfer.packs import PackedBlob

#: Bytes of changes up to which a segment may be inside its chain.
_INLINE_SEGMENT = 2 * 1024

#: A store's next chain, and its marker. Parts in the batch's blob have no blob name yet.
_Chained = tuple[SegmentChain, BlobMarker]


class BlobBackup(SegmentBackupManager):
    """Stores snapshots and segments in the blob store. It sends nothing in a transaction."""

    branches = True

    def __init__(self, services: Services, catalogue: Catalogue, batches: SegmentBatches) -> None:
        #: changes are recorded only if a commit may store them as a segment
        self.needs_directory = services.config.snapshot_interval.is_every_commit
        self.needs_changes = not self.needs_directory
        self._services = services
        self._chains = NextChains(services, catalogue)
        self._cleaner = Cleaner(services.transfer, catalogue, services.clock.monotonic)
        self._catalogue = catalogue
        self._batches = batches
        self._shared = SharedSegments(services.clock.monotonic)
        #: task → blobs of segments that it does not need and that could not be deleted yet
        self._undeleted: dict[StoreIdentity, set[str]] = {}

    # --- a commit -------------------------------------------------------------------------------------------------

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        return self.prepare_all([(snapshot, base)], portable=portable)[0]

    def prepare_all(
        self, snapshots: Sequence[tuple[StoreSnapshot, Marker | None]], *, portable: bool
    ) -> Sequence[PreparedBackup]:
        with self._batches.coming():
            drafts = [self._chains.draft(*request, segments=self.needs_changes) for request in snapshots]  # 1
            written = {draft: self._inline(draft, portable) for draft in drafts}  # 2, 3
        large = [draft for draft, made in written.items() if made is None]
        stored = Stored("", b"")
        if large:
            stored = self._store_together(large, written)
            if isinstance(stored.body, bytes) and not portable:
                self._keep_local({draft: written[draft] for draft in large}, stored.body)
        backups = [self._finished(draft, made, stored) for draft, made in written.items() if made]
        if portable and self.needs_changes:
            # each attempt leaves a local directory of the state that it prepares
            for (snapshot, _), backup in zip(snapshots, backups, strict=True):
                assert backup.marker is not None
                chain = self._catalogue.chain(snapshot.identity, backup.marker)
                ChainPositions(self._services, snapshot.identity).note(chain)
        return backups

    def _inline(self, draft: Draft, together: bool) -> _Chained | None:
        """Steps 2 and 3 for a chain that fits into the checkpoint record; None for a larger one.

        ``together``: all tasks of the job are published at once, and share the limit.
        """
        chain, changes, config = draft.chain, draft.changes, self._services.config
        if changes.size > _INLINE_SEGMENT:
            return None
        if changes.count:
            new = ChainSegment(draft.first, draft.end, inline=encode_segment(changes, draft.first))
            chain = replace(chain, segments=(*chain.segments, new))
        _check_restorable(draft, chain)
        data = encode_chain(chain)
        limit = inline_chain_limit(len(config.stores), config.tasks if together else 1)
        return (chain, BlobMarker(inline=data)) if not chain.segments or len(data) <= limit else None

    def _store_together(self, drafts: Sequence[Draft], written: dict[Draft, _Chained | None]) -> Stored:
        """Steps 2 to 4 for what does not fit into the checkpoint record."""
        owner, attempt = drafts[0].snapshot.identity, drafts[0].snapshot.attempt
        with self._batches.joined(owner, attempt, sum(draft.changes.size for draft in drafts)) as (blob, done):
            written |= {draft: self._write(draft, blob) for draft in drafts}
        announce(Phase.PUT_SEGMENTS, owner.task, owner.job_key)
        return self._batches.wait(done)

    def _write(self, draft: Draft, blob: PackedBlob) -> _Chained:
        """Steps 2 and 3 for a chain that is written into a blob, with its segments that were inline. The blob has no
        name yet."""
        chain, changes, first = draft.chain, draft.changes, draft.first
        segments = tuple(_moved(segment, blob) for segment in chain.segments)
        if changes.count:
            ref = put_segment(self._services, draft.snapshot.identity, changes, first, blob)
            segments = (*segments, ChainSegment(first, draft.end, ref))
        chain = replace(chain, segments=segments)
        _check_restorable(draft, chain)
        data = encode_chain(chain)
        return chain, BlobMarker(blob.section(lambda section: section.write(data)))

    def _keep_local(self, written: Mapping[Draft, _Chained | None], body: bytes) -> None:
        """Keep the new segments on this machine for a restart, and drop those that the chain no longer has."""
        for draft, made in written.items():
            assert made is not None
            cache = SegmentCache(self._services, draft.snapshot.identity)
            for segment in made[0].segments:
                if segment.blob is not None and not segment.blob.blob_id:
                    at = segment.blob.offset or 0
                    cache.keep(segment, memoryview(body)[at : at + segment.blob.size])
            cache.keep_only((*made[0].segments, *draft.writer.published))

    def forget_local(self, identity: StoreIdentity) -> None:
        SegmentCache(self._services, identity).keep_only(())

    def _finished(self, draft: Draft, made: _Chained, stored: Stored) -> PreparedBackup:
        (chain, marker), added, size = made, draft.added, draft.added_bytes
        if marker.blob is not None:
            marker = BlobMarker(replace(marker.blob, blob_id=stored.blob_id))
            chain = chain.lying_in(stored.blob_id)
            added = (*added, stored.blob_id)
            refs = [marker.blob, *(segment.blob for segment in chain.segments)]
            size += sum(ref.size for ref in refs if ref is not None and ref.blob_id == stored.blob_id)
            if draft.changes.count:
                draft.writer.persisted(chain.segments[-1], self._chains.now())
            if stored.tasks:
                self._shared.stored(stored.blob_id, draft.snapshot.identity, chain.end, stored.tasks)
        self._catalogue.remember_chain(marker, chain)
        return PreparedBackup(marker, added_blobs=added, added_bytes=size)

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        """The same marker again: its chain is complete."""
        return base if isinstance(base, BlobMarker) else None

    def branch(self, identity: StoreIdentity, marker: Marker, *, together: bool) -> PreparedBackup:
        """Put the same snapshot and segments into a chain of a new lineage.

        A chain that is too large for the record is stored as a blob.
        """
        services = self._services
        chain = self._catalogue.chain(identity, marker)
        for error in services.transfer().absent([chain.snapshot.index.blob_id]).values():
            raise error
        now_ms = services.clock.time_ns() // 1_000_000
        lineage = services.ids.attempt_id()
        return branch(
            services, identity, replace(chain, lineage=lineage, created_ms=now_ms, added=()), together=together
        )

    # --- background snapshots and local directories ---------------------------------------------------------------

    def backlog(self, identity: StoreIdentity, marker: Marker, session: StoreSession | None = None) -> Backlog:
        chain = self._catalogue.chain(identity, marker)
        waiting = self._chains.has_pending(identity, chain, session)
        return Backlog(len(chain.segments), sum(segment.size for segment in chain.segments), waiting)

    def snapshot_made_ms(self, identity: StoreIdentity, marker: Marker) -> int:
        chain = self._catalogue.chain(identity, marker)
        return self._catalogue.index(identity, chain.snapshot.index).created_ms

    def materialize(self, snapshot: StoreSnapshot, base: Marker) -> None:
        self._chains.materialize(snapshot, base)

    def materialize_published(self, snapshot: StoreSnapshot, marker: Marker) -> None:
        self._chains.materialize_published(snapshot, marker)

    def leave_snapshot(self, identity: StoreIdentity, session: StoreSession, marker: Marker) -> None:
        self._chains.leave(identity, session, marker)

    def note_compacted(self, identity: StoreIdentity, state_id: str) -> None:
        ChainPositions(self._services, identity).mark_compacted(state_id, compacted=True)

    def compacted(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        positions = ChainPositions(self._services, identity)
        if not positions.compacted():
            return ()
        chain = self._catalogue.chain(identity, marker)
        return [state_id for state_id, position in positions.fitting(chain).items() if position.compacted]

    # --- clean-up and garbage collection --------------------------------------------------------------------------

    def clean_up_all(
        self,
        task: StoreIdentity,
        evicted: Mapping[str, Sequence[Marker]],
        retained: Mapping[str, Sequence[Marker]],
    ) -> None:
        undeleted = self._undeleted.setdefault(task, set())
        self._shared.retained(self._cleaner.clean_up(task, evicted, retained, undeleted))
        self._shared.delete(self._services.transfer)

    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        chain = self._catalogue.chain(identity, marker)
        added = [marker.blob.blob_id] if isinstance(marker, BlobMarker) and marker.blob else []
        for blob_id in chain.added:
            if blob_id == chain.snapshot.index.blob_id:
                added += (blob.blob_id for blob in self._catalogue.index(identity, chain.snapshot.index).added())
            added.append(blob_id)
        return list(dict.fromkeys(added))

    def needed(self, identity: StoreIdentity, marker: Marker) -> Iterator[tuple[BlobRef, int]]:
        return self._catalogue.needed(identity, marker)

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        return dict.fromkeys(ref.blob_id for ref, _ in self.needed(identity, marker))


def _moved(segment: ChainSegment, blob: PackedBlob) -> ChainSegment:
    """Move a segment that was inline into the blob."""
    data = segment.inline
    if data is None:
        return segment
    return ChainSegment(segment.first, segment.end, blob.section(lambda section: section.write(data)))


def _check_restorable(draft: Draft, chain: SegmentChain) -> None:
    """Refuse to publish a chain that a restore would refuse. Raises: CorruptBlob."""
    identity = draft.snapshot.identity
    blob_id = segments_blob(identity, draft.snapshot.attempt)
    validate_for(chain.lying_in(blob_id), identity, blob_id)
