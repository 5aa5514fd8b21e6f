"""Clean-up of segment chains: deletes what no retained checkpoint of the task references, and nothing else.

Blobs of segments are shared by the stores of a task, so one is deleted only when all stores' retained chains are
known and none has it; those that other tasks may share are only named. Those that a crash leaves between a publish and
their deletion are left to a collection.
Snapshots are cleaned up as those of ``blob-store`` are. Only blobs below the task's own prefix are deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from statemgr.backends.blobs.chains import Chains
from statemgr.backends.blobs.names import segments_prefix
from statemgr.backends.blobs.snapshot_backup import BlobBackup
from statemgr.errors import CorruptBlob, MissingBlob
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import ChainMarker, IndexMarker, Marker
from statemgr.phases import Phase, announce
from statemgr.ports import StoreIdentity
from statemgr.transfer.transfer import Transfer

log = logging.getLogger(__name__)


def clean_up_chains(
    transfer: Transfer,
    chains: Chains,
    snapshots: BlobBackup,
    task: StoreIdentity,
    evicted: Mapping[str, Sequence[Marker]],
    retained: Mapping[str, Sequence[Marker]],
    undeleted: set[str] | None,
) -> list[str]:
    """Delete what only evicted markers (store → markers) reference.

    Args:
        undeleted: blobs of segments of the task that earlier calls could not delete; changed. None when there may be
            stores that are not named here: then no blob of segments is deleted.

    Returns: blobs of segments that the task does not need any more, and that other tasks may share.
    Raises: UnavailableError, AccessDenied; then what is left is tried again. MissingBlob, CorruptBlob: the newest chain
        of a store is damaged, and nothing was deleted.
    """
    live: set[str] = set()
    gone: dict[str, None] = {}
    of_snapshots: list[Callable[[], None]] = []
    at_open = not any(evicted.values())
    for store in dict.fromkeys((*retained, *evicted)):
        identity = replace(task, store=store)
        kept = _read(transfer, chains, identity, retained.get(store, ()))
        if kept is None:
            return []
        live.update(blob for marker, chain in kept.items() for blob in _segment_blobs(marker, chain))
        unneeded = [marker for marker in evicted.get(store, ()) if marker not in kept]
        if unneeded or at_open:
            old = _read(transfer, chains, identity, unneeded, missing_is_gone=True) or {}
            gone |= {blob: None for marker, chain in old.items() for blob in _segment_blobs(marker, chain)}
            of_snapshots.append(partial(snapshots.clean_up, identity, _indexes(old), _indexes(kept)))
    own = segments_prefix(task)
    if undeleted is not None:
        undeleted |= {blob for blob in gone if blob.startswith(own)}
        undeleted -= live
        _delete(transfer, task, undeleted)
    for clean_up in of_snapshots:
        clean_up()
    return [blob for blob in gone if blob not in live and not blob.startswith(own)]


def _delete(transfer: Transfer, task: StoreIdentity, garbage: set[str]) -> None:
    if not garbage:
        return
    announce(Phase.DELETE_BLOBS, task.task, task.job_key)
    failed = transfer.delete_all(sorted(garbage))
    garbage.intersection_update(failed)
    for error in failed.values():
        raise error


def _read(
    transfer: Transfer,
    chains: Chains,
    identity: StoreIdentity,
    markers: Sequence[Marker],
    *,
    missing_is_gone: bool = False,
) -> dict[ChainMarker, SegmentChain] | None:
    """The chains of markers; None when an older one cannot be read, unless a missing one is no wonder."""
    found = {}
    for marker in markers:
        if not isinstance(marker, ChainMarker):
            continue
        try:
            found[marker] = chains.get(transfer, identity, marker)
        except (MissingBlob, CorruptBlob) as error:
            if missing_is_gone:
                continue
            if marker is markers[0]:
                raise
            log.warning(
                "%s/%s: nothing is deleted, since a retained chain cannot be read: %s",
                identity.task, identity.store, error,
            )  # fmt: skip
            return None
    return found


def _segment_blobs(marker: ChainMarker, chain: SegmentChain) -> list[str]:
    found = [segment.blob.blob_id for segment in chain.segments if segment.blob]
    return [*found, marker.blob.blob_id] if marker.blob else found


def _indexes(found: Mapping[ChainMarker, SegmentChain]) -> list[Marker]:
    return list(dict.fromkeys(IndexMarker(chain.snapshot.index) for chain in found.values()))
