"""The restore manager of ``blob-changelog``: a snapshot, and then the changes after it in order.

Steps:

1. get the segment chain (of this store, without gaps, nothing hostile in it), before anything local is changed
2. the beginning: a local directory of a state that the chain goes through, or else the snapshot, restored as one of
   ``blob-store``
3. fetch the segments in parallel, those that are here already aside, and verify each whole
4. apply them in order to the store in the staging directory, from the beginning's sequence number on
5. flush and close it: the directory is the state

Touches the staging directory, which must not exist and is left to the caller when a step fails, and the scratch
directory.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from statemgr.backends.blob_restore import BlobRestore
from statemgr.backends.chain_positions import ChainPositions, Position
from statemgr.backends.chains import Chains
from statemgr.backends.context import BackendContext
from statemgr.backends.segment_cache import LocalSegment, SegmentCache
from statemgr.local import cloned, open_store, unshare
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import IndexMarker
from statemgr.model.segment import read_range
from statemgr.phases import Phase, announce
from statemgr.ports import LocalStore, Restored, RestoreRequest

_BATCH = 10_000


class ChainRestore:
    """Implements :class:`statemgr.ports.RestoreManager`."""

    def __init__(self, context: BackendContext, snapshots: BlobRestore, chains: Chains) -> None:
        self._context = context
        self._snapshots = snapshots
        self._chains = chains

    def restore(self, request: RestoreRequest) -> Restored:
        """As the port says."""
        identity = request.identity
        subject = f"{identity.task}/{identity.store}"
        announce(Phase.GET_INDEX, subject, request.identity.job_key)
        chain = self._chains.get(self._context.transfer(), identity, request.marker)  # 1
        positions = ChainPositions(self._context, identity)
        snapshot, start = self._beginning(request, chain, positions)  # 2
        segments = [segment for segment in chain.segments if segment.end > start]
        if not segments:
            positions.note(chain)
            return snapshot
        announce(Phase.APPLY_SEGMENTS, subject, request.identity.job_key)
        config = self._context.config.stores[identity.store]
        store = open_store(config.type, request.staging, config.rocksdb)
        try:
            records = fetched = 0
            cache = SegmentCache(self._context, identity)
            for local in cache.bring(segments):  # 3
                records += _apply(store, local, start)  # 4
                fetched += local.fetched
                request.progress(f"apply {config.name}", local.segment.end - start, chain.end - start)
            store.flush()  # 5
        finally:
            store.close()
        positions.note(chain)
        return Restored(
            None,
            bytes_fetched=snapshot.bytes_fetched + fetched,
            bytes_reused=snapshot.bytes_reused,
            records=records,
        )

    def _beginning(
        self, request: RestoreRequest, chain: SegmentChain, positions: ChainPositions
    ) -> tuple[Restored, int]:
        """Step 2. Returns: what was restored, and the sequence number of the first change that it lacks."""
        known = {chain.snapshot.state_id: Position(chain.snapshot.state_id, "", chain.start, "")}
        known |= positions.fitting(chain)
        here = [directory for directory in request.reusable if directory.state_id in known]
        # a compacted one first, then the newest
        here.sort(key=lambda found: (known[found.state_id].compacted, known[found.state_id].end), reverse=True)
        for directory in here:
            if cloned(directory, request.staging):
                positions.mark_compacted(directory.state_id, compacted=False)  # it is used once
                reused = sum(size for size, _ in directory.files.values())
                return Restored(directory.files, bytes_reused=reused), known[directory.state_id].end
        restored = self._snapshots.restore(replace(request, marker=IndexMarker(chain.snapshot.index)))
        unshare(request.staging)
        return restored, chain.start


def _apply(store: LocalStore, local: LocalSegment, after: int) -> int:
    """Apply the changes of a segment from the number ``after`` on, in large batches. Returns how many."""
    segment, count = local.segment, 0
    blob_id = segment.blob.blob_id if segment.blob else None
    with local.open() as source:
        changes = read_range(source, segment.first, segment.end, after, blob_id)
        while batch := list(islice(changes, _BATCH)):
            store.write(batch)
            count += len(batch)
    return count
