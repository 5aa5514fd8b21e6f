"""How a batch is described to Spark: as PySpark's own functions would, with few calls to the JVM."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from py4j.clientserver import JavaClient
from pyspark.sql import SparkSession, functions

from spark_integration import outbox, placement
from spark_integration.partitioning import TASK_COLUMN, Partitioning
from spark_integration.placement import placed
from spark_integration.query import parsed_schema
from spark_integration.sessions import changed
from spark_integration.stage import Stage

_STORED = "text string, data binary, at timestamp_ltz, wall timestamp_ntz, list array<string>"


@contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield a list of the calls of the JVM's methods in the block."""
    calls: list[str] = []
    send = JavaClient.send_command

    def counting(self: Any, command: str, *arguments: Any, **named: Any) -> Any:
        if command.startswith("c\n"):
            calls.append(command.replace("\n", " "))
        return send(self, command, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(JavaClient, "send_command", counting)
        yield calls


@pytest.mark.parametrize("by_key", [True, False])
def test_rows_are_spread_and_sorted_as_by_pysparks_functions(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, by_key: bool
) -> None:
    """Also if names of columns need quotes. A batch takes three calls."""
    name = "a `key`.part"
    rows = spark.createDataFrame(
        [(None if number == 7 else f"k{number % 11}", number % 3, -number) for number in range(100)],
        f"`{name.replace('`', '``')}` string, partition int, `order.by` long",
    )
    partitioning = Partitioning((name if by_key else "partition",), by_key=by_key)
    stage = Stage("job", rows, partitioning, 3, ("order.by",))
    with counted_calls(monkeypatch) as calls:
        spread = stage.spread(rows)
    assert len(calls) <= 3, calls

    found = [[tuple(row) for row in part] for part in spread.rdd.glom().collect()]
    hashed = functions.pmod(functions.hash(functions.col("`a ``key``.part`")), functions.lit(3))
    number = hashed if by_key else functions.col("partition")
    expected = rows.withColumn(TASK_COLUMN, number.cast("int")).collect()
    assert found == [
        sorted((tuple(row) for row in expected if row[-1] == task), key=lambda row: row[2]) for task in range(3)
    ]


def test_places_leave_the_rows_of_each_partition_as_they_are(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is its own executor asks for no places."""
    rows = spark.range(100).repartition(3, "id")
    assert placed("job", rows) is rows
    monkeypatch.setattr(placement, "_placement", placement.compiled)
    chosen = placed("job", rows)
    assert chosen is not rows
    assert chosen.rdd.glom().collect() == rows.rdd.glom().collect()


def test_a_second_application_of_the_process_has_places_too(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has an object of its own, of the same class: Py4J calls no methods of a second class of the same name."""
    rows = spark.range(100).repartition(3, "id")
    monkeypatch.setattr(placement, "_placement", placement.compiled)
    for _ in range(2):
        assert placed("job", rows).count() == 100


def test_without_a_compiler_spark_chooses_the_places(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The query runs, and the log says why."""
    (tmp_path / "Placement.java").write_text("class Placement extends Missing {}")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.resources.files", lambda _: tmp_path)
        patch.setattr(placement, "_constructor", placement._constructor.__wrapped__)
        assert placement.compiled(spark.sparkContext) is None
    assert "Spark chooses the executors" in caplog.text
    assert "Missing" in caplog.text


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("spark.sql.execution.arrow.useLargeVarTypes", "true"),
        ("spark.sql.execution.arrow.maxRecordsPerBatch", "-1"),
        ("spark.sql.session.timeZone", "Asia/Tokyo"),
        ("spark.sql.timestampType", "TIMESTAMP_NTZ"),
    ],
)
def test_stored_rows_are_the_same_in_sessions_with_other_settings(
    spark: SparkSession, setting: str, value: str
) -> None:
    """The driver does not ask for the settings that PySpark asks for when it makes a local relation."""
    moment = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "text": ["a", None, "ä" * 40_000],
            "data": pa.array([b"\x00", b"", None], pa.binary()),
            "at": pa.array([moment, None, moment], pa.timestamp("us", tz="UTC")),
            "wall": pa.array([moment.replace(tzinfo=None)] * 3, pa.timestamp("us")),
            "list": [["x"], [], None],
        }
    )
    with changed(spark, setting, value):
        rows = outbox._local(spark, table, parsed_schema(_STORED))
        assert rows.toArrow().cast(table.schema).equals(table)
        assert rows.select(functions.unix_micros("at")).first() == (int(moment.timestamp() * 1e6),)
