"""The metrics of one task, and what the log says about its commits.

The metrics disappear with the task, because another process may own it from then on. The log has at most one line in
:data:`INTERVAL_S` seconds, with the sums since the line before, and a line about a commit that takes long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING

from prometheus_client import Gauge

from statemgr.errors import StatemgrError
from statemgr.logs import Event, counted, size, tell
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase
from statemgr.ports import Clock
from statemgr.telemetry.metric_declarations import Series, Source

if TYPE_CHECKING:
    from statemgr.ports import PartialState
    from statemgr.stores.open_store import OpenStore
    from statemgr.telemetry.metrics import Metrics

#: Names of the same number in the statistics of each kind of store.
KEYS = ("rocksdb.estimate-num-keys", "memory.keys")
BYTES = ("rocksdb.live-sst-files-size", "memory.bytes")
#: Metric → the properties of RocksDB that it is the sum of, at each scrape.
ROCKSDB = {
    "rocksdb_keys": ("rocksdb.estimate-num-keys",),
    "rocksdb_bytes": ("rocksdb.live-sst-files-size",),
    "rocksdb_memtable_bytes": ("rocksdb.size-all-mem-tables",),
    "rocksdb_compaction_bytes": ("rocksdb.estimate-pending-compaction-bytes",),
    "rocksdb_writes_slowed": ("rocksdb.is-write-stopped", "rocksdb.actual-delayed-write-rate"),
}
log = logging.getLogger("statemgr.commits")
#: Seconds between two lines about the commits of a task.
INTERVAL_S = 30.0
#: Seconds after which a commit in progress has a line.
LONG_S = 10.0
_BLOBS, _KAFKA, _DISK, _CLEAN_UP = "the blob store", "Kafka", "the local disk", "the blob store, to clean up"
_EITHER = "Kafka or the blob store, to begin the backups"
#: What a task waits for while it is in a phase.
_WAITS_FOR = {
    Phase.FENCE: "Kafka, to fence older owners",
    Phase.READ_TOPIC: "Kafka, to read the checkpoint topic",
    Phase.GET_INDEX: _BLOBS,
    Phase.FETCH: _BLOBS,
    Phase.REPLAY: "Kafka, to replay the changelog",
    Phase.APPLY_SEGMENTS: _DISK,
    Phase.VERIFY: _DISK,
    Phase.SWAP: _DISK,
    Phase.OPEN: _DISK,
    # the flush has ended before a commit is in progress
    Phase.FLUSH: _EITHER,
    Phase.CHECKPOINT_DIR: _EITHER,
    Phase.DIFF: _BLOBS,
    Phase.UPLOAD: _BLOBS,
    Phase.PUT_INDEX: _BLOBS,
    Phase.PUT_SEGMENTS: _BLOBS,
    Phase.PREPARED: _KAFKA,
    Phase.BEGIN: _KAFKA,
    Phase.SEND_CHANGELOG: _KAFKA,
    Phase.SEND_CHECKPOINT: _KAFKA,
    Phase.COMMIT_TRANSACTION: _KAFKA,
    Phase.ACKNOWLEDGED: _CLEAN_UP,
    Phase.REMOVE_TTL: _CLEAN_UP,
    Phase.DELETE_BLOBS: _CLEAN_UP,
    Phase.DELETE_INDEX: _CLEAN_UP,
}


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
        self._stores: Mapping[str, OpenStore] = {}
        self._closed = False

    # --- restores --------------------------------------------------------------------------------------------------

    def restoring(self, store: str, ratio: float) -> None:
        """Set the share of a store's restore that is done, from 0 to 1."""
        self._gauge(self._metrics.restore_progress, ratio, store)

    def opened(self) -> None:
        """The task is open from now on."""
        self._gauge(self._metrics.last_commit, self._metrics.now_s())

    def watch(self, stores: Mapping[str, OpenStore]) -> None:
        """From now on, say at each scrape what RocksDB says of these stores, and what of them is still to come."""
        self._stores = stores
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

    def rocksdb(self, metric: str) -> Series:
        """The series of a metric of :data:`ROCKSDB`. Leaves out stores of another type, and those that are closed or
        busy."""
        for name, store in tuple(self._stores.items()):
            found = [store.local.gauge(one) for one in ROCKSDB[metric]]
            known = [value for value in found if value is not None]
            if known:
                yield (self._task, name), bool(sum(known)) if metric == "rocksdb_writes_slowed" else sum(known)

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

    def begins_commit(self) -> AbstractContextManager[None]:
        """Count one commit as failed if the block, which begins it, raises."""
        return self._metrics.committing(begins=True)

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Count one commit; as failed if the block raises."""
        with self._metrics.committing():
            yield
            self.committed()

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
        self._stores = {}
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


def total(statistics: list[Mapping[str, float]], names: tuple[str, ...]) -> int:
    """The sum of a number over stores."""
    return int(sum(one.get(name, 0) for one in statistics for name in names))


def waits_for(phase: Phase | None) -> str:
    """What a task waits for that has announced this phase last, and the phase itself."""
    if phase is None:
        return "a free thread"
    return f"{_WAITS_FOR.get(phase, 'other work')} (phase {phase.value})"


class CommitLog:
    """Sums up commits. The first one has a line of its own. Safe to use from many threads.

    Args:
        phase: returns the phase that the task has announced last.
    """

    def __init__(self, job: str, task: str, clock: Clock, phase: Callable[[], Phase | None]) -> None:
        self._job = job
        self._task = task
        self._clock = clock
        self._phase = phase
        self._lock = threading.Lock()
        self._last: float | None = None
        self._checkpoint: Checkpoint | None = None
        self._next_wait = LONG_S
        #: Those of the commit in progress. A commit that fails is repeated with the same changes.
        self.changes = self.uploaded = 0
        self._forget()

    def took(self, phase: str, seconds: float) -> None:
        """A phase of a commit has ended."""
        with self._lock:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def committed(self, checkpoint: Checkpoint) -> None:
        """Count a published commit, and write the line if it is time."""
        with self._lock:
            self._commits += 1
            self._changes += self.changes
            self._bytes += self.uploaded
            self._checkpoint = checkpoint
            self.changes = self.uploaded = 0
            now = self._clock.elapsed()
            if self._last is None or now - self._last >= INTERVAL_S:
                self._write(now, checkpoint)

    def waits(self, age_s: float) -> None:
        """Say what a commit waits for that is so old: after :data:`LONG_S`, and then every :data:`INTERVAL_S`."""
        if age_s < LONG_S:
            self._next_wait = LONG_S
        elif age_s >= self._next_wait:
            self._next_wait = age_s + INTERVAL_S
            tell(
                log, Event.WAITING, "%s: a commit has been in progress for %.0f s, and waits for %s",
                self._task, age_s, waits_for(self._phase()),
                level=logging.WARNING, job=self._job, task=self._task, seconds=round(age_s, 1), phase=self._phase(),
            )  # fmt: skip

    def close(self) -> None:
        """Write the line about commits that no line has counted."""
        with self._lock:
            if self._commits and self._checkpoint is not None:
                self._write(self._clock.elapsed(), self._checkpoint)

    def _write(self, now: float, checkpoint: Checkpoint) -> None:
        phases = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        count = counted(self._commits, "commit")
        tell(
            log, Event.COMMITTED, "%s: committed %s (%s: %s, %s uploaded; %s)",
            self._task, checkpoint.checkpoint_id,
            count if self._last is None else f"{count} in {now - self._last:.0f} s",
            counted(self._changes, "change"), size(self._bytes),
            ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items()),
            job=self._job, task=self._task, checkpoint=str(checkpoint.checkpoint_id),
            sequence=checkpoint.sequence, commits=self._commits, changes=self._changes, bytes=self._bytes,
            phases=phases,
        )  # fmt: skip
        self._last = now
        self._forget()

    def _forget(self) -> None:
        self._commits = self._changes = self._bytes = 0
        self._seconds: dict[str, float] = {}
        self._checkpoint = None
