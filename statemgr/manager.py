"""The state manager: opens tasks for a consumer loop, or acquires the whole job for an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from statemgr.config import JobConfig
from statemgr.consumer.application import Application
from statemgr.consumer.loop import ConsumerLoop
from statemgr.engine import Epoch
from statemgr.engine.coordinator import Coordinator, UpkeepThread
from statemgr.engine.input_lag import InputLag, Reached
from statemgr.engine.job_coordinator import JobCoordinator, look_at_job
from statemgr.engine.opening import Assignment, TaskOpener
from statemgr.engine.task import Task
from statemgr.errors import ClosedError, InvalidError, MissingState, StatemgrError
from statemgr.flows.committing.commit import Refill
from statemgr.flows.opening.open_job import JobTopics
from statemgr.flows.owner import always
from statemgr.ids import source_topic, task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.input_topics import InputTopics, TaskInputs
from statemgr.local.shared_directories import Scratch
from statemgr.logs import configure_logging, flush_suppressed
from statemgr.model.checkpoint import Attachment, Checkpoint, Layout, MicroBatch
from statemgr.model.checkpoint_records import Inputs
from statemgr.model.commit import PreparedCommit, ProducedRecord
from statemgr.model.jobs.permissions import PermissionFlags, Permissions
from statemgr.ports import Progress, no_progress
from statemgr.serdes import SerdeLike
from statemgr.services import Closing, Services
from statemgr.telemetry.liveness import Condition
from statemgr.telemetry.metrics import Metrics
from statemgr.telemetry.tracing import trace_job
from statemgr.wiring import open_services

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

    from statemgr.consumer.messages import InputMessage

M = TypeVar("M", bound="Message | InputMessage[Any, Any]")


class StateManager:
    """Manages the state of one job in this process.

    Args:
        config: the job's configuration.
        partitioner: how keys are spread over tasks (``kafka-partition``, ``kafka-murmur2``, ``spark-hash(<types>)``);
            it is part of every checkpoint, and a job opened with another one is refused.
        services: makes the adapters, the clock, the source of IDs and the threads.
    """

    def __init__(
        self,
        config: JobConfig,
        partitioner: str = "kafka-partition",
        *,
        services: Callable[[JobConfig], Services] = open_services,
    ) -> None:
        self.config = config
        self.layout = Layout(1, config.tasks, partitioner)
        self._services = made = services(config)
        with Closing() as undo:
            undo.callback(made.close)
            made.task_directory(task_name(0))  # a process that cannot keep state here fences nobody
            undo.pop_all()
        self.clock, self.executors = made.clock, made.executors
        self._log = CheckpointTopic(config, made.clock, owned=True)
        self.metrics = Metrics(
            config.job_name, config.job_key, config.metrics_port, made.clock, config.restore_factories
        )
        self.metrics.watch("job_tasks", lambda: [((), config.tasks)])
        self._topics = JobTopics(made)
        self.metrics.watch("topic_problems", lambda: [((), len(self._topics.wrong))])
        self._inputs = InputTopics(config, made.clock)
        self._tasks = TaskOpener(made, self._log, self.layout, self._topics, self._inputs, self.metrics)
        self._job: JobCoordinator | None = None
        self._upkeep = UpkeepThread(made, self._topics, self._owners)
        self._lag: InputLag | None = None
        self._closed = False
        self.metrics.health.base = self._condition
        self._tracing = trace_job(config.job_key)

    # --- a consumer loop -----------------------------------------------------------------------------------------

    def fence_tasks(
        self,
        tasks: Sequence[str],
        *,
        still_owned: Callable[[str], bool] = lambda task: True,
        allow_empty_start: bool = False,
    ) -> None:
        """Take over the transactional IDs of tasks that :meth:`open_task` opens next.

        Call this before opening several tasks. A dead owner may have left a transaction open for each of them. An
        opening waits until none is open on the checkpoint topic, and its own fence ends only that of its own task.

        Args:
            still_owned: whether the caller still has a task; called just before its ID is taken over. Tasks that the
                caller has lost are left alone.
            allow_empty_start: as in :meth:`open_task`.

        Raises: PermissionNeeded, TopicMisconfigured, AccessDenied, UnavailableError.
        """
        self._check_open()
        self._tasks.fence(tasks, still_owned, allow_empty_start=allow_empty_start)

    def open_task(
        self,
        task: str,
        *,
        still_owned: Callable[[], bool] = always,
        progress: Progress = no_progress,
        **permissions: Unpack[PermissionFlags],
    ) -> Task:
        """Take a task over: fence older owners, read the checkpoint topic, restore every store.

        If this process is still closing the same task, or has lost it, the opening waits for that.

        Args:
            task: ``Partition <i>`` with i below ``job.tasks``.
            still_owned: whether the caller still has the task. Called just before older owners are fenced, and on
                other threads while the stores are restored; False ends the opening with OpeningCancelled.
            progress: called while a store is restored.
            permissions: one-shot permissions to do what could lose state: see
                :class:`statemgr.model.jobs.permissions.Permissions`.

        Raises: OpeningCancelled, PermissionNeeded, LayoutMismatch, TopicMisconfigured, MissingState, CorruptError,
        UnavailableError.
        """
        self._check_open()
        opened = self._tasks.open(Assignment(task, still_owned), Permissions(**permissions), progress)
        self._upkeep.start()
        return opened

    def run(
        self,
        consumer: Consumer,
        process: Callable[[Task, M], None] | None = None,
        *,
        process_batch: Callable[[Task, Sequence[M]], None] | None = None,
        on_open: Callable[[Task], None] | None = None,
        topics: Sequence[str] | None = None,
        key_serde: SerdeLike | None = None,
        value_serde: SerdeLike | None = None,
        **permissions: Unpack[PermissionFlags],
    ) -> None:
        """Run the consumer loop: it handles rebalances, pauses partitions while their task restores, commits every
        ``task.commit.ms``, and stops cleanly on SIGTERM and SIGINT (:class:`statemgr.consumer.loop.ConsumerLoop`).
        It logs what happens; if the application has not configured logging, ``log.format`` and ``log.level`` apply
        (:func:`statemgr.configure_logging`).

        A partition that is in no checkpoint is read from its beginning; by a task without a checkpoint, from where
        ``task.input.start`` says. Take the consumer from :meth:`statemgr.JobConfig.consumer`. With any consumer,
        skipped input (truncated, expired, or a topic that was deleted and created again) ends the loop before a commit.

        After SIGTERM or SIGINT this returns, or raises the error of a last commit, within ``task.shutdown.ms``, two
        seconds and the time of one message or batch. If work had to be given up for that, the manager can only be
        closed.

        Args:
            process: called as ``process(task, message)`` for every message.
            process_batch: in place of ``process``, called as ``process_batch(task, messages)`` with messages of one
                task that were polled together, in the order of each partition: at most ``task.batch.messages``.
            on_open: called with each task before its first message, also after a rebalance: the place for
                :meth:`statemgr.Task.every`.
            topics: the input; by default ``task.inputs``.
            key_serde: how keys of messages are decoded; by default ``task.input.key.serde``. With ``bytes`` for both,
                messages are those of confluent_kafka, otherwise :class:`statemgr.InputMessage`.
            value_serde: the same for values; by default ``task.input.value.serde``.
            permissions: those of :meth:`open_task`, for the first opening of each task.

        Raises: the errors of the application and of commits; InvalidError unless it is given exactly one of ``process``
        and ``process_batch``; MissingState if the input does not have the records after the checkpoint; ConfigError if
        its partitions are not the job's tasks; AccessDenied.
        """
        configure_logging(self.config)
        self.loop(
            consumer,
            process,
            process_batch=process_batch,
            on_open=on_open,
            topics=topics,
            key_serde=key_serde,
            value_serde=value_serde,
            **permissions,
        ).run()

    def loop(
        self,
        consumer: Consumer,
        process: Callable[[Task, M], None] | None = None,
        *,
        process_batch: Callable[[Task, Sequence[M]], None] | None = None,
        on_open: Callable[[Task], None] | None = None,
        topics: Sequence[str] | None = None,
        key_serde: SerdeLike | None = None,
        value_serde: SerdeLike | None = None,
        **permissions: Unpack[PermissionFlags],
    ) -> ConsumerLoop:
        """The loop that :meth:`run` runs. Another thread can call its ``stop()``."""
        self._check_open()
        return ConsumerLoop(
            self._services,
            self,
            self._inputs,
            consumer,
            Application.of(
                self.config,
                process=process,
                process_batch=process_batch,
                on_open=on_open,
                key_serde=key_serde,
                value_serde=value_serde,
            ),
            topics or self.config.inputs,
            Permissions(**permissions),
            self._published_tasks,
        )

    # --- a whole job ---------------------------------------------------------------------------------------------

    def look(self, **permissions: Unpack[PermissionFlags]) -> Mapping[str, Checkpoint]:
        """Read what is published for the whole job, without fencing anybody: :meth:`acquire` ends the owner that runs,
        also if it then refuses.

        Returns: task → its current checkpoint, for the tasks that have one.
        Raises: as :meth:`acquire`, for another layout, stores or serdes, and if state is missing.
        """
        self._check_open()
        with self._failures_counted():
            return look_at_job(self._services, self._log, self.layout, self._topics, Permissions(**permissions))

    def acquire(self, **permissions: Unpack[PermissionFlags]) -> Epoch:
        """Take the whole job over: fence every older owner, and read what is published for all tasks.

        The epoch's permissions and ``refill`` are for the first publish. After it, use ``epoch.after_publish()``.
        Raises: as :meth:`open_task`, without the errors of a restore.
        """
        self._check_open()
        if self._job is not None:
            self._job.close()
            self._job = None
        with self._failures_counted():
            self._job, epoch = JobCoordinator.acquire(
                self._services, self._log, self.layout, self._topics, Permissions(**permissions), self.metrics
            )
        self._job.watched_by(self.metrics)
        self._upkeep.start()
        for task in epoch.checkpoints:
            self.metrics.task(task).opened()
        if self._lag is None:
            self._lag = self.watch_lag(self._unread)
        return epoch

    def publish(
        self,
        prepared_commits: Sequence[PreparedCommit],
        batch: MicroBatch | None = None,
        *,
        input_offsets: Mapping[str, int] | None = None,
        input_topic_ids: Mapping[str, str] | None = None,
        refill: Mapping[str, Refill] | None = None,
        wait: bool = True,
    ) -> Mapping[str, Checkpoint]:
        """Publish prepared commits of this epoch, one per task, in one transaction; then clean up.

        Args:
            input_offsets: how far the whole job has read, for commits that were prepared without input offsets.
            input_topic_ids: input topic → Kafka's ID of it as text, for the same commits.
            refill: the ``refill`` of the epoch that the attempts had. Other damaged backups stay damaged.
            wait: wait for the clean-up. Otherwise it runs in the background; the next publish and :meth:`close` wait.

        Returns: task → the checkpoint just published.
        Raises: FencedError; RetryableError; OutcomeUnknownError (call again with the same commits); InvalidError.
        """
        self._check_open()
        inputs = None if input_offsets is None else Inputs(dict(input_offsets), dict(input_topic_ids or {}))
        return self._acquired().publish(prepared_commits, batch, inputs, refill=refill or {}, wait=wait)

    def settle(self) -> Mapping[str, Checkpoint]:
        """Find out whether a publish or a repair whose acknowledgement was lost has succeeded. Call it before the next
        attempts, which continue its checkpoints. Costs no request if every outcome is known.

        Returns: task → its current checkpoint. Raises: FencedError, OutcomeUnknownError (call again), MissingState.
        """
        return self._acquired().settled_checkpoints()

    def damaged(self) -> Mapping[str, Refill]:
        """Task → (factory, store) pairs whose published backups are damaged.

        Add them to the ``refill`` of the next attempts' epoch, and pass that to :meth:`publish`, too.

        Raises: InvalidError before :meth:`acquire`.
        """
        return self._acquired().damaged

    def when_damaged(self, repair: Callable[[], bool]) -> None:
        """Call ``repair`` on another thread when a published backup turns out to be damaged, until it returns True.

        If no commit is being prepared, ``repair`` calls :meth:`repair`. Otherwise it returns False, or leaves the
        repair to the next commit.
        """
        self._acquired().when_damaged(repair)

    def repair(self) -> Mapping[str, Checkpoint]:
        """Make damaged backups of the current checkpoints again, by a commit without input.

        No commit may be in preparation, because it would continue an older checkpoint. Returns: task → its current
        checkpoint. Raises: as :meth:`publish`; MissingState and CorruptError if nothing can supply a store.
        """
        return self._acquired().repair()

    def publish_again(
        self, produced: Sequence[ProducedRecord], attached: Callable[[Attachment], Attachment]
    ) -> Mapping[str, Checkpoint]:
        """Publish the current checkpoints again, in a transaction that also sends output records.

        The state, the micro-batch, the output sequence and the input offsets stay. Every task needs a checkpoint.

        Args:
            attached: returns what the new checkpoints have in place of an attachment.

        Returns: task → its new checkpoint. Raises: as :meth:`publish`; InvalidError if the job has other stores by now.
        """
        return self._acquired().publish_again(produced, attached)

    def job_inputs(self, epoch: Epoch) -> TaskInputs:
        """The input topics of an acquired job, for an engine that reads its own input.

        Raises: MissingState if one was deleted and created again since the checkpoints, unless the epoch permits it.
        """
        known: dict[str, str] = {}
        for checkpoint in epoch.checkpoints.values():
            known |= checkpoint.input_topic_ids if checkpoint is not None else {}
        inputs = TaskInputs(self._inputs, "all", known, skip=epoch.permissions.allow_skipped_input)
        inputs.expect()
        return inputs

    def confirm(self) -> None:
        """Check that the last publish of this manager is still the newest, before the output relies on it: a process
        that was suspended does not notice that another owner has taken over.

        Raises: FencedError if another owner has published since; UnavailableError, AccessDenied; InvalidError.
        """
        self._check_open()
        self._acquired().confirm()

    def scratch(self, root: Path, base: Path) -> Scratch:
        """A directory below ``root`` for files that nobody needs after the end of this process; calling the result
        creates it. The caller closes it.

        Args:
            base: a directory above ``root``. No level in between may be a link.
        """
        return Scratch(root, self.clock, self._services.ids, base)

    # --- metrics -------------------------------------------------------------------------------------------------

    def watch_lag(self, reached: Callable[[], Iterable[Reached]]) -> InputLag:
        """Serve the lag of the input in the metrics, for whoever reads it. Close it with :meth:`unwatch_lag`."""
        lag = InputLag(self._services, reached)
        self.metrics.watch("input_lag", lag.series)
        self.metrics.watch("input_held_up_seconds", lag.held_up)
        return lag

    def unwatch_lag(self, lag: InputLag) -> None:
        """Serve it no more. Afterwards, nothing asks ``reached``."""
        self.metrics.unwatch(lag.series)
        self.metrics.unwatch(lag.held_up)
        lag.close()

    def _unread(self) -> list[Reached]:
        """How far the published checkpoints of an acquired job have read."""
        if self._job is None:
            return []
        offsets: dict[str, int] = {}
        for record in tuple(self._job.published.records.values()):
            offsets |= record.current.input_offsets if record is not None else {}
        places = ((source_topic(source), source.rpartition("-")[2], at) for source, at in offsets.items())
        return [Reached("", topic, int(number), at) for topic, number, at in places if topic is not None]

    @contextmanager
    def _failures_counted(self) -> Iterator[None]:
        try:
            yield
        except StatemgrError as error:
            self.metrics.failed(error)
            raise

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every task (without committing) and every connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with Closing() as closing:
            closing.callback(self._services.close)
            closing.callback(self._log.close)
            closing.callback(self._inputs.close)
            closing.callback(self.metrics.close)
            if self._tracing is not None:
                closing.callback(self._tracing.close)
            if self._lag is not None:
                closing.callback(self.unwatch_lag, self._lag)
            if self._job is not None:
                closing.callback(self._job.close)
            closing.callback(self._upkeep.close)
            closing.callback(self._tasks.close)
        flush_suppressed(now=True)

    def __enter__(self) -> StateManager:
        return self

    def __exit__(self, *exc: Any) -> None:
        with Closing(exc[1]) as closing:
            closing.callback(self.close)

    def _published_tasks(self) -> int | None:
        """The number of tasks that have checkpoints; None if there are none, or older software did not record it."""
        try:
            # a transaction that a dead owner has left open ends only when its task is fenced
            self._log.read((), only_settled=True)
            found = self._log.current()
        except MissingState:
            return None
        return max((record.layout.tasks for record in found.values()), default=0) or None

    def _condition(self) -> Condition:
        """For the probes of the process, unless a loop answers them."""
        return self._tasks.condition() if self._job is None else Condition(open=self.config.tasks)

    def _owners(self) -> Sequence[Coordinator]:
        return self._tasks.owners() if self._job is None else [self._job]

    def _acquired(self) -> JobCoordinator:
        if self._job is None:
            raise InvalidError("the job was not acquired", hint="call acquire() first", job=self.config.job_name)
        return self._job

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the state manager is closed", job=self.config.job_name)
