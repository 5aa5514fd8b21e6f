"""Publish: one Kafka transaction, and the only act that changes which state is current.

Steps:

1. if the transactional ID was initialised again since the last publish, check that no other owner has published. Check
   that every prepared commit continues the published checkpoint in the owner's epoch, and is so young that garbage
   collection leaves its blobs alone
2. stage: bring the changelogs' changes to this machine; nothing has been written to Kafka yet. If a changelog has
   unknown records, read the topic first, because another owner may have published them
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
from dataclasses import dataclass, replace
from functools import partial

from statemgr.errors import FencedError, InvalidError, OutcomeUnknownError, RetryableError
from statemgr.flows.committing.limits import check_inputs, check_young
from statemgr.flows.owner import Owner
from statemgr.flows.published import Published, send_records
from statemgr.ids import CheckpointId, check_offsets
from statemgr.logs import Event, counted, tell
from statemgr.model.checkpoint import (
    Checkpoint,
    CheckpointRecord,
    Marker,
    MicroBatch,
    OutstandingTtl,
    Retention,
    retired_changelogs,
)
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.commit import PreparedCommit
from statemgr.phases import Phase, announce
from statemgr.ports import Delivered, IdForgotten, StagedChanges, Transaction
from statemgr.services import Services

logger = logging.getLogger(__name__)

#: Times that a publish is repeated because the brokers had forgotten the transactional ID.
_REPEATS = 3
#: (factory, store) → changes that are ready to be sent
_Staged = dict[tuple[str, str], StagedChanges]


def publish(
    owner: Owner,
    commits: Sequence[PreparedCommit],
    *,
    batch: MicroBatch | None = None,
    inputs: Inputs | None = None,
    outstanding: Mapping[str, Sequence[OutstandingTtl]] | None = None,
    evict: bool = True,
) -> None:
    """Publish prepared commits of different tasks in one transaction, and update what the owner has published.

    Args:
        inputs: the input offsets of the whole job, for commits without input offsets of their task.
        evict: whether checkpoints beyond ``task.checkpoint.retained`` are dropped; if not, the next publish does that.

    Raises:
        FencedError: another owner took over; nothing was published.
        RetryableError: surely not published (also for a commit that is too old); the next commit has the changes.
        OutcomeUnknownError: the outcome is not settled yet; call :meth:`Owner.settle` before anything else.
        InvalidError: a prepared commit has another job, layout, epoch or base.
    """
    if owner.published.pending:
        raise OutcomeUnknownError(
            "the outcome of the last publish is unknown",
            hint="commit again: the next commit finds out first whether the last one was published",
        )
    attempt = _Publish(owner, commits, batch, inputs, outstanding or {}, evict)
    for left in reversed(range(_REPEATS + 1)):
        try:
            attempt.run()
            return
        except IdForgotten as error:
            if not left:
                raise
            tell(logger, Event.RETRYING, "publishing again: %s", error)
        except FencedError as error:
            raise owner.taken_over(error) from None


@dataclass(frozen=True)
class _Publish:
    """The arguments of :func:`publish`, and its steps."""

    owner: Owner
    commits: Sequence[PreparedCommit]
    batch: MicroBatch | None
    inputs: Inputs | None
    outstanding: Mapping[str, Sequence[OutstandingTtl]]
    evict: bool

    @property
    def services(self) -> Services:
        return self.owner.services

    @property
    def published(self) -> Published:
        return self.owner.published

    def run(self) -> None:
        """All steps, once. Raises: as :func:`publish`; IdForgotten if nothing was published and it may be repeated."""
        owner, services, published, config = self.owner, self.services, self.published, self.services.config
        owner.check()  # 1
        self._check_tasks()
        self._check_offsets()
        for commit in self.commits:
            self._check_base(commit)
            check_young(config, services.ids, commit, partial(age_in_store, services))
        with owner.explaining():
            staged = self._staged()  # 2
        publish_id = services.ids.checkpoint_id(), 1 + published.newest_sequence
        subject = ", ".join(commit.task for commit in self.commits)
        check_topic = owner.log.begin_check()
        try:
            announce(Phase.BEGIN, subject, config.job_key)
            with owner.publisher.transaction() as transaction:  # 3
                announce(Phase.SEND_CHANGELOG, subject, config.job_key)
                for commit in self.commits:  # 4
                    self._send_changes(transaction, commit, staged[commit.task])
                delivered = transaction.flush()
                announce(Phase.SEND_CHECKPOINT, subject, config.job_key)
                records = {c.task: self._record(c, *publish_id, staged[c.task], delivered) for c in self.commits}  # 5
                send = partial(transaction.send, config.checkpoint_topic, partition=0)
                send_records(config, send, published.layout, published.records, records, published.job_records)
                published.used = published.permits
                for permit in published.used:
                    send(permit.key, None)
                for offer in published.offers:
                    send(offer.encoded(), None)
                for record in published.along:
                    send(*record)
                end = transaction.flush()[config.checkpoint_topic, 0].end
                check_topic(end)
                published.pending = records  # from here on the outcome may become unknown
                announce(Phase.COMMIT_TRANSACTION, subject, config.job_key)  # 6
        except (RetryableError, FencedError):
            published.pending = {}
            raise
        except OutcomeUnknownError as error:
            if not owner.settle():
                raise RetryableError(
                    f"the commit was not published: {error.message}",
                    hint="the next commit has the changes of this one",
                    job=config.job_name,
                ) from None
            return
        published.acknowledge(records, end)
        announce(Phase.ACKNOWLEDGED, subject, config.job_key)

    # --- step 1 --------------------------------------------------------------------------------------------------

    def _check_tasks(self) -> None:
        """Check for one commit of each task, with a backup of every durable store. Raises: InvalidError."""
        job, tasks = self.services.config.job_name, sorted(commit.task for commit in self.commits)
        if tasks != sorted(self.published.records):
            raise InvalidError(
                f"one prepared commit for each of {len(self.published.records)} tasks is needed, not "
                f"{', '.join(tasks)}",
                hint="if a task had several attempts, publish exactly one of them",
                job=job,
            )
        durable = {store for store, is_durable in self.services.durable.items() if is_durable}
        for commit in self.commits:
            if commit.input_offsets is None and self.inputs is None:
                raise InvalidError(
                    "the prepared commit has no input offsets",
                    hint="pass the offsets of the job to publish(input_offsets=...), or those of the task to prepare()",
                    job=job,
                    task=commit.task,
                )
            bare = sorted(name for name, store in commit.stores.items() if not store.has_backup)
            if bare:
                raise InvalidError(
                    f"the prepared commit has no backup of store {bare[0]!r}, whose state would be lost",
                    hint="use the same configuration in executors and driver",
                    job=job, task=commit.task, store=bare[0],
                )  # fmt: skip
            if set(commit.stores) != durable:
                raise InvalidError(
                    f"the prepared commit has the stores {sorted(commit.stores)}, but the job has {sorted(durable)}",
                    hint="use the same configuration in executors and driver",
                    job=job,
                    task=commit.task,
                )

    def _check_offsets(self) -> None:
        """Check input offsets. Tasks often share one mapping, which is checked once. Raises: InvalidError."""
        of_job = self.inputs.offsets if self.inputs else None
        checked = set()
        for task, offsets in [(None, of_job), *((c.task, c.input_offsets) for c in self.commits)]:
            if offsets is not None and id(offsets) not in checked:
                checked.add(id(offsets))
                check_offsets(offsets, **({"task": task} if task else {}))
                check_inputs(self.services.config, Inputs(offsets))

    def _check_base(self, commit: PreparedCommit) -> None:
        """Check that a commit continues what is published. Raises: FencedError, InvalidError."""
        config, published = self.services.config, self.published
        base = published.checkpoint(commit.task)
        problem = None
        if (commit.job_name, commit.job_id) != (config.job_name, config.job_id):
            problem = f"it belongs to job {commit.job_name!r}/{commit.job_id!r}"
        elif commit.layout != published.layout:
            problem = f"it was made for {commit.layout}, the job has {published.layout}"
        elif commit.base_checkpoint_id != (str(base.checkpoint_id) if base else None):
            problem = (
                f"it continues checkpoint {commit.base_checkpoint_id}, the topic has {base and base.checkpoint_id}"
            )
        elif commit.epoch != published.epoch:
            raise FencedError(
                f"the commit was prepared in epoch {commit.epoch}, but the owner is in epoch {published.epoch}",
                job=config.job_name,
                task=commit.task,
            )
        if problem:
            raise InvalidError(f"prepared commit refused: {problem}", job=config.job_name, task=commit.task)

    # --- steps 2 to 5 --------------------------------------------------------------------------------------------

    def _staged(self) -> Mapping[str, _Staged]:
        """The changes of every task. A worker's changes may be in a blob, so several tasks are staged at a time."""
        staged = self.services.in_parallel("stage", self._stage, self.commits)
        return dict(zip([commit.task for commit in self.commits], staged, strict=True))

    def _stage(self, commit: PreparedCommit) -> _Staged:
        base = self.published.checkpoint(commit.task)
        staged = {}
        for store, prepared in commit.stores.items():
            for factory, changes in prepared.changes.items():
                marker = base.marker(factory, store) if base else None
                identity = self.services.identity(commit.task, store)
                staged[factory, store] = self.services.backup_manager(factory).stage(identity, changes, marker)
        return staged

    def _send_changes(self, transaction: Transaction, commit: PreparedCommit, staged: _Staged) -> None:
        for changes in staged.values():
            changes.send(transaction)
        for record in commit.produced:
            transaction.send(
                record.topic,
                record.key,
                record.value,
                partition=record.partition,
                headers=record.headers,
                timestamp_ms=record.timestamp_ms,
            )

    def _record(
        self,
        commit: PreparedCommit,
        checkpoint_id: CheckpointId,
        sequence: int,
        staged: _Staged,
        delivered: Mapping[tuple[str, int], Delivered],
    ) -> CheckpointRecord:
        """The task's record with the new checkpoint; ``delivered`` gives the offsets of the changelog markers."""
        services, published, stores = self.services, self.published, self.services.config.stores
        offsets, ids = commit.input_offsets, commit.input_topic_ids
        if offsets is None:
            assert self.inputs is not None
            offsets, ids = self.inputs.offsets, {**self.inputs.topic_ids, **ids}
        markers: dict[str, dict[str, Marker]] = {}
        for store, prepared in commit.stores.items():
            for factory, marker in prepared.markers.items():
                markers.setdefault(factory, {})[store] = marker
        for (factory, store), changes in staged.items():
            markers.setdefault(factory, {})[store] = changes.marker(delivered)
        checkpoint = Checkpoint(
            checkpoint_id=checkpoint_id,
            sequence=sequence,
            epoch=published.epoch,
            input_offsets=offsets,
            stores={store: prepared.state_id for store, prepared in commit.stores.items()},
            state_checkpoint_markers=markers,
            backup_factories={store: stores[store].backup_factories for store in commit.stores},
            restore_factories={store: stores[store].restore_factories for store in commit.stores},
            batch=self.batch,
            attachments=commit.attachments,
            outstanding_ttl=tuple(self.outstanding.get(commit.task, ())),
            input_topic_ids=ids,
            serdes={s: labels for s in commit.stores if (labels := published.serdes.get(s, stores[s].serdes))},
            retired_changelogs=retired_changelogs(published.checkpoint(commit.task), markers),
            kept=published.kept_by(commit.task),
            owner=self.owner.process,
        )
        before = published.records[commit.task]
        if before is not None:
            config = services.config
            stay = Retention(newest=config.retained, hourly=config.retained_hourly, daily=config.retained_daily)
            return replace(before.followed_by(checkpoint, stay if self.evict else None), layout=published.layout)
        return CheckpointRecord(commit.job_name, commit.job_id, commit.task, published.layout, (checkpoint,))


def publish_now(
    owner: Owner,
    what: str,
    commits: Sequence[PreparedCommit],
    *,
    batch: MicroBatch | None = None,
    outstanding: Mapping[str, Sequence[OutstandingTtl]] | None = None,
    evict: bool = True,
) -> None:
    """The last steps of a command: publish, find out what happened if that is not answered, and remove the TTLs of what
    the commits added. If some are left, a line of the log says so, and the next opening removes them.

    Args:
        what: what is published, for the message.

    Raises: FencedError, RetryableError: surely not published; OutcomeUnknownError: the topic says what is current.
    """
    owner.process = owner.process and owner.process.of_command()
    try:
        publish(owner, commits, batch=batch, outstanding=outstanding, evict=evict)
    except OutcomeUnknownError:
        owner.settle_now(what)
    added = [blob for commit in commits for blob in commit.added_blobs]
    failed = owner.services.transfer().remove_ttl_all(added) if added else {}  # changelogs alone have no blob store
    if failed:
        logger.warning(
            "%s is published, but the TTL of %s could not be removed: they expire unless the job opens its tasks "
            "before, or `statemgr gc --write --fix` removes it: %s",
            what,
            counted(len(failed), "blob"),
            next(iter(failed.values())),
        )


def age_in_store(services: Services, blob_ids: Collection[str]) -> int:
    """How long ago the oldest of some blobs was written, in milliseconds by the store's clock. Raises: MissingBlob,
    UnavailableError, AccessDenied."""
    blobs = services.blobs()
    oldest_ms = min(blobs.stat(blob_id).modified_ms for blob_id in blob_ids)
    return blobs.administration.time_ms() - oldest_ms
