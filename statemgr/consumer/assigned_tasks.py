"""The tasks that a member of a consumer group owns: opened as partitions arrive, committed and closed as they leave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TypeAlias

from confluent_kafka import Consumer, TopicPartition

from statemgr.consumer.assigned_task import AssignedTask
from statemgr.consumer.opener import Opener
from statemgr.engine.input_lag import Reached
from statemgr.engine.task import Task
from statemgr.errors import OpeningCancelled, StatemgrError, UnavailableError
from statemgr.flows.worker import Worker
from statemgr.ids import task_name
from statemgr.kafka.group_consumer import GroupConsumer, GroupOffsets
from statemgr.kafka.input_position import InputPosition
from statemgr.kafka.input_topics import InputTopics
from statemgr.kafka.output_topics import OutputTopics
from statemgr.logs import Event, tell
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.jobs.permissions import NO_PERMISSIONS, Permissions
from statemgr.services import Services
from statemgr.telemetry.metric_declarations import Series

log = logging.getLogger(__name__)
_Answer: TypeAlias = tuple[list[InputPosition], Mapping[tuple[str, int], tuple[int, int]], StatemgrError | None]
_OPENERS = 4
#: The first tasks open when as many are fenced.
_FENCED_TOGETHER = 32
_LAST_COMMITS = 32
_CLOSED_TOGETHER = 16
#: Seconds between two calls of ``stopping`` while last commits are in progress.
_LOOK_S = 0.1
#: Seconds between two tries to open a task that waits for its blob store.
_REACH_S = 2.0


class AssignedTasks:
    """Only the loop's thread uses it. It opens tasks on other threads.

    Args:
        topics: every task reads its partition of each.
        permissions: only for the first opening of each task.
    """

    def __init__(
        self,
        services: Services,
        manager: Opener,
        inputs: InputTopics,
        outputs: OutputTopics,
        consumer: Consumer,
        topics: Sequence[str],
        permissions: Permissions,
    ) -> None:
        self._services = services
        self._manager = manager
        self._inputs = inputs
        self._outputs = outputs
        self._consumer = consumer
        self._topics = list(topics)
        self._permissions = permissions
        self._group = GroupOffsets(consumer)
        #: task → as it was opened last
        self._opened: dict[str, Task] = {}
        self._owned: dict[int, AssignedTask] = {}
        #: (topic, partition) → its task and position
        self._by_place: dict[tuple[str, int], tuple[AssignedTask, InputPosition]] = {}
        self._openers = services.executors.pool("restore", _OPENERS)
        self._fencer = services.executors.pool("fencer", 1)
        #: Asks for the offsets of source partitions, and returns the positions that it has asked for, with the answer.
        self._asking: Worker[_Answer] = Worker(
            services, "input-offsets", f"job {services.config.job_name}", background=True
        )

    def __iter__(self) -> Iterator[AssignedTask]:
        return iter(self._owned.values())

    def find(self, topic: str | None, partition: int | None) -> tuple[AssignedTask, InputPosition] | None:
        """The task of a source partition, and its position there; None if this member does not own it."""
        return self._by_place.get((topic, partition))  # type: ignore[arg-type]

    def add(self, partitions: Sequence[TopicPartition]) -> None:
        """Take partitions that have arrived. A task opens when it has its partition of every topic: until then another
        member may still own it, or get it, and must not be fenced."""
        for partition in partitions:
            if (owned := self._owned.get(partition.partition)) is None:
                owned = self._owned[partition.partition] = self._new(partition.partition)
            owned.inputs.append(self._position(owned, partition))
        arrived = sorted({partition.partition for partition in partitions})
        self._begin([owned for index in arrived if len((owned := self._owned[index]).inputs) == len(self._topics)])

    def _begin(self, opening: Sequence[AssignedTask]) -> None:
        for first in range(0, len(opening), _FENCED_TOGETHER):
            together = opening[first : first + _FENCED_TOGETHER]
            fencing = self._fencer.submit(self._fence, {task_name(owned.index): owned.lost for owned in together})
            for owned in together:
                owned.opening = self._openers.submit(self._open, owned.index, fencing, owned.lost)

    def _new(self, index: int) -> AssignedTask:
        config = self._services.config
        return AssignedTask(
            index,
            frozenset(f"{topic}-{index}" for topic in self._topics),
            config.retained,
            Future(),
            self._services.clock,
            config.commit_max_delay_ms / 1000,
            config.commit_timeout_ms / 1000,
            assigned_s=self._services.clock.monotonic(),
            starts_latest=config.starts_latest,
        )

    def open_again(self, owned: AssignedTask, *, waits: bool) -> None:
        """Open a task again whose local files are damaged or missing: it is restored from a backend. ``waits``: try
        until the backend can be reached."""
        assert owned.task is not None
        owned.task.close()
        owned.open_again([self._position(owned, position.place) for position in owned.inputs], waits=waits)
        self._begin([owned])

    def try_again(self) -> None:
        """Begin the openings again that could not reach something :data:`_REACH_S` seconds ago. Until then, a task that
        waits holds no thread, and others open."""
        now, due = self._services.clock.elapsed(), list[AssignedTask]()
        for owned in self._owned.values():
            if (error := owned.unreachable()) is None:
                continue
            if owned.retry_s is None:
                owned.retry_s = now + _REACH_S
                if str(error) != owned.told:
                    owned.told = str(error)
                    log.warning("%s waits: %s", task_name(owned.index), error)
            elif now >= owned.retry_s:
                owned.retry_s = None
                due.append(owned)
        self._begin(due)

    def located(self, restored: Iterable[AssignedTask]) -> list[AssignedTask]:
        """The tasks whose source partitions have known bounds. Asks for those of the others, without waiting.

        One question is for all of them, and the next one follows its answer. Raises: as :meth:`InputPosition.locate`.
        """
        if not self._asking.busy and (answer := self._asking.take()) is not None:
            asked, found, failure = answer
            for position in asked:
                if self._by_place.get(position.key, (None, None))[1] is position:
                    position.locate(found.get(position.key), failure)
        tasks = list(restored)
        unknown = [position for owned in tasks for position in owned.inputs if not position.located]
        if unknown:
            self._asking.start(lambda: (unknown, *self._inputs.spans(position.key for position in unknown)))
        return [owned for owned in tasks if all(position.located for position in owned.inputs)]

    def reached(self) -> list[Reached]:
        """How far each restored task has read each source partition. Any thread may call this."""
        return [
            Reached(task_name(owned.index), at.place.topic, at.place.partition, at.next, at.end)
            for owned in tuple(self._owned.values())
            for at in tuple(owned.inputs)
            if at.next is not None
        ]

    def processed(self) -> Series:
        """How many messages each task has processed. Any thread may call this."""
        return [((task_name(owned.index),), owned.processed) for owned in tuple(self._owned.values())]

    def pass_ends(self) -> None:
        """Continue after the ends of transactions that the client has passed. Every polled message was processed."""
        for owned in self._owned.values():
            at_work = [position for position in owned.inputs if position.next is not None]
            for position, place in zip(at_work, self._consumer.position([at.place for at in at_work]), strict=True):
                # publish them: lag tools read the group's offsets, and operators the checkpoint's
                owned.dirty |= position.passed(place.offset)

    def store_offsets(self, owned: AssignedTask, published: Mapping[str, int]) -> None:
        """Store the offsets of a published checkpoint in the consumer group."""
        self._group.store([position.place for position in owned.inputs], published)

    def commit_and_wait(
        self, tasks: Collection[int], stopping: Callable[[], bool], hurried: Callable[[], bool]
    ) -> None:
        """Commit several tasks in parallel. Raises: the first error; the others are logged.

        Args:
            stopping: called from time to time. If it returns True, a failed commit is not tried again.
            hurried: if it returns True, no other commit begins. Any thread calls it.
        """
        leaving = [self._owned[index] for index in sorted(self._owned.keys() & set(tasks))]
        leaving = [owned for owned in leaving if owned.uncommitted]
        if not leaving:
            return
        ended, missed = threading.Condition(), list[str]()

        def commit(owned: AssignedTask) -> Checkpoint | None:
            if hurried():
                missed.append(task_name(owned.index))
                return None
            return owned.commit_and_wait(lambda: not stopping())

        def notify(_: object) -> None:
            with ended:
                ended.notify_all()

        with self._inputs.shared(), self._services.executors.pool("last-commit", _LAST_COMMITS) as pool:
            commits = [pool.submit(commit, owned) for owned in leaving]
            for one in commits:
                one.add_done_callback(notify)
            while not all(one.done() for one in commits):
                with ended:
                    self._services.clock.wait(ended, _LOOK_S)
                stopping()
        errors = []
        for owned, one in zip(leaving, commits, strict=True):
            error = one.exception()
            if error is not None:
                errors.append(error)
            elif (checkpoint := one.result()) is not None:
                self.store_offsets(owned, checkpoint.input_offsets)
        if missed:
            errors.append(
                UnavailableError(
                    f"the stop left no time for the last commits of {len(missed)} of {len(leaving)} tasks, and the "
                    "next owner processes their input since the commit before again",
                    hint="nothing is lost; to commit all at a stop, raise task.shutdown.ms, or run more processes",
                    first=missed[0],
                )
            )
        for error in errors[1:]:
            tell(log, Event.FAILED, "a last commit failed: %s", error, level=logging.ERROR)
        if errors:
            raise errors[0]

    def close(self, tasks: Collection[int] | None = None, hurried: Callable[[], bool] = lambda: False) -> None:
        """Close tasks (None: all) without a commit. A restore in progress is cancelled, without waiting for it; a fence
        in progress has ended, because the next owner may fence as soon as this returns, and must not be fenced by us.

        ``hurried``: if it returns True, tasks leave no local copies. Any thread calls it.
        """
        leaving = [owned for index in list(self._owned if tasks is None else tasks) if (owned := self._leave(index))]
        closing = [owned.task for owned in leaving if owned.task is not None]
        for owned in leaving:
            if owned.task is None and not owned.opening.cancel():
                owned.opening.add_done_callback(_close_opened)
        if len(closing) < len(leaving):
            self._fencer.submit(_nothing).result()  # what waits before this leaves out tasks that are lost

        def close(task: Task) -> None:
            task.close(leave_copies=not hurried())

        if closing:
            with self._services.executors.pool("close", _CLOSED_TOGETHER) as pool:
                ended = [pool.submit(close, task) for task in closing]
            for one in ended:  # an error of one leaves no other open
                one.result()

    def _leave(self, index: int) -> AssignedTask | None:
        """Forget a task. Returns: None if this member does not own it."""
        owned = self._owned.pop(index, None)
        if owned is not None:
            owned.lost.set()
            self._manager.metrics.forget(task_name(index))
            for position in owned.inputs:
                self._by_place.pop(position.key, None)
        return owned

    def cancel_openings(self) -> None:
        """End the restores that are in progress."""
        self.close([index for index, owned in self._owned.items() if not owned.restored()])

    def shut_down(self, hurried: Callable[[], bool]) -> None:
        """Close everything, as :meth:`close` does, and wait until the openings in progress have ended."""
        try:
            self.close(hurried=hurried)
        finally:
            self._asking.close(wait=False)
            self._fencer.shutdown(wait=True, cancel_futures=True)
            self._openers.shutdown(wait=True, cancel_futures=True)

    def _position(self, owned: AssignedTask, place: TopicPartition) -> InputPosition:
        never_jumps = isinstance(self._consumer, GroupConsumer)
        position = InputPosition(self._inputs, place, self._services.clock, never_jumps=never_jumps)
        self._by_place[place.topic, place.partition] = owned, position
        return position

    def _permissions_of(self, index: int) -> Permissions:
        return NO_PERMISSIONS if self._was_published(task_name(index)) else self._permissions

    def _was_published(self, task: str) -> bool:
        """Whether this process has had the task with a checkpoint: the permissions were for that one, or for the first
        commit."""
        return task in self._opened and self._opened[task].last_checkpoint is not None

    def _fence(self, lost: Mapping[str, threading.Event]) -> None:
        """Runs before any of these tasks reads the checkpoint topic."""
        empty = self._permissions.allow_empty_start and not any(map(self._was_published, lost))
        self._manager.fence_tasks(list(lost), still_owned=lambda task: not lost[task].is_set(), allow_empty_start=empty)

    def _open(self, index: int, fencing: Future[None], lost: threading.Event) -> Task:
        try:
            fencing.result()
        except CancelledError:
            raise OpeningCancelled("the loop ended before the task was opened", task=task_name(index)) from None
        permissions = self._permissions_of(index)
        task = self._manager.open_task(task_name(index), still_owned=lambda: not lost.is_set(), **permissions.flags)
        try:
            task.expect_inputs(self._topics)
            task.expect_outputs(self._outputs.check)
        except BaseException:
            task.close()
            raise
        self._opened[task.name] = task
        return task


def _nothing() -> None:
    """What a pool does last, when everything before it has ended."""


def _close_opened(opening: Future[Task]) -> None:
    if opening.cancelled():
        return
    error = opening.exception()
    if error is None:
        opening.result().close()
    elif isinstance(error, OpeningCancelled):
        tell(log, Event.REVOKED, "the opening of a task that was revoked has ended: %s", error)
    else:
        tell(log, Event.FAILED, "a task was revoked before it was restored: %s", error, level=logging.WARNING)
