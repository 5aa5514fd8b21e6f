"""The coordinator of a job whose tasks an engine runs: publishes their prepared commits, cleans up after them, and
repairs damaged backups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from statemgr.backends.services import Services
from statemgr.engine.attempts import Epoch
from statemgr.errors import FencedError
from statemgr.flows.clean_up import CleanUp
from statemgr.flows.commit import CommitBase, Refill
from statemgr.flows.damage import Damage, find_damage
from statemgr.flows.empty_start import remember_published
from statemgr.flows.open_job import JobTopics, fence_ids, read_published, take_over
from statemgr.flows.publish import publish
from statemgr.flows.published import Published, confirm, settle
from statemgr.flows.repair import can_repair, prepare_repair, repeated_attachments
from statemgr.flows.worker import Worker
from statemgr.ids import task_name
from statemgr.kafka.publisher import job_transactional_id, task_transactional_id
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout, MicroBatch
from statemgr.model.checkpoint_parts import Inputs
from statemgr.model.commit import PreparedCommit
from statemgr.model.permissions import Permissions
from statemgr.ports import CheckpointLog, Publisher

log = logging.getLogger(__name__)
_PARALLELISM = 8


class JobCoordinator:
    """The job's publisher, and what is published of all its tasks. Used by one thread at a time.

    After a publish it cleans up after all tasks on threads of its own: the next publish waits for that.
    """

    def __init__(
        self, services: Services, checkpoint_log: CheckpointLog, publisher: Publisher, published: Published
    ) -> None:
        self.publisher = publisher
        self.published = published
        self._services = services
        self._log = checkpoint_log
        self.name = services.config.job_name
        self._when_damaged: Callable[[], bool] | None = None
        self._fenced: FencedError | None = None
        self._unsettled: tuple[Sequence[PreparedCommit], Mapping[str, CheckpointRecord | None]] | None = None
        subject = f"job {services.config.job_name}"
        self._cleaner: Worker[None] = Worker(services, "clean-up", subject)
        self._repairs: Worker[None] = Worker(services, "repair", subject, background=True)
        self._clean_ups = {task: CleanUp(services, task, checkpoint_log) for task in published.records}
        with services.executors.pool("open", _PARALLELISM) as pool:
            list(pool.map(lambda item: self._clean_ups[item[0]].at_open(item[1]), published.records.items()))
        for clean_up in self._clean_ups.values():
            clean_up.damage.watch(self._look_for_damage)

    @classmethod
    def acquire(
        cls, services: Services, checkpoint_log: CheckpointLog, layout: Layout, topics: JobTopics, given: Permissions
    ) -> tuple[JobCoordinator, Epoch]:
        """Take the whole job over, by the steps of :mod:`statemgr.flows.open_job`.

        Raises: as :meth:`statemgr.StateManager.acquire`.
        """
        config = services.config
        topics.prepare(allow_empty_start=given.allow_empty_start)  # 1
        names = [task_name(index) for index in range(config.tasks)]
        others = [task_transactional_id(config, name) for name in names]
        publisher = take_over(services, job_transactional_id(config), config.job_name)  # 2
        try:
            fence_ids(services, others)
            found = read_published(services, checkpoint_log, layout, names, given, others=others)  # 3 to 5
            published = found.published
            published.job_records = set(checkpoint_log.job_records())
            acquired = cls(services, checkpoint_log, publisher, published)
        except BaseException:
            publisher.close()
            raise
        refill = {task: pairs | acquired.damaged[task] for task, pairs in found.refill.items()}
        checkpoints = {name: published.checkpoint(name) for name in names}
        return acquired, Epoch(published.epoch, published.layout, checkpoints, refill, found.permitted)

    # --- damage --------------------------------------------------------------------------------------------------

    @property
    def damaged(self) -> Mapping[str, Refill]:
        """Task → backends and stores whose published backups are known to be damaged."""
        return {task: clean_up.damage.pairs for task, clean_up in self._clean_ups.items()}

    def when_damaged(self, repair: Callable[[], bool]) -> None:
        """See :meth:`statemgr.StateManager.when_damaged`."""
        self._when_damaged = repair
        self._look_for_damage()  # there may have been damage before

    def _look_for_damage(self) -> None:
        self._repairs.wake("checking and repairing the backups", self._check_up)

    def _check_up(self) -> bool:
        """Look for damage in the current checkpoints; ask the owner to repair it. Returns: whether nothing is left."""
        done = True
        for task, clean_up in self._clean_ups.items():
            record, suspicion = self.published.records[task], clean_up.damage.suspicion
            if record is None or suspicion is None:
                continue
            found = find_damage(self._services, task, record.current)
            if self.published.records[task] is record:
                clean_up.damage.checked(suspicion, found)
            else:
                done = False  # it was evicted meanwhile, perhaps, and its blobs deleted
        if any(self.damaged.values()) and self._when_damaged is not None:
            done = self._when_damaged() and done
        return done

    def repair(self) -> Mapping[str, Checkpoint]:
        """Publish the current checkpoints once more, with damaged backups made again; on the thread that publishes.

        The micro-batch, the output and the input offsets stay what they are. Nothing is published where nothing is
        damaged, and where only a commit can help: a task has no checkpoint, or the stores are other ones by now.

        Returns: task → its current checkpoint. Raises: as :meth:`publish` and :func:`prepare_repair`.
        """
        if self._fenced is not None:
            raise self._fenced
        self._cleaner.take()
        self._settled(())
        damaged, records = self.damaged, [record for record in self.published.records.values() if record is not None]
        possible = len(records) == len(self.published.records) and all(can_repair(self._services, r) for r in records)
        if not possible or not any(damaged.values()):
            return self._checkpoints()
        batches = {record.current.batch for record in records}
        batch = batches.pop() if len(batches) == 1 else None

        def again(record: CheckpointRecord) -> PreparedCommit:
            current, published = record.current, self.published
            base = CommitBase(record.task, published.layout, published.epoch, current, damaged[record.task])
            return prepare_repair(self._services, record, base, attachments=repeated_attachments(current))[1]

        with self._services.executors.pool("repair", _PARALLELISM) as pool:
            commits = list(pool.map(again, records))
        return self.publish(commits, batch, wait=False)

    # --- commits -------------------------------------------------------------------------------------------------

    def publish(
        self,
        commits: Sequence[PreparedCommit],
        batch: MicroBatch | None,
        inputs: Inputs | None = None,
        *,
        wait: bool,
    ) -> Mapping[str, Checkpoint]:
        """Publish one commit per task, then clean up. See :meth:`statemgr.StateManager.publish`."""
        if self._fenced is not None:
            raise self._fenced
        self._cleaner.take()
        try:
            published = self._publish(commits, batch, inputs)
            if wait:
                self._cleaner.take()
            return published
        except FencedError as error:
            if all(commit.epoch == self.published.epoch for commit in commits):  # else they are stale, not the owner
                self._fenced = error
            raise

    def _publish(
        self, commits: Sequence[PreparedCommit], batch: MicroBatch | None, inputs: Inputs | None
    ) -> Mapping[str, Checkpoint]:
        if self._settled(commits):
            return self._checkpoints()
        for clean_up in self._clean_ups.values():
            clean_up.check()
        before = dict(self.published.records)
        outstanding = {task: clean_up.outstanding for task, clean_up in self._clean_ups.items()}
        try:
            publish(
                self._services,
                self.publisher,
                self._log,
                self.published,
                commits,
                batch=batch,
                inputs=inputs,
                outstanding=outstanding,
            )
        except BaseException:
            if self.published.pending:
                self._unsettled = commits, before
            raise
        self._after(commits, before)
        return self._checkpoints()

    def confirm(self) -> None:
        """See :meth:`statemgr.StateManager.confirm`."""
        if self._fenced is not None:
            raise self._fenced
        try:
            confirm(self._services, self._log, self.published)
        except FencedError as error:
            self._fenced = error
            raise

    def _settled(self, commits: Sequence[PreparedCommit]) -> bool:
        """Whether these very commits were published by an earlier call whose acknowledgement was lost."""
        if self._unsettled is None:
            return False
        was_published = settle(self._services, self.publisher, self._log, self.published)
        (sent, before), self._unsettled = self._unsettled, None
        if was_published:
            self._after(sent, before)
            self._cleaner.take()
        return was_published and {c.attempt for c in sent} == {c.attempt for c in commits}

    def _after(self, commits: Sequence[PreparedCommit], before: Mapping[str, CheckpointRecord | None]) -> None:
        """Begin to clean up after a publish."""
        records = dict(self.published.records)

        def clean_up(commit: PreparedCommit) -> None:
            record = records[commit.task]
            assert record is not None
            self._look_again(self._clean_ups[commit.task].damage)
            self._clean_ups[commit.task].after_publish(before[commit.task], record, commit)
            try:
                remember_published(self._services, commit.task)
            except OSError as error:
                log.warning(
                    "task %s: this machine could not record that it has published state: %s", commit.task, error
                )

        def clean_up_all() -> None:
            with self._services.executors.pool("clean-up", _PARALLELISM) as pool:
                list(pool.map(clean_up, commits))

        self._cleaner.start(clean_up_all)

    @staticmethod
    def _look_again(damage: Damage) -> None:
        """The commit has made again what was damaged when it was begun; whether that was all is looked at."""
        if pairs := damage.pairs:
            damage.repaired(pairs)
            damage.suspect()

    def close(self) -> None:
        """Finish the clean-up, and let the publisher go."""
        self._repairs.close()
        self._cleaner.close()
        self.publisher.close()

    def _checkpoints(self) -> Mapping[str, Checkpoint]:
        return {task: record.current for task, record in self.published.records.items() if record is not None}
