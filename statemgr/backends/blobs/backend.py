"""The state backend ``blob-store``: a snapshot in the blob store, and the changes of each commit after it as segments.

``task.commit.snapshot.interval`` says when a snapshot is made: by a commit (with ``1 commit`` by each one, and no
changes are recorded), or in the background. The marker of a checkpoint names the segment chain, from which alone the
store can be rebuilt. The backend unites the incremental snapshots of Samza's blob store backend, the changelog
checkpointing of Spark's RocksDB state store and Flink's generalised incremental checkpoints (FLIP-158).
"""

from __future__ import annotations

from statemgr.backends.blobs.backup import BlobBackup
from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.restore import BlobRestore
from statemgr.backends.blobs.segment_batch import SegmentBatches
from statemgr.services import Services


class BlobStoreBackend:
    """The backup and the restore manager, which share the chains and indexes that they have read."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._catalogue = Catalogue(services.transfer)
        self._batches = SegmentBatches(services)

    def backup_manager(self) -> BlobBackup:
        return BlobBackup(self._services, self._catalogue, self._batches)

    def restore_manager(self) -> BlobRestore:
        return BlobRestore(self._services, self._catalogue)

    def close(self) -> None:
        """Wait for running uploads."""
        self._batches.close()
