"""Output columns of every Spark type are stored and delivered, as are rows stored with another schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import CharType, StructField, StructType, UserDefinedType, VarcharType

from spark_integration import StateContext, outbox
from spark_integration.output_schema import can_be_local, to_arrow
from statemgr import StateManager, Store
from statemgr.errors import InvalidError
from tests.spark.conftest import PARTITIONER, Pipeline

MakePipeline = Callable[..., Pipeline]

#: A Spark type → an SQL literal of it.
TYPES = {
    "boolean": "true",
    "tinyint": "-1Y",
    "smallint": "2S",
    "int": "3",
    "bigint": "9223372036854775807",
    "float": "1.5F",
    "double": "-2.5D",
    "decimal(10,2)": "1.25BD",
    "decimal(38,18)": "cast('12345678901234567890.123456789012345678' as decimal(38,18))",
    "string": "'déjà vu'",
    "string collate UNICODE_CI": "'x' collate UNICODE_CI",
    "binary": "X'00ff'",
    "date": "date'0044-03-15'",
    "timestamp": "timestamp'2024-03-10 02:34:56.123456 America/New_York'",
    "timestamp_ntz": "timestamp_ntz'2024-03-10 02:34:56.123456'",
    "time(6)": "time'12:34:56.123456'",
    "interval day to second": "interval '1 02:03:04.5' day to second",
    "interval hour to minute": "interval '5:06' hour to minute",
    "void": "null",
    "variant": """parse_json('{"a": [1, null]}')""",
    "array<int>": "array(1, null)",
    "array<timestamp>": "array(timestamp'2024-02-29 12:34:56 UTC', null)",
    "map<string,timestamp_ntz>": "map('a', timestamp_ntz'2024-02-29 12:34:56')",
    "map<date,binary>": "map(date'2024-02-29', X'01')",
    "struct<a:int not null,b:timestamp>": "named_struct('a', 1, 'b', timestamp'2024-02-29 12:34:56 UTC')",
    "struct<a:int,b:array<map<string,decimal(5,1)>>>": "named_struct('a', 1, 'b', array(map('k', 1.5BD)))",
    "array<struct<v:variant>>": "array(named_struct('v', parse_json('1')))",
}


class Yields:
    """A process function in which task 0 yields given rows, kept as an Arrow stream."""

    def __init__(self, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        self.stream = sink.getvalue().to_pybytes()

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        if context.task == "Partition 0":
            yield from pa.ipc.open_stream(self.stream)


def shown(rows: DataFrame) -> list[tuple[Any, ...]]:
    """Return every value as Spark prints it, in the order of ``id``."""
    columns = [f"cast({name} as string)" for name in rows.columns]
    return [tuple(row) for row in rows.orderBy("id").selectExpr(*columns).collect()]


@pytest.mark.parametrize("fetched_by", ["driver", pytest.param("executors", marks=pytest.mark.long)])
def test_every_type_and_its_null(
    pipeline: MakePipeline, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, fetched_by: str
) -> None:
    """The output gets rows that equal the yielded ones, in a session with a custom time zone."""
    kinds = list(TYPES)
    if fetched_by == "executors":
        monkeypatch.setattr(outbox, "DRIVER_BYTES", 0)
    else:
        kinds = [kind for kind in TYPES if can_be_local(StructType.fromDDL(f"c {kind}"))]
        assert len(TYPES) - len(kinds) == 3
    declared = StructType.fromDDL("id int not null, " + ", ".join(f"c{i} {kind}" for i, kind in enumerate(kinds)))
    job = pipeline(tasks=2, backup=["blob-store"])
    job.produce(10)
    given: list[tuple[StructType, list[tuple[Any, ...]]]] = []
    settings = {"spark.sql.session.timeZone": "America/New_York", "spark.sql.timeType.enabled": "true"}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        source = spark.sql(
            "select 1 as id, " + ", ".join(f"cast({TYPES[kind]} as {kind}) as c{i}" for i, kind in enumerate(kinds))
        )
        expected = [*shown(source), ("2", *[None] * len(kinds))]
        values = source.toArrow()
        nulls = [pa.nulls(1, field.type) for field in list(values.schema)[1:]]
        both = [values, pa.Table.from_arrays([pa.array([2], pa.int32()), *nulls], schema=values.schema)]
        query = job.query().process(Yields(pa.concat_tables(both)), declared)
        job.run(query.output(lambda rows, sequence: given.append((rows.schema, shown(rows)))))
    finally:
        for name in settings:
            spark.conf.unset(name)

    assert given == [(declared, expected)]
    assert sum(value is None for value in expected[0]) == 1  # void


class Point(UserDefinedType):
    """A user-defined type."""

    @classmethod
    def sqlType(cls) -> StructType:  # noqa: N802 - Spark's name
        """Return the type that stores it."""
        return StructType.fromDDL("x double, y double")


#: A column that cannot be stored, and the part of it that an error names.
NOT_STORED: tuple[tuple[Any, str], ...] = (
    ("interval year to month", "wrong"),
    ("interval", "wrong"),
    ("geometry(4326)", "wrong"),
    ("geography(4326)", "wrong"),
    ("array<struct<a:map<string,interval month>>>", "wrong.element.a.value"),
    (CharType(3), "wrong"),
    (VarcharType(3), "wrong"),
    (Point(), "wrong"),
)


def test_a_type_that_cannot_be_stored(pipeline: MakePipeline) -> None:
    """A query rejects a column that cannot be stored, by name and before it takes over the job."""
    job = pipeline(tasks=2)
    for kind, column in NOT_STORED:
        schema = StructType.fromDDL("key string")
        schema.add(StructField("wrong", StructType.fromDDL(f"w {kind}")[0].dataType if isinstance(kind, str) else kind))
        with pytest.raises(InvalidError, match="cannot be stored") as caught:
            job.query().process(Yields(pa.table({})), schema).start()
        assert caught.value.where["column"] == column, kind
    with StateManager(job.config, PARTITIONER) as manager:
        assert manager.acquire().checkpoints == {"Partition 0": None, "Partition 1": None}
    with pytest.raises(InvalidError, match="two columns of one name"):
        to_arrow(StructType.fromDDL("a int, b int, a int"))


@pytest.mark.parametrize(
    ("deployed", "location"),
    [
        pytest.param("total bigint, change bigint, id int", "kept", marks=pytest.mark.long),
        pytest.param("total bigint, change bigint, id int", "lost", marks=pytest.mark.long),
        ("id int, change bigint, total bigint, extra string", "kept"),
        pytest.param("id int, change bigint, total bigint, extra string", "lost", marks=pytest.mark.long),
    ],
)
def test_a_deploy_changes_the_columns_before_a_replay(pipeline: MakePipeline, deployed: str, location: str) -> None:
    """FAULT 55: if two columns are swapped or one is added, rows that are delivered again keep their old names."""
    job = pipeline(tasks=2, backup=["blob-store"])
    job.produce(10)
    table = pa.table({"id": [1], "change": [10], "total": [100]})

    def fail(rows: DataFrame, sequence: int) -> None:
        raise ValueError("the sink is down")

    with pytest.raises(Exception, match="the sink is down"):
        job.run(job.query().process(Yields(table), "id int, change bigint, total bigint").output(fail))
    given: list[dict[str, Any]] = []

    def write(rows: DataFrame, sequence: int) -> None:
        given.extend(row.asDict() for row in rows.collect())

    where = job.location.as_uri() if location == "kept" else f"{job.location.as_uri()}-2"
    new = table.append_column("extra", pa.array(["x"])) if "extra" in deployed else table
    query = job.query().process(Yields(new), deployed).output(write).option("checkpointLocation", where)
    job.run(query)
    job.produce(10)
    job.run(query)

    assert given[0] == {"id": 1, "change": 10, "total": 100}
    assert given[1:] == new.to_pylist() * (len(given) - 1)
    assert len(given) > 1
