"""Publish: one Kafka transaction, and the only act that changes which state is current.

Steps:

1. where the transactional ID was initialised again since the last publish, check that the topic still says what this
   owner knows; check that every prepared commit continues that, in the owner's epoch, and is young enough for its blobs
   to be spared by a garbage collection
2. stage: bring the changelogs' changes to this machine (nothing has been written to Kafka yet); a changelog that holds
   what this owner cannot explain may be another owner's work, so the topic is asked first
3. begin the transaction
4. send the changelog records and the output, and wait for their offsets, which become the changelog markers
5. send the records of the checkpoint topic, and delete those that are no longer retained (``checkpoint_records``);
   check that the topic is still the one that was read
6. commit the transaction; if the outcome is unknown, settle it by reading the topic

If the brokers had forgotten the transactional ID, steps 1 to 6 are repeated, a few times at most.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from statemgr.backends.services import Services
from statemgr.errors import FencedError, InvalidError, OutcomeUnknownError, RetryableError
from statemgr.flows.checkpoint_records import send_records
from statemgr.flows.grace_period import check_young
from statemgr.flows.published import Published, explained, go_on, settle
from statemgr.flows.record_limits import check_inputs
from statemgr.ids import CheckpointId, check_offsets
from statemgr.model.checkpoint import (
    Checkpoint,
    CheckpointRecord,
    Marker,
    MicroBatch,
    OutstandingTtl,
    retired_changelogs,
)
from statemgr.model.checkpoint_parts import Inputs
from statemgr.model.commit import PreparedCommit
from statemgr.phases import Phase, announce
from statemgr.ports import CheckpointLog, Delivered, IdForgotten, Publisher, StagedChanges, Transaction

logger = logging.getLogger(__name__)

#: Times that a publish is repeated because the brokers had forgotten the transactional ID.
_REPEATS = 3
#: task → (store, factory) → changes that are ready to be sent
_Staged = dict[str, dict[tuple[str, str], StagedChanges]]


def publish(
    services: Services,
    publisher: Publisher,
    log: CheckpointLog,
    published: Published,
    commits: Sequence[PreparedCommit],
    *,
    batch: MicroBatch | None = None,
    inputs: Inputs | None = None,
    outstanding: Mapping[str, Sequence[OutstandingTtl]] | None = None,
) -> None:
    """Publish prepared commits of different tasks in one transaction, and update ``published``.

    Args:
        inputs: the input offsets of the whole job, for commits without input offsets of their task.

    Raises:
        FencedError: another owner took over; nothing was published.
        RetryableError: surely not published (also for a commit that is too old); the next commit has the changes.
        OutcomeUnknownError: the outcome is not settled yet; call :func:`settle` before anything else.
        InvalidError: a prepared commit has another job, layout, epoch or base.
    """
    if published.pending:
        raise OutcomeUnknownError(
            "the outcome of the last publish is unknown", hint="settle it before you publish again"
        )
    attempt = partial(_publish, services, publisher, log, published, commits, batch, inputs, outstanding or {})
    for _ in range(_REPEATS):
        try:
            return attempt()
        except IdForgotten as error:
            logger.info("publishing again: %s", error)
    return attempt()


def _publish(
    services: Services,
    publisher: Publisher,
    log: CheckpointLog,
    published: Published,
    commits: Sequence[PreparedCommit],
    batch: MicroBatch | None,
    inputs: Inputs | None,
    outstanding: Mapping[str, Sequence[OutstandingTtl]],
) -> None:
    go_on(services, publisher, log, published)  # 1
    _check_whole(services, published, commits, inputs)
    _check_inputs(services, commits, inputs)
    for commit in commits:
        _check(services, published, commit)
        check_young(services.config, services.ids, commit, partial(_age_in_store, services))
    with explained(services, log, published):
        staged = {commit.task: _stage(services, published, commit) for commit in commits}  # 2
    checkpoint_id = services.ids.checkpoint_id()
    sequence = 1 + published.newest_sequence
    subject = ", ".join(commit.task for commit in commits)
    records: dict[str, CheckpointRecord] = {}
    check_topic = log.begin_check()
    try:
        announce(Phase.BEGIN, subject, services.config.job_key)
        with publisher.transaction() as transaction:  # 3
            announce(Phase.SEND_CHANGELOG, subject, services.config.job_key)
            _send_changes(transaction, commits, staged)  # 4
            delivered = transaction.flush()
            announce(Phase.SEND_CHECKPOINT, subject, services.config.job_key)
            for commit in commits:  # 5
                ours = _checkpoint(
                    services,
                    published,
                    commit,
                    checkpoint_id,
                    sequence,
                    batch,
                    inputs,
                    tuple(outstanding.get(commit.task, ())),
                )
                ours = _with_changelog_markers(ours, staged[commit.task], delivered)
                retired = retired_changelogs(published.checkpoint(commit.task), ours.state_checkpoint_markers)
                ours = replace(ours, retired_changelogs=retired)
                records[commit.task] = _record(services, published, commit, ours)
            send = partial(transaction.send, services.config.checkpoint_topic, partition=0)
            send_records(services.config, send, published.layout, published.records, records, published.job_records)
            for permit in published.permits:
                send(permit.key, None)
            check_topic(transaction.flush()[services.config.checkpoint_topic, 0].end)
            published.pending = records  # from here on the outcome may become unknown
            announce(Phase.COMMIT_TRANSACTION, subject, services.config.job_key)  # 6
    except (RetryableError, FencedError):
        published.pending = {}
        raise
    except OutcomeUnknownError as error:
        if not settle(services, publisher, log, published):
            raise RetryableError(
                f"the commit was not published: {error.message}",
                hint="the next commit has the changes of this one",
                job=services.config.job_name,
            ) from None
        return
    published.acknowledge(records)
    announce(Phase.ACKNOWLEDGED, subject, services.config.job_key)


def _check_whole(
    services: Services, published: Published, commits: Sequence[PreparedCommit], inputs: Inputs | None
) -> None:
    """Check for one commit per task of the publisher, with every durable store. Raises: InvalidError."""
    tasks = [commit.task for commit in commits]
    if sorted(tasks) != sorted(published.records):
        raise InvalidError(
            f"one prepared commit for each of {len(published.records)} tasks is needed, not {', '.join(sorted(tasks))}",
            hint="if a task had several attempts, publish exactly one of them",
            job=services.config.job_name,
        )
    durable = {store for store, is_durable in services.durable.items() if is_durable}
    for commit in commits:
        if commit.input_offsets is None and inputs is None:
            raise InvalidError(
                "the prepared commit has no input offsets",
                hint="pass the offsets of the job to publish(input_offsets=...), or those of the task to prepare()",
                job=services.config.job_name,
                task=commit.task,
            )
        if set(commit.stores) != durable:
            raise InvalidError(
                f"the prepared commit has the stores {sorted(commit.stores)}, but the job has {sorted(durable)}",
                hint="use the same configuration in executors and driver",
                job=services.config.job_name,
                task=commit.task,
            )


def _check_inputs(services: Services, commits: Sequence[PreparedCommit], inputs: Inputs | None) -> None:
    """Check input offsets. Tasks often share one mapping, which is checked once. Raises: InvalidError."""
    found: list[tuple[str | None, Mapping[str, int] | None]] = [(c.task, c.input_offsets) for c in commits]
    checked = set()
    for task, offsets in [(None, inputs.offsets if inputs else None), *found]:
        if offsets is not None and id(offsets) not in checked:
            checked.add(id(offsets))
            check_offsets(offsets, **({"task": task} if task else {}))
            check_inputs(services.config, Inputs(offsets))


def _check(services: Services, published: Published, commit: PreparedCommit) -> None:
    config = services.config
    base = published.checkpoint(commit.task)
    problem = None
    if (commit.job_name, commit.job_id) != (config.job_name, config.job_id):
        problem = f"it belongs to job {commit.job_name!r}/{commit.job_id!r}"
    elif commit.layout != published.layout:
        problem = f"it was made for {commit.layout}, the job has {published.layout}"
    elif commit.base_checkpoint_id != (str(base.checkpoint_id) if base else None):
        problem = f"it continues checkpoint {commit.base_checkpoint_id}, the topic has {base and base.checkpoint_id}"
    if problem is None and commit.epoch != published.epoch:
        raise FencedError(
            f"the commit was prepared in epoch {commit.epoch}, but the owner is in epoch {published.epoch}",
            job=config.job_name,
            task=commit.task,
        )
    if problem:
        raise InvalidError(f"prepared commit refused: {problem}", job=config.job_name, task=commit.task)


def _stage(services: Services, published: Published, commit: PreparedCommit) -> dict[tuple[str, str], StagedChanges]:
    base = published.checkpoint(commit.task)
    staged = {}
    for store, prepared in commit.stores.items():
        for factory, changes in prepared.changes.items():
            marker = base.marker(factory, store) if base else None
            identity = services.identity(commit.task, store)
            staged[store, factory] = services.backup_manager(factory).stage(identity, changes, marker)
    return staged


def _send_changes(transaction: Transaction, commits: Sequence[PreparedCommit], staged: _Staged) -> None:
    for commit in commits:
        for changes in staged[commit.task].values():
            changes.send(transaction)
        for record in commit.produced:
            transaction.send(record.topic, record.key, record.value, partition=record.partition, headers=record.headers)


def _checkpoint(
    services: Services,
    published: Published,
    commit: PreparedCommit,
    checkpoint_id: CheckpointId,
    sequence: int,
    batch: MicroBatch | None,
    inputs: Inputs | None,
    outstanding: tuple[OutstandingTtl, ...],
) -> Checkpoint:
    offsets, ids = commit.input_offsets, commit.input_topic_ids
    if offsets is None:
        assert inputs is not None
        offsets, ids = inputs.offsets, {**inputs.topic_ids, **ids}
    markers: dict[str, dict[str, Marker]] = {}
    for store, prepared in commit.stores.items():
        for factory, marker in prepared.markers.items():
            markers.setdefault(factory, {})[store] = marker
    stores = services.config.stores
    return Checkpoint(
        checkpoint_id=checkpoint_id,
        sequence=sequence,
        epoch=published.epoch,
        input_offsets=offsets,
        stores={store: prepared.state_id for store, prepared in commit.stores.items()},
        state_checkpoint_markers=markers,
        backup_factories={store: stores[store].backup_factories for store in commit.stores},
        restore_factories={store: stores[store].restore_factories for store in commit.stores},
        batch=batch,
        attachments=commit.attachments,
        outstanding_ttl=outstanding,
        input_topic_ids=ids,
        serdes={s: published.serdes.get(s, (stores[s].key_serde, stores[s].value_serde)) for s in commit.stores},
    )


def _with_changelog_markers(
    checkpoint: Checkpoint,
    staged: Mapping[tuple[str, str], StagedChanges],
    delivered: Mapping[tuple[str, int], Delivered],
) -> Checkpoint:
    markers = {factory: dict(of_store) for factory, of_store in checkpoint.state_checkpoint_markers.items()}
    for (store, factory), changes in staged.items():
        markers.setdefault(factory, {})[store] = changes.marker(delivered)
    return replace(checkpoint, state_checkpoint_markers=markers)


def _record(
    services: Services, published: Published, commit: PreparedCommit, checkpoint: Checkpoint
) -> CheckpointRecord:
    before = published.records[commit.task]
    if before is not None:
        return replace(before.followed_by(checkpoint, services.config.retained), layout=published.layout)
    return CheckpointRecord(commit.job_name, commit.job_id, commit.task, published.layout, (checkpoint,))


def _age_in_store(services: Services, blob_ids: Collection[str]) -> int:
    blobs = services.blobs()
    oldest_ms = min(blobs.stat(blob_id).modified_ms for blob_id in blob_ids)
    return blobs.administration.time_ms() - oldest_ms
