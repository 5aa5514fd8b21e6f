"""Goes back to a retained checkpoint, or keeps one: for all tasks of a job, or for one task.

Steps of :func:`roll_back`, and of :func:`keep`, which publishes the current checkpoints again:

1. fence older owners and read the topic, as every opening does (:mod:`statemgr.flows.open_job`)
2. prepare a commit for each task (:mod:`statemgr.flows.rollback`)
3. publish all of them in one transaction; the topic is never rewound, so the older state gets a new record
4. remove the TTL of what was added

Nothing is evicted or deleted: the checkpoints that are taken back stay retained until later commits drop them, and the
next owner cleans up. Until step 3 has committed, the checkpoint before it is current.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from statemgr.backends.services import Services
from statemgr.errors import InvalidError, MissingState, OutcomeUnknownError
from statemgr.flows.clean_up import CleanUp
from statemgr.flows.commit import CommitBase, Refill
from statemgr.flows.open_job import JobTopics, fence_ids, read_published, take_over
from statemgr.flows.ownership import Published, common_serdes, explained, settle_now
from statemgr.flows.publish import publish
from statemgr.flows.repair import find_damage, repeated_attachments
from statemgr.flows.rollback import Rollback, check_alone, find_targets, plan_rollback, prepare_rollback
from statemgr.ids import task_name
from statemgr.kafka.publisher import job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import MOST_KEPT, Attachment, Checkpoint, CheckpointRecord, MicroBatch
from statemgr.model.commit import PreparedCommit
from statemgr.model.permissions import Permissions
from statemgr.ports import CheckpointLog, Progress, no_progress

T = TypeVar("T")
R = TypeVar("R")
_PARALLELISM = 8
#: The checkpoint's stores are checked instead of the current one's: going back may undo a change of the stores.
_ANY_STORES = Permissions(allow_new_stores=True, allow_removed_stores=True, allow_serde_change=True)


@dataclass(frozen=True)
class Goal:
    """Where to go back to. ``task``: the only task that goes back; None for all. ``checkpoint_ids``: one that all these
    tasks retain, or one for each task."""

    checkpoint_ids: Collection[str]
    task: str | None = None

    def targets(self, records: Mapping[str, CheckpointRecord], tasks: Sequence[str]) -> Mapping[str, Checkpoint]:
        """Task → its checkpoint. Raises: MissingState, InvalidError."""
        targets = find_targets(records, tasks, self.checkpoint_ids)
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

    def targets(self, records: Mapping[str, CheckpointRecord], tasks: Sequence[str]) -> Mapping[str, Checkpoint]:
        return {task: records[task].current for task in tasks if task in records}

    def kept(self, record: CheckpointRecord) -> tuple[str, ...]:
        """Raises: InvalidError if the task would keep too many checkpoints."""
        retained = [str(checkpoint.checkpoint_id) for checkpoint in record.checkpoints]
        wanted = {*record.current.kept, *self.checkpoint_ids} if self.is_kept else {*record.current.kept}
        wanted -= set() if self.is_kept else set(self.checkpoint_ids)
        kept = tuple(one for one in retained if one in wanted)
        if len(kept) > MOST_KEPT:
            raise InvalidError(
                f"{record.task} would keep {len(kept)} checkpoints, and the limit is {MOST_KEPT}",
                hint="release one with `statemgr checkpoints tag --drop`",
                task=record.task,
            )
        return kept


def plan(
    services: Services, records: Mapping[str, CheckpointRecord], goal: Goal, *, check_blobs: bool = True
) -> list[Rollback]:
    """What :func:`roll_back` would do, task by task. Fences nobody and writes nothing.

    Args:
        check_blobs: whether to ask for every blob that the checkpoint needs.

    Raises: MissingState if the checkpoint is not retained; InvalidError, ConfigError; RetryableError, AccessDenied.
    """
    rollbacks = _plans(services, records, goal, {})
    if not check_blobs:
        return rollbacks

    def checked(one: Rollback) -> Rollback:
        damaged = find_damage(services, one.record.task, one.target)
        return plan_rollback(services, one.record, one.target, damaged=damaged)

    return _in_parallel(services, checked, rollbacks)


def roll_back(
    services: Services, log: CheckpointLog, topics: JobTopics, goal: Goal, progress: Progress = no_progress
) -> tuple[Sequence[Rollback], Mapping[str, Checkpoint]]:
    """Make retained checkpoints current again.

    Returns: what was done for each task; and task → its new current checkpoint.
    Raises: what :func:`plan` raises, also MissingState and CorruptError if nothing can supply a state exactly;
        FencedError, RetryableError: surely not published; OutcomeUnknownError: the topic says what is current.
    """
    config, tasks = services.config, _tasks(services, goal)
    record = next(iter(log.read().values()), None)
    if record is None:
        raise MissingState(
            "the job has no checkpoint", hint="check job.name, job.id and task.checkpoint.topic", job=config.job_name
        )
    topics.ensure(allow_empty_start=False)
    job_id, task_ids = job_transactional_id(config), [task_transactional_id(config, task) for task in tasks]
    own, others = (job_id, task_ids) if goal.task is None else (task_ids[0], [job_id])
    with closing(take_over(services, own, goal.task or config.job_name)) as publisher:  # 1
        fence_ids(services, others)
        found = read_published(services, log, record.layout, tasks, _ANY_STORES, others=others)
        published = found.published
        published.permits = ()  # they are for the next opening
        if goal.task is None:
            published.job_records = set(log.job_records())
        with explained(services, log, published):
            records = {task: of_task for task, of_task in published.records.items() if of_task is not None}
            rollbacks = _plans(services, records, goal, found.refill)
            published.serdes = common_serdes(rollback.target for rollback in rollbacks)
            published.kept = {one.record.task: goal.kept(one.record) for one in rollbacks}
            attachments, batch = _output(rollbacks, alone=goal.task is not None)
            prepared = partial(_prepared, services, published, goal, attachments, progress)
            done = _in_parallel(services, prepared, rollbacks)  # 2
            rollbacks, commits = [one for one, _ in done], [commit for _, commit in done]
        clean_ups = {task: CleanUp(services, task, log) for task in tasks}
        _in_parallel(services, lambda task: _adopt(clean_ups[task], records[task]), tasks)
        outstanding = {task: clean_up.outstanding for task, clean_up in clean_ups.items()}
        try:
            publish(  # 3
                services, publisher, log, published, commits, batch=batch, outstanding=outstanding, evict=False
            )
        except OutcomeUnknownError:
            settle_now(services, publisher, log, published, "the rollback")
        _remove_ttls(services, commits)  # 4
    return rollbacks, {task: one.current for task, one in published.records.items() if one is not None}


def keep(
    services: Services, log: CheckpointLog, topics: JobTopics, checkpoint_id: str, *, is_kept: bool
) -> Mapping[str, Checkpoint]:
    """Keep a retained checkpoint beyond the retention, in every task that has it; or keep it no longer.

    Returns: task → the new current checkpoint, which repeats the one before it.
    Raises: MissingState if no task retains the checkpoint; InvalidError; as :func:`roll_back`.
    """
    records = log.read()
    retaining = [task for task, record in records.items() if _has(record, checkpoint_id)]
    if not retaining:
        raise MissingState(
            f"checkpoint {checkpoint_id} is not retained for any task",
            hint="run `statemgr checkpoints list` to see the checkpoints that are retained",
            job=services.config.job_name,
        )
    alone = retaining[0] if len(retaining) == 1 else None
    return roll_back(services, log, topics, _Keep((checkpoint_id,), alone, is_kept))[1]


def _has(record: CheckpointRecord, checkpoint_id: str) -> bool:
    return any(str(checkpoint.checkpoint_id) == checkpoint_id for checkpoint in record.checkpoints)


def _tasks(services: Services, goal: Goal) -> list[str]:
    """The tasks that the goal is for, in order."""
    if goal.task is not None:
        return [goal.task]
    return [task_name(index) for index in range(services.config.tasks)]


def _plans(
    services: Services, records: Mapping[str, CheckpointRecord], goal: Goal, tails: Mapping[str, Refill]
) -> list[Rollback]:
    targets = goal.targets(records, _tasks(services, goal))
    return [
        plan_rollback(services, records[task], target, tail=tails.get(task, frozenset()))
        for task, target in targets.items()
    ]


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


def _adopt(clean_up: CleanUp, record: CheckpointRecord) -> None:
    """Remove the TTLs that a dead owner has left on blobs of the current checkpoint. The next opening will not do this,
    because it looks only at the checkpoint that is current then. Raises: RetryableError."""
    clean_up.at_open(record, delete=False)
    clean_up.retry_ttls()


def _output(
    rollbacks: Sequence[Rollback], *, alone: bool
) -> tuple[Mapping[str, tuple[Attachment, ...]], MicroBatch | None]:
    """Task → the attachments of its new checkpoint; and the micro-batch.

    All tasks go back to the output of their checkpoint. A task that goes back alone keeps the output of the current
    micro-batch, which it shares with the other tasks.
    """
    chosen = {r.record.task: r.record.current if alone else r.target for r in rollbacks}
    batches = {checkpoint.batch for checkpoint in chosen.values()}
    batch = batches.pop() if len(batches) == 1 else None
    return {task: repeated_attachments(checkpoint) for task, checkpoint in chosen.items()}, batch


def _remove_ttls(services: Services, commits: Sequence[PreparedCommit]) -> None:
    """Remove the TTLs of the blobs that the new checkpoints added. The next opening tries the failures again."""
    added = [blob for commit in commits for blob in commit.added_blobs]
    if added:
        services.transfer().remove_ttl_all(added)


def _in_parallel(services: Services, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    with services.executors.pool("rollback", _PARALLELISM) as pool:
        return list(pool.map(work, items))
