"""Prometheus metrics of one state manager, as :mod:`statemgr.telemetry.metric_declarations` declares them. Served if
``metrics.port`` is set.

Most are counted or set when something happens. The others are asked for at each scrape (:meth:`Metrics.watch`), such as
the lag of the input, which would cost the loop something for every message otherwise.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, product
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from statemgr.blobs.counting import Counted, counts_of
from statemgr.errors import ClosedError, StatemgrError
from statemgr.local import memory_in_use
from statemgr.phases import Phase, add_observer, remove_observer, tasks_of
from statemgr.ports import Clock
from statemgr.telemetry.http import serve
from statemgr.telemetry.liveness import Health
from statemgr.telemetry.metric_declarations import MOST_KINDS, PROCESS_BUCKETS, PUBLISH_BUCKETS, Series, Source, named
from statemgr.telemetry.task_metrics import ROCKSDB, TaskMetrics

log = logging.getLogger(__name__)


def _kinds(error: type[StatemgrError]) -> set[str]:
    return {error.__name__}.union(*(_kinds(one) for one in error.__subclasses__()))


#: Why a restore takes a factory, and where else a state comes from and why.
BACKEND_REASONS = ("first-choice", "damaged", "unreachable", "absent")
OTHER_RESTORES = (("local", "local-copy"), ("empty", "new"))
#: Kinds of failures that are served from the start.
KINDS = frozenset(_kinds(StatemgrError))


class Restored(Protocol):
    """How a store was restored."""

    @property
    def factory(self) -> str: ...

    @property
    def bytes_fetched(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def reason(self) -> str: ...


class Metrics:
    """All metrics, in a registry of their own. ``backends``: the factories that restores may use."""

    def __init__(self, job: str, job_key: str, port: int | None, clock: Clock, backends: Sequence[str] = ()) -> None:
        self.registry = CollectorRegistry()
        self.job = job
        self.clock = clock
        self._begun: dict[str, float] = {}
        #: task → the phase that it has announced last
        self.last_phase: dict[str, Phase] = {}
        self._tasks: dict[str, TaskMetrics] = {}
        self._kinds = set(KINDS)
        self._failed: dict[str, int] = {}
        self._changing = threading.Lock()
        self._blob_counts = counts_of(job_key)
        self._asked = _Asked(job, self.registry)
        self._asked.watch("tasks", lambda: [((), self.health.condition().tasks)])
        for name in ("requests", "retries", "hedges", "bytes"):
            self._asked.watch(f"blob_{name}", lambda name=name: self._blobs(name))  # type: ignore[misc]
        for name in ROCKSDB:
            self._asked.watch(name, lambda name=name: self._rocksdb(name))  # type: ignore[misc]
        self._asked.watch("memory_bytes", lambda: [((), memory_in_use()[0])])
        self._asked.watch("memory_limit_bytes", lambda: [((), memory_in_use()[1])])
        publish = named("publish_seconds")
        self._publish = Histogram(
            publish.name, publish.text, ["job"], buckets=PUBLISH_BUCKETS, registry=self.registry
        ).labels(job)
        self.process_seconds = Durations(job, "process_seconds", PROCESS_BUCKETS, self.registry)
        self._failures = self.counter("failures")
        for kind in sorted(KINDS):
            self._failures.labels(job, kind)
        self._restores = self.counter("restores")
        self._restore_bytes = dict.fromkeys((*backends, "local", "empty"), 0)
        self._asked.watch("restore_bytes", self._restored_bytes)
        self._restore_seconds = self.counter("restore_seconds")
        for backend, reason in (*product(backends, BACKEND_REASONS), *OTHER_RESTORES):
            self._restores.labels(job, backend, reason)
            self._restore_seconds.labels(job, backend)
        self.restore_progress = self.gauge("restore_progress_ratio")
        self.last_commit = self.gauge("last_commit_timestamp_seconds")
        self.commits = self.counter("commits")
        self.skipped = self.counter("commits_skipped").labels(job)
        self.blocked = self.counter("commits_blocked").labels(job)
        self.blocked_seconds = self.counter("commit_blocked_seconds").labels(job)
        self.materializations = self.counter("materializations")
        self.changes = self.gauge("commit_changes")
        self.uploaded = self.gauge("commit_uploaded_bytes")
        self.seconds = self.gauge("commit_seconds")
        self.segments = self.gauge("segments")
        self.segments_bytes = self.gauge("segments_bytes")
        self.materialization = self.gauge("materialization_seconds")
        self.requests = self.gauge("commit_requests")
        self.keys = self.gauge("state_keys")
        self.bytes = self.gauge("state_bytes")
        self.health = Health()
        self._served = None if port is None else serve(port, self.registry, self.health)
        add_observer(self._observe, job_key)

    def of(self, task: str) -> TaskMetrics:
        """The metrics of a task that is being opened; close them with the task."""
        made = TaskMetrics(self, task)
        with self._changing:
            self._tasks[task] = made
        return made

    def task(self, task: str) -> TaskMetrics:
        """The metrics of a task that stays open as long as this manager."""
        return self._tasks.get(task) or self.of(task)

    def forget(self, task: str, closed: TaskMetrics | None = None) -> None:
        """Remove what is left of a task that this process no longer has. Not if it has the task again, by other metrics
        than ``closed``."""
        with self._changing:
            if self._tasks.get(task) is not closed:
                return
            self._tasks.pop(task, None)
            self.last_phase.pop(task, None)

    def watch(self, name: str, source: Source) -> None:
        """Ask ``source`` for the series of a declared gauge or counter at every scrape (name without ``statemgr_``)."""
        self._asked.watch(name, source)

    def unwatch(self, source: Source) -> None:
        """Ask no more. Waits for a scrape in progress."""
        self._asked.unwatch(source)

    def failed(self, error: BaseException) -> None:
        """Count a failure by the class of its error, once if several callers report the same error."""
        if getattr(error, "_is_counted", False):
            return
        error._is_counted = True  # type: ignore[attr-defined]
        self.failed_by(type(error).__name__)

    def failed_by(self, kind: str) -> None:
        """Count a failure whose error has this class, here or in another process of the job."""
        with self._changing:
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                kind = "other"
            self._kinds.add(kind)
            self._failed[kind] = self._failed.get(kind, 0) + 1
        self._failures.labels(self.job, kind).inc()

    @contextmanager
    def committing(self, commits: int = 1, *, begins: bool = False) -> Iterator[None]:
        """Count commits that are published together; as failed if the block raises. ClosedError does not count, because
        they were given up. ``begins``: another block publishes them later."""
        try:
            yield
        except ClosedError:
            raise
        except BaseException as error:
            self.commits.labels(self.job, "failed").inc(commits)
            if isinstance(error, Exception):
                self.failed(error)
            raise
        if not begins:
            self.commits.labels(self.job, "published").inc(commits)

    def failures(self) -> dict[str, int]:
        """Kind → how often something has failed so far, without the kinds that never have."""
        with self._changing:
            return dict(sorted(self._failed.items()))

    def blobs(self, counted: Counted) -> None:
        """Add the requests to the blob store that another process of the job made."""
        self._blob_counts.merge(counted)

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return self.clock.time_ns() / 1e9

    def restored(self, restore: Restored) -> None:
        """Count one store's restore."""
        backend = restore.factory
        self._restores.labels(self.job, backend, restore.reason).inc()
        self._restore_seconds.labels(self.job, backend).inc(restore.seconds)
        with self._changing:
            self._restore_bytes[backend] = self._restore_bytes.get(backend, 0) + restore.bytes_fetched

    @cached_property
    def batches(self) -> Batches:
        """The metrics of an engine's micro-batches. They are served from the first use on."""
        return Batches(self)

    @property
    def port(self) -> int | None:
        """The port that is served, or None."""
        return self._served.port if self._served is not None else None

    def close(self) -> None:
        """Stop counting and serving."""
        remove_observer(self._observe)
        if self._served is not None:
            self._served.close()

    def counter(self, name: str) -> Counter:
        """A declared counter."""
        found = named(name)
        made = Counter(found.name, found.text, ["job", *found.labels], registry=self.registry)
        for labels in found.known:
            made.labels(self.job, *labels)
        return made

    def gauge(self, name: str) -> Gauge:
        """A declared gauge."""
        found = named(name)
        return Gauge(found.name, found.text, ["job", *found.labels], registry=self.registry)

    def _rocksdb(self, name: str) -> Series:
        with self._changing:
            tasks = list(self._tasks.values())
        return [found for task in tasks for found in task.rocksdb(name)]

    def _blobs(self, name: str) -> list[tuple[tuple[str, ...], float]]:
        counted = dict.fromkeys(named(f"blob_{name}").known, 0)
        counted |= {count[1:]: number for count, number in self._blob_counts.read().items() if count[0] == name}
        return list(counted.items())

    def _restored_bytes(self) -> list[tuple[tuple[str, ...], float]]:
        """What openings fetched, and what has arrived of the stores since."""
        counted = self._blob_counts.read()
        with self._changing:
            fetched = dict(self._restore_bytes)
        return [((backend,), size + counted.get(("restored", backend), 0)) for backend, size in fetched.items()]

    def _observe(self, phase: Phase, subject: str) -> None:
        for task in tasks_of(subject) or [""]:
            self.last_phase[task] = phase
        if phase is Phase.BEGIN:
            self._begun[subject] = self.clock.elapsed()
        elif phase is Phase.ACKNOWLEDGED and subject in self._begun:
            self._publish.observe(self.clock.elapsed() - self._begun.pop(subject))


class Batches:
    """The metrics of an engine's micro-batches."""

    def __init__(self, metrics: Metrics) -> None:
        self._job = metrics.job
        self._batches = metrics.counter("batches")
        self._seconds = metrics.counter("batch_seconds")
        self._rows = metrics.counter("batch_rows")
        self._keys = metrics.counter("batch_keys")
        self._retries = metrics.counter("batch_retries").labels(self._job)
        self._watermark = metrics.gauge("watermark_seconds")

    def count(
        self,
        *,
        replayed: bool,
        seconds: Mapping[str, float],
        rows: Mapping[str, int],
        keys: Mapping[str, int],
        retries: int,
        watermark_ms: int | None,
    ) -> None:
        """Count one micro-batch: seconds by phase, rows and keys by kind."""
        self._batches.labels(self._job, "replayed" if replayed else "published").inc()
        for counter, counted in ((self._seconds, seconds), (self._rows, rows), (self._keys, keys)):
            for label, number in counted.items():
                counter.labels(self._job, label).inc(number)
        self._retries.inc(retries)
        if watermark_ms is not None:
            self._watermark.labels(self._job).set(watermark_ms / 1000)


class Durations(Collector):
    """A histogram that one thread counts in without a lock, several calls at a time."""

    def __init__(self, job: str, name: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._job, self._name, self._buckets = job, name, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def took(self, seconds: float, calls: int = 1) -> None:
        """Count calls that took ``seconds`` together, and about the same time each."""
        self._counts[bisect_left(self._buckets, seconds / calls)] += calls
        self._sum += seconds

    def describe(self) -> list[HistogramMetricFamily]:
        """Nothing: the name is known from the declarations."""
        return []

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The buckets, each with the calls that took no longer. Any thread may call this."""
        declared = named(self._name)
        family = HistogramMetricFamily(declared.name, declared.text, labels=["job"])
        ends = [*map(floatToGoString, self._buckets), "+Inf"]
        family.add_metric([self._job], list(zip(ends, accumulate(self._counts), strict=True)), self._sum)
        yield family


class _Asked(Collector):
    """Asks its sources at each scrape. A source that fails is left out of the scrape.

    Registers itself, so that the series exist only as long as their source is watched.
    """

    def __init__(self, job: str, registry: CollectorRegistry) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._sources: list[tuple[str, Source]] = []
        registry.register(self)

    def watch(self, name: str, source: Source) -> None:
        """Ask for the series of a declared metric (without ``statemgr_``) from now on."""
        named(name)
        with self._lock:
            self._sources.append((name, source))

    def unwatch(self, source: Source) -> None:
        """Ask ``source`` no more. Waits for a scrape in progress."""
        with self._lock:
            self._sources = [entry for entry in self._sources if entry[1] != source]

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the names are known from the declarations."""
        return []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The series of all sources, by metric."""
        with self._lock:
            families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
            for name, source in self._sources:
                declared = named(name)
                kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
                family = families.setdefault(name, kind(declared.name, declared.text, labels=["job", *declared.labels]))
                try:
                    for labels, value in source():
                        family.add_metric([self._job, *labels], value)
                except Exception:  # a scrape shows what it can
                    log.debug("the values of %s are unknown", declared.name, exc_info=True)
        yield from families.values()
