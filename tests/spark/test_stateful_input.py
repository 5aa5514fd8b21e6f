"""An input that keeps state in Spark is rejected by name. The watermark of a stateless input never goes back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.state import GroupStateTimeout

from spark_integration import StateContext
from statemgr import StateManager, Store
from statemgr.errors import InvalidError
from tests.spark.conftest import PARTITIONER, Pipeline

MakePipeline = Callable[..., Pipeline]


def marked(rows: DataFrame) -> DataFrame:
    """Add a watermark."""
    return rows.withWatermark("timestamp", "1 second")


def with_state(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Return the input, as a function for ``applyInPandasWithState``."""
    yield from frames


OPERATORS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "a join of two streams": lambda rows: marked(rows).join(marked(rows).select("key"), "key"),
    "dropDuplicates": lambda rows: rows.dropDuplicates(["key"]),
    "dropDuplicates|distinct": lambda rows: rows.select("key").distinct(),
    "dropDuplicatesWithinWatermark": lambda rows: marked(rows).dropDuplicatesWithinWatermark(["key"]),
    "an aggregation": lambda rows: rows.groupBy("key").count(),
    "session_window": lambda rows: (
        marked(rows).selectExpr("key", "session_window(timestamp, '1 minute') as w").groupBy("key", "w").count()
    ),
    "applyInPandasWithState": lambda rows: rows.groupBy("key").applyInPandasWithState(
        with_state, "key binary", "n int", "append", GroupStateTimeout.NoTimeout
    ),
    "limit": lambda rows: rows.limit(10),
    "dropDuplicates.*": lambda rows: rows.unionByName(rows.dropDuplicates(["key"])).where("offset > 3"),
}


def test_a_stateful_operator_in_the_input(pipeline: MakePipeline) -> None:
    """FAULT 55: the error names the operator before the query takes over the job."""
    job = pipeline(tasks=2)
    with StateManager(job.config, PARTITIONER) as owner:
        epoch = owner.acquire()

        for operator, applied in OPERATORS.items():
            query = job.query().input(lambda offsets, applied=applied: applied(job.rows(offsets)))  # type: ignore[misc]
            with pytest.raises(InvalidError, match=f"keeps state in Spark: .*{operator}") as caught:
                query.start()
            assert "store" in str(caught.value.hint)
            owner.confirm()  # the query has not fenced the owner
        assert epoch.checkpoints == {"Partition 0": None, "Partition 1": None}


def test_stateless_operators_in_the_input(pipeline: MakePipeline) -> None:
    """Joins with a table, an aggregation of a table, a watermark and a filter keep no state and are accepted."""
    job = pipeline(tasks=2, backup=["blob-store"])
    job.produce(20)
    table = job.spark.range(3).selectExpr("id % 2 as parity").groupBy("parity").count()

    def rows(offsets: str) -> DataFrame:
        stream = job.rows(offsets).where("offset >= 0").selectExpr("*", "offset % 2 as parity")
        return marked(stream).join(table, "parity").join(table.limit(2), "parity", "left_semi")

    job.run(job.query().input(lambda offsets: rows(offsets).drop("parity", "count")))

    assert job.state("blob-store") == job.produced


def tell_watermark(
    batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
) -> Iterator[pa.RecordBatch]:
    """Yield one row from task 0 with the sequence and the watermark."""
    for _ in batches:
        pass
    if context.task == "Partition 0":
        yield pa.RecordBatch.from_pydict({"sequence": [context.sequence], "watermark": [context.watermark]})


def test_the_watermark_never_goes_back(pipeline: MakePipeline) -> None:
    """FAULT 55: after the location is lost, Spark starts without a watermark, but the job keeps the published one."""
    job = pipeline(tasks=2, partitions=1, backup=["blob-store"])
    seen: dict[int, datetime | None] = {}

    def write(rows: DataFrame, sequence: int) -> None:
        seen.update({row.sequence: row.watermark for row in rows.collect()})

    def rows(offsets: str) -> DataFrame:
        # event times are an hour apart
        times = job.rows(offsets, 20).selectExpr("*", "timestamp_seconds(1700000000 + offset * 3600) as at")
        return times.withWatermark("at", "1 hour")

    running = job.query().input(rows).process(tell_watermark, "sequence int, watermark timestamp").output(write)
    job.produce(60)
    job.run(running)
    before = dict(seen)
    assert list(before) == [1, 2, 3]
    shutil.rmtree(job.location)
    job.produce(20)
    job.run(running)

    def at(offset: int) -> datetime:
        return datetime.fromtimestamp(1700000000 + (offset - 1) * 3600, UTC).astimezone().replace(tzinfo=None)

    assert before == {1: None, 2: at(19), 3: at(39)}
    assert seen == {**before, 4: at(39)}
    with StateManager(job.config, PARTITIONER) as manager:
        batches = {checkpoint.batch for checkpoint in manager.acquire().checkpoints.values() if checkpoint}
    assert [batch and batch.watermark_ms for batch in batches] == [(1700000000 + 38 * 3600) * 1000]
