"""Prometheus metrics of commits and restores, fed by the announced phases. Served when ``metrics.port`` is set."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from statemgr.engine.commit_metrics import CommitMetrics
from statemgr.errors import UnavailableError
from statemgr.flows.restore import StoreRestore
from statemgr.phases import Phase, add_observer, remove_observer, tasks_of
from statemgr.ports import Clock

_COMMIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics of one state manager, in a registry of their own.

    ``statemgr_phases_total{task, phase}`` counts the steps that this job took in this process (``task`` is empty for
    those of the whole job); ``statemgr_publish_seconds`` is the time from the begin of a publishing transaction to its
    acknowledgement; ``statemgr_restore_*`` describe restores per factory; ``commits`` has those of a consumer loop's
    commits.
    """

    def __init__(self, job: str, job_key: str, port: int | None, clock: Clock) -> None:
        self.registry = CollectorRegistry()
        self._monotonic = clock.monotonic
        self.commits = CommitMetrics(job, self.registry, clock)
        self._begun: dict[str, float] = {}
        labels = {"job": job}
        self._phases = Counter("statemgr_phases", "Steps taken", ["job", "task", "phase"], registry=self.registry)
        self._publish = Histogram(
            "statemgr_publish_seconds",
            "From the begin of a publishing transaction to its acknowledgement",
            ["job"],
            buckets=_COMMIT_BUCKETS,
            registry=self.registry,
        ).labels(**labels)
        self._restores = Counter("statemgr_restores", "Stores restored", ["job", "factory"], registry=self.registry)
        self._restore_bytes = Counter(
            "statemgr_restore_bytes", "Bytes fetched by restores", ["job", "factory"], registry=self.registry
        )
        self._restore_seconds = Counter(
            "statemgr_restore_seconds",
            "Seconds spent in restores",
            ["job", "factory"],
            registry=self.registry,
        )
        self._job = job
        self._server = self._serve(port)
        add_observer(self._observe, job_key)

    def restored(self, restore: StoreRestore) -> None:
        """Count one store's restore."""
        labels = (self._job, restore.factory)
        self._restores.labels(*labels).inc()
        self._restore_bytes.labels(*labels).inc(restore.bytes_fetched)
        self._restore_seconds.labels(*labels).inc(restore.seconds)

    def close(self) -> None:
        remove_observer(self._observe)
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def _serve(self, port: int | None):  # type: ignore[no-untyped-def]
        if port is None:
            return None
        try:
            return start_http_server(port, registry=self.registry)
        except OSError as error:
            raise UnavailableError(
                f"metrics.port {port} cannot be used: {error}",
                key="metrics.port",
                hint="choose a free port, or 0 for any free port",
            ) from error

    @property
    def port(self) -> int | None:
        """The port that is served, or None."""
        return self._server[0].server_port if self._server is not None else None

    def _observe(self, phase: Phase, subject: str) -> None:
        for task in tasks_of(subject) or [""]:
            self._phases.labels(self._job, task, phase.value).inc()
        if phase is Phase.BEGIN:
            self._begun[subject] = self._monotonic()
        elif phase is Phase.ACKNOWLEDGED and subject in self._begun:
            self._publish.observe(self._monotonic() - self._begun.pop(subject))
