"""Stores first snapshots of a job whose state comes from other software."""

from __future__ import annotations

from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.snapshots import Snapshots, UploadNotes
from statemgr.backends.services import Services
from statemgr.local.change_buffer import FrozenChanges
from statemgr.model.chain import ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobMarker
from statemgr.model.codecs import encode_chain
from statemgr.model.commit import StoreSession
from statemgr.model.snapshot import DirIndex
from statemgr.ports import FinishedDirectory, PreparedBackup, Progress, StoreIdentity, StoreSnapshot

_NONE = FrozenChanges(StoreSession(), 0, 0, ())


class AdoptedSnapshots:
    """Stores first snapshots, each with a chain of its own that has no segments."""

    def __init__(self, services: Services) -> None:
        self._services = services
        catalogue = Catalogue(services.transfer)
        self._snapshots = Snapshots(services.transfer, services.clock, catalogue)

    def store(
        self,
        identity: StoreIdentity,
        state_id: str,
        attempt: str,
        made: FinishedDirectory,
        held: DirIndex | None,
        progress: Progress,
    ) -> PreparedBackup:
        """Upload a finished directory, with TTLs.

        Args:
            held: files that blobs hold already; those that the directory has are not uploaded. After the publish, their
            blobs belong to this job.

        Raises: UnavailableError, AccessDenied, DiskFull, CorruptFile.
        """
        notes = UploadNotes(held, lambda files: None, progress)
        stored = self._snapshots.store(StoreSnapshot(identity, state_id, attempt, made, _NONE, None), None, notes)
        now_ms = self._services.clock.time_ns() // 1_000_000
        chain = SegmentChain(
            identity.job_name, identity.job_id, identity.task, identity.store, state_id, attempt, attempt, now_ms,
            ChainSnapshot(stored.index, state_id, 0), (), (stored.index.blob_id,),
        )  # fmt: skip
        marker = BlobMarker(inline=encode_chain(chain))
        return PreparedBackup(marker, added_blobs=stored.blobs, added_bytes=stored.size)
