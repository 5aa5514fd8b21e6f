"""Garbage collection: find the needed blobs from the checkpoint topic, then delete old blobs that nothing needs.
Fences nobody.

Steps of :func:`collect_garbage`:

1. ask the blob store for its time, read the checkpoint topic and find every blob that a retained checkpoint of any task
   needs. Stop if an index is lost, but not if its checkpoint was evicted meanwhile (proof:
   :mod:`statemgr.operations.gc.needed_blobs`), or belongs to a layout that a rescale has replaced
2. LIST the blobs below the job's prefix, page by page, and sort them: needed; not needed and young; not needed and
   older than the grace period (orphans). Needed blobs with a TTL whose checkpoint is old would expire
3. read the topic and find the needed blobs again; from here on a blob is an orphan only if neither reading needed it
4. ask by name for each needed blob that the listing did not have. If one does not exist, read the topic once more; if a
   checkpoint still needs the blob, it is lost, and nothing is deleted. What only a replaced layout needs stops nothing
5. only on request: remove the TTL of published blobs that would expire
6. only on request: LIST again, and delete the orphans, then their indexes, then unfinished uploads, and the records of
   offers that expired long ago. Then read the topic once more, and ask by name for each blob that became needed
   meanwhile: one that does not exist was deleted because a clock is wrong
7. only on request: collect the layouts that a rescale replaced longer ago than the grace period, unless they keep a
   checkpoint: delete their records from the topic (:mod:`statemgr.operations.gc.layouts`). Their blobs were still
   needed in steps 1 to 6; the next collection deletes them. For a job without a blob store, this is the only step

Why a commit that runs meanwhile is safe: a publish refers only to blobs that the checkpoint before it needs, and to
blobs younger than half the shortest grace period (:mod:`statemgr.flows.committing.limits`), which are no orphans.
So only a checkpoint that was published before step 1 can refer to an orphan of step 2, and step 1 read that checkpoint.

This needs clocks that differ by less than half a grace period. If the blob store's clock is wrong by more, blobs of a
commit in progress look old. Step 3 saves only those that are published before it. If the others are deleted before the
owner removes their TTLs, which it does right after its publish, the owner finds out and makes the backup again before
it reports success (``docs/decisions/0025-a-wrong-clock-at-gc.md``). If they are deleted later, step 6 reports them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TypeVar

from statemgr.backends.blobs.names import is_index_blob
from statemgr.errors import AccessDenied, InvalidError, MissingBlob, StatemgrError, UnavailableError
from statemgr.flows.committing.limits import chosen_grace_ms
from statemgr.kafka.plain_writes import withdraw_offers
from statemgr.model.jobs.offers import OfferKey
from statemgr.model.snapshot import blob_id_problem
from statemgr.operations.gc.layouts import RetiredReport, collect_old_layouts
from statemgr.operations.gc.needed_blobs import NeededBlobs, find_needed_blobs
from statemgr.ports import BlobInfo, CheckpointLog, Progress, UnfinishedUpload, list_blobs
from statemgr.services import Services

T = TypeVar("T")
#: Blobs that are checked or deleted together.
_CHUNK = 1000
#: Orphans that the report names as examples.
_EXAMPLES = 20


class BlobStatus(StrEnum):
    """What garbage collection knows about a blob below the job's prefix."""

    #: a retained checkpoint needs or names it
    KEPT = "kept"
    #: no checkpoint needs it, and it is younger than the grace period: it may belong to a commit in progress
    YOUNG = "young"
    #: no checkpoint needs it, and it is old: garbage
    ORPHAN = "orphans"
    #: old, and its task has no checkpoint on the topic, or none that could be read in time: left alone
    UNKNOWN = "unknown"
    #: a name that statemgr never gives: left alone
    FOREIGN = "foreign"


@dataclass
class BlobCount:
    """A number of blobs and their bytes."""

    blobs: int = 0
    size: int = 0

    def add(self, info: BlobInfo) -> None:
        self.blobs += 1
        self.size += info.size


@dataclass
class GarbageReport:
    """The result of a garbage collection.

    Attributes:
        expiring: published blobs that have a TTL; ``fixed``: those whose TTL was removed.
        missing: blobs that do not exist although retained checkpoints of tasks need them. If there are any before the
            deletion, nothing is deleted.
        unfinished: number of unfinished uploads older than the grace period; ``abandoned``: how many were removed.
        expired: offers of first snapshots that nobody can adopt any more.
        failed: blobs that could not be deleted or fixed, and why.
        layouts: the layouts that a rescale has replaced.
    """

    grace_ms: int
    counts: dict[BlobStatus, BlobCount] = field(default_factory=lambda: {status: BlobCount() for status in BlobStatus})
    examples: list[str] = field(default_factory=list)
    deleted: BlobCount = field(default_factory=BlobCount)
    expiring: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unfinished: int = 0
    abandoned: int = 0
    expired: tuple[OfferKey, ...] = ()
    failed: dict[str, StatemgrError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    layouts: list[RetiredReport] = field(default_factory=list)


def collect_garbage(
    services: Services,
    log: CheckpointLog,
    progress: Progress,
    *,
    grace_ms: int | None = None,
    delete: bool = False,
    fix: bool = False,
    allow_no_checkpoints: bool = False,
) -> GarbageReport:
    """Find the garbage of a job.

    Args:
        grace_ms: the grace period; None is the shortest one.
        delete: delete the orphans.
        fix: remove the TTL of published blobs that would expire.
        allow_no_checkpoints: also delete the blobs of a job or task that has no checkpoint.

    Raises: as ``find_needed_blobs``; ConfigError if a checkpoint names blobs, and no blob store is configured;
        InvalidError for too short a grace period, or a store that does not tell its time; UnavailableError and
        AccessDenied while listing.
    """
    grace_ms = chosen_grace_ms(services.config, grace_ms)
    if services.config.blob_uri is None:
        return _collect_layouts(services, log, grace_ms, delete=delete)
    cut_ms = _time_ms(services) - grace_ms  # 1
    report = GarbageReport(grace_ms=grace_ms)
    damaged: dict[int, str] = {}
    found: NeededBlobs | None = None

    def search() -> NeededBlobs:
        nonlocal found
        found = find_needed_blobs(services, log, allow_no_checkpoints=allow_no_checkpoints, before=found)
        damaged.update(found.damaged)
        return found

    first = search()
    unseen = _survey(services, first, cut_ms, report, progress)  # 2
    second = search()  # 3
    report.expired = second.expired
    report.expiring = [blob_id for blob_id in report.expiring if blob_id in second.needed]
    report.notes += [
        f"{task} commits faster than its indexes can be read: its blobs are kept this time"
        for task in dict.fromkeys((*first.busy, *second.busy))
    ]

    def lost(candidates: Iterable[str]) -> list[str]:
        absent = _absent(services, candidates)
        now = search() if absent else second
        damaged.update({now.replaced[blob_id]: blob_id for blob_id in absent if blob_id in now.replaced})
        return sorted(blob_id for blob_id in absent if blob_id in now.needed and blob_id not in now.replaced)

    report.missing = lost(unseen & second.needed.keys())  # 4
    if fix and report.expiring:  # 5
        report.failed |= services.transfer().remove_ttl_all(report.expiring)
        report.fixed = [blob_id for blob_id in report.expiring if blob_id not in report.failed]
    if delete and not report.missing:  # 6
        _delete_orphans(services, (first, second), cut_ms, report, progress)
        withdraw_offers(services.config, report.expired)
        try:
            third = search()
            report.missing = lost(third.needed.keys() - first.needed.keys() - second.needed.keys())
        except MissingBlob as error:  # an index
            report.missing = [str(error.where.get("blob", error.message))]
    # none is collected as long as a blob is missing
    before_ms = 0 if report.missing else cut_ms
    report.layouts = collect_old_layouts(services, log, before_ms, damaged, delete=delete)  # 7
    return report


def _collect_layouts(services: Services, log: CheckpointLog, grace_ms: int, *, delete: bool) -> GarbageReport:
    """Step 7 alone, by this machine's clock: the job has changelogs alone. Raises: as :func:`collect_garbage`."""
    current = log.read()
    replaced = [log.read(generation=one.layout.generation) for one in log.retired()]
    checkpoints = [one for records in (current, *replaced) for record in records.values() for one in record.checkpoints]
    if any(one.names_blobs or any(made.blob for made in one.attachments) for one in checkpoints):
        services.blobs()  # says that the configuration lacks the blob store
    report = GarbageReport(grace_ms)
    report.notes.append("blob.store.uri is not set: only the layouts that a rescale has replaced were looked at")
    before_ms = services.clock.time_ns() // 1_000_000 - grace_ms if current else 0
    report.layouts = collect_old_layouts(services, log, before_ms, {}, delete=delete)
    return report


def _prefix(services: Services) -> str:
    return f"{services.config.job_key}/"


def _time_ms(services: Services) -> int:
    """The blob store's time. A directory that nobody had to make yet has none, and no blob to compare it with; if a
    checkpoint needs one, step 4 finds out that the directory is not mounted."""
    try:
        return services.blobs().administration.time_ms()
    except UnavailableError:
        if next(list_blobs(services.blobs(), _prefix(services)), None) is not None:
            raise
        return services.clock.time_ns() // 1_000_000


def _status(services: Services, info: BlobInfo, readings: Iterable[NeededBlobs], cut_ms: int) -> BlobStatus:
    if any(info.blob_id in found for found in readings):
        return BlobStatus.KEPT
    name = info.blob_id
    hidden = any(part.startswith(".") for part in name.split("/"))
    if hidden or blob_id_problem(name, services.config.job_name, services.config.job_id):
        return BlobStatus.FOREIGN
    if info.modified_ms >= cut_ms:
        return BlobStatus.YOUNG
    if any(name.startswith(found.unknown) for found in readings if found.unknown):
        return BlobStatus.UNKNOWN
    return BlobStatus.ORPHAN


def _survey(services: Services, first: NeededBlobs, cut_ms: int, report: GarbageReport, progress: Progress) -> set[str]:
    """Step 2. Returns: needed blobs that the listing did not have."""
    unseen = set(first.needed)
    listed = 0
    for infos in _chunks(list_blobs(services.blobs(), _prefix(services))):
        old: list[BlobInfo] = []
        for info in infos:
            status = _status(services, info, (first,), cut_ms)
            report.counts[status].add(info)
            if status is BlobStatus.ORPHAN and len(report.examples) < _EXAMPLES:
                report.examples.append(info.blob_id)
            unseen.discard(info.blob_id)
            if first.needed.get(info.blob_id, cut_ms) < cut_ms:
                old.append(info)
        report.expiring += _expiring(services, old)
        listed += len(infos)
        progress("list", listed, 0)
    try:
        report.unfinished = sum(1 for _ in _unfinished(services, cut_ms))
    except (InvalidError, AccessDenied) as error:
        report.notes.append(f"unfinished uploads cannot be listed: {error.message}")
    return unseen


def _expiring(services: Services, infos: list[BlobInfo]) -> list[str]:
    """The blobs that have a TTL. Asks for each one if listings do not tell."""
    store = services.blobs()
    if store.administration.listing_tells_ttl:
        return [info.blob_id for info in infos if info.expires_ms is not None]
    expiring: list[str] = []

    def ask(blob_id: str) -> None:
        if store.stat(blob_id).expires_ms is not None:
            expiring.append(blob_id)

    for error in services.transfer().for_each((info.blob_id for info in infos), ask).values():
        if not isinstance(error, MissingBlob):  # evicted and deleted meanwhile, or lost: step 4 finds out
            raise error
    return sorted(expiring)


def _unfinished(services: Services, cut_ms: int) -> Iterator[UnfinishedUpload]:
    uploads = services.blobs().administration.unfinished(_prefix(services))
    return (upload for upload in uploads if upload.started_ms < cut_ms)


def _absent(services: Services, blob_ids: Iterable[str]) -> list[str]:
    """The blobs that do not exist. Raises: UnavailableError, AccessDenied if a blob could not be checked."""
    problems = services.transfer().absent(blob_ids)
    for error in problems.values():
        if not isinstance(error, MissingBlob):
            raise error
    return list(problems)


def _delete_orphans(
    services: Services,
    readings: tuple[NeededBlobs, NeededBlobs],
    cut_ms: int,
    report: GarbageReport,
    progress: Progress,
) -> None:
    for of_indexes in (False, True):
        orphans = (
            info
            for info in list_blobs(services.blobs(), _prefix(services))
            if is_index_blob(info.blob_id) == of_indexes
            and _status(services, info, readings, cut_ms) is BlobStatus.ORPHAN
        )
        for infos in _chunks(orphans):
            failed = services.transfer().delete_all(info.blob_id for info in infos)
            report.failed |= failed
            for info in infos:
                if info.blob_id not in failed:
                    report.deleted.add(info)
            progress("delete", report.deleted.blobs, report.counts[BlobStatus.ORPHAN].blobs)
    if not report.unfinished:
        return
    for uploads in _chunks(_unfinished(services, cut_ms)):
        refused = services.transfer().for_each(uploads, services.blobs().administration.abandon)
        report.failed |= {upload.blob_id: error for upload, error in refused.items()}
        report.abandoned += len(uploads) - len(refused)


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk
