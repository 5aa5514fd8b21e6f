"""Rollback: prepares commits that make a retained checkpoint current again, under a new record.

Steps of :func:`plan_rollback`, which changes nothing:

1. check that the checkpoint has exactly the job's stores, and that its query can continue from it
2. decide for each store and backend: *reference* the blobs that hold the state, *keep* a changelog to which nothing was
   written since, or *fill* the backend. :func:`check_restorable` looks whether the state for that is there

Steps of :func:`prepare_rollback`:

1. give the chains of blobs a lineage of their own, so that their next changes are not taken for those that were taken
   back; a chain whose snapshot is gone is filled instead
2. restore the stores that some backend is filled with, exactly as the checkpoint has them
3. fill these backends, as a commit does: a changelog gets the whole state after a delete of each key that it has
4. return a prepared commit of that state with its input offsets (``publish`` is the next flow)

A state that blobs hold is not copied: its blobs have two checkpoints now.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import ConfigError, CorruptError, InvalidError, MissingError, MissingState
from statemgr.flows.committing.commit import CommitBase, Refill, fill
from statemgr.flows.opening.restore import restore_task
from statemgr.flows.upkeep import Found
from statemgr.ids import CheckpointId, source_topic, task_index
from statemgr.model.checkpoint import Attachment, Checkpoint, CheckpointRecord, Marker, MicroBatch
from statemgr.model.commit import PreparedCommit, PreparedStore
from statemgr.model.keys.partitioners import is_by_input
from statemgr.model.plan import StorePlan, plan_retained
from statemgr.ports import Progress, no_progress
from statemgr.services import Services

log = logging.getLogger(__name__)


class Way(StrEnum):
    """How a backend gets a store's older state."""

    REFERENCE = "reference"
    KEEP = "keep"
    FILL = "fill"


@dataclass(frozen=True)
class Rollback:
    """What a rollback does for one task. ``ways``: (factory, store) → how the backend gets the state."""

    record: CheckpointRecord
    target: Checkpoint
    ways: Mapping[tuple[str, str], Way]

    @property
    def newer(self) -> Sequence[Checkpoint]:
        """The checkpoints whose changes are taken back, newest first."""
        return self.record.checkpoints[: self.record.checkpoints.index(self.target)]


def find_targets(
    records: Mapping[str, CheckpointRecord],
    tasks: Sequence[str],
    checkpoint_ids: Collection[str],
    *,
    option: str | None,
    one_task: str | None = None,
) -> dict[str, Checkpoint]:
    """The checkpoint of each task that a command begins with: the one of ``checkpoint_ids`` that the task retains.

    Args:
        option: the command's option that can name a checkpoint for each task; None if it takes one for all of them.
        one_task: how the same is done for one task alone, if it can be.

    Raises: MissingState if a task retains none of them; InvalidError if it retains several, or if no task retains one.
    """
    found: dict[str, Checkpoint] = {}
    wanted = {CheckpointId.parse(text) for text in checkpoint_ids}
    missing = []
    for task in tasks:
        record = records.get(task)
        retained = [c for c in record.checkpoints if c.checkpoint_id in wanted] if record else []
        if len(retained) > 1:
            raise InvalidError(
                f"{task} retains several of these checkpoints",
                hint="name only one of them" + (f", or use {one_task} for each task" if one_task else ""),
                task=task,
            )
        if retained:
            found[task] = retained[0]
        else:
            missing.append(task)
    unknown = set(checkpoint_ids) - {str(checkpoint.checkpoint_id) for checkpoint in found.values()}
    if unknown:
        raise MissingState(
            f"checkpoint {min(unknown)} is not retained for {', '.join(tasks) if len(tasks) == 1 else 'any task'}",
            hint="run `statemgr checkpoints list` to see the checkpoints that are retained",
        )
    if missing:
        way = f"use {one_task} for one of them, or " if one_task else ""
        if option is None:
            way += "leave the checkpoint out, to begin with the newest of each task"
        else:
            way += f"name a checkpoint for each: {_suggestion(records, tasks, found, option)}"
        raise MissingState(
            f"the checkpoint is not retained for {', '.join(missing)}",
            hint=f"these tasks commit one by one: {way}",
        )
    return found


def newest_before(records: Mapping[str, CheckpointRecord], tasks: Sequence[str], millis: int) -> dict[str, Checkpoint]:
    """The newest checkpoint of each task that was made before a time (epoch milliseconds).

    Raises: MissingState if a task retains none.
    """
    found, missing = dict[str, Checkpoint](), []
    for task in tasks:
        checkpoints = records[task].checkpoints if task in records else ()
        older = [c for c in checkpoints if c.checkpoint_id.millis < millis]
        if older:
            found[task] = older[0]
        else:
            missing.append(task)
    if missing:
        raise MissingState(
            f"no checkpoint from before that time is retained for {', '.join(missing)}",
            hint="run `statemgr checkpoints list` to see the checkpoints that are retained, and "
            "`statemgr checkpoints rollback --task` for one that has some",
        )
    return found


def check_alone(record: CheckpointRecord, target: Checkpoint) -> None:
    """Check that one task alone may go back: no other task processed the rows of its input.

    Raises: InvalidError.
    """
    sources = {*record.current.input_offsets, *target.input_offsets}
    if not all(_is_own(record, source) for source in sources):
        raise InvalidError(
            f"{record.task} cannot go back alone: other tasks have processed rows of the same input partitions "
            f"(the job is partitioned by {record.layout.partitioner!r})",
            hint="use `statemgr checkpoints rollback` for all tasks",
            task=record.task,
        )


def check_sources(target: Checkpoint, newest: MicroBatch | None, task: str) -> None:
    """Check that a job may continue from a checkpoint of one of its tasks. ``newest``: the job's last micro-batch.

    Raises: InvalidError if only the location of the query's last batch can continue it.
    """
    if target.batch is not None and target.batch.has_other_sources and target.batch != newest:
        raise InvalidError(
            f"the query of checkpoint {target.checkpoint_id} reads a source other than Kafka, and only the location of "
            "its last batch can continue it",
            hint="read these sources again in a job with another job.id; `statemgr store scan --checkpoint` reads the "
            "older state",
            task=task,
        )


def _is_own(record: CheckpointRecord, source: str) -> bool:
    """Whether only this task reads a source partition. After a rescale to fewer tasks, a task also has the partitions
    whose number, modulo the number of tasks, is its own."""
    if not is_by_input(record.layout.partitioner) or source_topic(source) is None:
        return False
    partition, number = int(source.rpartition("-")[2]), task_index(record.task)
    return number == (partition % record.layout.tasks if record.layout.tasks else partition)


def plan_rollback(
    services: Services,
    record: CheckpointRecord,
    target: Checkpoint,
    *,
    tail: Refill = frozenset(),
    damaged: Collection[tuple[str, str]] = (),
) -> Rollback:
    """Decide how each backend gets the state of ``target`` again.

    Args:
        tail: (factory, store) pairs that have more than the current checkpoint says.
        damaged: (factory, store) pairs whose backup of the target is known to be incomplete.

    Raises: ConfigError if the job has other stores than the target; InvalidError if only the location of its query's
        last batch can continue it; MissingState if a backend is to be filled, and no restore factory of the
        configuration has the target's state.
    """
    config, durable = services.config, {name for name, is_durable in services.durable.items() if is_durable}
    if set(target.stores) != durable:
        raise ConfigError(
            f"checkpoint {target.checkpoint_id} has the stores {', '.join(sorted(target.stores)) or '(none)'}, but the "
            f"configuration has {', '.join(sorted(durable)) or '(none)'}",
            hint="configure the stores of that checkpoint, and run this again",
            key="stores",
            task=record.task,
        )
    check_sources(target, record.current.batch, record.task)
    ways: dict[tuple[str, str], Way] = {}
    for store in sorted(durable):
        for factory in config.stores[store].backup_factories:
            marker = target.marker(factory, store)
            if marker is None or (factory, store) in damaged:
                ways[factory, store] = Way.FILL
            elif target is record.current and (factory, store) not in tail:
                ways[factory, store] = Way.KEEP
            elif services.backup_manager(factory).branches:
                ways[factory, store] = Way.REFERENCE
            elif marker == record.current.marker(factory, store) and (factory, store) not in tail:
                ways[factory, store] = Way.KEEP
            else:
                ways[factory, store] = Way.FILL
    rollback = Rollback(record, target, ways)
    _restores(services, rollback)
    return rollback


def _restores(services: Services, rollback: Rollback) -> Sequence[StorePlan]:
    """How the stores are restored that some backend is filled with. Raises: MissingState if no factory has one."""
    config = services.config
    filled = {store for (_, store), way in rollback.ways.items() if way is Way.FILL}
    factories = {store: config.stores[store].restore_factories for store in filled}
    return plan_retained(rollback.record, rollback.target, factories, job=config.job_name)


def check_restorable(services: Services, rollback: Rollback, damaged: Found) -> None:
    """Check that each store that some backend is filled with can be restored exactly, before anybody is fenced. Blobs
    count as there unless they are known to be damaged.

    Args:
        damaged: what is known to be incomplete of the target's backups.

    Raises: MissingState, CorruptError; RetryableError, AccessDenied.
    """
    task, target = rollback.record.task, rollback.target
    for plan in _restores(services, rollback):
        directories = services.directories(task, plan.store)
        if directories.find(target.stores[plan.store]) is not None:
            continue
        failures: dict[str, MissingError | CorruptError] = {}
        for factory, marker in plan.candidates:
            try:
                if factory == KAFKA_CHANGELOG:
                    successor = plan.successors.get(factory)
                    ChangelogRestore(services).exactly(task, marker, successor, lambda *_: None)
                elif (factory, plan.store) in damaged and not (directories.reusable() or directories.leftovers()):
                    raise MissingState(
                        damaged[factory, plan.store],
                        hint="choose another checkpoint: `statemgr checkpoints list` shows them",
                    )
                break
            except (MissingError, CorruptError) as error:
                failures[factory] = error
        else:
            ((_, failure), *others) = failures.items()
            if others:
                reasons = "; ".join(f"{factory}: {error.message}" for factory, error in failures.items())
                failure = MissingState(f"no restore factory can supply the store: {reasons}", hint=failure.hint)
            raise failure.with_where(task=task, store=plan.store)


def prepare_rollback(
    services: Services,
    rollback: Rollback,
    base: CommitBase,
    *,
    together: bool,
    attachments: tuple[Attachment, ...] = (),
    progress: Progress = no_progress,
) -> tuple[Rollback, PreparedCommit]:
    """Prepare the commit that makes the target current again.

    Args:
        base: what the current checkpoint is to a commit.
        together: whether all tasks of the job are published together.
        attachments: those of the new checkpoint.

    Returns: the rollback, with the ways that were taken; and the commit.
    Raises: MissingState, CorruptError if nothing can supply a store exactly; RetryableError, AccessDenied, DiskFull.
    """
    target = rollback.target
    branched = _branched(services, rollback, together=together)  # 1
    lost = {pair for pair, way in rollback.ways.items() if way is Way.REFERENCE and pair not in branched}
    rollback = replace(rollback, ways={**rollback.ways, **dict.fromkeys(lost, Way.FILL)})
    filled = frozenset(pair for pair, way in rollback.ways.items() if way is Way.FILL)
    commit = _filled(services, rollback, base, filled, progress) if filled else None  # 2, 3
    stores = {}
    for store, state_id in target.stores.items():
        made = commit.stores[store] if commit is not None and store in commit.stores else PreparedStore(state_id)
        markers = dict(made.markers)
        markers |= {f: marker for (f, s), (marker, _) in branched.items() if s == store}
        kept = [f for (f, s), way in rollback.ways.items() if s == store and way is Way.KEEP]
        markers |= {factory: target.state_checkpoint_markers[factory][store] for factory in kept}
        stores[store] = PreparedStore(state_id, markers, made.changes)
    added = [blob for _, blobs in branched.values() for blob in blobs]
    return rollback, PreparedCommit(  # 4
        job_name=services.config.job_name,
        job_id=services.config.job_id,
        task=base.task,
        layout=base.layout,
        epoch=base.epoch,
        attempt=commit.attempt if commit is not None else services.ids.attempt_id(),
        base_checkpoint_id=str(base.checkpoint.checkpoint_id) if base.checkpoint else None,
        input_offsets=target.input_offsets,
        stores=stores,
        added_blobs=(*added, *(commit.added_blobs if commit is not None else ())),
        attachments=attachments,
        input_topic_ids=target.input_topic_ids,
    )


def _branched(
    services: Services, rollback: Rollback, *, together: bool
) -> dict[tuple[str, str], tuple[Marker, Sequence[str]]]:
    """(factory, store) → the new marker of the state, and the blobs that were added for it. Leaves out the pairs whose
    blobs are gone. Raises: RetryableError, AccessDenied."""
    found: dict[tuple[str, str], tuple[Marker, Sequence[str]]] = {}
    for (factory, store), way in rollback.ways.items():
        marker = rollback.target.marker(factory, store)
        if way is not Way.REFERENCE or marker is None:
            continue
        task = rollback.record.task
        try:
            backup = services.backup_manager(factory).branch(services.identity(task, store), marker, together=together)
        except (MissingError, CorruptError) as error:
            log.warning("%s/%s: %s is filled again: %s", task, store, factory, error)
        else:
            assert backup.marker is not None
            found[factory, store] = backup.marker, backup.added_blobs
    return found


def _filled(
    services: Services,
    rollback: Rollback,
    base: CommitBase,
    filled: Refill,
    progress: Progress,
) -> PreparedCommit:
    """Steps 2 and 3, for the stores that some backend is filled with."""
    record, target = rollback.record, rollback.target
    older = record.checkpoints[record.checkpoints.index(target) + 1 :]
    stores, _ = restore_task(
        services, record.task, target,
        older=older, newer=rollback.newer[::-1], only={store for _, store in filled}, progress=progress,
    )  # fmt: skip
    return fill(services, stores, replace(base, checkpoint=target, refill=filled), target.input_offsets)


def _suggestion(
    records: Mapping[str, CheckpointRecord], tasks: Sequence[str], found: Mapping[str, Checkpoint], option: str
) -> str:
    """Options with a checkpoint for each task: the newest that is not after the ones that were named."""
    latest = max(checkpoint.checkpoint_id.millis for checkpoint in found.values())
    chosen = {str(checkpoint.checkpoint_id): None for checkpoint in found.values()}
    for task in tasks:
        record = records.get(task)
        if task not in found and record is not None:
            before = [c for c in record.checkpoints if c.checkpoint_id.millis <= latest]
            chosen[str((before or record.checkpoints[-1:])[0].checkpoint_id)] = None
    return " ".join(f"{option} {checkpoint_id}" for checkpoint_id in chosen)
