"""The restore manager of ``blob-store``: a snapshot, and then the changes after it in order, if there are any.

Steps:

1. get the segment chain (of this store, without gaps, nothing hostile in it), before anything local is changed
2. begin with a local directory of an earlier state of the chain, or else fetch the snapshot. Of what earlier tries
   left, remove what is of no use
3. fetch the segments that this machine does not have, in parallel, and verify each one completely
4. apply the changes that the beginning lacks, in order, to the store in the staging directory: tables are ingested
   whole and in groups, records are written
5. flush and close it: the directory is the state
6. if a snapshot or a segment is missing or corrupt, start again at 2 with an older snapshot, or another segment with
   the same changes, from older retained chains of the same lineage. If there is none, raise the error

Touches the staging directory, which must not exist and is left to the caller when a step fails, what earlier tries
left, and the scratch directory.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

from statemgr.backends.blobs.by_need import StateByNeed, open_by_need
from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.fetch_snapshot import fetch_snapshot
from statemgr.backends.blobs.local_notes import ChainPositions, Position
from statemgr.backends.blobs.segment_cache import SegmentCache
from statemgr.backends.blobs.tables import changes_of, replay
from statemgr.errors import ConfigError, CorruptError, CorruptFile, MissingError, MissingFile
from statemgr.local import cloned, fetched_tree, open_store, type_of, unshare
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain, Way, another_way, own_way, segments_between
from statemgr.model.checkpoint import BlobRef, Marker
from statemgr.model.commit import Change
from statemgr.phases import Phase, announce
from statemgr.ports import Moment, Restored, RestoreManager, RestoreRequest, StoreIdentity
from statemgr.services import Services

log = logging.getLogger(__name__)


class BlobRestore(RestoreManager):
    """Fetches the snapshot of a chain, and applies the segments after it."""

    def __init__(self, services: Services, catalogue: Catalogue) -> None:
        self._services = services
        self._catalogue = catalogue
        #: Indexes of snapshots of which a part was missing or damaged when it was needed.
        self._damaged_parts: set[BlobRef] = set()

    def restore(self, request: RestoreRequest) -> Restored:
        identity = request.identity
        announce(Phase.GET_INDEX, f"{identity.task}/{identity.store}", identity.job_key)
        chain = self._catalogue.chain(identity, request.marker)  # 1
        broken = _Broken()
        older: list[SegmentChain] | None = None
        way: Way | None = own_way(chain)
        while way is not None:
            try:
                restored = self._by(way, chain, request, broken)
            except (MissingError, CorruptError) as error:
                if not broken.is_new or isinstance(error, MissingFile | CorruptFile):
                    raise  # damage of a local copy, not of a backup
                broken.first = broken.first or error
                log.warning(
                    "%s/%s: a part is missing or damaged; the restore tries another way: %s",
                    identity.task,
                    identity.store,
                    error,
                )
            else:
                return replace(restored, damage=str(broken.first) if broken.first else None)
            if older is None:
                older = self._older(request)
            way = another_way(chain, older, broken.snapshots, broken.segments)  # 6
            broken.is_new = False
        assert broken.first is not None
        raise broken.first

    def open_by_need(self, request: RestoreRequest, at_least: int, *, owned: bool = False) -> StateByNeed | None:
        return open_by_need(self._services, self._catalogue, request, at_least, self._damaged_parts, owned=owned)

    def changes_between(
        self, identity: StoreIdentity, older: Marker, newer: Marker, as_of: Moment
    ) -> Iterator[Sequence[Change]] | None:
        """None if a snapshot has taken the place of some of the changes. ``as_of`` does not matter."""
        before, after = self._catalogue.chain(identity, older), self._catalogue.chain(identity, newer)
        segments = segments_between(before, after)
        return self._changes(identity, segments, before.end) if segments is not None else None

    def _changes(
        self, identity: StoreIdentity, segments: Sequence[ChainSegment], start: int
    ) -> Iterator[Sequence[Change]]:
        with SegmentCache(self._services, identity).brought(segments) as brought:
            for local in brought:
                yield from changes_of(local, start)

    def _by(self, way: Way, chain: SegmentChain, request: RestoreRequest, broken: _Broken) -> Restored:
        """Steps 2 to 5, with one choice of snapshot and segments."""
        identity = request.identity
        positions = ChainPositions(self._services, identity)
        try:
            began, start = self._beginning(request, chain, way.snapshot, positions, broken)  # 2
        except (MissingError, CorruptError):
            broken.add_snapshot(way.snapshot.index)
            raise
        segments = [segment for segment in way.segments if segment.end > start]
        if not segments:
            if chain.segments:
                positions.note(chain)
            return began
        announce(Phase.APPLY_SEGMENTS, f"{identity.task}/{identity.store}", identity.job_key)
        config = self._services.config.stores[identity.store]
        unshare(request.staging)
        store = open_store(config.type, request.staging, config.rocksdb, briefly=True)
        try:
            changes, fetched = replay(self._services, identity, store, segments, start, request.progress)  # 3, 4
            store.flush()  # 5
        except (MissingError, CorruptError) as error:
            broken.add_segments(self._damaged(way.segments, error))
            raise
        finally:
            store.close()
        positions.note(chain)
        return Restored(
            None,
            bytes_fetched=began.bytes_fetched + fetched,
            bytes_reused=began.bytes_reused,
            records=changes,
            tables=began.files,
        )

    def _beginning(
        self,
        request: RestoreRequest,
        chain: SegmentChain,
        snapshot: ChainSnapshot,
        positions: ChainPositions,
        broken: _Broken,
    ) -> tuple[Restored, int]:
        """Step 2. Returns: what was restored, and the sequence number of the first change that it lacks."""
        known = {snapshot.state_id: Position(snapshot.state_id, "", snapshot.end, "")}
        known |= positions.fitting(chain)
        here = [directory for directory in request.reusable if directory.state_id in known]
        # a compacted one first, then the newest
        here.sort(key=lambda found: (known[found.state_id].compacted, known[found.state_id].end), reverse=True)
        for directory in here:
            self._check_type(request.identity, directory.files)
            self._clear(request, broken, {})
            if cloned(directory, request.staging):
                positions.mark_compacted(directory.state_id, compacted=False)  # a compacted directory is used only once
                reused = sum(size for size, _ in directory.files.values())
                return Restored(directory.files, bytes_reused=reused), known[directory.state_id].end
        index = self._catalogue.index(request.identity, snapshot.index)
        files = dict(index.root.walk())
        self._check_type(request.identity, files)
        self._clear(request, broken, {path: file.size for path, file in files.items() if file.parts})
        return fetch_snapshot(self._services.transfer(), index, snapshot.index, request), snapshot.end

    @staticmethod
    def _clear(request: RestoreRequest, broken: _Broken, wanted: Mapping[str, int]) -> None:
        """Remove what another way has made, and the leftovers of earlier tries except the ``wanted`` files. A try that
        gets no further than its index removes nothing, because the snapshot may be gone and most of its files not."""
        if broken.first is not None:
            shutil.rmtree(request.staging, ignore_errors=True)
        fetched_tree.drop_others(request.leftovers, wanted)

    def _check_type(self, identity: StoreIdentity, files: Container[str]) -> None:
        """Raises: ConfigError if the files are of another type of store than the configuration's."""
        found, wanted = type_of(files), self._services.config.stores[identity.store].type
        if found not in (None, wanted):
            raise ConfigError(
                f"blobs have the state of this store as a {found} store, and its type is {wanted} now",
                hint=f"set stores.{identity.store}.type back. If kafka-changelog has the state, too, you can restore "
                "it with the new type from there: set task.restore.factories to kafka-changelog alone until each task "
                "has committed changes",
                **identity.where,
            )

    def _older(self, request: RestoreRequest) -> list[SegmentChain]:
        """The chains of older retained checkpoints that can be read."""
        found = []
        for marker in request.retained:
            try:
                found.append(self._catalogue.chain(request.identity, marker))
            except (MissingError, CorruptError) as error:
                log.warning(
                    "%s/%s: an older chain cannot be used: %s", request.identity.task, request.identity.store, error
                )
        return found

    def _damaged(self, segments: tuple[ChainSegment, ...], error: MissingError | CorruptError) -> list[ChainSegment]:
        """Which segments of the blob that an error names are damaged; a blob may have several. If all have the bytes
        that were written, the bytes were wrong from the start, so all count as damaged."""
        named = [one for one in segments if one.blob is not None and one.blob.blob_id == error.where.get("blob")]
        return [segment for segment in named if not self._is_whole(segment)] or named

    def _is_whole(self, segment: ChainSegment) -> bool:
        assert segment.blob is not None
        try:
            self._services.transfer().get_bytes(segment.blob, segment.blob.size)
        except (MissingError, CorruptError):
            return False
        return True


class _Broken:
    """The damage that was found so far, and whether the last try has found more."""

    def __init__(self) -> None:
        self.first: MissingError | CorruptError | None = None
        self.snapshots: set[BlobRef] = set()
        self.segments: set[ChainSegment] = set()
        self.is_new = False

    def add_snapshot(self, index: BlobRef) -> None:
        self.is_new = index not in self.snapshots
        self.snapshots.add(index)

    def add_segments(self, segments: list[ChainSegment]) -> None:
        self.is_new = not self.segments.issuperset(segments)
        self.segments.update(segments)
