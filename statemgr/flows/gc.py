"""Garbage collection: mark needed blobs from the checkpoint topic, then delete unmarked old blobs. Fences nobody.

Steps of :func:`collect`:

1. ask the blob store for its time, read the checkpoint topic and mark every blob that a retained checkpoint of any task
   needs; a lost index ends the collection here, one that was evicted meanwhile does not (proof:
   :mod:`statemgr.flows.gc_mark`)
2. LIST the blobs below the job's prefix, page by page, and sort them: marked; unmarked and young; unmarked and older
   than the grace period (orphans). Marked blobs that still have a TTL although their checkpoint is old would expire
3. read the topic and mark again; from here on a blob counts as unmarked only if it was unmarked both times
4. ask by name for each marked blob that the listing did not have, and read the topic once more; if a blob is still
   needed, it is lost, and nothing is deleted
5. only on request: remove the TTL of published blobs that would expire
6. only on request: LIST again, and delete the orphans, then their indexes, then unfinished uploads

Why a commit that runs meanwhile is safe: a publish refers only to blobs that are already marked, as part of the
checkpoint that it continues, and to blobs younger than half the shortest grace period
(:mod:`statemgr.flows.grace_period`), which are no orphans. So only a checkpoint that was published before step 1 can
refer to an orphan of step 2, and step 1 read that checkpoint. Step 3 covers a clock that is wrong by more than half a
grace period. Memory: the marks, see :mod:`statemgr.flows.gc_mark`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from statemgr.backends.blobs.names import is_index_blob
from statemgr.backends.services import Services
from statemgr.errors import AccessDenied, InvalidError, MissingBlob
from statemgr.flows.gc_fates import Collection, Fate, Request
from statemgr.flows.gc_mark import Marks, mark
from statemgr.flows.grace_period import chosen_grace_ms
from statemgr.model.snapshot import blob_id_problem
from statemgr.ports import BlobInfo, CheckpointLog, Progress, UnfinishedUpload, list_blobs

T = TypeVar("T")
#: Blobs that are checked or deleted together.
_CHUNK = 1000


def collect(services: Services, log: CheckpointLog, request: Request, progress: Progress) -> Collection:
    """Find the garbage of a job, and delete it on request. Returns: what was found and done.

    Raises: as :func:`statemgr.flows.gc_mark.mark`; ConfigError without a blob store; InvalidError for too short a grace
        period, or a store that does not tell its time; UnavailableError and AccessDenied while listing.
    """
    grace_ms = chosen_grace_ms(services.config, request.grace_ms)
    cut_ms = services.blobs().administration.time_ms() - grace_ms  # 1
    found = Collection(grace_ms=grace_ms)
    first = mark(services, log, allow_no_checkpoints=request.allow_no_checkpoints)
    unseen = _survey(services, first, cut_ms, found, progress)  # 2
    second = mark(services, log, allow_no_checkpoints=request.allow_no_checkpoints)  # 3
    found.expiring = [blob_id for blob_id in found.expiring if blob_id in second.needed]
    found.notes += [
        f"{task} commits faster than its indexes can be read: its blobs are kept this time"
        for task in dict.fromkeys((*first.busy, *second.busy))
    ]
    found.missing = _lost(services, log, request, unseen & second.needed.keys())  # 4
    if request.fix and found.expiring:  # 5
        found.failed |= services.transfer().remove_ttl_all(found.expiring)
        found.fixed = [blob_id for blob_id in found.expiring if blob_id not in found.failed]
    if request.delete and not found.missing:  # 6
        _sweep(services, (first, second), cut_ms, found, progress)
    return found


def _prefix(services: Services) -> str:
    return f"{services.config.job_name}/{services.config.job_id}/"


def _fate(services: Services, info: BlobInfo, marks: Iterable[Marks], cut_ms: int) -> Fate:
    if any(info.blob_id in found for found in marks):
        return Fate.KEPT
    name = info.blob_id
    hidden = any(part.startswith(".") for part in name.split("/"))
    if hidden or blob_id_problem(name, services.config.job_name, services.config.job_id):
        return Fate.FOREIGN
    if info.modified_ms >= cut_ms:
        return Fate.YOUNG
    if any(name.startswith(found.unknown) for found in marks if found.unknown):
        return Fate.UNKNOWN
    return Fate.ORPHAN


# --- step 2 ------------------------------------------------------------------------------------------------------


def _survey(services: Services, marks: Marks, cut_ms: int, found: Collection, progress: Progress) -> set[str]:
    """Count the listed blobs. Returns: needed blobs that the listing did not have."""
    unseen = set(marks.needed)
    listed = 0
    for infos in _chunks(list_blobs(services.blobs(), _prefix(services))):
        old: list[BlobInfo] = []
        for info in infos:
            fate = _fate(services, info, (marks,), cut_ms)
            found.count(fate, info)
            unseen.discard(info.blob_id)
            if marks.needed.get(info.blob_id, cut_ms) < cut_ms:
                old.append(info)
        found.expiring += _expiring(services, old)
        listed += len(infos)
        progress("list", listed, 0)
    try:
        found.unfinished = sum(1 for _ in _unfinished(services, cut_ms))
    except (InvalidError, AccessDenied) as error:
        found.notes.append(f"unfinished uploads cannot be listed: {error.message}")
    return unseen


def _expiring(services: Services, infos: list[BlobInfo]) -> list[str]:
    """Those that have a TTL. Asks for each one if listings do not tell."""
    store = services.blobs()
    if store.administration.listing_tells_ttl:
        return [info.blob_id for info in infos if info.expires_ms is not None]
    expiring: list[str] = []

    def ask(blob_id: str) -> None:
        if store.stat(blob_id).expires_ms is not None:
            expiring.append(blob_id)

    failed = services.transfer().for_each((info.blob_id for info in infos), ask)
    for error in failed.values():
        if not isinstance(error, MissingBlob):  # evicted and deleted meanwhile, or lost: step 4 finds out
            raise error
    return sorted(expiring)


def _unfinished(services: Services, cut_ms: int) -> Iterator[UnfinishedUpload]:
    uploads = services.blobs().administration.unfinished(_prefix(services))
    return (upload for upload in uploads if upload.started_ms < cut_ms)


# --- step 4 ------------------------------------------------------------------------------------------------------


def _lost(services: Services, log: CheckpointLog, request: Request, unseen: Iterable[str]) -> list[str]:
    """Blobs that do not exist although a retained checkpoint, read afterwards, needs them."""
    store = services.blobs()

    def ask(blob_id: str) -> None:
        store.stat(blob_id)

    failed = services.transfer().for_each(unseen, ask)
    for error in failed.values():
        if not isinstance(error, MissingBlob):
            raise error
    if not failed:
        return []
    now = mark(services, log, allow_no_checkpoints=request.allow_no_checkpoints)
    return sorted(blob_id for blob_id in failed if blob_id in now.needed)


# --- step 6 ------------------------------------------------------------------------------------------------------


def _sweep(services: Services, marks: tuple[Marks, Marks], cut_ms: int, found: Collection, progress: Progress) -> None:
    for of_indexes in (False, True):
        orphans = (
            info
            for info in list_blobs(services.blobs(), _prefix(services))
            if is_index_blob(info.blob_id) == of_indexes and _fate(services, info, marks, cut_ms) is Fate.ORPHAN
        )
        for infos in _chunks(orphans):
            failed = services.transfer().delete_all(info.blob_id for info in infos)
            found.failed |= failed
            for info in infos:
                if info.blob_id not in failed:
                    found.deleted.add(info)
            progress("delete", found.deleted.blobs, found.piles[Fate.ORPHAN].blobs)
    if not found.unfinished:
        return
    for uploads in _chunks(_unfinished(services, cut_ms)):
        refused = services.transfer().for_each(uploads, services.blobs().administration.abandon)
        found.failed |= {upload.blob_id: error for upload, error in refused.items()}
        found.abandoned += len(uploads) - len(refused)


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk
