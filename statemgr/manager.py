"""The state manager: opens tasks for a consumer loop, or acquires the whole job for an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from statemgr.config import JobConfig
from statemgr.engine import Epoch
from statemgr.errors import ClosedError, InvalidError
from statemgr.flows.clean_up import CleanUp
from statemgr.flows.first_start import remember_published
from statemgr.flows.opening import fence, latest_generation, prepare_topics, read_records, tails
from statemgr.flows.publish import Published, publish, settle
from statemgr.flows.restore import no_progress, restore_task
from statemgr.ids import task_index, task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.loop import ConsumerLoop
from statemgr.metrics import Metrics
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout, MicroBatch
from statemgr.model.commit import PreparedCommit
from statemgr.ports import Progress
from statemgr.runtime import Runtime
from statemgr.task import Task

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

log = logging.getLogger(__name__)


class StateManager:
    """Manages the state of one job in this process.

    Args:
        config: the job's configuration.
        partitioner: how keys are spread over tasks (``kafka-partition``, ``kafka-murmur2``, ``spark-hash``); it is
            part of every checkpoint, and a job opened with another one is refused.
    """

    def __init__(self, config: JobConfig, partitioner: str = "kafka-partition") -> None:
        self.config = config
        self.layout = Layout(1, config.tasks, partitioner)
        self._runtime = Runtime(config)
        self._parts = self._runtime.parts
        self._log = CheckpointTopic(config, self._runtime.clock)
        self.metrics = Metrics(config.job_name, config.metrics_port, self._runtime.clock.monotonic)
        self._tasks: dict[str, Task] = {}
        self._job: _WholeJob | None = None
        self._closed = False

    # --- a consumer loop -----------------------------------------------------------------------------------------

    def open_task(
        self,
        task: str,
        *,
        allow_empty_start: bool = False,
        allow_new_stores: bool = False,
        allow_removed_stores: bool = False,
        progress: Progress = no_progress,
    ) -> Task:
        """Take a task over: fence older owners, read the checkpoint topic, restore every store.

        Args:
            task: ``Partition <i>`` with i below ``job.tasks``.
            allow_empty_start, allow_new_stores, allow_removed_stores: one-shot permissions.

        Raises: PermissionNeeded, LayoutMismatch, TopicMisconfigured, MissingState, CorruptError, UnavailableError.
        """
        self._check_open()
        self._check_task(task)
        if task in self._tasks:
            raise InvalidError("the task is open in this process already", task=task)
        prepare_topics(self._parts, allow_empty_start=allow_empty_start)
        publisher = TransactionalPublisher(self.config, task_transactional_id(self.config, task), self._runtime.clock)
        try:
            fence(self._parts, publisher, [job_transactional_id(self.config)])
            records = read_records(self._parts, self._log, self.layout, [task], allow_empty_start=allow_empty_start)
            refill = tails(self._parts, records)[task]
            published = self._published(records)
            stores, restored = restore_task(
                self._parts,
                task,
                published.checkpoint(task),
                allow_new_stores=allow_new_stores,
                allow_removed_stores=allow_removed_stores,
                progress=progress,
            )
        except BaseException:
            publisher.close()
            raise
        opened = Task(
            self._parts,
            task,
            publisher,
            self._log,
            published,
            stores,
            restored,
            refill,
            on_close=lambda: self._forget(task),
        )
        self._tasks[task] = opened
        for restore in restored:
            self.metrics.restored(restore)
        if refill:
            self._undo_tail(opened)
        return opened

    def run(
        self,
        consumer: Consumer,
        process: Callable[[Task, Message], None],
        *,
        topics: Sequence[str] | None = None,
        **permissions: bool,
    ) -> None:
        """Own the loop: assign, revoke and lost; partitions paused while restoring; commit by ``task.commit.ms``;
        clean stop on SIGTERM and SIGINT. See :class:`statemgr.loop.ConsumerLoop`."""
        ConsumerLoop(self, consumer, process, topics or self.config.inputs, permissions).run()

    # --- a whole job ---------------------------------------------------------------------------------------------

    def acquire(
        self,
        *,
        allow_empty_start: bool = False,
        allow_new_stores: bool = False,
        allow_removed_stores: bool = False,
    ) -> Epoch:
        """Take the whole job over: fence every older owner, read what is published for all tasks.

        Raises: what :meth:`open_task` does, but for restoring.
        """
        self._check_open()
        if self._job is not None:
            self._job.publisher.close()
            self._job = None
        prepare_topics(self._parts, allow_empty_start=allow_empty_start)
        names = [task_name(index) for index in range(self.config.tasks)]
        publisher = TransactionalPublisher(self.config, job_transactional_id(self.config), self._runtime.clock)
        try:
            fence(self._parts, publisher, [task_transactional_id(self.config, name) for name in names])
            records = read_records(self._parts, self._log, self.layout, names, allow_empty_start=allow_empty_start)
            refill = tails(self._parts, records)
            self._job = _WholeJob(self, publisher, self._published(records))
        except BaseException:
            publisher.close()
            raise
        return Epoch(
            self._job.published.epoch,
            self._job.published.layout,
            {name: self._job.published.checkpoint(name) for name in names},
            refill,
            allow_new_stores,
            allow_removed_stores,
        )

    def publish(
        self, prepared_commits: Sequence[PreparedCommit], batch: MicroBatch | None = None
    ) -> Mapping[str, Checkpoint]:
        """Publish prepared commits of this epoch in one transaction, then clean up.

        Returns: task → the checkpoint just published.
        Raises: FencedError, RetryableError, OutcomeUnknownError (call again with the same commits), InvalidError.
        """
        self._check_open()
        if self._job is None:
            raise InvalidError("publish needs acquire() first", job=self.config.job_name)
        return self._job.publish(prepared_commits, batch)

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every task (without committing) and every connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in list(self._tasks.values()):
            task.close()
        if self._job is not None:
            self._job.publisher.close()
        self.metrics.close()
        self._log.close()
        self._runtime.close()

    def __enter__(self) -> StateManager:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _published(self, records: dict[str, CheckpointRecord | None]) -> Published:
        epoch = 1 + max((record.current.epoch for record in records.values() if record), default=0)
        return Published(records, epoch, latest_generation(records, self.layout))

    def _forget(self, task: str) -> None:
        self._tasks.pop(task, None)

    def _undo_tail(self, task: Task) -> None:
        """Changes beyond the checkpoint were left out; overwrite them now, in one transaction with a checkpoint."""
        checkpoint = task.last_checkpoint
        assert checkpoint is not None
        try:
            task.commit(checkpoint.input_offsets)
        except BaseException:
            task.close()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the state manager is closed", job=self.config.job_name)

    def _check_task(self, task: str) -> None:
        if task_index(task) >= self.config.tasks:
            raise InvalidError(
                f"the job has {self.config.tasks} tasks, so there is no {task!r}",
                hint="job.tasks is the number of partitions of the input",
                job=self.config.job_name,
            )


class _WholeJob:
    """The job's publisher and what is published of all its tasks."""

    def __init__(self, manager: StateManager, publisher: TransactionalPublisher, published: Published) -> None:
        self.publisher = publisher
        self.published = published
        self._parts = manager._parts
        self._log = manager._log
        self._clean_ups = {task: CleanUp(self._parts, task) for task in published.records}
        for task, record in published.records.items():
            self._clean_ups[task].at_open(record)

    def publish(self, commits: Sequence[PreparedCommit], batch: MicroBatch | None) -> Mapping[str, Checkpoint]:
        before = dict(self.published.records)
        settled = bool(self.published.pending) and settle(self._parts, self.publisher, self._log, self.published)
        if not settled:
            for commit in commits:
                self._clean_ups[commit.task].check()
            outstanding = {task: clean_up.outstanding for task, clean_up in self._clean_ups.items()}
            publish(
                self._parts,
                self.publisher,
                self._log,
                self.published,
                commits,
                batch=batch,
                outstanding=outstanding,
            )
        checkpoints = {}
        for commit in commits:
            record = self.published.records[commit.task]
            assert record is not None
            remember_published(self._parts, commit.task)
            self._clean_ups[commit.task].after_publish(before[commit.task], record, commit)
            checkpoints[commit.task] = record.current
        return checkpoints
