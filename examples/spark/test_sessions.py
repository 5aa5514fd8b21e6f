"""Tests of the sessions, without Kafka, a blob store and executors: ``pytest examples/spark``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from pyspark.sql import SparkSession
from sessions import sessions

from spark_integration import SparkJobTester
from statemgr import JobConfig

CONFIG = JobConfig.from_mapping(
    {
        "job.name": "sessions",
        "job.tasks": 2,
        "kafka.bootstrap.servers": "localhost:9092",
        "blob.store.uri": "s3://state/sessions",
        "task.backup.factories": ["blob-store", "kafka-changelog"],
        "stores.sessions.type": "rocksdb",
    }
)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A small session of Spark, for all tests."""
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def tester(spark: SparkSession) -> Iterator[SparkJobTester]:
    """The query, whose input is the rows of the test."""
    query = sessions(spark, "localhost:9092", "views", CONFIG)
    with SparkJobTester(query, "user string, at timestamp, ms bigint", watermark=("at", 600), spark=spark) as tester:
        yield tester


def view(user: str, time: str) -> tuple[str, datetime, int]:
    """A row as the input of the query has it."""
    at = datetime.fromisoformat(f"2024-01-01T{time}").replace(tzinfo=UTC)
    return user, at, int(at.timestamp() * 1000)


def ended(rows: list) -> list[tuple[str, int]]:
    """The user and the views of each session."""
    return sorted((row.user, row.views) for row in rows)


def test_a_session_comes_out_once_it_is_over(tester: SparkJobTester) -> None:
    """The watermark is ten minutes behind the newest view, and a session lasts half an hour longer than its last."""
    assert tester.batch([view("ann", "10:00"), view("bob", "10:10"), view("ann", "10:20")]) == []
    assert tester.batch([view("ann", "12:00")]) == []  # the watermark follows with the next batch
    assert ended(tester.batch()) == [("ann", 2), ("bob", 1)]


@pytest.mark.parametrize("backend", ["blob-store", "kafka-changelog"])
def test_a_crash_loses_and_doubles_nothing(tester: SparkJobTester, backend: str) -> None:
    """Wherever the driver dies, and whichever backend restores the state."""
    tester.batch([view("ann", "10:00")])
    assert tester.batch([view("ann", "10:20"), view("bob", "12:00")], crash_before="publish") == []
    assert tester.restore(backend) == []  # the same batch again
    assert tester.batch(crash_before="output") == []
    assert ended(tester.restore(backend)) == [("ann", 2)]  # its state was published, and its output is delivered now
    [still_open] = tester.state(variable="open")
    assert still_open["key"]["user"] == "bob"
