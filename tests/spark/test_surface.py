"""``stateful`` has the surface of Spark's ``groupBy``: its keys, its frames, its queries and their progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery

from spark_integration import RunningQuery, stateful
from spark_integration.sessions import MAX_RECORDS, changed
from statemgr.errors import BatchMismatch, InvalidError
from tests.spark.conftest import Pipeline
from tests.spark.processors import Alarm, Comparison, Counting, CountingInPandas, NotNull

MakePipeline = Callable[..., Pipeline]
COUNTS = "id string, count bigint, total bigint"


@pytest.fixture
def comparison(pipeline: MakePipeline) -> Comparison:
    """Make a job of two tasks with six rows of two keys."""
    found = Comparison(pipeline(tasks=2, partitions=1), rows_per_batch=3)
    found.produce([{"id": "ab"[i % 2], "n": i} for i in range(6)])
    return found


def run(comparison: Comparison, frame: Any, mode: str = "update") -> tuple[RunningQuery, list[tuple[Any, ...]]]:
    """Run a query to the end of its input. Returns: the query and its rows."""
    rows: list[tuple[Any, ...]] = []
    writer = frame.writeStream.foreachBatch(lambda df, _: rows.extend(map(tuple, df.collect()))).outputMode(mode)
    query = writer.option("checkpointLocation", comparison.job.location.as_uri()).trigger(availableNow=True).start()
    query.awaitTermination()
    return query, sorted(rows)


def test_keys_are_columns_too_and_a_frame_has_columns(comparison: Comparison) -> None:
    """Keys, and methods of a DataFrame that keep no state. A processor's output mode does not bind the writer."""
    groups = stateful(comparison.rows, sf.col("id"), config=comparison.job.config)
    frame = groups.transformWithState(Counting(), COUNTS, "Update", "None")
    assert frame.isStreaming
    assert frame.dtypes == [("id", "string"), ("count", "bigint"), ("total", "bigint")]
    shaped = frame[frame["count"] > 1].where(frame.total > 0)[["id", "count"]].repartition(2).coalesce(1)

    query, rows = run(comparison, shaped, "append")

    assert rows == [("a", 2), ("a", 3), ("b", 3)]
    assert isinstance(query, StreamingQuery)


def test_progress_and_plan_show_the_operator(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    """``stateOperators`` has the batch's numbers, as dashboards read them, and ``explain`` names the processor."""
    groups = stateful(comparison.rows, "id", config=comparison.job.config)

    query, _ = run(comparison, groups.transformWithState(Counting(), COUNTS, "Update", "None"))

    batches = {report.batch_id: report for report in query.recentBatches}
    assert len(batches) == 2
    for progress in query.recentProgress:
        [operator] = progress.stateOperators
        report = batches[progress.batchId]
        assert operator.operatorName == "transformWithStateInPySparkExec"
        assert (operator.numRowsTotal, operator.numRowsUpdated) == (report.keys_estimated, report.keys_written)
        assert operator.numRowsUpdated == 2
        assert operator.numShufflePartitions == operator.numStateStoreInstances == 2
        assert operator.customMetrics["numValueStateVars"] == 1
        assert operator.customMetrics["commitBytes"] == report.commit_bytes
        assert f'"numRowsUpdated": {report.keys_written}' in progress.json
    assert query.lastProgress is not None
    assert query.lastProgress.stateOperators == query.recentProgress[-1].stateOperators
    query.explain()
    printed = capsys.readouterr().out
    assert "transformWithStateInPySparkExec Counting" in printed
    assert "2 tasks by id" in printed
    assert "== Physical Plan ==" in printed


def test_fields_that_are_not_null_with_sparks_avro_format(comparison: Comparison, spark: SparkSession) -> None:
    """``start`` refuses them with Spark's condition, and the job has published nothing."""
    name = "spark.sql.streaming.stateStore.encodingFormat"
    frame = stateful(comparison.rows, "id", config=comparison.job.config)
    with changed(spark, name, "avro"), pytest.raises(PySparkRuntimeError, match="SCHEMA_MUST_BE_NULLABLE"):
        run(comparison, frame.transformWithState(NotNull(), COUNTS, "Update", "None"))
    _, rows = run(comparison, frame.transformWithState(NotNull(), COUNTS, "Update", "None"))
    assert len(rows) == 4


def test_batches_without_input_can_be_turned_off(comparison: Comparison, spark: SparkSession) -> None:
    """With Spark's setting, timers fire in batches with input alone. A location keeps the setting."""
    name = "spark.sql.streaming.noDataMicroBatches.enabled"
    rows: list[tuple[Any, ...]] = []
    frame = stateful(comparison.rows, "id", config=comparison.job.config).transformWithState(
        Alarm(), COUNTS, "Update", "ProcessingTime"
    )
    writer = frame.writeStream.foreachBatch(lambda df, _: rows.extend(map(tuple, df.collect())))
    writer.option("checkpointLocation", comparison.job.location.as_uri())
    with changed(spark, name, "false"):
        query = writer.start()
    query.processAllAvailable()
    query.processAllAvailable()
    query.stop()
    assert sorted(rows) == [("a", -1, 0), ("a", 1, 0), ("a", 2, 0), ("b", -1, 0), ("b", 1, 0), ("b", 2, 0)]
    assert {report.input_rows for report in query.recentBatches} == {3}
    assert len(query.recentProgress[-1].sources) == 1
    with pytest.raises(BatchMismatch, match=r"number of sources.*noDataMicroBatches"):
        writer.start().awaitTermination()


def test_a_session_without_a_limit_of_rows(comparison: Comparison, spark: SparkSession) -> None:
    """All rows of a key in a batch are one data frame."""
    frames = stateful(comparison.rows, "id", config=comparison.job.config).transformWithStateInPandas(
        CountingInPandas(), COUNTS, "Update", "None"
    )
    with changed(spark, MAX_RECORDS, "-1"):
        _, rows = run(comparison, frames)
    assert rows == [("a", 2, 2), ("a", 3, 4), ("b", 1, 1), ("b", 3, 8)]


def test_a_directory_can_be_read_before_the_first_batch(pipeline: MakePipeline, tmp_path: Path) -> None:
    """``start`` makes it, as on Spark."""
    job = pipeline(tasks=1, partitions=1)
    frame = stateful(Comparison(job).rows, "id", config=job.config).transformWithState(
        Counting(), COUNTS, "Update", "None"
    )
    query = (
        frame.writeStream.format("json")
        .option("checkpointLocation", job.location.as_uri())
        .start(str(tmp_path / "out"))
    )
    try:
        assert job.spark is not None
        assert job.spark.read.schema(COUNTS).json(str(tmp_path / "out")).count() == 0
    finally:
        query.stop()


def refused(call: Callable[[], object], message: str) -> None:
    """Check that a call is refused with a typed error that has a hint."""
    with pytest.raises(InvalidError, match=message) as caught:
        call()
    assert caught.value.hint


def test_what_is_no_processor_and_no_stream(pipeline: MakePipeline, spark: SparkSession) -> None:
    """A class, another object, a batch and keys that are no columns of the input are named."""
    job = pipeline(tasks=1, partitions=1)
    groups = stateful(job.rows, "key", config=job.config)
    for wrong in (Counting, "Counting", lambda key, rows: rows):
        refused(lambda wrong=wrong: groups.transformWithState(wrong, COUNTS, "Update", "None"), "no stateful processor")  # type: ignore[misc]
    refused(lambda: groups.applyInPandasWithState("f", COUNTS, "n int", "Update", "NoTimeout"), "takes a function")  # type: ignore[arg-type]
    refused(lambda: stateful(spark.range(3), "id", config=job.config), "no streaming DataFrame, but a batch")
    refused(lambda: stateful(job.rows, 5, config=job.config), "5 is no column")  # type: ignore[arg-type]

    def started(*keys: Any) -> None:
        frame = stateful(job.rows, *keys, config=job.config).transformWithState(Counting(), COUNTS, "Update", "None")
        run(Comparison(job), frame)

    refused(lambda: started(sf.upper(sf.col("value"))), "no such column")
    refused(lambda: started(job.rows("earliest")["value"] + 1), "no such column")


def test_what_a_frame_cannot_do(comparison: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    """Each public method and property of a DataFrame works, or is refused by a typed error that says what to do."""
    groups = stateful(comparison.rows, "id", config=comparison.job.config)
    frame = groups.transformWithState(Counting(), COUNTS, "Update", "None")
    frame.printSchema()
    assert "|-- count: long" in capsys.readouterr().out
    refused(lambda: frame["nothing"], "has no column 'nothing'")
    refused(lambda: frame.createOrReplaceTempView("v"), "createOrReplaceTempView is not possible")
    assert frame.join(comparison.job.spark.range(1).toDF("count"), on="count").columns == ["count", "id", "total"]
    refused(lambda: frame.join(other=comparison.rows("earliest"), on="id"), "two streams")
    for name in [name for name in dir(DataFrame) if not name.startswith("_")]:
        with contextlib.suppress(InvalidError):
            getattr(frame, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = frame.nothing
