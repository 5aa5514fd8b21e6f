"""The consumer loop that :meth:`statemgr.StateManager.run` owns.

Steps of a turn:

1. poll; rebalances arrive here (assign, revoke, lost)
2. hand messages to ``process``; remember the next offset of each source partition
3. tasks whose restore has ended: seek to the checkpoint's input offsets, resume their partitions
4. when ``task.commit.ms`` has passed, start a commit per task; where one is on its way, leave it out
5. back-pressure: pause the partitions of a task whose commit is on its way for ``task.commit.max.delay.ms``, resume
   them when it ends

Partitions are paused while their task restores or is held back, and polling goes on, so that the group keeps its
members.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    MissingState,
    StatemgrError,
    UnavailableError,
)
from statemgr.ids import task_name
from statemgr.input_topics import check_offset, check_topics
from statemgr.owned_task import OwnedTask
from statemgr.task import Task

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_BATCH = 500
_OPENERS = 4
_LAST_COMMITS = 32


class ConsumerLoop:
    """Runs until SIGTERM or SIGINT (or :meth:`stop`), then commits and closes.

    ``process(task, message)`` is called on one thread for every message; what it raises stops the loop without a
    commit of the message it raised for. ``open_task`` is :meth:`statemgr.StateManager.open_task`.

    All input topics have ``job.tasks`` partitions, and partition i of each goes to the member that has partition i of
    the others (the ``range`` strategy, which is the client's default).
    """

    def __init__(
        self,
        config: JobConfig,
        open_task: Callable[..., Task],
        consumer: Consumer,
        process: Callable[[Task, Message], None],
        topics: Sequence[str],
        permissions: Mapping[str, Any],
        fence_tasks: Callable[..., None] = lambda tasks, **_: None,
    ) -> None:
        if not topics:
            raise ConfigError(
                "there is nothing to consume", hint="set task.inputs, or pass topics=[…]", key="task.inputs"
            )
        self._config = config
        self._open_task = open_task
        self._fence_tasks = fence_tasks
        self._consumer = consumer
        self._process = process
        self._topics = list(topics)
        self._permissions = dict(permissions)
        self._opened: set[str] = set()
        self._owned: dict[int, OwnedTask] = {}
        self._to_pause: list[TopicPartition] = []
        self._stop = threading.Event()
        self._openers = ThreadPoolExecutor(_OPENERS, thread_name_prefix="statemgr-restore")

    def stop(self, *_: Any) -> None:
        """Ask the loop to end after the current batch."""
        self._stop.set()

    def run(self) -> None:
        """Raises: what ``process`` or a commit raises; the consumer is left to the caller."""
        check_topics(self._consumer, self._topics, self._config.tasks)
        previous = self._install_signals()
        interval = self._config.commit_ms / 1000
        self._consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        due = monotonic() + interval
        try:
            while not self._stop.is_set():
                messages = self._consumer.consume(_BATCH, _POLL_SECONDS)  # 1
                for message in messages:  # 2
                    self._one(message)
                self._pause_assigned()
                self._start_restored()  # 3
                if monotonic() >= due:  # 4
                    for owned in self._owned.values():
                        owned.start_commit()
                    due = monotonic() + interval
                self._hold_back()  # 5
            self._commit_and_wait(set(self._owned))
        finally:
            self._close(set(self._owned))
            self._openers.shutdown(wait=True, cancel_futures=True)
            self._consumer.unsubscribe()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _one(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            self._consumer_error(error, message)
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        owned = self._owned.get(partition)
        source = f"{message.topic()}-{partition}"
        if owned is None or owned.task is None or source in map(_source, owned.waiting):
            return  # read before the pause took effect; the seek reads it again
        if offset < owned.offsets.get(source, 0):
            return
        self._process(owned.task, message)
        owned.offsets[source] = offset + 1
        owned.dirty = True

    def _consumer_error(self, error: KafkaError, message: Message) -> None:
        """What the client mends by itself is logged; the rest ends the loop."""
        where: dict[str, Any] = {"topic": message.topic(), "partition": message.partition()}
        if error.code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED):
            raise AccessDenied(f"consuming was refused: {error.str()}", **where)
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise MissingState(
                f"the input that follows the checkpoint is gone: {error.str()}",
                hint="its retention is shorter than the job was down",
                **where,
            )
        if error.fatal():
            raise UnavailableError(f"consuming failed: {error.str()}", **where)
        if error.code() != KafkaError._PARTITION_EOF:
            log.warning("consumer: %s", error.str())

    # --- rebalances ----------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """The pause follows the poll. Offsets of the group are not asked for: the checkpoint has them."""
        at_start = [TopicPartition(partition.topic, partition.partition, OFFSET_BEGINNING) for partition in partitions]
        try:
            consumer.assign(at_start)
        except KafkaException:  # a strategy that rebalances step by step
            consumer.incremental_assign(at_start)
        lost = {partition.partition: threading.Event() for partition in partitions}
        opening = [index for index in lost if index not in self._owned]
        fencing = self._openers.submit(self._fence, {task_name(index): lost[index] for index in opening})
        for index in opening:
            self._owned[index] = OwnedTask(
                self._openers.submit(self._open, index, fencing, lost[index]),
                self._config.commit_max_delay_ms / 1000,
                self._config.commit_timeout_ms / 1000,
                lost=lost[index],
            )
        for partition in partitions:
            owned = self._owned[partition.partition]
            owned.partitions.append(partition)
            owned.waiting.append(partition)
            self._to_pause.append(partition)

    def _pause_assigned(self) -> None:
        """What the poll has returned of them already is dropped in ``_one`` and read again after the seek."""
        if not self._to_pause:
            return
        self._consumer.pause(self._to_pause)
        self._to_pause = []
        for index, owned in self._owned.items():
            missing = set(self._topics) - {partition.topic for partition in owned.partitions}
            if missing:
                raise ConfigError(
                    f"{task_name(index)} was given without its partition of {', '.join(sorted(missing))}",
                    hint="set the consumer's partition.assignment.strategy to range",
                )

    def _fence(self, lost: Mapping[str, threading.Event]) -> None:
        """On a thread of the openers, before any of these tasks reads the checkpoint topic."""
        empty = self._permissions.get("allow_empty_start", False) and not self._opened & lost.keys()
        self._fence_tasks(list(lost), still_owned=lambda task: not lost[task].is_set(), allow_empty_start=empty)

    def _open(self, index: int, fencing: Future[None], lost: threading.Event) -> Task:
        """On a thread of the openers. Permissions are for the first opening of a task alone."""
        fencing.result()
        name = task_name(index)
        permissions = {} if name in self._opened else self._permissions
        task = self._open_task(name, still_owned=lambda: not lost.is_set(), **permissions)
        self._opened.add(name)
        return task

    def _start_restored(self) -> None:
        for owned in self._owned.values():
            if owned.waiting and not owned.held and owned.restored() and self._sought(owned):
                self._consumer.resume(owned.waiting)
                owned.waiting = []

    def _sought(self, owned: OwnedTask) -> bool:
        """Move to the checkpoint's input offsets. False while the client has not begun to fetch: next turn again."""
        for source in owned.waiting:
            offset = owned.offsets.get(_source(source), OFFSET_BEGINNING)
            try:
                if offset != OFFSET_BEGINNING:
                    check_offset(self._consumer, source, offset)
                self._consumer.seek(TopicPartition(source.topic, source.partition, offset))
            except KafkaException as error:
                if error.args[0].code() == KafkaError._STATE:
                    return False
                raise UnavailableError(f"seeking failed: {error.args[0].str()}", topic=source.topic) from error
        return True

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what the leaving tasks have, then close them, before another member may open them."""
        leaving = {partition.partition for partition in partitions}
        try:
            self._commit_and_wait(leaving)
        except StatemgrError as error:
            log.warning("what was not committed is processed again by the next owner: %s", error)
        self._close(leaving)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Another member may own them already: close without a commit."""
        self._close({partition.partition for partition in partitions})

    # --- commits -------------------------------------------------------------------------------------------------

    def _hold_back(self) -> None:
        """A task that is held back still processes what the client had given out already."""
        for owned in self._owned.values():
            held = owned.hold_back()
            if held == owned.held:
                continue
            owned.held = held
            started = [partition for partition in owned.partitions if partition not in owned.waiting]
            (self._consumer.pause if held else self._consumer.resume)(started)
            log.info(
                "%s is %s", task_name(owned.partitions[0].partition), "held back by its commit" if held else "going on"
            )

    def _commit_and_wait(self, tasks: set[int]) -> None:
        """Commit the tasks, all at the same time; raise the first error if there was one, and log the others."""
        leaving = [self._owned[index] for index in sorted(tasks & self._owned.keys())]
        with ThreadPoolExecutor(_LAST_COMMITS, thread_name_prefix="statemgr-last-commit") as pool:
            commits = [pool.submit(owned.commit_and_wait) for owned in leaving]
        errors = [error for commit in commits if (error := commit.exception()) is not None]
        for error in errors[1:]:
            log.error("a last commit failed: %s", error)
        if errors:
            raise errors[0]

    def _close(self, tasks: set[int]) -> None:
        """Let tasks go without a commit. A restore that is under way is cancelled, and not waited for."""
        for index in tasks:
            owned = self._owned.pop(index, None)
            if owned is None:
                continue
            owned.lost.set()
            self._to_pause = [p for p in self._to_pause if p.partition != index]
            if owned.task is not None:
                owned.task.close()
            elif not owned.opening.cancel():
                owned.opening.add_done_callback(_close_opened)

    def _install_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self.stop) for number in (signal.SIGTERM, signal.SIGINT)}


def _close_opened(opening: Future[Task]) -> None:
    if opening.cancelled():
        return
    error = opening.exception()
    if error is None:
        opening.result().close()
    else:
        log.warning("a task was given back before it was restored: %s", error)


def _source(partition: TopicPartition) -> str:
    return f"{partition.topic}-{partition.partition}"
