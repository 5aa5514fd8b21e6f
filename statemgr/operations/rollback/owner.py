"""Goes back to a retained checkpoint, or keeps one: for all tasks of a job, or for one task.

Steps of :func:`roll_back`, and of :func:`keep`, which publishes the current checkpoints again:

1. fence older owners and read the topic, as every opening does (:mod:`statemgr.flows.opening.open_job`)
2. prepare a commit for each task (:mod:`statemgr.flows.rollback`)
3. publish all of them in one transaction; the topic is never rewound, so the older state gets a new record
4. remove the TTL of what was added

Nothing is evicted or deleted: the checkpoints that are taken back stay retained until later commits drop them, and the
next owner cleans up. Until step 3 has committed, the checkpoint before it is current.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from statemgr.errors import MissingBlob, MissingState
from statemgr.flows.committing.clean_up import taken_over
from statemgr.flows.committing.commit import CommitBase, Refill
from statemgr.flows.committing.publish import publish_now
from statemgr.flows.opening.open_job import JobTopics, check_layout, look_at_published, read_published
from statemgr.flows.opening.opening_checks import serdes_in_force
from statemgr.flows.opening.repair import repeated_attachments
from statemgr.flows.owner import Owner
from statemgr.flows.published import Published, common_batch, common_serdes
from statemgr.flows.replaced_layouts import keep_in_layout
from statemgr.flows.rollback import (
    Rollback,
    check_alone,
    check_restorable,
    find_targets,
    newest_before,
    plan_rollback,
    prepare_rollback,
)
from statemgr.flows.upkeep import find_damage
from statemgr.ids import task_index, task_name
from statemgr.model.checkpoint import SEQUENCE, Attachment, Checkpoint, CheckpointRecord, Layout, MicroBatch
from statemgr.model.commit import PreparedCommit
from statemgr.model.jobs.permissions import Permissions
from statemgr.model.keys.partitioners import is_by_input
from statemgr.ports import CheckpointLog, Progress, no_progress
from statemgr.services import Services

#: The checkpoint's stores are checked instead of the current one's: going back may undo a change of the stores.
_ANY_STORES = Permissions(allow_new_stores=True, allow_removed_stores=True, allow_serde_change=True)


@dataclass(frozen=True)
class Goal:
    """Where to go back to. ``task``: the only task that goes back; None for all that have a checkpoint.
    ``checkpoint_ids``: one that all these tasks retain, or one for each task. ``before_ms``: in their place, the newest
    checkpoint of each task from before that time (epoch milliseconds)."""

    checkpoint_ids: Collection[str]
    task: str | None = None
    before_ms: int | None = None

    def targets(self, records: Mapping[str, CheckpointRecord]) -> Mapping[str, Checkpoint]:
        """Task → its checkpoint. A task that never had input has none, and stays as it is.

        Raises: MissingState, InvalidError.
        """
        tasks = sorted(records, key=task_index) if self.task is None else [self.task]
        if self.before_ms is not None:
            targets = newest_before(records, tasks, self.before_ms)
        else:
            by_input = all(is_by_input(record.layout.partitioner) for record in records.values())
            one_task = "`statemgr checkpoints rollback --task`" if by_input else None
            targets = find_targets(records, tasks, self.checkpoint_ids, option="--to", one_task=one_task)
        if self.task is not None:
            check_alone(records[self.task], targets[self.task])
        return targets

    def kept(self, record: CheckpointRecord) -> tuple[str, ...]:
        """The same checkpoints as before."""
        return record.current.kept


@dataclass(frozen=True)
class _Keep(Goal):
    """Nothing goes back. One checkpoint is kept beyond the retention from now on, or no longer."""

    is_kept: bool = True

    def targets(self, records: Mapping[str, CheckpointRecord]) -> Mapping[str, Checkpoint]:
        (checkpoint_id,) = self.checkpoint_ids
        if not any(record.find(checkpoint_id) for record in records.values()):
            raise MissingState(
                f"checkpoint {checkpoint_id} is not retained any more: the job has committed meanwhile",
                hint="run `statemgr checkpoints list`, and choose a newer checkpoint",
                task=self.task,
            )
        tasks = records if self.task is None else [self.task]
        return {task: records[task].current for task in tasks}

    def kept(self, record: CheckpointRecord) -> tuple[str, ...]:
        """Raises: InvalidError if the task would keep too many checkpoints."""
        (checkpoint_id,) = self.checkpoint_ids
        return record.with_kept(checkpoint_id, is_kept=self.is_kept)


def plan(services: Services, log: CheckpointLog, goal: Goal, *, check_blobs: bool = True) -> list[Rollback]:
    """What :func:`roll_back` would do, task by task. Fences nobody, and writes nothing that stays.

    To read an older checkpoint from a changelog, it asks for the broker's time: it creates a topic, and deletes it.

    Args:
        check_blobs: whether to ask for every blob that the stores of the checkpoint need.

    Raises: MissingState if the checkpoint is not retained, or MissingState or CorruptError if its state cannot be
        restored where that is needed; MissingBlob if an attachment of it is gone; LayoutMismatch if ``job.tasks`` is
        another number; PermissionNeeded if a task without a checkpoint had state; InvalidError, ConfigError;
        RetryableError, AccessDenied.
    """
    tasks = _tasks(services, goal)
    records, _ = look_at_published(services, log, _layout(services, log), tasks, _ANY_STORES)
    rollbacks = _plans(services, {task: records[task] for task in tasks if task in records}, goal, {})
    _labels_and_kept(services, rollbacks, goal)
    _check_attachments(services, rollbacks, goal)

    def checked(one: Rollback) -> Rollback:
        damaged = find_damage(services, one.record.task, one.target) if check_blobs else {}
        one = plan_rollback(services, one.record, one.target, damaged=damaged)
        check_restorable(services, one, damaged)
        return one

    return services.in_parallel("rollback", checked, rollbacks)


def roll_back(
    services: Services, log: CheckpointLog, topics: JobTopics, goal: Goal, progress: Progress = no_progress
) -> tuple[Sequence[Rollback], Mapping[str, Checkpoint]]:
    """Make retained checkpoints current again.

    Returns: what was done for each task; and task → its new current checkpoint.
    Raises: what :func:`plan` raises, also MissingState and CorruptError if nothing can supply a state exactly;
        FencedError, RetryableError: surely not published; OutcomeUnknownError: the topic says what is current.
    """
    layout = _layout(services, log)
    topics.ensure(allow_empty_start=False)
    with Owner.take(services, log, goal.task) as owner:  # 1
        found = read_published(owner, layout, _tasks(services, goal), _ANY_STORES)
        published = owner.published
        published.permits = ()  # they are for the next opening
        with owner.explaining():
            records = {task: of_task for task, of_task in published.records.items() if of_task is not None}
            rollbacks = _plans(services, records, goal, found.refill)
            published.records = {one.record.task: one.record for one in rollbacks}
            published.serdes, published.kept = _labels_and_kept(services, rollbacks, goal)
            attachments, batch = _output(rollbacks, alone=goal.task is not None)
            prepared = partial(_prepared, services, published, goal, attachments, progress)
            done = services.in_parallel("rollback", prepared, rollbacks)  # 2
            rollbacks, commits = [one for one, _ in done], [commit for _, commit in done]
        clean_ups = services.in_parallel("rollback", lambda one: taken_over(services, one.record), rollbacks)
        outstanding = {
            one.record.task: clean_up.outstanding for one, clean_up in zip(rollbacks, clean_ups, strict=True)
        }
        publish_now(owner, "the rollback", commits, batch=batch, outstanding=outstanding, evict=False)  # 3 and 4
    return rollbacks, published.checkpoints


def keep(
    services: Services, log: CheckpointLog, topics: JobTopics, checkpoint_id: str, *, is_kept: bool
) -> Mapping[str, tuple[str, ...]]:
    """Keep a retained checkpoint beyond the retention, in every task that has it; or keep it no longer.

    A checkpoint of a layout that a rescale has replaced is kept there, and the current layout does not change.

    Returns: task → the checkpoints that it keeps now.
    Raises: MissingState if no task retains the checkpoint; InvalidError; as :func:`roll_back`.
    """
    records = log.read()
    retaining = [task for task, record in records.items() if record.find(checkpoint_id) is not None]
    if not retaining:
        return keep_in_layout(services, log, checkpoint_id, is_kept=is_kept)
    alone = retaining[0] if len(retaining) == 1 else None
    goal = _Keep((checkpoint_id,), alone, is_kept=is_kept)
    if not is_kept and not any(checkpoint_id in records[task].kept for task in retaining):
        return {task: records[task].kept for task in (records if alone is None else retaining)}
    plan(services, log, goal, check_blobs=False)  # what it refuses is refused before the fence
    published = roll_back(services, log, topics, goal)[1]
    return {task: checkpoint.kept for task, checkpoint in published.items()}


def _layout(services: Services, log: CheckpointLog) -> Layout:
    """The job's layout. Raises: MissingState if it has no checkpoint; LayoutMismatch."""
    seen = log.read()
    if not seen:
        raise MissingState(
            "the job has no checkpoint",
            hint="check job.name, job.id and task.checkpoint.topic",
            job=services.config.job_name,
        )
    _check_tasks(services, seen)
    return next(iter(seen.values())).layout


def _check_tasks(services: Services, records: Mapping[str, CheckpointRecord]) -> None:
    """Raises: LayoutMismatch if the configuration has another number of tasks: not all of the job would go back."""
    for record in records.values():
        check_layout(services, record, replace(record.layout, tasks=services.config.tasks))


def _tasks(services: Services, goal: Goal) -> list[str]:
    """The tasks that the goal is for, also those without a checkpoint, in order."""
    if goal.task is not None:
        return [goal.task]
    return [task_name(index) for index in range(services.config.tasks)]


def _plans(
    services: Services, records: Mapping[str, CheckpointRecord], goal: Goal, tails: Mapping[str, Refill]
) -> list[Rollback]:
    return [
        plan_rollback(services, records[task], target, tail=tails.get(task, frozenset()))
        for task, target in goal.targets(records).items()
    ]


def _labels_and_kept(
    services: Services, rollbacks: Sequence[Rollback], goal: Goal
) -> tuple[dict[str, tuple[str, str] | None], dict[str, tuple[str, ...]]]:
    """Store → the labels of its serdes, and task → the checkpoints that it keeps, after the rollback.

    Raises: InvalidError if the tasks' checkpoints have other serdes, or a task would keep too many checkpoints.
    """
    labels = serdes_in_force(services, None) | common_serdes(rollback.target for rollback in rollbacks)
    return labels, {one.record.task: goal.kept(one.record) for one in rollbacks}


def _check_attachments(services: Services, rollbacks: Sequence[Rollback], goal: Goal) -> None:
    """Ask for the blobs of attachments that become current again.

    Raises: MissingBlob if one is gone: nothing can make it again; RetryableError, AccessDenied.
    """
    needed = {}
    for one in rollbacks:
        checkpoint = _repeated(one, alone=goal.task is not None)
        if checkpoint is not one.record.current:
            blobs = [made.blob.blob_id for made in checkpoint.attachments if made.blob is not None]
            needed.update(dict.fromkeys(blobs, (one.record.task, checkpoint.checkpoint_id)))
    for blob_id, error in services.transfer().absent(sorted(needed)).items() if needed else ():
        if not isinstance(error, MissingBlob):
            raise error
        task, checkpoint_id = needed[blob_id]
        raise MissingBlob(
            f"an attachment of checkpoint {checkpoint_id} is gone",
            hint="choose another checkpoint: `statemgr checkpoints list` shows them",
            job=services.config.job_name,
            task=task,
            blob=blob_id,
        )


def _prepared(
    services: Services,
    published: Published,
    goal: Goal,
    attachments: Mapping[str, tuple[Attachment, ...]],
    progress: Progress,
    rollback: Rollback,
) -> tuple[Rollback, PreparedCommit]:
    task = rollback.record.task
    base = CommitBase(task, published.layout, published.epoch, rollback.record.current)
    return prepare_rollback(
        services, rollback, base, together=goal.task is None, attachments=attachments[task], progress=progress
    )


def _output(
    rollbacks: Sequence[Rollback], *, alone: bool
) -> tuple[Mapping[str, tuple[Attachment, ...]], MicroBatch | None]:
    """Task → the attachments of its new checkpoint; and the micro-batch.

    All tasks go back to the output of their checkpoint. A task that goes back alone keeps the output of the current
    micro-batch, which it shares with the other tasks.
    """
    chosen = {one.record.task: _repeated(one, alone=alone) for one in rollbacks}
    attachments = {task: repeated_attachments(checkpoint) for task, checkpoint in chosen.items()}
    return attachments, common_batch(chosen.values())


def _repeated(rollback: Rollback, *, alone: bool) -> Checkpoint:
    """The checkpoint whose output the new one has."""
    current, target = rollback.record.current, rollback.target
    names = {one.name for checkpoint in (current, target) for one in checkpoint.attachments}
    shares = current.batch is not None or target.batch is not None or bool(names - {SEQUENCE})
    return current if alone and shares else target
