"""Goes back from a rescale: makes the layout before it current again, while garbage collection has not collected it.

Steps:

1. read the topic, and find the layout that was current before, or the one that retains a given checkpoint
2. create the changelogs that the layout lacks, fence the job, and check that nobody has changed the layout since
3. look at the backups of its last checkpoints, and fill those that are damaged
4. in one transaction, publish the last checkpoint of each of its tasks under a new generation, with its other retained
   and kept checkpoints; delete its old records, and retire the layout that was current. Publish nothing if the layout
   was collected meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import LayoutMismatch, MissingBlob, MissingState, PermissionNeeded
from statemgr.flows.committing.commit import CommitBase, Refill
from statemgr.flows.committing.publish import publish_now
from statemgr.flows.opening.open_job import JobTopics, guard_targets
from statemgr.flows.opening.opening_checks import serdes_in_force
from statemgr.flows.opening.repair import repeated_attachments
from statemgr.flows.owner import Owner
from statemgr.flows.published import Published, common_batch, common_serdes
from statemgr.flows.replaced_layouts import find_layout
from statemgr.flows.rollback import Rollback, check_sources, plan_rollback, prepare_rollback
from statemgr.flows.upkeep import Found, find_damage
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs
from statemgr.logs import counted
from statemgr.model.checkpoint import Attachment, ChangelogMarker, Checkpoint, CheckpointRecord, Layout
from statemgr.model.commit import PreparedCommit
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.model.jobs.permissions import NO_PERMISSIONS
from statemgr.operations.rescale.plan import changelog_key, changes_in_force, overtaken, topic_of_generation
from statemgr.operations.rescale.publish import OfLayout, keep_blobs, newest_sequence, retiring
from statemgr.ports import CheckpointLog, Progress
from statemgr.services import Services


@dataclass(frozen=True)
class UndoPlan:
    """The layout to go back to, the records of its tasks, and those of the current layout."""

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
        """The current layout."""
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


def plan_undo(config: JobConfig, log: CheckpointLog, checkpoint_id: str | None = None) -> UndoPlan:
    """Find the layout to go back to.

    Args:
        checkpoint_id: one that the layout retains; None for the layout that was current before.

    Raises: LayoutMismatch if the configuration is not that of the current layout; MissingState if there is no earlier
        one, or garbage collection has collected it; InvalidError if only the location of its query's last batch can
        continue it; FencedError if the job goes back to it at the same time.
    """
    return _find(config, log, checkpoint_id)


def _find(config: JobConfig, log: CheckpointLog, checkpoint_id: str | None, before: Layout | None = None) -> UndoPlan:
    """Step 1. ``before``: the layout that was current when the command began; None if it begins. Raises: as
    :func:`plan_undo`."""
    found = find_layout(log, checkpoint_id)
    current = log.read()  # after it: whoever has gone back meanwhile has also taken the layout that was looked for
    now = next((record.layout for record in current.values()), None)
    if now is None or not log.retired():
        raise MissingState(
            "the checkpoint topic has no earlier layout of the job",
            hint="only the layout before a rescale can be brought back, until `statemgr gc --write` collects it; use "
            "`statemgr rescale --tasks` instead",
            job=config.job_name,
        )
    if before is not None and now != before:
        raise overtaken(config)
    # between layouts of as many tasks, only the changelogs show that an earlier command has gone back already
    may_be_back = found is None or found[0].layout.tasks == now.tasks
    changes = changes_in_force(config, current) if may_be_back else {}
    if changes or now.tasks != config.tasks:
        has = f"job.tasks = {config.tasks}"
        if now.tasks == config.tasks:
            has = f"the changelogs of another layout ({', '.join(key for key in changes if key != 'job.tasks')})"
        raise LayoutMismatch(
            f"the job has {counted(now.tasks, 'task')} now, but the configuration has {has}",
            hint="if an earlier command was interrupted, the job may be back already. "
            f"`statemgr rescale --tasks {now.tasks} --write` only writes the configuration of the current tasks, and "
            "`statemgr rescale --undo` then goes back from them",
            job=config.job_name,
        )
    if found is None:
        raise MissingState(
            f"no earlier layout of the job retains checkpoint {checkpoint_id}",
            hint="run `statemgr checkpoints list` to see the checkpoints that are retained",
            job=config.job_name,
        )
    if found[0] not in log.retired():
        raise overtaken(config)
    plan = UndoPlan(config, *found, current)
    newest = common_batch(record.current for record in current.values())
    for task, target in plan.targets.items():
        check_sources(target, newest, task)
    return plan


def undo(
    services: Services,
    log: CheckpointLog,
    open_new: Callable[[JobConfig], Services],
    progress: Progress,
    checkpoint_id: str | None = None,
) -> tuple[UndoPlan, Mapping[str, Checkpoint]]:
    """Make an earlier layout current again (see :func:`plan_undo`), at its last checkpoint.

    Returns: what was done, and task → its new checkpoint. Raises: as :func:`plan_undo`; TopicMisconfigured if an old
    changelog is gone; PermissionNeeded if the name of a new one is taken; MissingState, CorruptError if nothing can
    supply a state; FencedError, RetryableError, OutcomeUnknownError as :func:`rescale`.
    """
    plan = plan_undo(services.config, log, checkpoint_id)
    with closing(open_new(plan.new_config)) as new:
        _refuse_left(new, plan)
        JobTopics(new).ensure(allow_empty_start=False)
        with Owner.take(new, log, tasks=max(plan.before.tasks, plan.after.tasks)) as owner:
            looked, plan = plan, _find(services.config, log, checkpoint_id, plan.before)
            if plan.retired != looked.retired:
                raise overtaken(services.config)
            brought_back = plan.records
            plan = replace(plan, records=_with_output(new, plan.records))
            epoch = new.ids.epoch(max(record.current.epoch for record in plan.current.values()))
            owner.published = published = Published(dict(plan.records), epoch, plan.after)
            published.sequence = newest_sequence(log, plan.current)
            old_keys = log.record_keys(plan.retired.layout.generation)
            deletes = ((key, None) for key in (*old_keys, plan.retired.key))
            published.along = (retiring(new, plan.before), *deletes)
            published.serdes = serdes_in_force(new, None) | common_serdes(plan.targets.values())
            owner.log = OfLayout(log, plan.after, plan.records, plan.current, brought_back)
            keep_blobs(new, plan.current)

            def prepared(rollback: Rollback) -> PreparedCommit:
                base = CommitBase(rollback.record.task, plan.after, epoch, rollback.target)
                attached = repeated_attachments(rollback.target)
                return prepare_rollback(new, rollback, base, together=True, attachments=attached, progress=progress)[1]

            with owner.explaining():
                tails = guard_targets(new, dict(plan.records), dict.fromkeys(plan.records, NO_PERMISSIONS))
                rollbacks = [rollback for rollback, _ in _planned(new, plan.records, tails)]
                commits = new.in_parallel("undo", prepared, rollbacks)
            batch = common_batch(plan.targets.values())
            publish_now(owner, "the new layout", commits, batch=batch, evict=False)
    return plan, published.checkpoints


def _refuse_left(new: Services, plan: UndoPlan) -> None:
    """A command for another number of tasks may have made a changelog of this name, and died. It is not deleted here:
    this process may be suspended until another one has filled it.

    Raises: PermissionNeeded for such a changelog; UnavailableError, AccessDenied.
    """
    markers = (one.marker(KAFKA_CHANGELOG, store) for one in plan.targets.values() for store in new.config.stores)
    used = {marker.topic for marker in markers if isinstance(marker, ChangelogMarker)}
    made = [spec.name for spec in changelog_topic_specs(new.config) if spec.name not in used]
    with TopicAdmin(new.config, new.clock) as admin:
        for name, found in admin.describe(made).items():
            if (partitions := len(found.partitions)) != new.config.tasks:
                raise PermissionNeeded(
                    f"topic {name} is to be the new changelog, and has {counted(partitions, 'partition')} instead of "
                    f"{new.config.tasks}: a command for another number of tasks may have left it",
                    hint="delete the topic if nobody needs it, and run this again",
                    topic=name,
                )


def look(new: Services, plan: UndoPlan) -> Mapping[str, Found]:
    """Check what :func:`undo` would check after the fence. Fences nobody and writes nothing.

    Args:
        new: services of the layout to come.

    Returns: task → what of its backups is damaged, and would be filled again from another backend or a local copy.
    Raises: MissingBlob, MissingState if something is lost for sure; ConfigError; RetryableError, AccessDenied.
    """
    planned = _planned(new, _with_output(new, plan.records), {})
    return {rollback.record.task: damaged for rollback, damaged in planned if damaged}


def _planned(
    new: Services, records: Mapping[str, CheckpointRecord], tails: Mapping[str, Refill]
) -> Sequence[tuple[Rollback, Found]]:
    """Step 3: how each backend of each task gets the last state, and what is damaged. Nobody has looked after the blobs
    since the layout was replaced. Raises: as :func:`look`."""

    def planned(record: CheckpointRecord) -> tuple[Rollback, Found]:
        damaged = find_damage(new, record.task, record.current)
        tail = tails.get(record.task, frozenset())
        return plan_rollback(new, record, record.current, tail=tail, damaged=damaged), damaged

    return new.in_parallel("undo", planned, records.values())


def _with_output(services: Services, records: Mapping[str, CheckpointRecord]) -> Mapping[str, CheckpointRecord]:
    """The records with the output that still exists: the newer layout has delivered some, and may have deleted it. Of a
    publish there is all of it, in all tasks, or none.

    Raises: MissingBlob if another attachment of a last checkpoint is gone; UnavailableError, AccessDenied.
    """
    checkpoints = [one for record in records.values() for one in record.checkpoints]
    blobs = {made.blob.blob_id for one in checkpoints for made in one.attachments if made.blob is not None}
    gone = services.transfer().absent(sorted(blobs)) if blobs else {}
    for error in gone.values():
        if not isinstance(error, MissingBlob):
            raise error

    def is_gone(attachment: Attachment) -> bool:
        return attachment.blob is not None and attachment.blob.blob_id in gone

    for task, record in records.items():
        for lost in filter(is_gone, record.current.attachments):
            if not lost.is_output:
                raise MissingBlob(
                    f"the layout cannot be brought back: {lost.name!r} of checkpoint {record.current.checkpoint_id} "
                    "is gone",
                    hint="bring an earlier version of the blob back if the store keeps versions, or stay with the "
                    "current layout",
                    job=services.config.job_name,
                    task=task,
                    blob=lost.blob and lost.blob.blob_id,
                )
    delivered = {
        (one.sequence, one.checkpoint_id)
        for one in checkpoints
        if any(made.is_output for made in filter(is_gone, one.attachments))
    }

    def left(checkpoint: Checkpoint) -> Checkpoint:
        if (checkpoint.sequence, checkpoint.checkpoint_id) not in delivered:
            return checkpoint
        return replace(checkpoint, attachments=tuple(one for one in checkpoint.attachments if not one.is_output))

    return {task: replace(record, checkpoints=tuple(map(left, record.checkpoints))) for task, record in records.items()}
