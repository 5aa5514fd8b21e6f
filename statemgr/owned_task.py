"""A task that a member of a consumer group owns: its source partitions, its restore, its commits."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic

from confluent_kafka import TopicPartition

from statemgr.errors import OutcomeUnknownError, RetryableError, UnavailableError
from statemgr.model.checkpoint import Checkpoint
from statemgr.task import Task

log = logging.getLogger(__name__)


@dataclass
class OwnedTask:
    """One task of this member. Used on the loop's thread alone.

    ``lost`` is set when the task was taken away: an opening in progress ends then.
    ``waiting``: partitions that are paused until the task is restored and they are at its input offsets.
    ``offsets``: source partition → next offset to process. ``dirty``: whether something was processed since the last
    commit began. ``held``: its partitions are paused until the commit on its way ends.
    """

    opening: Future[Task]
    max_delay_s: float
    commit_timeout_s: float
    partitions: list[TopicPartition] = field(default_factory=list)
    waiting: list[TopicPartition] = field(default_factory=list)
    task: Task | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    dirty: bool = False
    held: bool = False
    lost: threading.Event = field(default_factory=threading.Event)
    _commit: Future[Checkpoint] | None = None
    _commit_started: float = 0.0
    _failing_since: float | None = None

    def restored(self) -> bool:
        """Whether the task is open; takes it over when its restore has ended. Raises: what the restore raised."""
        if self.task is None and self.opening.done():
            self.task = self.opening.result()
            checkpoint = self.task.last_checkpoint
            self.offsets = dict(checkpoint.input_offsets) if checkpoint else {}
        return self.task is not None

    def start_commit(self) -> None:
        """Start a periodic commit if there is something to commit and none is on its way (the next one covers it).

        Raises: what the last one failed with, once commits have failed for ``task.commit.timeout.ms`` or when a
        repetition cannot help.
        """
        if self.task is None:
            return
        if self._commit is not None:
            if not self._commit.done():
                self.task.metrics.skipped()
                return
            self._end_commit(self.task)
        if self.dirty:
            self._commit_started = monotonic()
            try:
                self._commit = self.task.commit_async(self.offsets)
                self.dirty = False
            except (RetryableError, OutcomeUnknownError) as error:
                self._failed(self.task, error)

    def hold_back(self) -> bool:
        """Whether to process nothing more for now: the commit on its way began ``task.commit.max.delay.ms`` ago.

        Raises: UnavailableError for a commit that has not ended within ``task.commit.timeout.ms``.
        """
        if self.task is None:
            return False
        age = self.task.in_flight_seconds or 0.0
        if age > self.commit_timeout_s:
            raise UnavailableError(
                f"a commit has not ended within task.commit.timeout.ms = {self.commit_timeout_s * 1000:.0f}",
                task=self.task.name,
            )
        held = age > self.max_delay_s
        self.task.metrics.hold(held)
        return held

    def commit_and_wait(self) -> None:
        """Commit what is not committed; tried once more when it fails for now."""
        if self.task is None or not (self.dirty or self._commit is not None):
            return
        try:
            self.task.commit(self.offsets)
        except (RetryableError, OutcomeUnknownError) as error:
            log.warning("%s: a commit failed and is repeated: %s", self.task.name, error)
            self.task.commit(self.offsets)
        self.dirty, self._commit = False, None

    def _end_commit(self, task: Task) -> None:
        assert self._commit is not None
        error, self._commit = self._commit.exception(), None
        if error is None:
            self._failing_since = None
            return
        self.dirty = True
        task.forgive()
        self._failed(task, error)

    def _failed(self, task: Task, error: BaseException) -> None:
        self._failing_since = self._failing_since or self._commit_started
        too_long = monotonic() - self._failing_since > self.commit_timeout_s
        if too_long or not isinstance(error, RetryableError | OutcomeUnknownError):
            raise error
        log.warning("%s: a commit failed and is repeated: %s", task.name, error)
