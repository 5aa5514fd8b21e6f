"""The metrics of one task. They disappear with the task, because another process may own it from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from statemgr.errors import StatemgrError
from statemgr.telemetry.asked_metrics import Series, Source
from statemgr.telemetry.commit_log import CommitLog

if TYPE_CHECKING:
    from statemgr.ports import PartialState
    from statemgr.stores.open_store import OpenStore
    from statemgr.telemetry.metrics import Metrics


class TaskMetrics:
    """The state and the commits of one task."""

    def __init__(self, metrics: Metrics, task: str) -> None:
        self._metrics = metrics
        self._task = task
        #: What the log says about its commits.
        self.log = CommitLog(metrics.job, task, metrics.clock, lambda: metrics.last_phase.get(task))
        self._blocked_at: float | None = None
        #: Everything that was set for this task, in order to remove it.
        self._set: set[tuple[Gauge, tuple[str, ...]]] = set()
        self._setting = threading.Lock()
        self._sources: list[Source] = []
        self._closed = False

    # --- restores --------------------------------------------------------------------------------------------------

    def restoring(self, store: str, ratio: float) -> None:
        """Set the share of a store's restore that is done, from 0 to 1."""
        self._gauge(self._metrics.restore_progress, ratio, store)

    def opened(self) -> None:
        """The task is open from now on."""
        self._gauge(self._metrics.last_commit, self._metrics.now_s())

    def fills(self, stores: Mapping[str, OpenStore]) -> None:
        """From now on, say at each scrape what of these stores is still to come."""
        parts = [(name, store.by_need) for name, store in stores.items() if store.by_need is not None]
        values: dict[str, Callable[[PartialState], float]] = {
            "restore_bytes_to_come": lambda part: part.missing,
            "restore_seconds_to_come": lambda part: part.missing / part.rate if part.rate else 0.0,
            "restore_faults": lambda part: part.faults,
        }
        for name, value in values.items() if parts else ():

            def source(value: Callable[[PartialState], float] = value) -> Series:
                return [((self._task, store), value(part)) for store, part in parts]

            self._metrics.watch(name, source)
            self._sources.append(source)

    # --- commits ---------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure one phase of a commit: ``flush``, ``upload``, ``publish`` or ``clean-up``."""
        begun = self._metrics.clock.elapsed()
        try:
            yield
        finally:
            self.took(name, self._metrics.clock.elapsed() - begun)

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
            self.committed()
        except Exception as error:
            self._metrics.failed(error)
            raise
        finally:
            self._metrics.commits.labels(self._metrics.job, outcome).inc()

    def committed(self) -> None:
        """A commit was published now."""
        self._gauge(self._metrics.last_commit, self._metrics.now_s())

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

    # --- state -----------------------------------------------------------------------------------------------------

    def holds(self, keys: int, size: int) -> None:
        """Set the estimated number of keys and the bytes of the task's stores."""
        self._gauge(self._metrics.keys, keys)
        self._gauge(self._metrics.bytes, size)

    def measure(self, stores: Mapping[str, OpenStore]) -> None:
        """Ask open stores for their keys and bytes. On the task's thread."""
        with suppress(StatemgrError):  # the next use of the store reports it
            counted = [store.content.statistics() for store in stores.values()]
            self.holds(total(counted, KEYS), total(counted, BYTES))

    def backlog(self, store: str, segments: int, size: int) -> None:
        """Set the number and the bytes of the segments in a store's published chain."""
        self._gauge(self._metrics.segments, segments, store)
        self._gauge(self._metrics.segments_bytes, size, store)

    def materialized(self, store: str, seconds: float | None, error: Exception | None = None) -> None:
        """Count a snapshot that took ``seconds``; None if it failed with ``error``."""
        outcome = "failed" if seconds is None else "made"
        self._metrics.materializations.labels(self._metrics.job, outcome).inc()
        if seconds is not None:
            self._gauge(self._metrics.materialization, seconds, store)
        if error is not None:
            self._metrics.failed(error)

    # --- waits -----------------------------------------------------------------------------------------------------

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
        now = self._metrics.clock.elapsed()
        if self._blocked_at is not None:
            self._metrics.blocked_seconds.inc(now - self._blocked_at)
        elif held:
            self._metrics.blocked.inc()
        self._blocked_at = now if held else None

    def close(self) -> None:
        """Forget the task: another process may own it from now on. Idempotent."""
        self.hold(False)
        self.log.close()
        for source in self._sources:
            self._metrics.unwatch(source)
        with self._setting:
            closed, self._closed = self._closed, True
            for gauge, labels in self._set:
                gauge.remove(*labels)
            self._set.clear()
        if not closed:
            self._metrics.forget(self._task, self)

    def _gauge(self, gauge: Gauge, value: float, *labels: str) -> None:
        every = (self._metrics.job, self._task, *labels)
        with self._setting:
            if not self._closed:  # a snapshot may end after its task was closed
                self._set.add((gauge, every))
                gauge.labels(*every).set(value)


#: Names of the same number in the statistics of each kind of store.
KEYS = ("rocksdb.estimate-num-keys", "memory.keys")
BYTES = ("rocksdb.live-sst-files-size", "memory.bytes")


def total(statistics: list[Mapping[str, float]], names: tuple[str, ...]) -> int:
    """The sum of a number over stores."""
    return int(sum(one.get(name, 0) for one in statistics for name in names))
