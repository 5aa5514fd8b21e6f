"""The commit of a task that is on its way: its thread, its age, and who waits for it how long; and whose turn it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from statemgr.config import JobConfig
from statemgr.errors import RetryableError
from statemgr.flows.repair import GivesWay
from statemgr.model.checkpoint import Checkpoint
from statemgr.ports import Clock
from statemgr.tasks.commit_metrics import TaskCommits

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
            raise GivesWay("a commit goes first")


class InFlight:
    """At most one commit of a task is on its way. Used on the task's thread; the commit's work has one of its own.

    Its error is raised by :meth:`end` or :meth:`make_way`, whichever comes first, unless it is forgiven; one that
    nobody was told of is logged when the task closes.
    """

    def __init__(self, task: str, config: JobConfig, clock: Clock, metrics: TaskCommits) -> None:
        self._task = task
        self._max_delay_s = config.commit_max_delay_ms / 1000
        self._timeout_s = config.commit_timeout_ms / 1000
        self._clock = clock
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"statemgr-commit-{task}")
        self._future: Future[Checkpoint] | None = None
        self._started = 0.0

    @property
    def seconds(self) -> float | None:
        """How long ago the commit on its way was begun; None when there is none."""
        if self._future is None or self._future.done():
            return None
        return self._clock.monotonic() - self._started

    def start(self, work: Callable[[], Checkpoint]) -> Future[Checkpoint]:
        """Run ``work`` on the commit's thread; :meth:`make_way` comes first."""
        assert self._future is None
        self._started = self._clock.monotonic()
        self._future = self._pool.submit(work)
        return self._future

    def make_way(self) -> None:
        """Wait for the commit on its way, for another one to follow.

        From the age of ``task.commit.max.delay.ms`` on the wait is counted as blocked.
        Raises: its error; RetryableError when it is older than ``task.commit.timeout.ms``.
        """
        if self._future is None:
            return
        wait([self._future], self._until(self._max_delay_s))
        if not self._future.done():
            log.warning(
                "task %s: blocked by a commit that began %.1f s ago",
                self._task,
                self._clock.monotonic() - self._started,
            )
            with self._metrics.blocked():
                wait([self._future], self._until(self._timeout_s))
        self.end()

    def end(self) -> Checkpoint:
        """Wait for the commit on its way, and return its checkpoint. Raises: as :meth:`make_way`."""
        assert self._future is not None
        future = self._future
        wait([future], self._until(self._timeout_s))
        if not future.done():
            raise RetryableError(
                f"the commit has not ended within task.commit.timeout.ms = {self._timeout_s * 1000:.0f}",
                hint="it goes on; the next commit waits for it",
                task=self._task,
            )
        self._future = None
        return future.result()

    def forgive(self) -> None:
        """The error of a commit that has ended was seen: nobody is told again."""
        if self._future is not None and self._future.done():
            self._future = None

    def close(self) -> None:
        """Wait for the commit on its way, and log its error if nobody was told."""
        self._pool.shutdown(wait=True)
        future, self._future = self._future, None
        error = future.exception() if future is not None else None
        if error is not None:
            log.error("task %s: the last commit failed, what it carried is not committed: %s", self._task, error)

    def _until(self, age_s: float) -> float:
        """Seconds until the commit is as old as that."""
        return max(0.0, self._started + age_s - self._clock.monotonic())
