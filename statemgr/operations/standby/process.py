"""A warm standby of a job's tasks: its loop and its metrics. ``operations/standby/standby.py`` has the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

from statemgr.config import JobConfig
from statemgr.errors import InvalidError, StatemgrError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.standby.standby import Followed, Follower
from statemgr.ports import Progress, no_progress
from statemgr.services import Services
from statemgr.telemetry.liveness import Condition
from statemgr.telemetry.metrics import Metrics
from statemgr.wiring import open_services

_MOST_BACKOFF_S = 60.0


class _Stopped(Exception):
    """Ends a restore in progress when the standby stops. Callers never see it."""


class Standby:
    """Keeps the state of tasks on this machine (below ``state.dir``), at most one checkpoint behind.

    Reads the checkpoint topic and fetches what is missing; fences nobody, and writes nothing to Kafka or to blobs.
    Metrics, in addition to those of restores: ``statemgr_standby_sequence{task}`` and
    ``statemgr_standby_checkpoint_seconds{task}`` (sequence number and time of the checkpoint that this machine has),
    and ``statemgr_standby_failures_total``.

    Args:
        tasks: ``Partition <i>``; if none is named, all that have a checkpoint.
        progress: called while a store is fetched.
        services: makes the adapters, the clock, the source of IDs and the threads.

    Raises: InvalidError if the job has no such task.
    """

    def __init__(
        self,
        config: JobConfig,
        tasks: Collection[str] = (),
        progress: Progress = no_progress,
        services: Callable[[JobConfig], Services] = open_services,
    ) -> None:
        for task in tasks:
            config.check_task(task)
        self._job = config.job_name
        self._shown = progress
        self._stopped = False
        self._changed = threading.Condition()
        #: tasks without a checkpoint that were reported
        self._waiting: set[str | None] = set()
        with ExitStack() as undo:
            self._services = services(config)
            undo.callback(self._services.close)
            self._log = CheckpointTopic(config, self._services.clock)
            undo.callback(self._log.close)
            self.metrics = Metrics(
                config.job_name, config.job_key, config.metrics_port, self._services.clock, config.restore_factories
            )
            undo.callback(self.metrics.close)
            self._closing = undo.pop_all()
        self._is_ready = False
        self.metrics.health.base = self._condition
        self._sequence = self.metrics.gauge("standby_sequence")
        self._taken = self.metrics.gauge("standby_checkpoint_seconds")
        self._failures = self.metrics.counter("standby_failures").labels(self._job)
        self._follower = Follower(self._services, self._log, tasks, self._progress)

    def once(self) -> list[Followed]:
        """One turn. Raises: InvalidError, MissingState, CorruptRecord, UnavailableError for the topic as a whole."""
        turn = self._follower.turn()
        for followed in turn:
            if followed.error is not None:
                self._failures.inc()
                self.metrics.failed(followed.error)
            elif followed.checkpoint is not None:
                self._sequence.labels(self._job, followed.task).set(followed.checkpoint.sequence)
                self._taken.labels(self._job, followed.task).set(followed.checkpoint.checkpoint_id.millis / 1000)
                for restored in followed.stores:
                    self.metrics.restored(restored)
        self._is_ready = self._is_ready or all(followed.error is None for followed in turn)
        return turn

    def run(self, report: Callable[[Followed], None], interval_s: float = 1.0) -> None:
        """Follow until :meth:`stop`, and look for new checkpoints every ``interval_s`` seconds.

        Reports failures and tries again, after waits that grow to a minute. Reports once that a task has no commit yet.
        Raises: InvalidError (a wrong configuration).
        """
        delay = interval_s
        while not self._stopped:
            failed = False
            for followed in self._turn():
                if followed.waits:
                    if followed.task in self._waiting:
                        continue
                    self._waiting.add(followed.task)
                failed = failed or followed.error is not None
                report(followed)
            delay = min(2 * delay, max(_MOST_BACKOFF_S, interval_s)) if failed else interval_s
            with self._changed:
                if not self._stopped:
                    self._services.clock.wait(self._changed, delay)

    def stop(self, *_: Any) -> None:
        """End :meth:`run` and what it fetches. May be called from a signal handler."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close every connection. Local directories stay. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _condition(self) -> Condition:
        return Condition(unready=() if self._is_ready else ("the current checkpoints were not fetched yet",))

    def _turn(self) -> list[Followed]:
        try:
            return self.once()
        except _Stopped:
            return []
        except InvalidError:
            raise
        except StatemgrError as error:
            self._failures.inc()
            self.metrics.failed(error)
            return [Followed(None, None, error=error)]

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._stopped:
            raise _Stopped
        self._shown(what, done, total)
