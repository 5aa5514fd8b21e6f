"""Fills the changelogs of a job that is in stage 4, by a commit of the current state. The job must be stopped.

A commit fills a changelog that the checkpoint before it does not have: a delete for every key on the topic, then the
whole state. The input offsets stay. Each task is done when its checkpoint has the changelogs, so a rebuild that was
killed continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from statemgr import StateManager
from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import FencedError
from statemgr.flows.committing.commit import CommitBase
from statemgr.flows.opening.repair import prepare_repair, repeated_attachments
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.commit import PreparedCommit
from statemgr.ports import Progress
from statemgr.reader import JobReader
from statemgr.services import Services
from statemgr.wiring import open_services


def lacking(config: JobConfig, checkpoint: Checkpoint | None) -> frozenset[tuple[str, str]]:
    """The changelogs that the configuration wants and a checkpoint lacks: factory and store."""
    return frozenset(
        (KAFKA_CHANGELOG, name)
        for name, store in config.stores.items()
        if KAFKA_CHANGELOG in store.backup_factories
        and checkpoint is not None
        and checkpoint.marker(KAFKA_CHANGELOG, name) is None
    )


def rebuild(
    config: JobConfig,
    records: Sequence[CheckpointRecord],
    together: bool,
    progress: Progress,
    services: Callable[[JobConfig], Services] = open_services,
) -> None:
    """Make every task's changelogs hold its current state, under a configuration that backs up to both backends.

    Args:
        together: whether all tasks are published in one transaction, as on Spark.
        services: makes the adapters, the clock, the source of IDs and the threads.

    Raises: as the opening and the commit of a task; PermissionNeeded if a changelog holds what others wrote;
        FencedError if a task has no changelogs at the end, because the job still runs.
    """
    if not any(lacking(config, record.current) for record in records):
        return
    # a command is no part of the job: it serves no metrics, and the job's port may be taken
    quiet = JobConfig.from_mapping({k: v for k, v in config.to_mapping().items() if k != "metrics.port"})
    with StateManager(quiet, records[0].layout.partitioner, services=services) as manager:
        if together:
            _together(manager, config, services)
        else:
            _one_by_one(manager, config, records, progress)
    with JobReader(config, services=services) as reader:
        lost = [record.task for record in reader.retaining() if lacking(config, record.current)]
    if lost:
        raise FencedError(
            f"{lost[0]} has committed without the changelogs while they were rebuilt: somebody still runs the job",
            hint="stop the job, and run the same command again; the configuration file is unchanged",
            job=config.job_name,
        )


def _one_by_one(
    manager: StateManager, config: JobConfig, records: Sequence[CheckpointRecord], progress: Progress
) -> None:
    manager.fence_tasks([record.task for record in records])
    for number, record in enumerate(records, 1):
        if lacking(config, record.current):
            with manager.open_task(record.task) as task:
                newest = task.last_checkpoint
                if newest is not None and lacking(config, newest):
                    task.commit(newest.input_offsets)
        progress("rebuild changelogs", number, len(records))


def _together(manager: StateManager, config: JobConfig, made_by: Callable[[JobConfig], Services]) -> None:
    """As the repair of damaged backups: the micro-batch, the output and the input offsets stay."""
    epoch = manager.acquire()
    with JobReader(config, services=made_by) as reader:  # nothing is open any more
        records = reader.retaining()
    manager.confirm()  # otherwise these are the records of a newer owner
    with closing(made_by(config)) as services:

        def again(record: CheckpointRecord) -> PreparedCommit:
            base = CommitBase(record.task, epoch.layout, epoch.number, record.current, lacking(config, record.current))
            return prepare_repair(services, record, base, attachments=repeated_attachments(record.current))[1]

        if any(lacking(config, record.current) for record in records):
            manager.publish([again(record) for record in records], records[0].current.batch)
