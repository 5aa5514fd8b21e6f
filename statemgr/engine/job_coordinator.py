"""The owner of a whole job whose tasks an engine runs: publishes one commit per task, cleans up in the background, and
repairs damaged backups."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from statemgr.engine.attempts import Epoch
from statemgr.engine.coordinator import Coordinator
from statemgr.errors import FencedError, InvalidError, RetryableError, StatemgrError
from statemgr.flows.committing.clean_up import CleanUp
from statemgr.flows.committing.commit import CommitBase, Refill
from statemgr.flows.offers import Adoption, prepare_adoption
from statemgr.flows.opening.adopted_job import OldJobWatch
from statemgr.flows.opening.open_job import JobTopics, look_at_published, read_published
from statemgr.flows.opening.opening_checks import remember_published
from statemgr.flows.opening.repair import can_repair, prepare_repair, repeated_attachments
from statemgr.flows.owner import Owner
from statemgr.flows.published import common_batch
from statemgr.flows.worker import Worker
from statemgr.ids import task_name
from statemgr.model.checkpoint import Attachment, Checkpoint, CheckpointRecord, Layout, MicroBatch
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.commit import PreparedCommit, ProducedRecord
from statemgr.model.jobs.permissions import Permissions
from statemgr.phases import flow
from statemgr.ports import CheckpointLog
from statemgr.services import Services
from statemgr.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
_PARALLELISM = 8


class JobCoordinator(Coordinator):
    """Publishes for all tasks of a job. The next publish waits for the clean-up after the last one."""

    def __init__(self, owner: Owner, topics: JobTopics, metrics: Metrics) -> None:
        super().__init__(owner, topics)
        self._metrics = metrics
        services, published = owner.services, owner.published
        self._when_damaged: Callable[[], bool] | None = None
        subject = f"job {services.config.job_name}"
        self._cleaner: Worker[None] = Worker(services, "clean-up", subject)
        self._repairs: Worker[None] = Worker(services, "repair", subject, background=True)
        #: Held while the engine repairs.
        self._repairing = threading.RLock()
        services.in_parallel("open", lambda task: self.clean_ups[task].at_open(published.records[task]), self.clean_ups)
        for clean_up in self.clean_ups.values():
            clean_up.damage.watch(self._check_backups, lambda: self._repairs.busy)

    @classmethod
    def acquire(
        cls,
        services: Services,
        log: CheckpointLog,
        layout: Layout,
        topics: JobTopics,
        given: Permissions,
        metrics: Metrics,
    ) -> tuple[JobCoordinator, Epoch]:
        """Take the whole job over, by the steps of :mod:`statemgr.flows.opening.open_job`.

        Raises: as :meth:`statemgr.StateManager.acquire`.
        """
        config = services.config
        topics.ensure(allow_empty_start=given.allow_empty_start)  # 1
        names = [task_name(index) for index in range(config.tasks)]
        owner = Owner.take(services, log)  # 2
        acquired: JobCoordinator | None = None
        try:
            found = read_published(owner, layout, names, given)  # 3 to 5
            if found.permitted.allow_empty_start and not owner.published.checkpoints:
                # outputs skip the sequence numbers that the lost state has used
                owner.published.sequence = services.clock.time_ns() // 1_000_000
            if (adopted := log.adopted()) is not None:
                old_job = OldJobWatch(services)
                for task in names:
                    old_job.check(adopted, task, owner.published.checkpoint(task), found.permissions[task])
            acquired = cls(owner, topics, metrics)
            acquired.adopt_offers(found.refill)
        except BaseException:
            (acquired or owner).close()
            raise
        published = owner.published
        refill = {task: pairs | acquired.damaged[task] for task, pairs in found.refill.items()}
        checkpoints = {name: published.checkpoint(name) for name in names}
        sequence = published.newest_sequence
        return acquired, Epoch(
            published.epoch, published.layout, checkpoints, refill, found.permitted, sequence, found.has_blobs
        )

    # --- commits -------------------------------------------------------------------------------------------------

    def publish(
        self,
        commits: Sequence[PreparedCommit],
        batch: MicroBatch | None,
        inputs: Inputs | None = None,
        *,
        refill: Mapping[str, Refill],
        wait: bool,
    ) -> Mapping[str, Checkpoint]:
        """Publish one commit per task, then clean up. See :meth:`statemgr.StateManager.publish`.

        Args:
            refill: task → the damaged backups that its commit has made again.
        """
        with self._metrics.committing(len(commits)):
            if not self._settled(commits):
                self._publish_all(commits, batch, inputs, refill)
            if wait:
                self._cleaner.take()
        for commit in commits:
            self._metrics.task(commit.task).committed()
        return self.published.checkpoints

    def _publish_all(
        self,
        commits: Sequence[PreparedCommit],
        batch: MicroBatch | None,
        inputs: Inputs | None,
        refill: Mapping[str, Refill],
    ) -> None:
        left = [clean_up for clean_up in self.clean_ups.values() if clean_up.is_unfinished]
        self._services.in_parallel("ttl", CleanUp.retry_ttls, left)
        follow_up = partial(self._start_clean_up, commits, dict(self.published.records), refill)
        with flow("publish", self._services.config.job_name, self._services.config.job_key) as publishing:
            self._publish(commits, follow_up, batch, inputs)
            newest = max(one.checkpoint_id for one in self.published.checkpoints.values())
            added = sum(commit.added_bytes for commit in commits)
            publishing.attributes |= {"checkpoint": str(newest), "bytes": added, "tasks": len(commits)}
        follow_up()

    def _settled(self, commits: Sequence[PreparedCommit]) -> bool:
        """Whether an earlier call whose outcome was unknown has published exactly these commits.

        Raises: the error of the last clean-up.
        """
        self._cleaner.take()
        found = self.settle()
        self._cleaner.take()
        return bool(found) and {commit.attempt for commit in found} == {commit.attempt for commit in commits}

    def _start_clean_up(
        self,
        commits: Sequence[PreparedCommit],
        before: Mapping[str, CheckpointRecord | None],
        refill: Mapping[str, Refill],
    ) -> None:
        records = dict(self.published.records)

        def clean_up(commit: PreparedCommit) -> None:
            task, record = commit.task, records[commit.task]
            assert record is not None
            self.clean_ups[task].after_publish(before[task], record, commit)
            try:
                remember_published(self._services, task)
            except (StatemgrError, OSError) as error:
                log.warning("%s: this machine could not record that it has published state: %s", task, error)

        def clean_up_all() -> None:
            with self._services.executors.pool("clean-up", _PARALLELISM) as pool:
                cleaning = [pool.submit(clean_up, commit) for commit in commits]
            for one in cleaning:  # none of them keeps the others from being cleaned up
                one.result()

        for commit in commits:
            self.clean_ups[commit.task].published(commit)
            damage, made = self.damage_of(commit.task), refill.get(commit.task, frozenset())
            if damage.pairs & made:
                damage.repaired(made)
                damage.suspect()
            damage.remind()
        try:
            self._cleaner.start(clean_up_all)
        except RetryableError as error:
            log.warning("the commits are published, but not cleaned up; the next publish removes their TTLs: %s", error)

    def adopt_offers(self, refill: Mapping[str, Refill]) -> None:
        """Publish the current checkpoints again, with the first snapshots that ``statemgr materialize`` has offered.

        The micro-batch, the output and the input offsets stay. If that fails, the next commits upload the whole state.

        Args:
            refill: task → what its next commit fills in any case.

        Raises: FencedError.
        """
        records = [record for record in self.published.records.values() if record is not None]
        offers = self._log.offers()
        batches = {record.current.batch for record in records}
        if not offers or len(records) != len(self.published.records) or len(batches) != 1:
            return

        def prepared(record: CheckpointRecord) -> Adoption | None:
            attachments, base = repeated_attachments(record.current), self.base(record.task, refill[record.task])
            return prepare_adoption(self._services, offers, record, base, attachments=attachments, together=True)

        try:
            adoptions = [found for found in self._services.in_parallel("adopt", prepared, records) if found is not None]
            if len(adoptions) < len(records) or not any(adoption.offers for adoption in adoptions):
                return
            with self._adopting(adoptions):
                self.publish([adoption.commit for adoption in adoptions], batches.pop(), refill={}, wait=False)
        except FencedError:
            raise
        except StatemgrError as error:
            log.warning("job %s: offers of first snapshots were not adopted: %s", self._services.config.job_name, error)

    # --- damage --------------------------------------------------------------------------------------------------

    @property
    def damaged(self) -> Mapping[str, Refill]:
        """Task → (factory, store) pairs whose published backups are known to be damaged."""
        return {task: clean_up.damage.pairs for task, clean_up in self.clean_ups.items()}

    def when_damaged(self, repair: Callable[[], bool]) -> None:
        """See :meth:`statemgr.StateManager.when_damaged`."""
        self._when_damaged = repair
        self._check_backups()  # damage may have been found before

    def _check_backups(self) -> None:
        self._repairs.wake("checking and repairing the backups", self._checked)

    def _checked(self) -> bool:
        """Check the backups of all tasks, and let the engine repair them. Returns: whether nothing is left to do."""
        checked = [self._repairs.closing or self.look_for_damage(task) for task in self.clean_ups]
        done = all(checked)
        with self._repairing:
            if any(self.damaged.values()) and self._when_damaged is not None and not self._repairs.closing:
                done = self._when_damaged() and done
        return done

    def settled_checkpoints(self) -> Mapping[str, Checkpoint]:
        """See :meth:`statemgr.StateManager.settle`."""
        if not self.settled:
            self._settled(())
        return self.published.checkpoints

    def repair(self) -> Mapping[str, Checkpoint]:
        """Publish the current checkpoints again, with complete backups. Called on the thread that publishes.

        The micro-batch, the output and the input offsets stay. Nothing is published if nothing is damaged, if a task
        has no checkpoint, or if the job has other stores by now: then only a commit can help.

        Returns: task → its current checkpoint. Raises: as :meth:`publish` and :func:`prepare_repair`.
        """
        self._settled(())
        records = [record for record in self.published.records.values() if record is not None]
        possible = len(records) == len(self.published.records) and all(can_repair(self._services, r) for r in records)
        if not possible or not any(self.damaged.values()):
            return self.published.checkpoints
        return self._again(records)

    def publish_again(
        self, produced: Sequence[ProducedRecord], attached: Callable[[Attachment], Attachment]
    ) -> Mapping[str, Checkpoint]:
        """See :meth:`statemgr.StateManager.publish_again`."""
        self._settled(())
        records = [record for record in self.published.records.values() if record is not None]
        if not all(can_repair(self._services, record) for record in records):
            raise InvalidError(
                "the last output cannot be sent, because the job has other stores than its last checkpoint",
                hint="start once with the stores or the output that the job had before",
                job=self._services.config.job_name,
            )
        return self._again(records, produced, attached)

    def _again(
        self,
        records: Sequence[CheckpointRecord],
        produced: Sequence[ProducedRecord] = (),
        attached: Callable[[Attachment], Attachment] = lambda one: one,
    ) -> Mapping[str, Checkpoint]:
        batch = common_batch(record.current for record in records)

        def again(record: CheckpointRecord) -> tuple[CommitBase, PreparedCommit]:
            attachments = tuple(map(attached, repeated_attachments(record.current)))
            return prepare_repair(self._services, record, self.base(record.task), attachments=attachments)

        repairs = self._services.in_parallel("repair", again, records)
        refill = {base.task: base.refill for base, _ in repairs}
        first, *others = (commit for _, commit in repairs)
        return self.publish([replace(first, produced=tuple(produced)), *others], batch, refill=refill, wait=False)

    def close(self) -> None:
        """Finish a repair and the clean-up, and release the transactional ID. Nobody waits for a check of backups."""
        self._repairs.close(wait=False)
        with self._repairing:
            self._cleaner.close()
        super().close()


def look_at_job(
    services: Services, log: CheckpointLog, layout: Layout, topics: JobTopics, given: Permissions
) -> Mapping[str, Checkpoint]:
    """See :meth:`statemgr.StateManager.look`."""
    topics.ensure(allow_empty_start=given.allow_empty_start)
    names = [task_name(index) for index in range(services.config.tasks)]
    found, _ = look_at_published(services, log, layout, names, given, only_settled=True)
    return {task: record.current for task, record in found.items()}
