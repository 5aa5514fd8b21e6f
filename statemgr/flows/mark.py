"""Mark: which blobs the retained checkpoints of a job need, by the checkpoint topic. Reads only; fences nobody.

Memory: one dictionary entry per needed blob (some 250 bytes: a state of 1 TiB in parts of 64 MiB comes to 4 MB);
what nothing needs takes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from statemgr.errors import CorruptError, InvalidError, MissingError, MissingState, PermissionNeeded, RetryableError
from statemgr.flows.parts import Parts
from statemgr.ids import task_path
from statemgr.model.checkpoint import CheckpointRecord, Marker
from statemgr.ports import CheckpointLog

#: Times that tasks which commit meanwhile are looked at again.
_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class _Need:
    """One store's marker in a retained checkpoint, which was taken at ``taken_ms``."""

    task: str
    store: str
    factory: str
    marker: Marker
    taken_ms: int


@dataclass
class Marks:
    """``needed``: blob → when the oldest retained checkpoint that needs it was taken (epoch milliseconds by its
    owner's clock). ``spared``: blobs that a checkpoint names and no restore needs. ``unknown``: what the names of the
    blobs of a task start with that the layout has and the topic has no checkpoint of."""

    needed: dict[str, int] = field(default_factory=dict)
    spared: set[str] = field(default_factory=set)
    unknown: tuple[str, ...] = ()

    def __contains__(self, blob_id: object) -> bool:
        return blob_id in self.needed or blob_id in self.spared

    def need(self, blob_id: str, taken_ms: int) -> None:
        """Mark a blob."""
        self.needed[blob_id] = min(taken_ms, self.needed.get(blob_id, taken_ms))


def mark(parts: Parts, log: CheckpointLog, *, allow_no_checkpoints: bool) -> Marks:
    """Everything that any retained checkpoint of any task references, as of now.

    A task that publishes meanwhile, and deletes what it evicts, is looked at again.

    Raises: PermissionNeeded without any checkpoint, unless allowed; MissingBlob, CorruptBlob for an index that a
        retained checkpoint needs; CorruptRecord; UnavailableError; InvalidError for a backend that does not say what
        it needs.
    """
    records = _read(parts, log, allow_no_checkpoints)
    of_task: dict[str, Marks] = {}
    pending: Mapping[str, CheckpointRecord] = records
    lost: set[_Need] = set()
    for _ in range(_ROUNDS):
        failed: dict[_Need, MissingError | CorruptError] = {}
        for task, record in pending.items():
            of_task[task] = Marks()
            failed |= _mark_task(parts, record, of_task[task])
        for need, error in failed.items():
            if need in lost:  # it is gone, and the topic still names it
                raise error.with_where(task=need.task, store=need.store)
        if not failed:
            return _union(of_task.values(), () if allow_no_checkpoints else _unknown(parts, records))
        lost = set(failed)
        tasks = {need.task for need in failed}
        pending = log.read(tasks)
        if set(pending) != tasks:
            raise MissingState(
                "the checkpoint topic has lost the records of tasks while it was read",
                hint="look who deletes from it",
                job=parts.config.job_name,
                topic=parts.config.checkpoint_topic,
            )
    raise RetryableError(
        "the job publishes faster than its indexes can be read",
        hint="raise task.checkpoint.retained, or try again when it is less busy",
        job=parts.config.job_name,
    )


def _read(parts: Parts, log: CheckpointLog, allow_no_checkpoints: bool) -> Mapping[str, CheckpointRecord]:
    try:
        records = log.read()
    except MissingState:
        if not allow_no_checkpoints:
            raise
        records = {}
    if not records and not allow_no_checkpoints:
        raise PermissionNeeded(
            "the job has no checkpoint: everything it has in the blob store would be garbage",
            hint="check kafka.bootstrap.servers, task.checkpoint.topic, job.name and job.id; "
            "`statemgr gc --allow-no-checkpoints` collects a job that is given up",
            job=parts.config.job_name,
            topic=parts.config.checkpoint_topic,
        )
    return records


def _mark_task(parts: Parts, record: CheckpointRecord, marks: Marks) -> dict[_Need, MissingError | CorruptError]:
    """Returns: the markers whose blobs could not be told, since an index is lost. Raises: any other error."""
    needs: list[_Need] = []
    for checkpoint in record.checkpoints:
        taken_ms = checkpoint.checkpoint_id.millis
        for factory, of_store in checkpoint.state_checkpoint_markers.items():
            needs += [_Need(record.task, store, factory, marker, taken_ms) for store, marker in of_store.items()]
        for attachment in checkpoint.attachments:
            if attachment.blob is not None:
                marks.need(attachment.blob.blob_id, taken_ms)
        marks.spared.update(outstanding.blob_id for outstanding in checkpoint.outstanding_ttl)
    failed: dict[_Need, MissingError | CorruptError] = {}
    for need in needs:
        try:
            for blob_id in _referenced(parts, need):
                marks.need(blob_id, need.taken_ms)
        except (MissingError, CorruptError) as error:
            failed[need] = error
    return failed


def _referenced(parts: Parts, need: _Need) -> Iterable[str]:
    manager = parts.backup_manager(need.factory)
    if not hasattr(manager, "referenced_blobs"):
        raise InvalidError(
            f"the backend {need.factory} does not say which blobs it needs: none can be called garbage",
            hint="its backup manager must have the method referenced_blobs",
            job=parts.config.job_name,
            task=need.task,
            store=need.store,
        )
    return manager.referenced_blobs(parts.identity(need.task, need.store), need.marker)


def _unknown(parts: Parts, records: Mapping[str, CheckpointRecord]) -> tuple[str, ...]:
    """The tasks of the layout that the topic does not know: new, or their records were lost."""
    tasks = max(record.layout.tasks for record in records.values())
    job = f"{parts.config.job_name}/{parts.config.job_id}/"
    known = {task_path(task) for task in records}
    unknown = tuple(f"{job}Partition_{i}/" for i in range(tasks) if f"Partition_{i}" not in known)
    # a task of which nothing is known may have segments in blobs that tasks share
    return (*unknown, f"{job}_segments/") if unknown else ()


def _union(of_task: Iterable[Marks], unknown: tuple[str, ...]) -> Marks:
    marks = Marks(unknown=unknown)
    for found in of_task:
        for blob_id, taken_ms in found.needed.items():
            marks.need(blob_id, taken_ms)
        marks.spared |= found.spared
    return marks
