"""Finds the blobs that the retained checkpoints of a job need, from the checkpoint topic. Reads only; fences nobody.

It also spares the blobs of offers (:mod:`statemgr.flows.offers`), which it reads first: if an offer is adopted
meanwhile, a checkpoint that is read later needs them.

Steps of :func:`find_needed_blobs`, for several tasks at a time:

1. note every blob that a restore of the task's retained checkpoints needs, store by store, the newest checkpoint first
2. if an index or a chain cannot be read, read the topic again
3. if the checkpoint is still retained, its blob is lost, and that ends the search
4. if the checkpoint is no longer retained, it needs nothing: skip it
5. if it was the newest one, continue at 1 with the record that was just read; after many rounds leave the task's blobs
   alone

The layouts that a rescale has replaced need their blobs too, until garbage collection collects them. If such a layout
has lost a blob, nothing repairs it, and the search goes on: the rest of its blobs is left alone.

A task of the layout that has no record never had a checkpoint, or its record was lost. Its blobs are left alone, and so
are those that several tasks share, because it may need them. A task that was ever backed up has a blob of its own: its
first commit stores a snapshot, and every later chain begins with one. So a task without any blob needs none that is
shared, and a partition that never had a message does not keep shared garbage.

Why step 4 misses nothing, whatever the job publishes meanwhile:

- An owner deletes the blobs of a checkpoint only after the publish that evicts it was acknowledged. So reading the
  topic after a blob was missing distinguishes the two cases. If the topic still names the checkpoint, the blob is lost
  (step 3). If it does not, no restore will ask for the checkpoint.
- A checkpoint that is published after the search began refers to two kinds of blobs. *Young* blobs were uploaded less
  than half the shortest grace period before the publish (:mod:`statemgr.flows.committing.limits`), so garbage
  collection keeps them. The others are *old*. Each commit continues the checkpoint before it, and no later commit
  refers to a blob that a commit has dropped: blob names are unique, and the next diff is against the commit that
  dropped it. So the checkpoints that refer to a blob follow one another without a gap. An old blob that a later
  checkpoint needs was therefore needed by the newest checkpoint of every record that the search has read. That is why
  it must read the newest checkpoint, and why that is enough (step 5).

Memory: one dictionary entry of about 250 bytes per needed blob (4 MB for a state of 1 TiB in parts of 64 MiB), and
nothing for garbage. Blobs never change, so the next search has the names that this one has read, up to
:data:`_REMEMBERED` of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from statemgr.errors import CorruptError, InvalidError, MissingError, MissingState, PermissionNeeded
from statemgr.flows.offers import expired_offers, offered_blobs
from statemgr.ids import CheckpointId, task_name, task_prefix
from statemgr.model.checkpoint import CheckpointRecord, Marker
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.model.jobs.offers import OfferKey
from statemgr.ports import CheckpointLog, list_blobs
from statemgr.services import Services

#: Times that the topic is read again for a task whose newest index was deleted before it could be read.
_ROUNDS = 30
#: Names that a search remembers for the next one, which mostly needs the same checkpoints: 8 bytes each.
_REMEMBERED = 4_000_000


@dataclass(frozen=True, slots=True)
class _Need:
    """One store's marker in a retained checkpoint."""

    task: str
    store: str
    factory: str
    marker: Marker
    checkpoint_id: CheckpointId


@dataclass
class NeededBlobs:
    """Blobs to keep.

    Attributes:
        needed: blob → time of the oldest retained checkpoint that needs it (epoch milliseconds by its owner's clock).
        spared: blobs that a checkpoint names although no restore needs them, and those of offers.
        expired: offers of first snapshots that nobody can adopt any more.
        replaced: those of ``needed`` that no task needs, but a layout that a rescale has replaced → its generation.
        damaged: generation of such a layout that has lost a blob → the blob.
        unknown: prefixes of blobs of which nobody can say whether they are needed.
        busy: tasks among those, whose owners published faster than an index could be read.
        read: the blobs of markers, for the next search. ``known``: what the search before this one has read.
    """

    needed: dict[str, int] = field(default_factory=dict)
    spared: set[str] = field(default_factory=set)
    expired: tuple[OfferKey, ...] = ()
    replaced: dict[str, int] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()
    read: dict[_Need, Sequence[str]] = field(default_factory=dict, repr=False)
    known: Mapping[_Need, Sequence[str]] = field(default_factory=dict, repr=False)
    _names: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __contains__(self, blob_id: object) -> bool:
        return blob_id in self.needed or blob_id in self.spared

    def add(self, blob_ids: Iterable[str], taken_ms: int, generation: int | None = None) -> None:
        """Note that a checkpoint of this time needs blobs. ``generation``: of a layout that a rescale has replaced."""
        with self._lock:
            for blob_id in blob_ids:
                if generation is not None and blob_id not in self.needed:
                    self.replaced[blob_id] = generation
                self.needed[blob_id] = min(taken_ms, self.needed.get(blob_id, taken_ms))

    def referenced(self, services: Services, need: _Need) -> Sequence[str]:
        """The blobs of a marker. Raises: MissingError, CorruptError, UnavailableError; InvalidError."""
        blob_ids = self.known.get(need)
        if blob_ids is None:
            blob_ids = _referenced(services, need)
        with self._lock:
            self._names += len(blob_ids)
            if self._names <= _REMEMBERED:
                self.read[need] = blob_ids
        return blob_ids


def find_needed_blobs(
    services: Services, log: CheckpointLog, *, allow_no_checkpoints: bool, before: NeededBlobs | None = None
) -> NeededBlobs:
    """The blobs that any retained checkpoint of any task references, and perhaps some that one referenced meanwhile.

    ``before``: the search before this one, if there was one.

    Raises: PermissionNeeded without any checkpoint, unless allowed; MissingBlob, CorruptBlob for an index that a
        retained checkpoint needs; CorruptRecord; UnavailableError; InvalidError for a backend that cannot list its
        blobs.
    """
    records = _read(services, log, allow_no_checkpoints)
    found = NeededBlobs(known=before.read if before is not None else {})
    offers = log.offers()
    found.expired = tuple(expired_offers(services, offers))
    found.spared.update(offered_blobs(services, {key: offers[key] for key in offers.keys() - set(found.expired)}))
    were_read = services.in_parallel("search", partial(_add_task, services, log, found), records.values())
    found.busy = tuple(task for task, was_read in zip(records, were_read, strict=True) if not was_read)
    unknown = {*found.busy}
    for retired in log.retired():
        if not _add_retired(services, log, retired, found):
            unknown.update(map(task_name, range(retired.layout.tasks)))
    # the tasks of the layout without a record: they never had one, or it was lost
    tasks = 0 if allow_no_checkpoints else max(record.layout.tasks for record in records.values())
    missing = [name for name in map(task_name, range(tasks)) if name not in records]
    unknown.update(compress(missing, services.in_parallel("search", partial(_has_blobs, services), missing)))
    if unknown:
        # they may have segments in blobs that several tasks share
        job = services.config.job_key
        found.unknown = (*(task_prefix(job, task) for task in unknown), f"{job}/_segments/")
    return found


def _has_blobs(services: Services, task: str) -> bool:
    """Whether the task may have been backed up: its first commit stores a snapshot, with an index below its prefix."""
    return next(list_blobs(services.blobs(), task_prefix(services.config.job_key, task)), None) is not None


def _read(services: Services, log: CheckpointLog, allow_no_checkpoints: bool) -> Mapping[str, CheckpointRecord]:
    try:
        records = log.read()
    except MissingState:
        if not allow_no_checkpoints:
            raise
        records = {}
    if not records and not allow_no_checkpoints:
        raise PermissionNeeded(
            "the job has no checkpoint: all its blobs would be deleted",
            hint="check kafka.bootstrap.servers, task.checkpoint.topic, job.name and job.id; to delete the blobs of a "
            "job that nobody needs any more, use `statemgr gc --allow-no-checkpoints --write`",
            job=services.config.job_name,
            topic=services.config.checkpoint_topic,
        )
    return records


def _add_retired(services: Services, log: CheckpointLog, retired: RetiredLayout, found: NeededBlobs) -> bool:
    """Add the blobs of a layout that a rescale has replaced. No owner publishes in it any more.

    Its last output was delivered before the next layout went on, which deletes it like its own. Other attachments are
    needed. Returns: whether all its indexes could be read, or are not needed any more, because it was brought back or
    collected meanwhile.
    """
    generation = retired.layout.generation

    def add(record: CheckpointRecord) -> None:
        for need in _needs(record, found, generation):
            found.add(found.referenced(services, need), need.checkpoint_id.millis, generation)

    try:
        records = log.read(generation=generation).values()
        services.in_parallel("search", add, records)
    except (MissingError, CorruptError) as error:
        log.read(())
        if retired in log.retired():
            found.damaged[generation] = str(error.where.get("blob", error.message))
            return False
    return True


def _add_task(services: Services, log: CheckpointLog, found: NeededBlobs, record: CheckpointRecord) -> bool:
    """Add the blobs of one task. Returns: whether its newest checkpoint could be read before it was evicted.

    Raises: MissingBlob, CorruptBlob for a blob that a retained checkpoint has lost.
    """
    read: set[_Need] = set()
    missed: set[_Need] = set()
    for _ in range(_ROUNDS):
        failed: set[_Need] = set()
        for need in _needs(record, found):  # 1
            if need in read:
                continue
            try:
                blob_ids = found.referenced(services, need)
            except (MissingError, CorruptError) as error:
                error.with_where(task=need.task, store=need.store)
                if need in missed:
                    raise  # 3
                failed.add(need)
                continue
            read.add(need)
            found.add(blob_ids, need.checkpoint_id.millis)
        if not failed:
            return True
        newest = record.current.checkpoint_id
        record = _read_again(services, log, record.task)  # 2
        missed = failed & set(_needs(record, found))
        if not missed and all(need.checkpoint_id != newest for need in failed):
            return True  # 4
    return False


def _needs(record: CheckpointRecord, found: NeededBlobs, generation: int | None = None) -> list[_Need]:
    """The markers of the retained checkpoints, store by store, newest first. Also adds the blobs that a record itself
    names. ``generation``: of a layout that a rescale has replaced."""
    needs: list[_Need] = []
    for checkpoint in record.checkpoints:
        for factory, of_store in checkpoint.state_checkpoint_markers.items():
            needs += [
                _Need(record.task, store, factory, marker, checkpoint.checkpoint_id)
                for store, marker in of_store.items()
            ]
        for attachment in checkpoint.attachments:
            if attachment.blob is None:
                continue
            if generation is not None and attachment.is_output:
                found.spared.add(attachment.blob.blob_id)
            else:
                found.add([attachment.blob.blob_id], checkpoint.checkpoint_id.millis, generation)
    # the newest checkpoint has all blobs whose TTL its owner has yet to remove; those of older ones may be garbage
    found.spared.update([outstanding.blob_id for outstanding in record.current.outstanding_ttl])
    return sorted(needs, key=lambda need: need.store)  # the checkpoints of a store share indexes


def _read_again(services: Services, log: CheckpointLog, task: str) -> CheckpointRecord:
    record = log.read([task]).get(task)
    if record is None:
        raise MissingState(
            "the checkpoint topic lost the record of a task while it was read",
            hint="find out what deletes records from the topic",
            job=services.config.job_name,
            task=task,
            topic=services.config.checkpoint_topic,
        )
    return record


def _referenced(services: Services, need: _Need) -> Sequence[str]:
    manager = services.backup_manager(need.factory)
    found = manager.referenced_blobs(services.identity(need.task, need.store), need.marker)
    if found is None:
        raise InvalidError(
            f"the backend {need.factory} does not say which blobs it needs: nothing can be deleted",
            hint="have the method referenced_blobs of its backup manager return their names",
            job=services.config.job_name,
            task=need.task,
            store=need.store,
        )
    return tuple(found)
