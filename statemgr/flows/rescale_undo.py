"""Goes back from a rescale: puts the layout before it in force again, while garbage collection has not collected it.

Steps:

1. read the topic, and find the layout that was in force before
2. fence the job
3. in one transaction, publish the last checkpoint of each of its tasks under a new generation, delete its old records,
   and retire the layout that was in force
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from statemgr.backends.services import Services
from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import MissingBlob, MissingState
from statemgr.flows.commit import CommitBase
from statemgr.flows.open_job import JobTopics, guard_targets
from statemgr.flows.ownership import Published, common_serdes, explained
from statemgr.flows.repair import repeated_attachments
from statemgr.flows.rescale_plan import changelog_key, topic_of_generation
from statemgr.flows.rescale_publish import (
    OfLayout,
    current_checkpoints,
    fenced,
    keep_blobs,
    newest_sequence,
    publish_layout,
    retiring,
)
from statemgr.flows.rollback import plan_rollback, prepare_rollback
from statemgr.model.checkpoint import Attachment, ChangelogMarker, Checkpoint, CheckpointRecord, Layout
from statemgr.model.commit import PreparedCommit
from statemgr.model.layouts import RetiredLayout
from statemgr.model.permissions import NO_PERMISSIONS
from statemgr.ports import CheckpointLog, Progress

_PARALLELISM = 8


@dataclass(frozen=True)
class UndoPlan:
    """The layout to go back to, the records of its tasks, and those of the layout in force."""

    config: JobConfig
    retired: RetiredLayout
    records: Mapping[str, CheckpointRecord]
    current: Mapping[str, CheckpointRecord]

    @property
    def after(self) -> Layout:
        """The layout to come."""
        return replace(self.retired.layout, generation=self.before.generation + 1)

    @property
    def before(self) -> Layout:
        """The layout in force."""
        return next(iter(self.current.values())).layout

    @property
    def targets(self) -> Mapping[str, Checkpoint]:
        """Task → its last checkpoint."""
        return {task: record.current for task, record in self.records.items()}

    @property
    def changes(self) -> Mapping[str, int | str]:
        """Configuration key → its new value."""
        found: dict[str, int | str] = {"job.tasks": self.retired.layout.tasks}
        for store, config in self.config.stores.items():
            if config.durable:
                markers = [target.marker(KAFKA_CHANGELOG, store) for target in self.targets.values()]
                used = next((marker.topic for marker in markers if isinstance(marker, ChangelogMarker)), None)
                new = topic_of_generation(store, config.changelog_topic, self.after.generation)
                found[changelog_key(store)] = used or new
        return found

    @property
    def new_config(self) -> JobConfig:
        """The configuration of the layout to come."""
        return JobConfig.from_mapping(self.config.to_mapping(), self.changes)


def plan_undo(config: JobConfig, log: CheckpointLog) -> UndoPlan:
    """Find the layout that was in force before. Raises: MissingState if garbage collection has collected it."""
    current = log.read()
    retired = log.retired()
    if not current or not retired:
        raise MissingState(
            "the checkpoint topic has no earlier layout of the job",
            hint="only the layout before a rescale can be brought back, until `statemgr gc` collects it; use "
            "`statemgr rescale --tasks` instead",
            job=config.job_name,
        )
    newest = retired[-1]
    return UndoPlan(config, newest, log.read(generation=newest.layout.generation), current)


def undo(
    services: Services, log: CheckpointLog, open_new: Callable[[JobConfig], Services], progress: Progress
) -> tuple[UndoPlan, Mapping[str, Checkpoint]]:
    """Put the layout before the last rescale in force again, at its last checkpoint.

    Returns: what was done, and task → its new checkpoint. Raises: as :func:`plan_undo`; TopicMisconfigured if an old
    changelog is gone; MissingState, CorruptError if nothing can supply a state; FencedError, RetryableError,
    OutcomeUnknownError as :func:`rescale`.
    """
    plan = plan_undo(services.config, log)
    with closing(open_new(plan.new_config)) as new:
        JobTopics(new).ensure(allow_empty_start=False)
        with fenced(new, plan.before.tasks) as (publisher, fence_others):
            plan = plan_undo(services.config, log)
            epoch = new.ids.epoch(max(record.current.epoch for record in plan.current.values()))
            records = {task: replace(of_task, checkpoints=(of_task.current,)) for task, of_task in plan.records.items()}
            published = Published(dict(records), epoch, plan.after, fence_others)
            published.sequence = newest_sequence(plan.current)
            old_keys = log.record_keys(plan.retired.layout.generation)
            deletes = ((key, None) for key in (*old_keys, plan.retired.key))
            published.along = (retiring(new, plan.before), *deletes)
            published.serdes = common_serdes(plan.targets.values())
            of_layout = OfLayout(log, plan.after, records, plan.current)
            keep_blobs(new, log, plan.current)
            tails = guard_targets(new, dict(plan.records), dict.fromkeys(plan.records, NO_PERMISSIONS))

            def prepared(task: str) -> PreparedCommit:
                record = plan.records[task]
                rollback = plan_rollback(new, record, record.current, tail=tails[task])
                base = CommitBase(task, plan.after, epoch, record.current)
                attached = _attached(new, record.current)
                return prepare_rollback(new, rollback, base, together=True, attachments=attached, progress=progress)[1]

            with explained(new, of_layout, published), new.executors.pool("undo", _PARALLELISM) as pool:
                commits = list(pool.map(prepared, plan.records))
            batches = {target.batch for target in plan.targets.values()}
            publish_layout(new, publisher, of_layout, published, commits, batches.pop() if len(batches) == 1 else None)
    return plan, current_checkpoints(published)


def _attached(services: Services, checkpoint: Checkpoint) -> tuple[Attachment, ...]:
    """The last output, if it still exists: the newer layout has delivered it, and may have deleted it."""
    attachments = repeated_attachments(checkpoint)
    blobs = [one.blob.blob_id for one in attachments if one.blob is not None]
    gone = services.transfer().absent(blobs) if blobs else {}
    for error in gone.values():
        if not isinstance(error, MissingBlob):
            raise error
    return tuple(one for one in attachments if one.blob is None or one.blob.blob_id not in gone)
