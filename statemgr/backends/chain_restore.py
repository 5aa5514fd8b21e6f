"""The restore manager of ``blob-changelog``: a snapshot, and then the changes after it in order.

Steps:

1. get the segment chain (of this store, without gaps, nothing hostile in it), before anything local is changed
2. the snapshot: the local directory that was made for it, or restored as one of ``blob-store``
3. fetch the segments in parallel, those that are here already aside, and verify each whole
4. apply them in order to the store in the staging directory, from the snapshot's sequence number on
5. flush and close it: the directory is the state

Touches the staging directory, which must not exist and is left to the caller when a step fails, and the scratch
directory.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from statemgr.backends.blob_restore import BlobRestore
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
        snapshot = self._snapshot(request, chain)  # 2
        segments = [segment for segment in chain.segments if segment.end > chain.start]
        if not segments:
            return snapshot
        announce(Phase.APPLY_SEGMENTS, subject, request.identity.job_key)
        config = self._context.config.stores[identity.store]
        store = open_store(config.type, request.staging, config.rocksdb)
        try:
            records = fetched = 0
            cache = SegmentCache(self._context, identity)
            for local in cache.bring(segments):  # 3
                records += _apply(store, local, chain.start)  # 4
                fetched += local.fetched
                request.progress(f"apply {config.name}", local.segment.end - chain.start, chain.end - chain.start)
            store.flush()  # 5
        finally:
            store.close()
        return Restored(
            None,
            bytes_fetched=snapshot.bytes_fetched + fetched,
            bytes_reused=snapshot.bytes_reused,
            records=records,
        )

    def _snapshot(self, request: RestoreRequest, chain: SegmentChain) -> Restored:
        for directory in request.reusable:
            if directory.state_id == chain.snapshot.state_id and cloned(directory, request.staging):
                return Restored(directory.files, bytes_reused=sum(size for size, _ in directory.files.values()))
        restored = self._snapshots.restore(replace(request, marker=IndexMarker(chain.snapshot.index)))
        unshare(request.staging)
        return restored


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
