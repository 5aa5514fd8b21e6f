"""The state manager: opens tasks for a consumer loop, or acquires the whole job for an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from statemgr.config import JobConfig
from statemgr.consumer.loop import ConsumerLoop
from statemgr.engine import Epoch
from statemgr.engine.job import WholeJob
from statemgr.errors import ClosedError, InvalidError, MissingState
from statemgr.flows.changes import check_changes, serdes_in_force
from statemgr.flows.commit import Refill
from statemgr.flows.open_job import Found, fence, fence_ids, guard_targets, in_parallel, prepare_topics, read_records
from statemgr.flows.published import Published, explained
from statemgr.flows.restore import restore_task
from statemgr.ids import task_index, task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.input_topics import InputTopics, TaskInputs
from statemgr.kafka.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.local.clock import moment
from statemgr.model.checkpoint import Checkpoint, Layout, MicroBatch
from statemgr.model.checkpoint_parts import Inputs
from statemgr.model.commit import PreparedCommit
from statemgr.model.permissions import PermissionFlags, Permissions
from statemgr.phases import Phase, announce
from statemgr.ports import Progress, no_progress
from statemgr.tasks.caretaker import Caretaker
from statemgr.tasks.metrics import Metrics
from statemgr.tasks.open_tasks import Assignment, OpenTasks, always
from statemgr.tasks.task import Task
from statemgr.wiring import Runtime

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message


class StateManager:
    """Manages the state of one job in this process.

    Args:
        config: the job's configuration.
        partitioner: how keys are spread over tasks (``kafka-partition``, ``kafka-murmur2``, ``spark-hash(<types>)``);
            it is part of every checkpoint, and a job opened with another one is refused.
    """

    def __init__(self, config: JobConfig, partitioner: str = "kafka-partition") -> None:
        self.config = config
        self.layout = Layout(1, config.tasks, partitioner)
        self._runtime = Runtime(config)
        self._parts = self._runtime.parts
        self._log = CheckpointTopic(config, self._runtime.clock, owned=True)
        self.metrics = Metrics(config.job_name, config.job_key, config.metrics_port, self._runtime.clock)
        self._lock = threading.Lock()
        self._topics_ready = False
        self._tasks = OpenTasks()
        self._inputs = InputTopics(config)
        self._job: WholeJob | None = None
        self._caretaker = Caretaker(self._runtime.clock)
        self._closed = False

    # --- a consumer loop -----------------------------------------------------------------------------------------

    def fence_tasks(
        self,
        tasks: Sequence[str],
        *,
        still_owned: Callable[[str], bool] = lambda task: True,
        allow_empty_start: bool = False,
    ) -> None:
        """Take over the transactional IDs of tasks that :meth:`open_task` opens next.

        Who opens several tasks calls this first: an opening waits for the transactions that a dead owner left open on
        the checkpoint topic, and its fence ends only that of its own task.

        Args:
            tasks: names of tasks.
            still_owned: whether the caller still has a task; asked just before its ID is taken over. A task that it
                does not have any more is left alone.
            allow_empty_start: as in :meth:`open_task`.

        Raises: PermissionNeeded, TopicMisconfigured, AccessDenied, UnavailableError.
        """
        self._check_open()
        for task in tasks:
            self._check_task(task)
        self._prepare_topics(allow_empty_start)

        def fence_one(task: str) -> None:
            self._tasks.put_fenced(task, None)
            if not still_owned(task):
                return
            publisher = self._publisher(task_transactional_id(self.config, task))
            announce(Phase.FENCE, task, self.config.job_key)
            try:
                publisher.fence()
            except BaseException:
                publisher.close()
                raise
            self._tasks.put_fenced(task, publisher)

        in_parallel(fence_one, tasks)

    def open_task(
        self,
        task: str,
        *,
        still_owned: Callable[[], bool] = always,
        progress: Progress = no_progress,
        **permissions: Unpack[PermissionFlags],
    ) -> Task:
        """Take a task over: fence older owners, read the checkpoint topic, restore every store.

        If the same task is being closed in this process, or was taken away from who opened it, this waits for that.

        Args:
            task: ``Partition <i>`` with i below ``job.tasks``.
            still_owned: whether the caller still has the task. It is asked just before older owners are fenced and
                while the stores are restored, on other threads; the opening ends with OpeningCancelled on False.
            progress: called while a store is restored.
            permissions: what this opening may do although it could lose state: see
                :class:`statemgr.model.permissions.Permissions`.

        Raises: OpeningCancelled, PermissionNeeded, LayoutMismatch, TopicMisconfigured, MissingState, CorruptError,
        UnavailableError.
        """
        self._check_open()
        self._check_task(task)
        assignment = Assignment(task, still_owned)
        self._tasks.claim(assignment)
        try:
            opened = self._open_task(assignment, Permissions(**permissions), progress)
        except BaseException:
            self._tasks.forget(task)
            raise
        self._tasks.opened(task, opened)
        return opened

    def _open_task(self, assignment: Assignment, permissions: Permissions, progress: Progress) -> Task:
        self._prepare_topics(permissions.allow_empty_start)
        task = assignment.task
        others = [job_transactional_id(self.config)]
        with ExitStack() as undo:
            publisher = self._fenced(assignment, undo)
            fence_ids(self._parts, others)
            assignment.check()
            as_of = moment(self._runtime.clock)
            found = read_records(self._parts, self._log, self.layout, [task], permissions)
            permissions = found.permissions[task]
            check_changes(self._parts, found.records, found.permissions, application_may_choose=True)
            published = self._published(found, others, assignment.still_owned)
            published.serdes = serdes_in_force(self._parts, published.checkpoint(task))
            inputs = self._task_inputs(task, published.checkpoint(task), permissions.allow_skipped_input)
            with explained(self._parts, self._log, published):
                refill = guard_targets(self._parts, found.records, found.permissions)[task]
                stores, restored = restore_task(
                    self._parts,
                    task,
                    published.checkpoint(task),
                    permissions=permissions,
                    older=published.older(task),
                    as_of=as_of,
                    progress=assignment.checked(progress),
                )
            for store in stores.values():
                undo.callback(store.close)
            opened = Task(
                self._parts,
                task,
                publisher,
                self._log,
                published,
                stores,
                restored,
                refill,
                self.metrics.commits.of(task),
                inputs,
                permissions,
                on_close=lambda: self._forget(opened),
            )
            undo.callback(opened.close)
            assignment.check()
            for restore in restored:
                self.metrics.restored(restore)
            if refill or inputs.recreated or permissions.names or found.permits:
                # changes beyond the checkpoint were left out: overwrite them now, in one transaction with a checkpoint;
                # and a permission was for this opening alone, whether or not input follows
                opened.commit(opened.start_offsets)
            undo.pop_all()
        opened.damage.watch(lambda: self._caretaker.wake(opened))
        return opened

    def run(
        self,
        consumer: Consumer,
        process: Callable[[Task, Message], None],
        *,
        topics: Sequence[str] | None = None,
        **permissions: Unpack[PermissionFlags],
    ) -> None:
        """Own the loop: assign, revoke and lost; partitions paused while restoring; commit by ``task.commit.ms``;
        clean stop on SIGTERM and SIGINT. See :class:`statemgr.consumer.loop.ConsumerLoop`.

        A partition of which no checkpoint knows starts at its beginning. Take the consumer from
        :meth:`statemgr.JobConfig.consumer`. With any consumer, input that was skipped (truncated, expired, or a topic
        that was deleted and created again) ends the loop before a commit.
        ``permissions`` are those of :meth:`open_task`, given to the first opening of each task alone.

        After SIGTERM or SIGINT this returns, or raises what a last commit failed with, within five seconds and the
        time of one message. If something had to be given up for that, the manager can only be closed.

        Raises: what ``process`` and commits raise; MissingState when the input does not have what follows the
        checkpoint; ConfigError when its partitions are not the job's tasks; AccessDenied.
        """
        self.loop(consumer, process, topics=topics, **permissions).run()

    def loop(
        self,
        consumer: Consumer,
        process: Callable[[Task, Message], None],
        *,
        topics: Sequence[str] | None = None,
        **permissions: bool,
    ) -> ConsumerLoop:
        """What :meth:`run` runs, for who stops it from another thread: its ``run()`` and ``stop()``."""
        self._check_open()
        return ConsumerLoop(
            self.config,
            self,
            self._inputs,
            consumer,
            process,
            topics or self.config.inputs,
            permissions,
            published_tasks=self._published_tasks,
            give_up=self._runtime.give_up,
        )

    # --- a whole job ---------------------------------------------------------------------------------------------

    def acquire(self, **permissions: Unpack[PermissionFlags]) -> Epoch:
        """Take the whole job over: fence every older owner, read what is published for all tasks.

        Permissions and ``refill`` of the epoch are for the first publish; after it use ``epoch.after_publish()``.
        Raises: what :meth:`open_task` does, but for restoring.
        """
        self._check_open()
        allowed = Permissions(**permissions)
        if self._job is not None:
            self._job.close()
            self._job = None
        self._prepare_topics(allowed.allow_empty_start)
        names = [task_name(index) for index in range(self.config.tasks)]
        others = [task_transactional_id(self.config, name) for name in names]
        with ExitStack() as undo:
            publisher = self._publisher(job_transactional_id(self.config))
            undo.callback(publisher.close)
            fence(self._parts, publisher, others)
            found = read_records(self._parts, self._log, self.layout, names, allowed)
            check_changes(self._parts, found.records, found.permissions, application_may_choose=False)
            published = self._published(found, others)
            with explained(self._parts, self._log, published):
                refill = guard_targets(self._parts, found.records, found.permissions)
            published.job_records = set(self._log.job_records())
            self._job = job = WholeJob(self._parts, self._log, publisher, published)
            refill = {task: pairs | self._job.damaged[task] for task, pairs in refill.items()}
            undo.pop_all()
        job.watch(lambda: self._caretaker.wake(job))
        return Epoch(
            published.epoch,
            published.layout,
            {name: published.checkpoint(name) for name in names},
            refill,
            found.permitted,
        )

    def publish(
        self,
        prepared_commits: Sequence[PreparedCommit],
        batch: MicroBatch | None = None,
        *,
        input_offsets: Mapping[str, int] | None = None,
        input_topic_ids: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> Mapping[str, Checkpoint]:
        """Publish prepared commits of this epoch, one per task, in one transaction; then clean up.

        Args:
            input_offsets: how far the whole job has read, for commits that were prepared without input offsets.
            input_topic_ids: input topic → Kafka's ID of it as text, for the same commits.
            wait: for the clean-up. Otherwise it goes on in the background, until the next publish or :meth:`close`.

        Returns: task → the checkpoint just published.
        Raises: FencedError; RetryableError; OutcomeUnknownError (call again with the same commits); InvalidError.
        """
        self._check_open()
        inputs = None if input_offsets is None else Inputs(dict(input_offsets), dict(input_topic_ids or {}))
        return self._acquired().publish(prepared_commits, batch, inputs, wait=wait)

    def damaged(self) -> Mapping[str, Refill]:
        """Task → (factory, store) pairs whose published backups are damaged: what an epoch's ``refill`` should have.

        Raises: InvalidError before :meth:`acquire`.
        """
        return self._acquired().damaged

    def when_damaged(self, repair: Callable[[], bool]) -> None:
        """Call this when a published backup turns out to be damaged, on another thread, until it returns True.

        It calls :meth:`repair` when no commit is being prepared. Otherwise it returns False, or leaves the repair to
        the next commit.
        """
        job = self._acquired()
        job.when_damaged = repair
        self._caretaker.wake(job)  # it may have looked before

    def repair(self) -> Mapping[str, Checkpoint]:
        """Make damaged backups of the current checkpoints again, by a commit without input. No commit may be in
        preparation: it would no longer continue what is published.

        Returns: task → its current checkpoint. Raises: as :meth:`publish`; MissingState and CorruptError when nothing
        can supply a store.
        """
        return self._acquired().repair()

    def job_inputs(self, epoch: Epoch) -> TaskInputs:
        """The input topics of an acquired job, for an engine that reads its input by itself.

        Raises: MissingState when one was deleted and created again since the checkpoints, unless the epoch permits it.
        """
        known: dict[str, str] = {}
        for checkpoint in epoch.checkpoints.values():
            known |= checkpoint.input_topic_ids if checkpoint is not None else {}
        inputs = TaskInputs(self._inputs, "all", known, skip=epoch.permissions.allow_skipped_input)
        inputs.expect()
        return inputs

    def confirm(self) -> None:
        """Confirm that what this manager published last is still what the topic says, before anything outside relies
        on it: a process that was suspended may have been overtaken without noticing.

        Raises: FencedError when another owner has published since; UnavailableError, AccessDenied; InvalidError.
        """
        self._check_open()
        if self._job is None:
            raise InvalidError("confirm needs acquire() first", job=self.config.job_name)
        self._job.confirm()

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every task (without committing) and every connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:
            closing.callback(self._runtime.close)
            closing.callback(self._log.close)
            closing.callback(self._inputs.close)
            closing.callback(self.metrics.close)
            if self._job is not None:
                closing.callback(self._job.close)
            closing.callback(self._caretaker.close)
            closing.callback(self._tasks.close)

    def __enter__(self) -> StateManager:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _prepare_topics(self, allow_empty_start: bool) -> None:
        with self._lock:
            if not self._topics_ready:
                prepare_topics(self._parts, allow_empty_start=allow_empty_start)
                self._topics_ready = True

    def _fenced(self, assignment: Assignment, undo: ExitStack) -> TransactionalPublisher:
        """The task's publisher, its ID taken over by :meth:`fence_tasks` or now. Raises: OpeningCancelled."""
        publisher = self._tasks.take_fenced(assignment.task)
        if publisher is not None:
            undo.callback(publisher.close)
            assignment.check()
            return publisher
        assignment.check()
        publisher = self._publisher(task_transactional_id(self.config, assignment.task))
        undo.callback(publisher.close)
        announce(Phase.FENCE, assignment.task, self.config.job_key)
        publisher.fence()
        return publisher

    def _task_inputs(self, task: str, checkpoint: Checkpoint | None, skip: bool) -> TaskInputs:
        """The task's input topics, if they are those of the checkpoint. Raises: MissingState."""
        inputs = TaskInputs(self._inputs, task, checkpoint.input_topic_ids if checkpoint else {}, skip=skip)
        inputs.expect()
        return inputs

    def _published_tasks(self) -> int | None:
        """For how many tasks the job has checkpoints; None when it has none, or older software did not say."""
        try:
            found = self._log.read()
        except MissingState:
            return None
        return max((record.layout.tasks for record in found.values()), default=0) or None

    def _publisher(self, transactional_id: str) -> TransactionalPublisher:
        return TransactionalPublisher(self.config, transactional_id, self._runtime.clock)

    def _published(self, found: Found, others: Sequence[str], still_owned: Callable[[], bool] = always) -> Published:
        """The epoch is a fencing token: above every published one, and unlike that of an owner that never published."""
        newest = max((record.current.epoch for record in found.records.values() if record), default=0)
        epoch = self._runtime.ids.epoch(newest)
        fence_others = partial(fence_ids, self._parts, others)
        return Published(found.records, epoch, found.layout, fence_others, still_owned, permits=found.permits)

    def _acquired(self) -> WholeJob:
        if self._job is None:
            raise InvalidError("the job was not acquired", hint="call acquire() first", job=self.config.job_name)
        return self._job

    def _forget(self, task: Task) -> None:
        self._caretaker.dismiss(task)
        self._tasks.forget(task.name)

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
