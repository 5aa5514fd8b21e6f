"""The chain of a store's next commit: which snapshot it begins with, and which changes it still has to store.

A commit continues the published chain, or it begins a new chain with a snapshot. It stores a snapshot if the store has
no chain yet, or one of another type of store, if the configuration asks for one at every commit, or if the new files
are smaller than the changes. A snapshot that was made meanwhile in the background replaces the segments that it covers.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.local_notes import PendingNote
from statemgr.backends.blobs.snapshots import Snapshots
from statemgr.backends.blobs.writer_state import PendingSnapshot, WriterState
from statemgr.config.factories import BLOB_STORE
from statemgr.errors import MissingBlob
from statemgr.local import type_of
from statemgr.local.machine import moment
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobMarker, Marker
from statemgr.model.commit import NumberedChanges, StoreSession
from statemgr.model.segment import write_segment
from statemgr.ports import Moment, StoreIdentity, StoreSnapshot
from statemgr.services import Services
from statemgr.transfer.packs import PackedBlob

log = logging.getLogger(__name__)
#: From this many bytes of changes, a commit that made a directory checks whether a snapshot is smaller.
_MUCH = 1024 * 1024


@dataclass(frozen=True, eq=False)
class Draft:
    """A store's next chain without the changes that are still to be stored.

    Attributes:
        changes: the changes to store; ``first``: the chain's number of the first of them.
        added: the blobs that the commit adds so far; ``added_bytes``: the bytes of those that it uploaded itself.
    """

    snapshot: StoreSnapshot
    writer: WriterState
    chain: SegmentChain
    changes: NumberedChanges
    first: int
    added: tuple[str, ...]
    added_bytes: int = 0

    @property
    def end(self) -> int:
        """The chain's number after the last change."""
        return self.first + self.changes.end - self.changes.first


class NextChains:
    """Drafts chains, and stores snapshots for them in the background."""

    def __init__(self, services: Services, catalogue: Catalogue) -> None:
        self._services = services
        self._catalogue = catalogue
        self._snapshots = Snapshots(services.transfer, services.clock, catalogue)

    def draft(self, snapshot: StoreSnapshot, base: Marker | None, *, segments: bool) -> Draft:
        """The next chain of a store.

        Args:
            base: the marker in the acknowledged checkpoint.
            segments: whether changes are recorded. If not, each commit stores a snapshot.

        Raises: UnavailableError, AccessDenied, DiskFull, CorruptError, DirectoryNeeded.
        """
        changes, identity, now = snapshot.changes, snapshot.identity, self.now()
        published = None
        if isinstance(base, BlobMarker):
            published = self._catalogue.if_readable(identity, self._catalogue.chain, base)
        if not segments:
            # without numbered changes no other chain leads to this state: a lineage of its own
            return self._filled(snapshot, WriterState(), published, snapshot.attempt, 0)
        writer = self.writer(changes.session)
        if published is None or (writer.chain is None and self._has_another_type(identity, published)):
            writer.start_lineage()
            return self._filled(snapshot, writer, None, snapshot.attempt, changes.end)
        is_first = writer.chain is None
        writer.continue_from(published, changes, now)
        pending, first = writer.unpersisted(changes)
        if snapshot.materialize or self._is_less_as_snapshot(snapshot, published, pending):
            return self._filled(snapshot, writer, published, published.lineage, writer.number_of(changes.end))
        if writer.pending is None and is_first:
            self._find_pending(identity, writer, published)
        taken = writer.snapshot_for(changes, now)
        newest, blobs = taken if taken is not None else (published.snapshot, ())
        stored = writer.stored_after(newest.end)
        kept = {segment.blob.blob_id for segment in stored if segment.blob}
        # segments of an earlier, failed commit that the snapshot covers expire
        reused = tuple(dict.fromkeys(s.blob.blob_id for s, _ in writer.durable if s.blob and s.blob.blob_id in kept))
        added = (*reused, newest.index.blob_id) if taken is not None else reused
        chain = self._chain(snapshot, published.lineage, newest, stored, added)
        return Draft(snapshot, writer, chain, pending, first, (*reused, *blobs))

    def materialize(self, snapshot: StoreSnapshot, base: Marker) -> None:
        """Store a snapshot of an open store. Raises: as :meth:`draft`."""
        began, changes = self.now(), snapshot.changes
        published = self._catalogue.chain(snapshot.identity, base)
        self.writer(changes.session).pending = self._pending(snapshot, published, changes.end, began, changes.freeze)

    def materialize_published(self, snapshot: StoreSnapshot, marker: Marker) -> None:
        """Store a snapshot of a published state, unless another process here does that or there already is one.

        Raises: as :meth:`draft`.
        """
        began = self.now()
        published = self._catalogue.chain(snapshot.identity, marker)
        note = PendingNote(self._services, snapshot.identity)
        with note.making() as is_free:
            if is_free and note.find(published, began) is None:
                note.write(self._pending(snapshot, published, published.end, began).reaching(published, published.end))

    def leave(self, identity: StoreIdentity, session: StoreSession, marker: Marker) -> None:
        """Note the snapshot that an open store knows for others. Raises: UnavailableError, CorruptError, DiskFull."""
        writer, chain = self.writer(session), self._catalogue.chain(identity, marker)
        pending, note = writer.pending, PendingNote(self._services, identity)
        if pending is None or not pending.fits(chain, self.now()) or (writer.chain is None and writer.has_restarted):
            return
        # a session that has committed no change begins at the end of the chain
        end = writer.number_of(pending.snapshot.end) if writer.chain is not None else chain.end
        with note.making() as is_free:
            if is_free:
                note.write(pending.reaching(chain, end))

    def has_pending(self, identity: StoreIdentity, chain: SegmentChain, session: StoreSession | None) -> bool:
        """Whether a commit that continues the chain would build on a newer snapshot: one that the open store knows or,
        until its first commit, one in a note on this machine."""
        writer = self.writer(session) if session is not None else WriterState()
        if writer.pending is None and writer.chain is None:
            return PendingNote(self._services, identity).find(chain, self.now()) is not None
        return writer.pending is not None and writer.pending.fits(chain, self.now())

    def writer(self, session: StoreSession) -> WriterState:
        """The state of an open store's writer."""
        return session.kept_by(self, WriterState)

    def now(self) -> Moment:
        return moment(self._services.clock)

    def _has_another_type(self, identity: StoreIdentity, chain: SegmentChain) -> bool:
        """Whether the chain is of another type of store than the configuration's. Only a store that another backend has
        restored can continue such a chain."""
        config = self._services.config.stores[identity.store]
        if set(config.restore_factories) <= {BLOB_STORE}:
            return False
        index = self._catalogue.if_readable(identity, self._catalogue.index, chain.snapshot.index)
        return index is not None and type_of(dict(index.root.walk())) not in (None, config.type)

    def _find_pending(self, identity: StoreIdentity, writer: WriterState, published: SegmentChain) -> None:
        """Use the snapshot in this machine's note, if all its blobs still exist."""
        note = PendingNote(self._services, identity)
        pending = note.find(published, self.now())
        if pending is None:
            return
        for blob, error in self._services.transfer().absent(pending.blobs).items():
            if not isinstance(error, MissingBlob):
                raise error
            log.warning("%s: a snapshot that was made in the background has lost %s", identity, blob)
            note.remove()
            return
        writer.begin_with(pending)

    def _is_less_as_snapshot(self, snapshot: StoreSnapshot, base: SegmentChain, changes: NumberedChanges) -> bool:
        """Whether the new files of the directory, if one was made, are smaller than the segment would be."""
        if snapshot.made is None or changes.size < _MUCH:
            return False
        new = self._snapshots.new_bytes(snapshot, base.snapshot.index)
        if new is None or changes.size <= new:
            return False
        with closing(PackedBlob(self._services.scratch_file("segments"))) as packed:
            return packed.section(lambda sink: write_segment(changes, sink)).size > new

    def _filled(
        self, snapshot: StoreSnapshot, writer: WriterState, base: SegmentChain | None, lineage: str, end: int
    ) -> Draft:
        """Store the state as a snapshot, without segments."""
        stored = self._snapshots.store(snapshot, base.snapshot.index if base else None)
        newest = ChainSnapshot(stored.index, snapshot.state_id, end)
        chain = self._chain(snapshot, lineage, newest, (), (stored.index.blob_id,))
        nothing = snapshot.changes.since(snapshot.changes.end)
        return Draft(snapshot, writer, chain, nothing, end, stored.blobs, stored.size)

    def _pending(
        self, snapshot: StoreSnapshot, base: SegmentChain, end: int, began: Moment, freeze: int = -1
    ) -> PendingSnapshot:
        stored = self._snapshots.store(snapshot, base.snapshot.index)
        made = ChainSnapshot(stored.index, snapshot.state_id, end)
        return PendingSnapshot(made, base.snapshot.index, stored.blobs, began, freeze)

    def _chain(
        self,
        snapshot: StoreSnapshot,
        lineage: str,
        newest: ChainSnapshot,
        stored: tuple[ChainSegment, ...],
        added: tuple[str, ...],
    ) -> SegmentChain:
        owner, now_ms = snapshot.identity, self._services.clock.time_ns() // 1_000_000
        return SegmentChain(
            owner.job_name, owner.job_id, owner.task, owner.store, snapshot.state_id, snapshot.attempt,
            lineage, now_ms, newest, stored, added,
        )  # fmt: skip
