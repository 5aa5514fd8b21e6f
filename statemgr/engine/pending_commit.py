"""The commit of a task that is in progress, the output that waits for it, and how commits and repairs take turns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from statemgr.errors import OutcomeUnknownError, RetryableError
from statemgr.flows.opening.repair import GivesWay
from statemgr.flows.worker import Worker
from statemgr.logs import Event, tell
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.commit import ProducedRecord
from statemgr.model.record_size import PRODUCER_LIMIT, size_of_record, too_large
from statemgr.services import Services
from statemgr.telemetry.task_metrics import TaskMetrics

log = logging.getLogger(__name__)
_LATE = "it continues, and the next commit waits for it; raise the timeout if this happens often"
#: Bytes of output that may wait for a commit.
BUDGET = 256 * 1024 * 1024


class Turn:
    """Either a commit begins or a repair runs. A commit, or the close, makes a repair give way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0
        self._asked = False

    def ask(self) -> bool:
        """Before a commit that must not wait: ask a repair in progress to give way. Returns: whether there is none."""
        self._asked = self._lock.locked()
        return not self._asked

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Begin a commit. Waits until a repair in progress has given way."""
        with self._counting:
            self._waiting += 1
        try:
            with self._lock:
                self._asked = False
                yield
        finally:
            with self._counting:
                self._waiting -= 1

    @contextmanager
    def repair(self) -> Iterator[bool]:
        """Run a repair if no commit begins. Yields whether it may run."""
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()

    def give_way(self) -> None:
        """Raises: GivesWay if a commit waits."""
        if self._waiting or self._asked:
            raise GivesWay("a commit takes precedence")


class PendingCommit:
    """At most one commit of a task is in progress, on a thread of its own. Only the task's thread uses this.

    :meth:`end` or :meth:`make_way` raises the error of a commit once, unless it is forgiven. An error that nobody has
    seen is logged when the task closes.
    """

    def __init__(self, services: Services, task: str, metrics: TaskMetrics) -> None:
        self._task = task
        self._max_delay_s = services.config.commit_max_delay_ms / 1000
        self._timeout_s = services.config.commit_timeout_ms / 1000
        self._clock = services.clock
        self._metrics = metrics
        self._worker: Worker[Checkpoint] = Worker(services, f"commit-{task}", f"task {task}")
        #: When it began, for deadlines and for its age.
        self._started = self._began = 0.0

    @property
    def seconds(self) -> float | None:
        """The age of the commit in progress; None if there is none."""
        return self._clock.elapsed() - self._began if self._worker.busy else None

    def start(self, work: Callable[[], Checkpoint]) -> Future[Checkpoint]:
        """Run ``work`` on the commit's thread. Call :meth:`make_way` first."""
        self._started, self._began = self._clock.monotonic(), self._clock.elapsed()
        started = self._worker.start(work)
        assert started is not None
        return started

    def make_way(self) -> None:
        """Wait for the commit in progress, so that another one can follow.

        When it is older than ``task.commit.max.delay.ms``, the wait counts as blocked.

        Raises: its error; RetryableError if it is older than ``task.commit.timeout.ms``.
        """
        if not self._worker.wait(self._until(self._max_delay_s)):
            age_s = self._clock.elapsed() - self._began
            tell(
                log, Event.WAITING, "%s: the next commit waits for one that began %.1f s ago", self._task, age_s,
                level=logging.WARNING, task=self._task, seconds=round(age_s, 1),
            )  # fmt: skip
            with self._metrics.blocked():
                ended = self._worker.wait(self._until(self._timeout_s))
            if not ended:
                raise RetryableError(f"the last commit {self._late()}", hint=_LATE, task=self._task)
        self._worker.take()

    def end(self) -> Checkpoint | None:
        """Wait for the commit in progress. Returns: its checkpoint; None if there was none.

        Raises: its error; OutcomeUnknownError if it is older than ``task.commit.timeout.ms``.
        """
        if not self._worker.wait(self._until(self._timeout_s)):
            raise OutcomeUnknownError(f"the commit {self._late()}", hint=_LATE, task=self._task)
        return self._worker.take()

    def forgive(self) -> None:
        """The caller has seen the error of a commit that has ended, so it is not raised again."""
        self._worker.forget()

    def close(self) -> None:
        """Wait for the commit in progress, and log its error if nobody has seen it."""
        self._worker.close("the last commit failed, and its changes are not committed")

    def _late(self) -> str:
        return f"did not end within task.commit.timeout.ms = {self._timeout_s * 1000:.0f}"

    def _until(self, age_s: float) -> float:
        """Seconds until the commit is this old."""
        return max(0.0, self._started + age_s - self._clock.monotonic())


class Output:
    """Records in order. The task's thread adds them; the commit's thread removes them.

    Args:
        most_bytes: what the producer takes as key, value and headers of one record.
    """

    def __init__(self, task: str, most_bytes: int) -> None:
        self._task = task
        self._most_bytes = most_bytes
        self._records: list[ProducedRecord] = []
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, record: ProducedRecord) -> None:
        """Add a record. Raises: InvalidError if it is too large; RetryableError if too many bytes wait for a commit."""
        size = _size(record)
        if size > self._most_bytes:
            raise too_large(record.key, size, self._most_bytes, PRODUCER_LIMIT, task=self._task, topic=record.topic)
        with self._lock:
            if self._bytes + size > BUDGET:
                raise RetryableError(
                    f"more than {BUDGET} bytes of output are waiting for a commit",
                    hint="commit more often, or send less output for one message or batch",
                    task=self._task,
                )
            self._records.append(record)
            self._bytes += size

    @property
    def is_much(self) -> bool:
        """Whether a commit should send it before more is added: half of the bytes that may wait."""
        return self._bytes >= BUDGET // 2

    def waiting(self) -> tuple[ProducedRecord, ...]:
        """The records that no commit has published yet."""
        return tuple(self._records)

    def drop(self) -> int:
        """Remove all records, while no commit is in progress. Returns: their number."""
        with self._lock:
            dropped, self._records, self._bytes = len(self._records), [], 0
        return dropped

    def published(self, count: int) -> None:
        """Remove the first ``count`` records, which were published."""
        with self._lock:
            self._bytes -= sum(map(_size, self._records[:count]))
            del self._records[:count]


def _size(record: ProducedRecord) -> int:
    return size_of_record(record.key, record.value, record.headers)
