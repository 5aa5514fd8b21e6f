"""Prometheus metrics of a consumer loop's commits: by task what the last one cost, and how often it held one up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prometheus_client import CollectorRegistry, Counter, Gauge

from statemgr.ports import Clock


class CommitMetrics:
    """The metrics of all tasks of one state manager.

    Of each task's last commit: ``statemgr_commit_changes``, ``statemgr_commit_uploaded_bytes`` and
    ``statemgr_commit_seconds{phase}``. Of all together: ``statemgr_commits_total{outcome}``,
    ``statemgr_commits_skipped_total`` (periodic ones that fell due while one was on its way),
    ``statemgr_commits_blocked_total`` and ``statemgr_commit_blocked_seconds_total`` (back-pressure).
    """

    def __init__(self, job: str, registry: CollectorRegistry, clock: Clock) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"statemgr_commit_{name}", text, ["job", "task", *labels], registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"statemgr_{name}", text, ["job", *labels], registry=registry)

        self.job = job
        self.clock = clock
        self.changes = gauge("changes", "Changes in the last commit")
        self.uploaded = gauge("uploaded_bytes", "Bytes of the blobs that the last commit uploaded")
        self.seconds = gauge("seconds", "Seconds that a phase of the last commit took", "phase")
        self.commits = counter("commits", "Commits that ended", "outcome")
        self.skipped = counter("commits_skipped", "Periodic commits left out while one was on its way").labels(job)
        self.blocked = counter("commits_blocked", "Waits for a commit beyond task.commit.max.delay.ms").labels(job)
        self.blocked_seconds = counter("commit_blocked_seconds", "Seconds of those waits").labels(job)

    def of(self, task: str) -> TaskCommits:
        """The metrics of one task, until they are closed."""
        return TaskCommits(self, task)


class TaskCommits:
    """What one task counts."""

    def __init__(self, metrics: CommitMetrics, task: str) -> None:
        self._metrics = metrics
        self._labels = (metrics.job, task)
        self._blocked_at: float | None = None
        self._phases: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase of a commit: ``flush``, ``upload``, ``publish`` or ``clean-up``."""
        self._phases.add(name)
        begun = self._metrics.clock.monotonic()
        try:
            yield
        finally:
            self._metrics.seconds.labels(*self._labels, name).set(self._metrics.clock.monotonic() - begun)

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Count one commit, as failed when the block raises."""
        outcome = "failed"
        try:
            yield
            outcome = "published"
        finally:
            self._metrics.commits.labels(self._metrics.job, outcome).inc()

    def carried(self, changes: int) -> None:
        """How many changes the commit carries."""
        self._metrics.changes.labels(*self._labels).set(changes)

    def uploaded(self, size: int) -> None:
        """How many bytes of blobs the commit uploaded."""
        self._metrics.uploaded.labels(*self._labels).set(size)

    def skipped(self) -> None:
        """A periodic commit was left out, since one was on its way."""
        self._metrics.skipped.inc()

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count a wait for a commit."""
        self.hold(True)
        try:
            yield
        finally:
            self.hold(False)

    def hold(self, held: bool) -> None:
        """The task is held back, still or not any more: seconds are counted from call to call."""
        now = self._metrics.clock.monotonic()
        if self._blocked_at is not None:
            self._metrics.blocked_seconds.inc(now - self._blocked_at)
        elif held:
            self._metrics.blocked.inc()
        self._blocked_at = now if held else None

    def close(self) -> None:
        """Forget the task: another process may own it from now on."""
        self.hold(False)
        with suppress(KeyError):  # nothing was committed
            self._metrics.changes.remove(*self._labels)
            self._metrics.uploaded.remove(*self._labels)
            for name in self._phases:
                self._metrics.seconds.remove(*self._labels, name)
