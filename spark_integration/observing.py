"""Passes the report of a finished batch to the list of recent ones, listeners, Prometheus and the log.

Runs on the driver after the batch's output was written. Nothing here can fail the batch.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from spark_integration.reports import BatchReport, OnBatch, StatefulQueryListener
from spark_integration.story import BatchLog

if TYPE_CHECKING:
    from statemgr import StateManager

log = logging.getLogger(__name__)
#: Reports that are kept, and the tasks in them, of about 2.5 KB each. The last report is kept whatever it has.
_REPORTS_KEPT, _TASKS_KEPT = 100, 20_000


class Observers:
    """All observers of one query. ``on_batch`` is the function that was set before the query started, if any."""

    def __init__(self, manager: StateManager, on_batch: OnBatch | None) -> None:
        self.recent: deque[BatchReport] = deque(maxlen=_REPORTS_KEPT)
        self._metrics, self._batches = manager.metrics, manager.metrics.batches
        self._log = BatchLog(manager.clock)
        self._on_batch = on_batch
        self._listeners: tuple[StatefulQueryListener, ...] = ()

    def add(self, listener: StatefulQueryListener) -> None:
        """Add a listener. Any thread may call this."""
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: StatefulQueryListener) -> None:
        """Remove a listener. Like Spark, ignore one that was not added."""
        self._listeners = tuple(one for one in self._listeners if one is not listener)

    def observe(self, report: BatchReport) -> None:
        """Pass on the report of a finished batch."""
        self.recent.append(report)
        while len(self.recent) > 1 and sum(len(one.tasks) for one in self.recent) > _TASKS_KEPT:
            self.recent.popleft()
        self._log.published(report)
        functions = [] if self._on_batch is None else [("on_batch", self._on_batch)]
        functions += [(type(listener).__name__, listener.onBatch) for listener in self._listeners]
        functions.append(("metrics", self._measure))
        for name, function in functions:
            try:
                function(report)
            except Exception:  # the batch is complete without its report
                log.exception(
                    "%s failed for the report of batch %s, sequence %s", name, report.batch_id, report.sequence
                )

    def close(self) -> None:
        """Close the observers after the last batch. Idempotent."""
        self._log.close()

    def _measure(self, report: BatchReport) -> None:
        metrics = self._metrics
        self._batches.count(
            replayed=report.replayed,
            seconds=_phases(report),
            rows={"input": report.input_rows, "late": report.late_rows, "output": report.output_rows},
            keys={"read": report.keys_read, "written": report.keys_written},
            retries=report.retries,
            watermark_ms=report.watermark_ms,
        )
        for one in report.restored:
            metrics.restored(one)
        for task in report.tasks:
            metrics.blobs({tuple(name): number for *name, number in task.blob_counts})
            for made, store, seconds, kind in task.snapshots:
                metrics.task(made).materialized(store, seconds)
                if kind is not None:
                    metrics.failed_by(kind)
            of = metrics.task(task.task)
            of.carried(task.keys_written)
            of.uploaded(task.commit_bytes)
            of.requested(task.commit_requests)
            of.took("open", task.open_seconds)
            of.took("process", task.process_seconds)
            of.took("prepare", task.prepare_seconds)
            of.holds(task.keys_estimated, task.state_bytes)
            for store, (segments, size) in task.segments.items():
                of.backlog(store, segments, size)
        for one in report.restored:
            metrics.task(one.task).restoring(one.store, 1.0)


def _phases(report: BatchReport) -> dict[str, float]:
    return {"stage": report.stage_seconds, "publish": report.publish_seconds, "output": report.output_seconds}
