"""The consumer loop that :meth:`statemgr.StateManager.run` owns.

Steps of a turn:

1. poll; rebalances arrive here (assign, revoke, lost)
2. hand messages to ``process``; remember the next offset of each source partition
3. tasks whose restore has ended: seek to the checkpoint's input offsets, resume their partitions
4. when ``task.commit.ms`` has passed, start a commit per task

Partitions are paused while their task restores, and polling goes on, so that the group keeps its members.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from statemgr.errors import ConfigError, OutcomeUnknownError, RetryableError, StatemgrError, UnavailableError
from statemgr.ids import task_name
from statemgr.task import Task

if TYPE_CHECKING:
    from statemgr.manager import StateManager

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_BATCH = 500


@dataclass
class _Owned:
    """A task of this member: its source partitions, its restore, and where its input has been read to."""

    partitions: list[TopicPartition]
    opening: Future[Task]
    #: Partitions that are paused until the task is restored and they are at its input offsets.
    waiting: list[TopicPartition] = field(default_factory=list)
    task: Task | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    dirty: bool = False
    failing_since: float | None = None


class ConsumerLoop:
    """Runs until SIGTERM or SIGINT (or :meth:`stop`), then commits and closes.

    ``process(task, message)`` is called on one thread for every message; what it raises stops the loop without a
    commit of the message it raised for.
    """

    def __init__(
        self,
        manager: StateManager,
        consumer: Consumer,
        process: Callable[[Task, Message], None],
        topics: Sequence[str],
        permissions: Mapping[str, Any],
    ) -> None:
        if not topics:
            raise ConfigError(
                "there is nothing to consume", hint="set task.inputs, or pass topics=[…]", key="task.inputs"
            )
        self._manager = manager
        self._consumer = consumer
        self._process = process
        self._topics = list(topics)
        self._permissions = dict(permissions)
        self._owned: dict[int, _Owned] = {}
        self._to_pause: list[TopicPartition] = []
        self._stop = threading.Event()
        self._openers = ThreadPoolExecutor(4, thread_name_prefix="statemgr-restore")

    def stop(self, *_: Any) -> None:
        """Ask the loop to end after the current batch."""
        self._stop.set()

    def run(self) -> None:
        """Raises: what ``process`` or a commit raises; the consumer is left to the caller."""
        previous = self._install_signals()
        clock = self._manager._runtime.clock
        interval = self._manager.config.commit_ms / 1000
        self._consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        due = clock.monotonic() + interval
        try:
            while not self._stop.is_set():
                messages = self._consumer.consume(_BATCH, _POLL_SECONDS)  # 1
                for message in messages:  # 2
                    self._one(message)
                self._pause_assigned()
                self._start_restored()  # 3
                if clock.monotonic() >= due:  # 4
                    self._commit_all(wait=False)
                    due = clock.monotonic() + interval
            self._commit_all(wait=True)
        finally:
            self._close_all()
            self._openers.shutdown(wait=True, cancel_futures=True)
            self._consumer.unsubscribe()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _one(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                return
            raise UnavailableError(
                f"consuming failed: {error.str()}", topic=message.topic(), partition=message.partition()
            )
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

    # --- rebalances ----------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """The client assigns after this returns, in the protocol of its strategy; the pause follows the poll."""
        for partition in partitions:
            owned = self._owned.get(partition.partition)
            if owned is None:
                opening = self._openers.submit(self._open, task_name(partition.partition))
                owned = self._owned[partition.partition] = _Owned([], opening)
            owned.partitions.append(partition)
            owned.waiting.append(partition)
            self._to_pause.append(partition)

    def _pause_assigned(self) -> None:
        """What the poll has returned of them already is dropped in ``_one`` and read again after the seek."""
        if self._to_pause:
            self._consumer.pause(self._to_pause)
            self._to_pause = []

    def _open(self, task: str) -> Task:
        return self._manager.open_task(task, **self._permissions)

    def _start_restored(self) -> None:
        for owned in self._owned.values():
            if not owned.waiting or not owned.opening.done():
                continue
            if owned.task is None:
                owned.task = owned.opening.result()
                checkpoint = owned.task.last_checkpoint
                owned.offsets = dict(checkpoint.input_offsets) if checkpoint else {}
            for source in owned.waiting:
                offset = owned.offsets.get(_source(source), OFFSET_BEGINNING)
                self._consumer.seek(TopicPartition(source.topic, source.partition, offset))
            self._consumer.resume(owned.waiting)
            owned.waiting = []

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what the leaving tasks have, then close them, before another member may open them."""
        leaving = {partition.partition for partition in partitions}
        self._commit(leaving, wait=True)
        self._close(leaving)

    def _lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Another member may own them already: close without a commit."""
        self._close({partition.partition for partition in partitions})

    # --- commits -------------------------------------------------------------------------------------------------

    def _commit_all(self, *, wait: bool) -> None:
        self._commit(set(self._owned), wait=wait)

    def _commit(self, tasks: set[int], *, wait: bool) -> None:
        for index in sorted(tasks):
            owned = self._owned.get(index)
            if owned is None or owned.task is None or not owned.dirty:
                continue
            if wait:
                owned.task.commit(owned.offsets)
                owned.dirty = False
            elif not owned.task.commit_in_flight:  # one that is on its way is not waited for: the next one covers it
                self._start_commit(owned)

    def _start_commit(self, owned: _Owned) -> None:
        """A failed commit is repeated at the next interval, until it has failed for ``task.commit.timeout.ms``."""
        assert owned.task is not None
        now = self._manager._runtime.clock.monotonic()
        try:
            future = owned.task.commit_async(owned.offsets)
        except (RetryableError, OutcomeUnknownError) as error:
            owned.failing_since = owned.failing_since or now
            if now - owned.failing_since > self._manager.config.commit_timeout_ms / 1000:
                raise
            log.warning("%s: a commit failed and is repeated: %s", owned.task.name, error)
            return
        owned.dirty = False
        owned.failing_since = None
        future.add_done_callback(lambda ended: setattr(owned, "dirty", owned.dirty or ended.exception() is not None))

    def _close(self, tasks: set[int]) -> None:
        for index in tasks:
            owned = self._owned.pop(index, None)
            if owned is None:
                continue
            try:
                task = owned.task or owned.opening.result()
            except StatemgrError as error:
                log.warning("task %s was given back before it was restored: %s", task_name(index), error)
                continue
            task.close()

    def _close_all(self) -> None:
        self._close(set(self._owned))

    def _install_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self.stop) for number in (signal.SIGTERM, signal.SIGINT)}


def _source(partition: TopicPartition) -> str:
    return f"{partition.topic}-{partition.partition}"
