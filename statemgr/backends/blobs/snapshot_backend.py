"""The state backend ``blob-store``: snapshots of stores in a blob store, each one incremental to the last.

The marker of a checkpoint is the index blob; with it, and nothing else, the store's directory is rebuilt.
"""

from __future__ import annotations

from statemgr.backends.blobs.snapshot_backup import BlobBackup
from statemgr.backends.blobs.snapshot_indexes import SnapshotIndexes
from statemgr.backends.blobs.snapshot_restore import BlobRestore
from statemgr.backends.services import BackendContext


class BlobStoreBackend:
    """Backup and restore managers that share the indexes they have read."""

    def __init__(self, context: BackendContext) -> None:
        self._context = context
        self._indexes = SnapshotIndexes()

    def backup_manager(self) -> BlobBackup:
        """For commits and clean-up."""
        return BlobBackup(self._context.transfer, self._context.clock, self._indexes)

    def restore_manager(self) -> BlobRestore:
        """For restores."""
        return BlobRestore(self._context.transfer, self._indexes)

    def close(self) -> None:
        """Nothing to close: the transfer engine is the context's."""
