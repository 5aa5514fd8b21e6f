"""The backup manager of ``blob-store``: a snapshot, and the changes of the commits after it as segments.

Steps of :meth:`BlobBackup.prepare_all`, for all stores of a task at once:

1. continue the published chain; or store a snapshot, which a chain begins with: of a store that has no chain yet, at
   every commit where the configuration says so, or where its new files are fewer bytes than the changes
2. write the changes that no stored segment has yet as one segment, which is a table when they are many, and the chain
   that ends with it
3. what is very small, and a chain without segments, travels inline; all else goes into one blob
4. wait until that blob, which commits of other tasks may share, is put; each marker says where in it its chain lies

A snapshot that was made meanwhile in the background takes the place of the segments that it covers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import BinaryIO

from statemgr.backends.blobs.catalogue import Catalogue, validate_for
from statemgr.backends.blobs.clean_up import Cleaner
from statemgr.backends.blobs.local_notes import ChainPositions, Offer, Offers
from statemgr.backends.blobs.names import segments_blob
from statemgr.backends.blobs.segment_batch import SegmentBatches, Stored
from statemgr.backends.blobs.segment_cache import SegmentCache
from statemgr.backends.blobs.shared_segments import Read, SharedSegments
from statemgr.backends.blobs.snapshots import Snapshots, StoredSnapshot
from statemgr.backends.blobs.tables import table_of
from statemgr.backends.blobs.writer_state import Materialized, SegmentLog
from statemgr.backends.services import Services
from statemgr.errors import CorruptBlob, InvalidError, MissingBlob
from statemgr.local.clock import moment
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain, history_of
from statemgr.model.checkpoint import BlobMarker, Marker
from statemgr.model.codecs import encode_chain
from statemgr.model.commit import NumberedChanges, PreparedChanges, StoreSession
from statemgr.model.record_size import inline_chain_limit
from statemgr.model.segment import encode_segment, write_segment, write_table_segment
from statemgr.phases import Phase, announce
from statemgr.ports import Backlog, Moment, PreparedBackup, StagedChanges, StoreIdentity, StoreSnapshot
from statemgr.transfer.packs import PackedBlob

log = logging.getLogger(__name__)
#: Bytes of changes up to which a segment may travel inside its chain.
_INLINE_SEGMENT = 2 * 1024
#: Bytes of changes from which on a snapshot may be stored instead of them, where a directory was made anyway.
_MUCH = 1024 * 1024


#: A store's next chain, and its marker. What lies in the batch's blob has no name yet.
_Chained = tuple[SegmentChain, BlobMarker]


@dataclass(frozen=True, eq=False)
class _Draft:
    """A store's next chain without the changes that are still to be written, which begin with the number ``first``.

    ``added``: the blobs that the commit adds so far; ``added_bytes``: those that it uploaded itself.
    """

    snapshot: StoreSnapshot
    log: SegmentLog
    chain: SegmentChain
    changes: NumberedChanges
    first: int
    added: tuple[str, ...]
    added_bytes: int = 0

    @property
    def end(self) -> int:
        """The sequence number after its last change."""
        return self.first + self.changes.end - self.changes.first


class BlobBackup:
    """Implements :class:`statemgr.ports.SegmentBackupManager`."""

    fills_from_changes = False
    local_copy_interval_s: float | None = None

    def __init__(self, services: Services, catalogue: Catalogue, batches: Callable[[], SegmentBatches]) -> None:
        #: changes are recorded only where one of their segments may be chosen
        self.needs_directory = services.config.snapshot_interval.is_every_commit
        self.needs_changes = not self.needs_directory
        self._services = services
        self._snapshots = Snapshots(services.transfer, services.clock, catalogue)
        self._cleaner = Cleaner(services.transfer, catalogue)
        self._catalogue = catalogue
        self._batches = batches
        self._shared = SharedSegments(services.clock.monotonic)
        self._offers = Offers(services)
        #: task → blobs of segments that it does not need and that could not be deleted yet
        self._undeleted: dict[StoreIdentity, set[str]] = {}

    # --- a commit -------------------------------------------------------------------------------------------------

    def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
        """As the port says, for one store alone."""
        return self.prepare_all([(snapshot, base)], portable=portable)[0]

    def prepare_all(
        self, snapshots: Sequence[tuple[StoreSnapshot, Marker | None]], *, portable: bool
    ) -> Sequence[PreparedBackup]:
        """Raises: UnavailableError, AccessDenied, DiskFull, CorruptError, DirectoryNeeded."""
        batches, of_task = self._batches(), snapshots[0][0]
        with batches.coming():
            drafts = [self._draft(snapshot, base) for snapshot, base in snapshots]  # 1
            written = {draft: self._inline(draft, portable) for draft in drafts}  # 2, 3
        large = [draft for draft, made in written.items() if made is None]
        stored = Stored("", b"", shared=False)
        if large:
            expected = sum(draft.changes.size for draft in large)
            with batches.joined(of_task.identity, of_task.attempt, expected) as (blob, done):
                written |= {draft: self._written(draft, blob) for draft in large}
            announce(Phase.PUT_SEGMENTS, of_task.identity.task, of_task.identity.job_key)
            stored = batches.wait(done)  # 4
            if isinstance(stored.body, bytes) and not portable:
                self._keep_local({draft: written[draft] for draft in large}, stored.body)
        backups = [self._finished(draft, made, stored) for draft, made in written.items() if made]
        if portable and self.needs_changes:
            self._note(snapshots, backups)
        return backups

    def _note(self, snapshots: Sequence[tuple[StoreSnapshot, Marker | None]], done: Sequence[PreparedBackup]) -> None:
        """Attempts leave a directory of each state that they prepare: at which point of the chain it is."""
        for (snapshot, _), backup in zip(snapshots, done, strict=True):
            assert backup.marker is not None
            chain = self._catalogue.chain(snapshot.identity, backup.marker)
            ChainPositions(self._services, snapshot.identity).note(chain)

    def note_compacted(self, identity: StoreIdentity, state_id: str) -> None:
        ChainPositions(self._services, identity).mark_compacted(state_id, compacted=True)

    def compacted(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """Raises: MissingBlob, CorruptBlob, UnavailableError."""
        positions = ChainPositions(self._services, identity)
        if not positions.compacted():
            return ()
        chain = self._catalogue.chain(identity, marker)
        return [state_id for state_id, position in positions.fitting(chain).items() if position.compacted]

    def _keep_local(self, written: Mapping[_Draft, _Chained | None], body: bytes) -> None:
        """The new segments on this machine, for a restart here; those that the chain has no more go."""
        for draft, made in written.items():
            assert made is not None
            cache = SegmentCache(self._services, draft.snapshot.identity)
            for segment in made[0].segments:
                if segment.blob is not None and not segment.blob.blob_id:
                    at = segment.blob.offset or 0
                    cache.keep(segment, memoryview(body)[at : at + segment.blob.size])
            cache.keep_only((*made[0].segments, *draft.log.published))

    def _draft(self, snapshot: StoreSnapshot, base: Marker | None) -> _Draft:
        """Step 1."""
        changes, identity = snapshot.changes, snapshot.identity
        published = self._published(identity, base)
        if not self.needs_changes:
            # without numbered changes no other chain leads to this state: a lineage of its own
            return self._filled(snapshot, SegmentLog(), published, snapshot.attempt, 0)
        segments = self._log(changes.session)
        if published is None:
            segments.start_anew()
            return self._filled(snapshot, segments, None, snapshot.attempt, changes.end)
        segments.continue_from(published, changes, self._now())
        pending, first = segments.unpersisted(changes)
        if snapshot.materialize or self._is_less_as_snapshot(snapshot, published, pending):
            return self._filled(snapshot, segments, published, published.lineage, segments.number_of(changes.end))
        if segments.waiting is None:
            self._take_offer(identity, segments, published)
        taken = segments.snapshot_for(changes, self._now())
        newest, blobs = taken if taken is not None else (published.snapshot, ())
        stored = segments.stored_after(newest.end)
        kept = {segment.blob.blob_id for segment in stored if segment.blob}
        # what an earlier commit stored, and the snapshot covers, is left to its TTL
        reused = tuple(dict.fromkeys(s.blob.blob_id for s, _ in segments.durable if s.blob and s.blob.blob_id in kept))
        added = (*reused, newest.index.blob_id) if taken is not None else reused
        chain = self._chain(snapshot, published.lineage, newest, stored, added)
        return _Draft(snapshot, segments, chain, pending, first, (*reused, *blobs))

    def _take_offer(self, identity: StoreIdentity, segments: SegmentLog, published: SegmentChain) -> None:
        """Begin with the snapshot that is offered on this machine, if all its blobs are still there."""
        offer = self._offers.find(identity, published, self._now())
        if offer is None:
            return
        for blob, error in self._services.transfer().absent(offer.blobs).items():
            if not isinstance(error, MissingBlob):
                raise error
            log.warning(
                "%s/%s: a snapshot that was made in the background has lost %s", identity.task, identity.store, blob
            )
            self._offers.take_back(identity)
            return
        segments.begin_with(offer.snapshot, offer.base, offer.blobs, offer.stored)

    def _is_less_as_snapshot(self, snapshot: StoreSnapshot, base: SegmentChain, changes: NumberedChanges) -> bool:
        """Whether the new files of a directory that was made are fewer bytes than the changes are as a segment."""
        if snapshot.made is None or changes.size < _MUCH:
            return False
        new = self._snapshots.new_bytes(snapshot, base.snapshot.index)
        if new is None or changes.size <= new:
            return False
        segment = PackedBlob(self._services.scratch() / f"segments-{self._services.ids.token()}")
        with closing(segment):
            return segment.section(lambda sink: write_segment(changes, sink), changes.size).size > new

    def _filled(
        self, snapshot: StoreSnapshot, segments: SegmentLog, base: SegmentChain | None, lineage: str, end: int
    ) -> _Draft:
        """The state as a snapshot that is stored now, without segments."""
        stored = self._store_snapshot(snapshot, base)
        newest = ChainSnapshot(stored.index, snapshot.state_id, end)
        chain = self._chain(snapshot, lineage, newest, (), (stored.index.blob_id,))
        nothing = snapshot.changes.since(snapshot.changes.end)
        return _Draft(snapshot, segments, chain, nothing, end, stored.blobs, stored.size)

    def _chain(
        self,
        snapshot: StoreSnapshot,
        lineage: str,
        newest: ChainSnapshot,
        stored: tuple[ChainSegment, ...],
        added: tuple[str, ...],
    ) -> SegmentChain:
        owner = snapshot.identity
        return SegmentChain(
            owner.job_name, owner.job_id, owner.task, owner.store, snapshot.state_id, snapshot.attempt,
            lineage, self._now_ms(), newest, stored, added,
        )  # fmt: skip

    def _inline(self, draft: _Draft, together: bool) -> _Chained | None:
        """Steps 2 and 3 for what travels inside the checkpoint record; None for what is too large for that."""
        chain, changes = draft.chain, draft.changes
        if changes.size > _INLINE_SEGMENT:
            return None
        if changes.count:
            new = ChainSegment(draft.first, draft.end, inline=encode_segment(changes, draft.first))
            chain = replace(chain, segments=(*chain.segments, new))
        self._check(draft, chain)
        data = encode_chain(chain)
        fits = not chain.segments or len(data) <= self._inline_limit(together)
        return (chain, BlobMarker(inline=data)) if fits else None

    def _written(self, draft: _Draft, blob: PackedBlob) -> _Chained:
        """Steps 2 and 3 for what goes into a blob, with all that was inline before. The blob has no name yet."""
        chain, changes, first = draft.chain, draft.changes, draft.first
        segments = tuple(_moved(segment, blob) for segment in chain.segments)
        if changes.count:
            with table_of(self._services, draft.snapshot.identity, changes) as table:
                ref = blob.section(lambda section: _write(section, changes, table, first), changes.size)
            segments = (*segments, ChainSegment(first, draft.end, ref))
        chain = replace(chain, segments=segments)
        self._check(draft, chain)
        data = encode_chain(chain)
        return chain, BlobMarker(blob.section(lambda section: section.write(data), len(data)))

    def _check(self, draft: _Draft, chain: SegmentChain) -> None:
        """What would be refused at a restore must never be published. Raises: CorruptBlob."""
        identity = draft.snapshot.identity
        blob_id = segments_blob(identity, draft.snapshot.attempt)
        validate_for(chain.lying_in(blob_id), identity, blob_id)

    def _finished(self, draft: _Draft, made: _Chained, stored: Stored) -> PreparedBackup:
        (chain, marker), added, size = made, draft.added, draft.added_bytes
        if marker.blob is not None:
            marker = BlobMarker(replace(marker.blob, blob_id=stored.blob_id))
            chain = chain.lying_in(stored.blob_id)
            added = (*added, stored.blob_id)
            refs = [marker.blob, *(segment.blob for segment in chain.segments)]
            size += sum(ref.size for ref in refs if ref is not None and ref.blob_id == stored.blob_id)
            if draft.changes.count:
                draft.log.persisted(chain.segments[-1], self._now())
            if stored.shared:
                self._shared.stored(stored.blob_id, draft.snapshot.identity, chain.end)
        self._catalogue.remember_chain(marker, chain)
        return PreparedBackup(marker, added_blobs=added, added_bytes=size)

    def _inline_limit(self, together: bool) -> int:
        """``together``: all tasks of the job are published at once."""
        config = self._services.config
        return inline_chain_limit(len(config.stores), config.tasks if together else 1)

    def _published(self, identity: StoreIdentity, base: Marker | None) -> SegmentChain | None:
        if not isinstance(base, BlobMarker):
            return None
        try:
            return self._catalogue.chain(identity, base)
        except (MissingBlob, CorruptBlob) as error:
            log.warning(
                "%s/%s: the published chain cannot be read; everything is uploaded again: %s",
                identity.task, identity.store, error,
            )  # fmt: skip
            return None

    # --- materialisation ------------------------------------------------------------------------------------------

    def backlog(self, identity: StoreIdentity, marker: Marker, session: StoreSession | None = None) -> Backlog:
        """Raises: MissingBlob, CorruptBlob, UnavailableError."""
        chain = self._catalogue.chain(identity, marker)
        now = self._now()
        if session is None:
            found: object = self._offers.find(identity, chain, now)
        else:
            found = self._log(session).usable(chain, now)
        return Backlog(len(chain.segments), sum(segment.size for segment in chain.segments), found is not None)

    def snapshot_made_ms(self, identity: StoreIdentity, marker: Marker) -> int:
        """Raises: MissingBlob, CorruptBlob, UnavailableError."""
        chain = self._catalogue.chain(identity, marker)
        return self._catalogue.index(identity, chain.snapshot.index).created_ms

    def materialize(self, snapshot: StoreSnapshot, base: Marker) -> None:
        """Raises: UnavailableError, AccessDenied, DiskFull, CorruptError."""
        changes, published = snapshot.changes, self._catalogue.chain(snapshot.identity, base)
        began = self._now()
        stored = self._store_snapshot(snapshot, published)
        self._log(changes.session).waiting = Materialized(
            stored.index, snapshot.state_id, changes.end, changes.freeze, published.snapshot.index, stored.blobs, began
        )

    def materialize_published(self, snapshot: StoreSnapshot, marker: Marker) -> None:
        """Raises: UnavailableError, AccessDenied, DiskFull, CorruptError."""
        identity, began = snapshot.identity, self._now()
        published = self._catalogue.chain(identity, marker)
        with self._offers.making(identity) as is_free:
            if not is_free or self._offers.find(identity, published, began) is not None:
                return
            stored = self._store_snapshot(snapshot, published)
            made = ChainSnapshot(stored.index, snapshot.state_id, published.end)
            base = published.snapshot.index
            self._offers.make(identity, Offer(made, base, history_of(published.segments), stored.blobs, began))

    def _store_snapshot(self, snapshot: StoreSnapshot, base: SegmentChain | None) -> StoredSnapshot:
        return self._snapshots.store(snapshot, base.snapshot.index if base else None)

    # --- the rest of the port -------------------------------------------------------------------------------------

    def stage(self, identity: StoreIdentity, changes: PreparedChanges, base: Marker | None) -> StagedChanges:
        """Never asked for: ``prepare`` gives a marker."""
        raise InvalidError(
            "the backend blob-store sends nothing in a transaction", task=identity.task, store=identity.store
        )

    def carry(self, identity: StoreIdentity, base: Marker) -> Marker | None:
        """The same chain again: it is complete by itself."""
        return base if isinstance(base, BlobMarker) else None

    def has_tail(self, identity: StoreIdentity, marker: Marker) -> bool:
        """Never: a chain is what it is."""
        return False

    def clean_up(self, identity: StoreIdentity, evicted: Sequence[Marker], retained: Sequence[Marker]) -> None:
        """As the port says, but for blobs that other stores of the task may share."""
        self._cleaner.clean_up(identity, {identity.store: evicted}, {identity.store: retained}, None)

    def clean_up_all(
        self,
        task: StoreIdentity,
        evicted: Mapping[str, Sequence[Marker]],
        retained: Mapping[str, Sequence[Marker]],
    ) -> None:
        """As the port says. What cannot be proved unreferenced stays."""
        undeleted = self._undeleted.setdefault(task, set())
        self._shared.let_go(self._cleaner.clean_up(task, evicted, retained, undeleted))

    def release_shared(self, read: Read) -> None:
        """Raises: UnavailableError, AccessDenied, CorruptRecord, MissingError."""
        self._shared.release(read, self._catalogue, self._services.transfer())

    def added_blobs(self, identity: StoreIdentity, marker: Marker) -> Sequence[str]:
        """Raises: MissingBlob, CorruptBlob, UnavailableError."""
        chain = self._catalogue.chain(identity, marker)
        added = [marker.blob.blob_id] if isinstance(marker, BlobMarker) and marker.blob else []
        for blob_id in chain.added:
            if blob_id == chain.snapshot.index.blob_id:
                added += (blob.blob_id for blob in self._catalogue.index(identity, chain.snapshot.index).added())
            added.append(blob_id)
        return list(dict.fromkeys(added))

    def referenced_blobs(self, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        """Raises: MissingBlob, CorruptBlob, UnavailableError."""
        return dict.fromkeys(ref.blob_id for ref, _ in self._catalogue.needed(identity, marker))

    def _log(self, session: StoreSession) -> SegmentLog:
        return session.kept_by(self, SegmentLog)

    def _now(self) -> Moment:
        return moment(self._services.clock)

    def _now_ms(self) -> int:
        return self._services.clock.time_ns() // 1_000_000


def _write(section: BinaryIO, changes: NumberedChanges, table: BinaryIO | None, first: int) -> None:
    if table is None:
        write_segment(changes, section, first)
    else:
        write_table_segment(table, changes.count, section, first)


def _moved(segment: ChainSegment, blob: PackedBlob) -> ChainSegment:
    """A segment that was inline, in the blob."""
    data = segment.inline
    if data is None:
        return segment
    return ChainSegment(segment.first, segment.end, blob.section(lambda section: section.write(data), len(data)))
