"""Prometheus metrics of a consumer loop's commits: for each task the cost of the last one, and how often it blocked the
task; for each store the size of its segments, and the duration of its last snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prometheus_client import CollectorRegistry, Counter, Gauge

from statemgr.ports import Clock

_OF_STORE = ("job", "task", "store")


class CommitMetrics:
    """The metrics of all tasks of one state manager.

    Of each task's last commit: ``statemgr_commit_changes``, ``statemgr_commit_uploaded_bytes`` and
    ``statemgr_commit_seconds{phase}``. Of all together: ``statemgr_commits_total{outcome}``,
    ``statemgr_commits_skipped_total`` (periodic ones that fell due while one was in progress),
    ``statemgr_commits_blocked_total`` and ``statemgr_commit_blocked_seconds_total`` (back-pressure).

    Of each store that is committed as segments: ``statemgr_segments`` and ``statemgr_segments_bytes`` (those after its
    snapshot, at the last commit) and ``statemgr_materialization_seconds`` (of its last snapshot). Of all together:
    ``statemgr_materializations_total{outcome}``.
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
        self.segments = Gauge("statemgr_segments", "Segments after the last snapshot", _OF_STORE, registry=registry)
        self.segments_bytes = Gauge(
            "statemgr_segments_bytes", "Bytes of the segments after the last snapshot", _OF_STORE, registry=registry
        )
        self.materialization = Gauge(
            "statemgr_materialization_seconds", "Seconds that the last snapshot took", _OF_STORE, registry=registry
        )
        self.materializations = counter("materializations", "Snapshots that ended", "outcome")
        self.commits = counter("commits", "Commits that ended", "outcome")
        self.skipped = counter("commits_skipped", "Periodic commits skipped while another was in progress").labels(job)
        self.blocked = counter(
            "commits_blocked", "Waits for commits that took longer than task.commit.max.delay.ms"
        ).labels(job)
        self.blocked_seconds = counter("commit_blocked_seconds", "Seconds that tasks waited for such commits").labels(
            job
        )

    def of(self, task: str) -> TaskCommits:
        """The metrics of one task; close them with the task."""
        return TaskCommits(self, task)


class TaskCommits:
    """The metrics of one task."""

    def __init__(self, metrics: CommitMetrics, task: str) -> None:
        self._metrics = metrics
        self._labels = (metrics.job, task)
        self._blocked_at: float | None = None
        self._phases: set[str] = set()
        self._segments: set[str] = set()
        self._materialized: set[str] = set()
        self._closed = False

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
        """Count one commit; as failed if the block raises."""
        outcome = "failed"
        try:
            yield
            outcome = "published"
        finally:
            self._metrics.commits.labels(self._metrics.job, outcome).inc()

    def carried(self, changes: int) -> None:
        """Set the number of changes in the commit."""
        self._metrics.changes.labels(*self._labels).set(changes)

    def uploaded(self, size: int) -> None:
        """Set the bytes that the commit uploaded."""
        self._metrics.uploaded.labels(*self._labels).set(size)

    def backlog(self, store: str, segments: int, size: int) -> None:
        """Set the number and the bytes of the segments in a store's published chain."""
        self._segments.add(store)
        self._metrics.segments.labels(*self._labels, store).set(segments)
        self._metrics.segments_bytes.labels(*self._labels, store).set(size)

    def materialized(self, store: str, seconds: float | None) -> None:
        """Count a snapshot that took ``seconds``; None if it failed."""
        outcome = "failed" if seconds is None else "made"
        self._metrics.materializations.labels(self._metrics.job, outcome).inc()
        if seconds is not None and not self._closed:  # a task does not wait for a snapshot when it closes
            self._materialized.add(store)
            self._metrics.materialization.labels(*self._labels, store).set(seconds)

    def skipped(self) -> None:
        """Count a periodic commit that was skipped because one was in progress."""
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
        """Note whether the task is held back. Counts seconds from call to call."""
        now = self._metrics.clock.monotonic()
        if self._blocked_at is not None:
            self._metrics.blocked_seconds.inc(now - self._blocked_at)
        elif held:
            self._metrics.blocked.inc()
        self._blocked_at = now if held else None

    def close(self) -> None:
        """Forget the task: another process may own it from now on."""
        self._closed = True
        self.hold(False)
        with suppress(KeyError):  # nothing was committed
            self._metrics.changes.remove(*self._labels)
            self._metrics.uploaded.remove(*self._labels)
            for name in self._phases:
                self._metrics.seconds.remove(*self._labels, name)
        for store in self._segments:
            self._metrics.segments.remove(*self._labels, store)
            self._metrics.segments_bytes.remove(*self._labels, store)
        for store in self._materialized:
            self._metrics.materialization.remove(*self._labels, store)
