"""The tasks that a member of a consumer group owns: opened as partitions arrive, committed and closed as they leave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

from confluent_kafka import Consumer, TopicPartition

from statemgr.backends.services import Services
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.engine.task import Task
from statemgr.errors import OpeningCancelled
from statemgr.ids import task_name
from statemgr.kafka.group_consumer import GroupConsumer, GroupOffsets
from statemgr.kafka.input_position import InputPosition

log = logging.getLogger(__name__)
_OPENERS = 4
_LAST_COMMITS = 32
_SKIP = "allow_skipped_input"


class Opener(Protocol):
    """What opens tasks: :class:`statemgr.StateManager`."""

    def fence_tasks(
        self, tasks: Sequence[str], *, still_owned: Callable[[str], bool] = ..., allow_empty_start: bool = ...
    ) -> None: ...

    @property
    def open_task(self) -> Callable[..., Task]: ...


class AssignedTasks:
    """Used on the loop's thread alone. Tasks are opened on threads of its own.

    Args:
        topics: every task reads its partition of each.
        permissions: given to the first opening of each task alone.
    """

    def __init__(
        self,
        services: Services,
        opener: Opener,
        consumer: Consumer,
        topics: Sequence[str],
        permissions: Mapping[str, Any],
    ) -> None:
        self._services = services
        self._opener = opener
        self._consumer = consumer
        self._topics = list(topics)
        self._permissions = dict(permissions)
        self._group = GroupOffsets(consumer)
        self._opened: set[str] = set()
        self._owned: dict[int, AssignedTask] = {}
        #: (topic, partition) → its task and position
        self._by_place: dict[tuple[str, int], tuple[AssignedTask, InputPosition]] = {}
        self._openers = services.executors.pool("restore", _OPENERS)

    def __iter__(self) -> Iterator[AssignedTask]:
        return iter(self._owned.values())

    def find(self, topic: str | None, partition: int | None) -> tuple[AssignedTask, InputPosition] | None:
        """The task of a source partition, and its position in it; None when it is not owned."""
        return self._by_place.get((topic, partition))  # type: ignore[arg-type]

    def add(self, partitions: Sequence[TopicPartition]) -> None:
        """Begin to open the tasks of partitions that have arrived."""
        lost = {partition.partition: threading.Event() for partition in partitions}
        opening = [index for index in lost if index not in self._owned]
        fencing = self._openers.submit(self._fence, {task_name(index): lost[index] for index in opening})
        for index in opening:
            self._owned[index] = AssignedTask(
                index,
                self._openers.submit(self._open, index, fencing, lost[index]),
                self._services.clock,
                self._services.config.commit_max_delay_ms / 1000,
                self._services.config.commit_timeout_ms / 1000,
                lost=lost[index],
                skip=self._first(index).get(_SKIP, False),
            )
        for partition in partitions:
            owned = self._owned[partition.partition]
            position = self._position(partition)
            owned.inputs.append(position)
            self._by_place[partition.topic, partition.partition] = owned, position

    def open_again(self, owned: AssignedTask) -> None:
        """Open a task again whose local files are damaged or gone: it is restored from a backend."""
        assert owned.task is not None
        owned.task.close()
        fencing = self._openers.submit(self._fence, {task_name(owned.index): owned.lost})
        inputs = [self._position(position.place) for position in owned.inputs]
        owned.open_again(self._openers.submit(self._open, owned.index, fencing, owned.lost), inputs)
        for position in inputs:
            self._by_place[position.place.topic, position.place.partition] = owned, position

    def told(self, owned: AssignedTask, published: Mapping[str, int]) -> None:
        """Tell the group of a published checkpoint."""
        self._group.store([position.place for position in owned.inputs], published)

    def commit_and_wait(self, tasks: Collection[int], stopping: Callable[[], bool]) -> None:
        """Commit tasks, all at the same time; raise the first error if there was one, and log the others.

        ``stopping`` is asked while it waits, and says whether a failed commit is not to be tried again.
        """
        leaving = [self._owned[index] for index in sorted(self._owned.keys() & set(tasks))]
        if not leaving:
            return
        with self._services.executors.pool("last-commit", _LAST_COMMITS) as pool:
            commits = [pool.submit(owned.commit_and_wait, lambda: not stopping()) for owned in leaving]
            while wait(commits, 0.1).not_done:
                stopping()
        errors = []
        for owned, commit in zip(leaving, commits, strict=True):
            error = commit.exception()
            if error is not None:
                errors.append(error)
            elif (checkpoint := commit.result()) is not None:
                self.told(owned, checkpoint.input_offsets)
        for error in errors[1:]:
            log.error("a last commit failed: %s", error)
        if errors:
            raise errors[0]

    def close(self, tasks: Collection[int] | None = None) -> None:
        """Let tasks (None: all) go without a commit. A restore in progress is cancelled, and not waited for."""
        for index in list(self._owned if tasks is None else tasks):
            owned = self._owned.pop(index, None)
            if owned is None:
                continue
            owned.lost.set()
            for position in owned.inputs:
                self._by_place.pop((position.place.topic, position.place.partition), None)
            if owned.task is not None:
                owned.task.close()
            elif not owned.opening.cancel():
                owned.opening.add_done_callback(_close_opened)

    def cancel_openings(self) -> None:
        """End the restores that are in progress."""
        self.close([index for index, owned in self._owned.items() if not owned.restored()])

    def shut_down(self) -> None:
        """Close everything, and wait until the openings in progress have ended."""
        try:
            self.close()
        finally:
            self._openers.shutdown(wait=True, cancel_futures=True)

    def _position(self, place: TopicPartition) -> InputPosition:
        never_jumps = isinstance(self._consumer, GroupConsumer)
        return InputPosition(self._consumer, place, self._services.clock, never_jumps=never_jumps)

    def _first(self, index: int) -> Mapping[str, Any]:
        """Permissions are for the first opening of a task alone."""
        return {} if task_name(index) in self._opened else self._permissions

    def _fence(self, lost: Mapping[str, threading.Event]) -> None:
        """On a thread of the openers, before any of these tasks reads the checkpoint topic."""
        empty = self._permissions.get("allow_empty_start", False) and not self._opened & lost.keys()
        self._opener.fence_tasks(list(lost), still_owned=lambda task: not lost[task].is_set(), allow_empty_start=empty)

    def _open(self, index: int, fencing: Future[None], lost: threading.Event) -> Task:
        """On a thread of the openers."""
        fencing.result()
        task = self._opener.open_task(task_name(index), still_owned=lambda: not lost.is_set(), **self._first(index))
        try:
            task.expect_inputs(self._topics)
        except BaseException:
            task.close()
            raise
        self._opened.add(task.name)
        return task


def _close_opened(opening: Future[Task]) -> None:
    if opening.cancelled():
        return
    error = opening.exception()
    if error is None:
        opening.result().close()
    elif isinstance(error, OpeningCancelled):
        log.info("the opening of a task that was revoked has ended: %s", error)
    else:
        log.warning("a task was revoked before it was restored: %s", error)
