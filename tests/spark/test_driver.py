"""What the driver does when a publish fails, when it has lost the job, and when it is stopped; on in-memory servers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from spark_integration import SparkJobTester, stateful
from spark_integration.processors.frame import StatefulFrame
from spark_integration.processors.variables import RECORD
from statemgr import JobConfig
from statemgr.engine import attempts
from statemgr.errors import FencedError, InvalidError, LayoutMismatch, MissingBlob, RetryableError
from statemgr.flows.committing import publish
from tests.spark.test_spark_job_tester import FOR_PROCESSORS, ROWS, contents, query

pytestmark = pytest.mark.spark


class Counts(StatefulProcessor):
    """Counts rows; the type of the count is an argument."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self.count = handle.getValueState("count", f"count {self.kind}")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the count."""
        count = (self.count.get()[0] if self.count.exists() else 0) + sum(1 for _ in rows)
        self.count.update((count,))
        yield Row(key=key[0], count=count)

    def close(self) -> None:
        """Nothing is open."""


#: A job without changelogs, whose partitions would be found to be too few.
BLOBS = JobConfig.from_mapping(
    FOR_PROCESSORS.to_mapping(), {"task.backup.factories": ["blob-store"], "task.restore.factories": ["blob-store"]}
)


def counts(kind: str = "bigint", config: JobConfig = FOR_PROCESSORS) -> StatefulFrame:
    """Return a query with a processor."""
    rows: Any = lambda offsets: None  # noqa: E731
    return stateful(rows, "key", config=config).transformWithState(
        Counts(kind), "key string, count bigint", "Update", "None"
    )


@pytest.mark.parametrize(("kind", "tasks", "error"), [("string", 2, InvalidError), ("bigint", 3, LayoutMismatch)])
def test_a_start_that_is_refused_fences_nobody(
    spark: SparkSession, kind: str, tasks: int, error: type[Exception]
) -> None:
    """A deploy with another state variable or number of tasks is refused, and the query that runs continues."""
    with SparkJobTester(counts(config=BLOBS), ROWS, spark=spark) as tester:
        assert tester.batch([("a", 1)]) == [("a", 1)]
        deployed = tester._adapted(counts(kind))
        changed = JobConfig.from_mapping(tester.config.to_mapping(), {"job.tasks": tasks})
        deployed = replace(deployed, config=tester._servers.on_disk(changed, "deploy"))
        with pytest.raises(error):
            deployed.take_over(spark.createDataFrame([], ROWS), tester._attempts)
        assert tester.batch([("a", 1)]) == [("a", 2)]


def test_a_publish_that_surely_failed_is_repeated(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An aborted transaction does not end the query: the same commits are published once."""
    send, left = publish.send_records, [1]

    def fail_once(*args: Any, **more: Any) -> None:
        send(*args, **more)
        if left:
            left.pop()
            raise RetryableError("the transaction was aborted")

    with SparkJobTester(query(), ROWS, spark=spark) as tester:
        tester.batch([("a", 1)])
        monkeypatch.setattr(publish, "send_records", fail_once)
        assert tester.batch([("a", 2)]) == [("a", 3)]
        assert not left
        assert contents(tester) == {"a": 3}
        assert {one.sequence for one in tester.checkpoints().values()} == {2}
    assert "publishing again: the transaction was aborted" in caplog.text


def test_a_publish_that_fails_again_and_again_ends_the_query(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query ends with the error after a few tries, and the batch runs again at the next start."""
    tries = []

    def fail(*args: Any, **more: Any) -> None:
        tries.append(1)
        raise RetryableError("the transaction was aborted")

    with SparkJobTester(query(), ROWS, spark=spark) as tester:
        monkeypatch.setattr(publish, "send_records", fail)
        with pytest.raises(RetryableError):
            tester.batch([("a", 1)])
        monkeypatch.undo()
        assert len(tries) == 3
        assert tester.restore() == [("a", 1)]


@pytest.mark.parametrize(("replaced", "error"), [(True, FencedError), (False, MissingBlob)])
def test_a_driver_that_was_replaced_does_not_report_lost_state(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, replaced: bool, error: type[Exception]
) -> None:
    """Attempts of a driver that was suspended find blobs deleted, because another driver has published since."""

    def gone(*args: Any, **more: Any) -> None:
        raise MissingBlob("the blob does not exist", blob="a/b")

    with SparkJobTester(query(), ROWS, spark=spark) as tester:
        tester.batch([("a", 1)])
        rows = spark.createDataFrame([("a", 1)], ROWS)
        planned, log = tester._log.next_batch({"input-0": 1}, tester.now_ms), copy.copy(tester._log)
        if replaced:
            other, job = tester._query.take_over(spark.createDataFrame([], ROWS), tester._attempts)
            log.current, other.offsets = planned, log
            other.run(rows, planned.batch_id)
            job.close()
        monkeypatch.setattr(attempts, "restore_task", gone)
        tester._log.current = planned
        assert tester._driver is not None
        with pytest.raises(error):
            tester._driver.run(rows, planned.batch_id)


def test_the_record_of_a_processor_is_in_the_checkpoint(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changelogs alone restore a processor of a job with many tasks, whose attachments are blobs."""
    limit = attempts.inline_attachments_limit
    monkeypatch.setattr(attempts, "inline_attachments_limit", lambda tasks: limit(tasks if tasks == 1 else 100_000))
    with SparkJobTester(counts(), ROWS, spark=spark) as tester:
        tester.batch([("a", 1)])
        found = [one for task in tester.checkpoints().values() for one in task.attachments if one.name == RECORD]
        assert [one.blob for one in found] == [None]


def broken(batches: Iterator[pa.RecordBatch], stores: Any, context: Any) -> Iterator[pa.RecordBatch]:
    """Fail as a worker that is interrupted."""
    raise ValueError("interrupted")


@pytest.mark.parametrize("stopping", [False, True])
def test_a_stop_in_a_batch_is_no_failure(spark: SparkSession, caplog: pytest.LogCaptureFixture, stopping: bool) -> None:
    """A batch that `stop` interrupts is not logged as one that failed."""
    caplog.set_level(logging.INFO)
    with SparkJobTester(query().process(broken, "key string, total bigint"), ROWS, spark=spark) as tester:
        driver = tester._driver
        assert driver is not None
        driver.stopping = stopping
        with pytest.raises(ValueError, match="interrupted"):
            tester.batch([("a", 1)])
        assert (driver.failed is None) == stopping
    assert ("a batch failed" in caplog.text) != stopping
