"""The commit of a task that is in progress: its age, and who waits for it how long; and whose turn it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from statemgr.backends.services import Services
from statemgr.engine.metrics import TaskMetrics
from statemgr.errors import RetryableError
from statemgr.flows.repair import GivesWay
from statemgr.flows.worker import Worker
from statemgr.model.checkpoint import Checkpoint

log = logging.getLogger(__name__)


class Turn:
    """Either a commit is begun or a repair runs. A commit, or the close, makes a repair give way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Begin a commit: a repair that runs is given up, and waited for."""
        with self._counting:
            self._waiting += 1
        try:
            with self._lock:
                yield
        finally:
            with self._counting:
                self._waiting -= 1

    @contextmanager
    def repair(self) -> Iterator[bool]:
        """Run a repair, if it is free."""
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()

    def give_way(self) -> None:
        """Raises: GivesWay when a commit waits."""
        if self._waiting:
            raise GivesWay("a commit takes precedence")


class PendingCommit:
    """At most one commit of a task is in progress. Used on the task's thread; the commit's work has one of its own.

    Its error is raised by :meth:`end` or :meth:`make_way`, whichever comes first, unless it is forgiven; one that
    nobody was told of is logged when the task closes.
    """

    def __init__(self, services: Services, task: str, metrics: TaskMetrics) -> None:
        self._task = task
        self._max_delay_s = services.config.commit_max_delay_ms / 1000
        self._timeout_s = services.config.commit_timeout_ms / 1000
        self._clock = services.clock
        self._metrics = metrics
        self._worker: Worker[Checkpoint] = Worker(services, f"commit-{task}", f"task {task}")
        self._started = 0.0

    @property
    def seconds(self) -> float | None:
        """How long ago the commit in progress was begun; None when there is none."""
        return self._clock.monotonic() - self._started if self._worker.busy else None

    def start(self, work: Callable[[], Checkpoint]) -> Future[Checkpoint]:
        """Run ``work`` on the commit's thread; :meth:`make_way` comes first."""
        self._started = self._clock.monotonic()
        started = self._worker.start(work)
        assert started is not None
        return started

    def make_way(self) -> None:
        """Wait for the commit in progress, for another one to follow.

        From the age of ``task.commit.max.delay.ms`` on the wait is counted as blocked.
        Raises: its error; RetryableError when it is older than ``task.commit.timeout.ms``.
        """
        if not self._worker.wait(self._until(self._max_delay_s)):
            log.warning(
                "task %s: waits for a commit that began %.1f s ago",
                self._task,
                self._clock.monotonic() - self._started,
            )
            with self._metrics.blocked():
                self._worker.wait(self._until(self._timeout_s))
        self.end()

    def end(self) -> Checkpoint | None:
        """Wait for the commit in progress. Returns: its checkpoint; None when there was none. Raises: as
        :meth:`make_way`."""
        if not self._worker.wait(self._until(self._timeout_s)):
            raise RetryableError(
                f"the commit did not end within task.commit.timeout.ms = {self._timeout_s * 1000:.0f}",
                hint="it continues, and the next commit waits for it; raise the timeout if this happens often",
                task=self._task,
            )
        return self._worker.take()

    def forgive(self) -> None:
        """The error of a commit that has ended was seen: nobody is told again."""
        self._worker.forget()

    def close(self) -> None:
        """Wait for the commit in progress, and log its error if nobody was told."""
        self._worker.close("the last commit failed, and what it carried is not committed")

    def _until(self, age_s: float) -> float:
        """Seconds until the commit is as old as that."""
        return max(0.0, self._started + age_s - self._clock.monotonic())
