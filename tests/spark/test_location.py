"""The checkpoint location on file systems that only Spark can read, its cost per batch, and reports of batches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from spark_integration.location import Location
from statemgr.errors import BatchMismatch
from tests.spark.conftest import Pipeline, make_pipeline

MakePipeline = Callable[..., Pipeline]


class WithoutJvm:
    """A session in which Python cannot reach the JVM."""

    def __init__(self, spark: Any) -> None:
        self.read = spark.read


def test_reading_a_location_by_hadoop_and_by_a_job(pipeline: MakePipeline) -> None:
    """For a path without a scheme, Hadoop and a Spark job both return a file's lines, and None for a missing file."""
    job = pipeline()
    directory = job.directory / "with [brackets] and a space"
    (directory / "offsets").mkdir(parents=True)
    (directory / "offsets" / "0").write_text("\0v1\n{}\n\n-\n")
    assert Location(job.spark, str(directory)).read("offsets/0") == ["v1", "{}", "-"]
    assert Location(job.spark, str(directory)).read("offsets/1") is None
    plain = directory.rename(job.directory / "plain")
    for session in (job.spark, WithoutJvm(job.spark)):
        location = Location(session, str(plain))  # type: ignore[arg-type]
        assert location.read("offsets/0") == ["v1", "{}", "-"]
        assert location.read("offsets/1") is None


@pytest.mark.long
def test_a_location_without_a_scheme_costs_no_job(pipeline: MakePipeline) -> None:
    """A batch starts as many Spark jobs as with a location that Python reads itself."""
    job = pipeline(tasks=2, backup=["blob-store"])
    job.produce(90)
    scheduler = job.spark.sparkContext._jsc.sc().dagScheduler()  # type: ignore[union-attr]
    jobs: dict[str, list[int]] = {}
    for form in (job.location.as_uri(), f"{job.location}-plain"):
        started: list[int] = []
        query = job.query(per_batch=30).output(lambda rows, sequence: None).option("checkpointLocation", form)
        job.run(query.on_batch(lambda report, to=started: to.append(scheduler.numTotalJobs())))
        jobs[form] = [later - earlier for earlier, later in pairwise(started)]
        job.produce(90)

    by_python, by_hadoop = jobs.values()
    assert set(by_hadoop) == set(by_python)
    assert len(set(by_hadoop)) == 1


def test_an_exception_in_on_batch(pipeline: MakePipeline, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in ``on_batch`` is logged for each batch, and the query continues."""
    job = pipeline(tasks=2)
    job.produce(60)

    def report(batch: object) -> None:
        raise KeyError("the dashboard is down")

    running = job.run(job.query(per_batch=30).on_batch(report))

    reports = running.recentBatches
    assert [batch.sequence for batch in reports] == list(range(1, len(reports) + 1))
    assert job.outputs.counts() == job.produced == job.state("blob-store")
    messages = [record for record in caplog.records if "on_batch failed" in record.getMessage()]
    assert len(messages) == len(reports) > 1
    assert all("the dashboard is down" in str(record.exc_info) for record in messages)


@pytest.mark.long
@pytest.mark.parametrize("reused", [False, True])
def test_a_kept_location_is_lost_while_the_query_runs(pipeline: MakePipeline, reused: bool) -> None:
    """It is deleted, and another job's query may use the path since. The query ends before it publishes another batch.
    Both jobs count each row once at new locations."""
    job = pipeline(tasks=1, partitions=1, backup=["blob-store"])
    (job.directory / "other").mkdir()
    other = make_pipeline(job.spark, job.kafka, job.directory / "other", tasks=1, partitions=1, backup=["blob-store"])
    job.produce(30)
    running = job.query().trigger(processingTime="0 seconds").start()
    running.processAllAvailable()
    shutil.rmtree(job.location)
    if reused:
        other.produce(20)
        other.run(other.query().option("checkpointLocation", job.location.as_uri()))
    job.produce(30)
    with pytest.raises(BatchMismatch, match="another query has taken" if reused else "was removed"):
        running.awaitTermination(120)
    running.stop()
    assert [report.sequence for report in running.recentBatches] == [1]

    job.run(job.query().option("checkpointLocation", (job.directory / "new").as_uri()))
    assert job.state("blob-store") == job.outputs.counts() == job.produced
    if reused:
        other.produce(20)
        other.run(other.query().option("checkpointLocation", (other.directory / "new").as_uri()))
        assert other.state("blob-store") == other.outputs.counts() == other.produced
