"""The driver's log lines about a query: took over, restored, failed, publishing again, stopping, stopped.

The lines about published batches are limited in number, like those about the commits of a consumer loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from spark_integration.reports import BatchReport, RestoreReport
from statemgr import JobConfig
from statemgr.engine import Epoch
from statemgr.logs import Event, counted, ranges, size, tell
from statemgr.ports import Clock

log = logging.getLogger(__name__)
#: Seconds between two lines about published batches.
INTERVAL_S = 30.0


class BatchLog:
    """The log lines about the batches of one query.

    The first line is the report of the first batch. After that, there is at most one line in :data:`INTERVAL_S`
    seconds, with the sums since the line before. A batch whose output is delivered again gets its own line.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: float | None = None
        self._reports: list[BatchReport] = []

    def published(self, report: BatchReport) -> None:
        """Count a batch, and write the line if it is due."""
        with self._lock:
            now = self._clock.monotonic()
            if report.replayed:
                self._write([report], 0.0)
                return
            self._reports.append(report)
            if self._last is None or now - self._last >= INTERVAL_S:
                self._flush(now)

    def close(self) -> None:
        """Write a line about the batches that no line has counted yet."""
        with self._lock:
            self._flush(self._clock.monotonic())

    def _flush(self, now: float) -> None:
        reports, self._reports = self._reports, []
        if reports:
            self._write(reports, now - (now if self._last is None else self._last))
            self._last = now

    def _write(self, reports: Sequence[BatchReport], seconds: float) -> None:
        last = reports[-1]
        rows, changes = sum(one.input_rows for one in reports), sum(one.keys_written for one in reports)
        uploaded = sum(one.commit_bytes for one in reports)
        phases = {
            "stage": sum(one.stage_seconds for one in reports),
            "publish": sum(one.publish_seconds for one in reports),
            "output": sum(one.output_seconds for one in reports),
        }
        line = str(last)
        if len(reports) > 1:
            took = ", ".join(f"{name} {part:.3f} s" for name, part in phases.items())
            line = (
                f"{last.job}: {counted(len(reports), 'batch', 'batches')} published in {seconds:.0f} s, up to batch "
                f"{last.batch_id} as sequence {last.sequence} ({counted(rows, 'row')} in, "
                f"{counted(changes, 'change')}, {size(uploaded)} uploaded; {took})"
            )
        tell(
            log, Event.COMMITTED, "%s", line, job=last.job, batch_id=last.batch_id, sequence=last.sequence,
            replayed=last.replayed, batches=len(reports), rows=rows, changes=changes, bytes=uploaded,
            phases={name: round(part, 3) for name, part in phases.items()},
        )  # fmt: skip


def took_over(config: JobConfig, epoch: Epoch) -> None:
    """Log that the driver owns the job."""
    job = config.job_name
    newest = max((one.sequence for one in epoch.checkpoints.values() if one is not None), default=0)
    at = f"continues after sequence {newest}" if newest else "nothing is published yet"
    tell(
        log, Event.ASSIGNED, "%s: took over %s; %s", job, counted(config.tasks, "task"), at,
        job=job, tasks=ranges(range(config.tasks)), sequence=newest,
    )  # fmt: skip


def sends_to_kafka(job: str, *, in_transaction: bool) -> None:
    """Log which way the output records take."""
    if in_transaction:
        log.info("%s: output records are in Kafka once: the transaction that publishes the state sends them", job)
    else:
        log.info(
            "%s: Spark sends the output records, to brokers that are not the job's: those of a sequence that is given "
            "again are sent again", job,
        )  # fmt: skip


def restored(job: str, report: RestoreReport) -> None:
    """Log that an executor has restored a store from a backend."""
    why = "; ".join(f"{factory} was not used: {reason}" for factory, reason in report.reasons.items())
    tell(
        log, Event.RESTORED, "%s/%s: restored on an executor from %s in %.3f s (%s fetched, %s reused, %s)%s; %s",
        report.task, report.store, report.factory, report.seconds, size(report.bytes_fetched),
        size(report.bytes_reused), counted(report.records, "record"),
        f", {size(report.bytes_to_come)} to come" if report.bytes_to_come else "",
        why or "the first of task.restore.factories",
        job=job, task=report.task, store=report.store, backend=report.factory,
        why=why or "the first of task.restore.factories", bytes=report.bytes_fetched,
        bytes_reused=report.bytes_reused, bytes_to_come=report.bytes_to_come, records=report.records,
        seconds=round(report.seconds, 3),
    )  # fmt: skip


def publishing_again(job: str, error: BaseException) -> None:
    """Log that a publish has failed, or that its outcome is unknown."""
    tell(log, Event.RETRYING, "%s: publishing again: %s", job, error, level=logging.WARNING, job=job)


def left_out(job: str, sequence: int, error: BaseException) -> None:
    """Log that the output of a batch is lost, and not delivered."""
    log.warning("%s: the output of sequence %d is left out, with permission: %s", job, sequence, error)


def failed(job: str, error: BaseException) -> None:
    """Log that a batch has failed, which ends the query."""
    what = type(error).__name__
    first = next(iter(str(error).splitlines()), "")
    tell(log, Event.FAILED, "%s: a batch failed: %s: %s", job, what, first, level=logging.ERROR, job=job, error=what)


def stopping(job: str, why: str) -> None:
    """Log that the query was asked to stop."""
    tell(log, Event.STOPPING, "%s: stopping because %s", job, why, job=job, why=why)


def given_up(job: str, error: BaseException) -> None:
    """Log that a stop has interrupted a batch, which the next start runs again."""
    log.info("%s: the batch in progress was given up: %s", job, type(error).__name__)


def stopped(job: str, why: str) -> None:
    """Log that the query has stopped, and the job has no owner."""
    tell(log, Event.STOPPED, "%s: the query has stopped, because %s", job, why, job=job, why=why)
