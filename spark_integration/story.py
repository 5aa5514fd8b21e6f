"""What the log of the driver says about a query: took over, restored, failed, publishing again, stopping, stopped. The
line about each batch is the report itself (:mod:`spark_integration.observing`)."""

from __future__ import annotations

import logging

from spark_integration.reports import RestoreReport
from statemgr import JobConfig
from statemgr.engine import Epoch
from statemgr.logs import Event, ranges, size, tell

log = logging.getLogger(__name__)


def took_over(config: JobConfig, epoch: Epoch) -> None:
    """The driver owns the job."""
    job = config.job_name
    newest = max((one.sequence for one in epoch.checkpoints.values() if one is not None), default=0)
    at = f"continues after sequence {newest}" if newest else "nothing is published yet"
    tell(
        log, Event.ASSIGNED, "%s: took over all %d tasks; %s", job, config.tasks, at,
        job=job, tasks=ranges(range(config.tasks)), sequence=newest,
    )  # fmt: skip


def restored(job: str, report: RestoreReport) -> None:
    """An executor has restored a store from a backend."""
    why = "; ".join(f"{factory} was not used: {reason}" for factory, reason in report.reasons.items())
    tell(
        log, Event.RESTORED, "%s/%s: restored on an executor from %s in %.3f s (%s fetched, %s reused, %d records); %s",
        report.task, report.store, report.factory, report.seconds, size(report.bytes_fetched),
        size(report.bytes_reused), report.records, why or "the first of task.restore.factories",
        job=job, task=report.task, store=report.store, backend=report.factory,
        why=why or "the first of task.restore.factories", bytes=report.bytes_fetched,
        bytes_reused=report.bytes_reused, records=report.records, seconds=round(report.seconds, 3),
    )  # fmt: skip


def publishing_again(job: str, error: BaseException) -> None:
    """The outcome of a publish is unknown."""
    tell(log, Event.RETRYING, "%s: publishing again: %s", job, error, level=logging.WARNING, job=job)


def failed(job: str, error: BaseException) -> None:
    """A batch has failed, which ends the query."""
    what = type(error).__name__
    first = next(iter(str(error).splitlines()), "")
    tell(log, Event.FAILED, "%s: a batch failed: %s: %s", job, what, first, level=logging.ERROR, job=job, error=what)


def stopping(job: str, why: str) -> None:
    """The query was asked to stop."""
    tell(log, Event.STOPPING, "%s: stopping because %s", job, why, job=job, why=why)


def stopped(job: str, why: str) -> None:
    """The query has stopped, and the job has no owner."""
    tell(log, Event.STOPPED, "%s: the query has stopped, because %s", job, why, job=job, why=why)
