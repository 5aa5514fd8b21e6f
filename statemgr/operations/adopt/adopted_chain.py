"""The first snapshot of a store whose state comes from other software."""

from __future__ import annotations

from dataclasses import replace

from statemgr.backends.blobs.branches import put_chain
from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.snapshots import Snapshots, UploadNotes
from statemgr.model.chain import ChainSnapshot, SegmentChain
from statemgr.model.snapshot import DirIndex
from statemgr.ports import FinishedDirectory, PreparedBackup, Progress, StoreIdentity, StoreSnapshot
from statemgr.services import Services
from statemgr.stores.open_store import NO_CHANGES


def store_adopted(
    services: Services,
    identity: StoreIdentity,
    state_id: str,
    attempt: str,
    made: FinishedDirectory,
    held: DirIndex | None,
    progress: Progress,
) -> PreparedBackup:
    """Upload a finished directory, with TTLs, and give it a chain of its own that has no segments.

    Args:
        held: files that blobs hold already; those that the directory has are not uploaded. After the publish, their
            blobs belong to this job.

    Raises: UnavailableError, AccessDenied, DiskFull, CorruptFile.
    """
    snapshots = Snapshots(services.transfer, services.clock, Catalogue(services.transfer))
    notes = UploadNotes(held, lambda files: None, progress)
    stored = snapshots.store(StoreSnapshot(identity, state_id, attempt, made, NO_CHANGES, None), None, notes)
    now_ms = services.clock.time_ns() // 1_000_000
    chain = SegmentChain(
        identity.job_name, identity.job_id, identity.task, identity.store, state_id, attempt, attempt, now_ms,
        ChainSnapshot(stored.index, state_id, 0), (), (stored.index.blob_id,),
    )  # fmt: skip
    marked = put_chain(services, identity, chain, together=True)
    return replace(marked, added_blobs=stored.blobs, added_bytes=stored.size)
