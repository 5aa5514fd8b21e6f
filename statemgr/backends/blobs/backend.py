"""The state backend ``blob-changelog``: a snapshot, and the changes of each commit after it as segments.

A commit costs what changed, whatever the size of the state; snapshots are made in the background. The marker of a
checkpoint is the segment chain, with which, and nothing else, the store is rebuilt. It unites the changelog
checkpointing of Spark's RocksDB state store and Flink's generalised incremental checkpoints (FLIP-158).
"""

from __future__ import annotations

import threading

from statemgr.backends.blobs.backup import ChainBackup
from statemgr.backends.blobs.chains import Chains
from statemgr.backends.blobs.restore import ChainRestore
from statemgr.backends.blobs.segment_batch import SegmentBatches
from statemgr.backends.blobs.segment_upload import SegmentUploads
from statemgr.backends.blobs.snapshot_backup import BlobBackup
from statemgr.backends.blobs.snapshot_indexes import SnapshotIndexes
from statemgr.backends.blobs.snapshot_restore import BlobRestore
from statemgr.backends.services import BackendContext


class BlobChangelogBackend:
    """Backup and restore managers that share the chains and indexes they have read."""

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._indexes = SnapshotIndexes()
        self._chains = Chains()
        self._lock = threading.Lock()
        self._uploads: SegmentUploads | None = None
        self._batches: SegmentBatches | None = None

    def backup_manager(self) -> ChainBackup:
        """For commits, materialisations and clean-up."""
        snapshots = BlobBackup(self._context.transfer, self._context.clock, self._indexes)
        return ChainBackup(self._context, snapshots, self._chains, self._segment_batches)

    def restore_manager(self) -> ChainRestore:
        """For restores."""
        return ChainRestore(self._context, BlobRestore(self._context.transfer, self._indexes), self._chains)

    def close(self) -> None:
        """Wait for uploads that run."""
        if self._batches is not None and self._uploads is not None:
            self._batches.close()
            self._uploads.close()

    def _segment_batches(self) -> SegmentBatches:
        with self._lock:
            if self._batches is None:
                self._uploads = SegmentUploads(self._context)
                self._batches = SegmentBatches(self._context, self._uploads)
            return self._batches
