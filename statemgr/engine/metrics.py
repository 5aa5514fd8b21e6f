"""Prometheus metrics of one state manager; ``docs/operations.md`` lists them. Served if ``metrics.port`` is set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from statemgr.engine.commit_log import CommitLog
from statemgr.engine.health import Health
from statemgr.engine.http import serve
from statemgr.phases import Phase, add_observer, remove_observer, tasks_of
from statemgr.ports import Clock

_PUBLISH_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Restored(Protocol):
    """How a store was restored."""

    @property
    def factory(self) -> str: ...

    @property
    def bytes_fetched(self) -> int: ...

    @property
    def seconds(self) -> float: ...


class Metrics:
    """All metrics, in a registry of their own. Steps of flows are counted from the announced phases."""

    def __init__(self, job: str, job_key: str, port: int | None, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self.job = job
        self.clock = clock
        self._begun: dict[str, float] = {}
        #: task → the phase that it has announced last
        self.last_phase: dict[str, Phase] = {}
        publish = "From the begin of a publishing transaction to its acknowledgement"
        self._publish = Histogram(
            "statemgr_publish_seconds", publish, ["job"], buckets=_PUBLISH_BUCKETS, registry=self.registry
        ).labels(job)
        self._phases = self._counter("phases", "Steps taken", "task", "phase")
        self._restores = self._counter("restores", "Stores restored", "factory")
        self._restore_bytes = self._counter("restore_bytes", "Bytes fetched by restores", "factory")
        self._restore_seconds = self._counter("restore_seconds", "Seconds spent in restores", "factory")
        self.commits = self._counter("commits", "Commits that ended", "outcome")
        skipped = "Periodic commits skipped while another was in progress"
        waits = "Seconds that tasks waited for such commits"
        blocked = "Waits for commits that took longer than task.commit.max.delay.ms"
        self.skipped = self._counter("commits_skipped", skipped).labels(job)
        self.blocked = self._counter("commits_blocked", blocked).labels(job)
        self.blocked_seconds = self._counter("commit_blocked_seconds", waits).labels(job)
        self.materializations = self._counter("materializations", "Snapshots that ended", "outcome")
        self.changes = self._gauge("commit_changes", "Changes in the last commit")
        self.uploaded = self._gauge("commit_uploaded_bytes", "Bytes of the blobs that the last commit uploaded")
        self.seconds = self._gauge("commit_seconds", "Seconds that a phase of the last commit took", "phase")
        self.segments = self._gauge("segments", "Segments after the last snapshot", "store")
        self.segments_bytes = self._gauge("segments_bytes", "Bytes of the segments after the last snapshot", "store")
        self.materialization = self._gauge("materialization_seconds", "Seconds that the last snapshot took", "store")
        self.requests = self._gauge("commit_requests", "Blobs that the last commit uploaded, one PUT each")
        self.keys = self._gauge("state_keys", "Keys in the stores, as the local stores estimate them")
        self.bytes = self._gauge("state_bytes", "Bytes of the stores on disk")
        self._batches = self._counter("batches", "Micro-batches that ended", "kind")
        self._batch_seconds = self._counter("batch_seconds", "Seconds that a phase of the micro-batches took", "phase")
        self._rows = self._counter("batch_rows", "Rows of the micro-batches", "kind")
        self._keys = self._counter("batch_keys", "Keys that the micro-batches looked up or changed", "kind")
        self._retries = self._counter("batch_retries", "Attempts at tasks that failed and ran again").labels(job)
        self._watermark = Gauge(
            "statemgr_watermark_seconds", "Watermark in seconds since the epoch", ["job"], registry=self.registry
        )
        self.health = Health()
        self._served = None if port is None else serve(port, self.registry, self.health)
        add_observer(self._observe, job_key)

    def of(self, task: str) -> TaskMetrics:
        """The metrics of one task; close them with the task."""
        return TaskMetrics(self, task)

    def restored(self, restore: Restored) -> None:
        """Count one store's restore."""
        labels = (self.job, restore.factory)
        self._restores.labels(*labels).inc()
        self._restore_bytes.labels(*labels).inc(restore.bytes_fetched)
        self._restore_seconds.labels(*labels).inc(restore.seconds)

    def batch(
        self,
        *,
        replayed: bool,
        seconds: Mapping[str, float],
        rows: Mapping[str, int],
        keys: Mapping[str, int],
        retries: int,
        watermark_ms: int | None,
    ) -> None:
        """Count one micro-batch of an engine: seconds by phase, rows and keys by kind."""
        self._batches.labels(self.job, "replayed" if replayed else "published").inc()
        for counter, counted in ((self._batch_seconds, seconds), (self._rows, rows), (self._keys, keys)):
            for label, number in counted.items():
                counter.labels(self.job, label).inc(number)
        self._retries.inc(retries)
        if watermark_ms is not None:
            self._watermark.labels(self.job).set(watermark_ms / 1000)

    @property
    def port(self) -> int | None:
        """The port that is served, or None."""
        return self._served.port if self._served is not None else None

    def close(self) -> None:
        """Stop counting and serving."""
        remove_observer(self._observe)
        if self._served is not None:
            self._served.close()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"statemgr_{name}", text, ["job", *labels], registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"statemgr_{name}", text, ["job", "task", *labels], registry=self.registry)

    def _observe(self, phase: Phase, subject: str) -> None:
        for task in tasks_of(subject) or [""]:
            self.last_phase[task] = phase
            self._phases.labels(self.job, task, phase.value).inc()
        if phase is Phase.BEGIN:
            self._begun[subject] = self.clock.monotonic()
        elif phase is Phase.ACKNOWLEDGED and subject in self._begun:
            self._publish.observe(self.clock.monotonic() - self._begun.pop(subject))


class TaskMetrics:
    """The cost of one task's commits, and how long they blocked it."""

    def __init__(self, metrics: Metrics, task: str) -> None:
        self._metrics = metrics
        self._task = task
        #: What the log says about these commits.
        self.log = CommitLog(metrics.job, task, metrics.clock, lambda: metrics.last_phase.get(task))
        self._blocked_at: float | None = None
        #: Everything that was set for this task, in order to remove it.
        self._set: set[tuple[Gauge, tuple[str, ...]]] = set()
        self._closed = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase of a commit: ``flush``, ``upload``, ``publish`` or ``clean-up``."""
        begun = self._metrics.clock.monotonic()
        try:
            yield
        finally:
            self.took(name, self._metrics.clock.monotonic() - begun)

    def took(self, name: str, seconds: float) -> None:
        """Set the seconds of a phase of a commit."""
        self.log.took(name, seconds)
        self._gauge(self._metrics.seconds, seconds, name)

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
        self.log.changes = changes
        self._gauge(self._metrics.changes, changes)

    def uploaded(self, size: int) -> None:
        """Set the bytes that the commit uploaded."""
        self.log.uploaded = size
        self._gauge(self._metrics.uploaded, size)

    def requested(self, requests: int) -> None:
        """Set the number of blobs that the commit uploaded."""
        self._gauge(self._metrics.requests, requests)

    def holds(self, keys: int, size: int) -> None:
        """Set the estimated number of keys and the bytes of the task's stores."""
        self._gauge(self._metrics.keys, keys)
        self._gauge(self._metrics.bytes, size)

    def backlog(self, store: str, segments: int, size: int) -> None:
        """Set the number and the bytes of the segments in a store's published chain."""
        self._gauge(self._metrics.segments, segments, store)
        self._gauge(self._metrics.segments_bytes, size, store)

    def materialized(self, store: str, seconds: float | None) -> None:
        """Count a snapshot that took ``seconds``; None if it failed."""
        outcome = "failed" if seconds is None else "made"
        self._metrics.materializations.labels(self._metrics.job, outcome).inc()
        if seconds is not None:
            self._gauge(self._metrics.materialization, seconds, store)

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
        self.log.close()
        self._metrics.last_phase.pop(self._task, None)
        self.hold(False)
        for gauge, labels in self._set:
            gauge.remove(*labels)

    def _gauge(self, gauge: Gauge, value: float, *labels: str) -> None:
        if not self._closed:  # a snapshot may end after its task was closed
            every = (self._metrics.job, self._task, *labels)
            self._set.add((gauge, every))
            gauge.labels(*every).set(value)
