"""``SparkJobTester`` runs a stateful query in the test's process on in-memory servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession, functions
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from spark_integration import SparkJobTester, StatefulQuery, stateful
from spark_integration.outputs import FileOutput
from spark_integration.processors.frame import StatefulFrame
from spark_integration.sessions import changed
from statemgr import JobConfig
from statemgr.errors import InvalidError
from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.spark

CONFIG = JobConfig.from_mapping(
    {
        "job.name": "totals",
        "job.tasks": 2,
        "kafka.bootstrap.servers": "kafka:9092",
        "blob.store.uri": "s3://bucket/prefix",
        "task.backup.factories": ["blob-store", "kafka-changelog"],
        "task.restore.factories": ["blob-store", "kafka-changelog"],
        "stores.totals.value.serde": "integer",
        "stores.totals.key.serde": "string",
    }
)
#: The same job with a store for a processor.
FOR_PROCESSORS = JobConfig.from_mapping(
    {key: value for key, value in CONFIG.to_mapping().items() if ".serde" not in key},
    {"stores.totals.type": "rocksdb"},
)
ROWS = "key string, amount bigint"


def totals(batches: Iterator[pa.RecordBatch], stores: Any, context: Any) -> Iterator[pa.RecordBatch]:
    """Add up amounts by key."""
    for batch in batches:
        for row in batch.to_pylist():
            total = (stores["totals"].get(row["key"]) or 0) + row["amount"]
            stores["totals"].put(row["key"], total)
            yield pa.RecordBatch.from_pylist([{"key": row["key"], "total": total}])


def query() -> StatefulQuery:
    """Return an application's query."""
    made = StatefulQuery(CONFIG).key_by("key").process(totals, "key string, total bigint")
    return made.then(lambda rows: rows.where("total > 0"))


def contents(tester: SparkJobTester) -> dict[str, int]:
    """Return the published state."""
    return {row["key"]: row["value"] for row in tester.state("totals")}


def typed(kind: str, value: Any) -> StatefulQuery:
    """Return a version of the query with another output column, of this type."""

    def process(batches: Iterator[pa.RecordBatch], stores: Any, context: Any) -> Iterator[pa.RecordBatch]:
        for rows in totals(batches, stores, context):
            yield pa.RecordBatch.from_pylist([{**row, "more": value} for row in rows.to_pylist()])

    return query().process(process, f"key string, total bigint, more {kind}")


@pytest.mark.parametrize(
    ("before", "after", "given"),
    [
        (("string", "12"), ("array<bigint>", [1]), []),
        (("string", "12"), ("bigint", 1), [12]),
        (("string", "x"), ("bigint", 1), [None]),
        (("bigint", 12), ("string", "x"), ["12"]),
        (
            ("struct<a:bigint,b:bigint>", {"a": 1, "b": 2}),
            ("struct<b:bigint, a:bigint>", {"b": 2, "a": 1}),
            [None],
        ),
    ],
)
def test_a_step_uses_a_column_whose_stored_type_is_another(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, before: Any, after: Any, given: list[Any]
) -> None:
    """After a deploy that changes a column's type, the last batch has values of the new type, or nulls."""
    deployed = typed(*after).then(lambda rows: rows.select("more"))
    if after[0].startswith("array"):
        deployed = deployed.then(lambda rows: rows.select(functions.explode("more").alias("more")))
    with SparkJobTester(typed(*before), ROWS, spark=spark) as tester:
        tester.batch([("a", 1)], crash_before="output")
        assert [row.more for row in tester.restore(query=deployed)] == given
        assert f"the output column more was {before[0]} and is" in caplog.text
        assert len(tester.batch([("a", 2)])) == 1


def test_batches_give_rows_and_state(spark: SparkSession) -> None:
    """A batch returns the rows after the steps that follow the state."""
    with SparkJobTester(query(), ROWS, spark=spark) as tester:
        assert sorted(tester.batch([("a", 1), ("b", 2), ("a", 3)])) == [("a", 1), ("a", 4), ("b", 2)]
        assert tester.batch([{"key": "b", "amount": -2}]) == []
        assert contents(tester) == {"a": 4, "b": 0}
        assert {one.sequence for one in tester.checkpoints().values()} == {2}


@pytest.mark.parametrize(
    "backend",
    ["kafka-changelog", pytest.param("blob-store", marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.long)],
)
def test_a_driver_that_dies_loses_nothing(spark: SparkSession, backend: str | None) -> None:
    """After a crash before the publish, the batch runs again. After a later crash, only its output is delivered."""
    sequences: list[int] = []
    declared = query().output(lambda rows, sequence: sequences.append(sequence))
    with SparkJobTester(declared, ROWS, spark=spark) as tester:
        tester.batch([("a", 1)])
        assert tester.batch([("a", 2)], crash_before="publish") == []
        assert contents(tester) == {"a": 1}
        assert tester.restore(backend) == [("a", 3)]
        assert tester.batch([("a", 4)], crash_before="output") == []
        assert contents(tester) == {"a": 7}
        assert tester.restore(backend) == [("a", 7)]
        assert tester.batch([("a", 5)], lost_attempts=1) == [("a", 12)]
        tester.crash(lose_disk=True)
        assert tester.restore() == []
        assert contents(tester) == {"a": 12}
        assert sequences == [1, 2, 3, 4]


def test_an_error_of_the_application_ends_the_query(spark: SparkSession) -> None:
    """A new version of the application runs the failed batch again."""

    def broken(batches: Iterator[pa.RecordBatch], stores: Any, context: Any) -> Iterator[pa.RecordBatch]:
        raise ZeroDivisionError
        yield from batches

    with SparkJobTester(query().process(broken, "key string, total bigint"), ROWS, spark=spark) as tester:
        with pytest.raises(ZeroDivisionError):
            tester.batch([("a", 1)])
        with pytest.raises(InvalidError, match="cannot run a batch: the query does not run"):
            tester.batch([("b", 1)])
        assert tester.restore(query=query()) == [("a", 1)]


def test_a_step_uses_a_column_that_stored_rows_lack(spark: SparkSession) -> None:
    """After a deploy that adds a column and a step with it, the last batch is delivered with nulls there."""

    def by_day(batches: Iterator[pa.RecordBatch], stores: Any, context: Any) -> Iterator[pa.RecordBatch]:
        for rows in totals(batches, stores, context):
            yield rows.append_column("day", pa.array(["monday"] * rows.num_rows))

    deployed = query().process(by_day, "key string, total bigint, day string")
    deployed = deployed.then(lambda rows: rows.select("day", "key", "total"))
    with SparkJobTester(query(), ROWS, spark=spark) as tester:
        tester.batch([("a", 1)], crash_before="output")
        assert tester.restore(query=deployed) == [(None, "a", 1)]
        assert tester.batch([("a", 2)]) == [("monday", "a", 3)]


class Visits(StatefulProcessor):
    """Counts a user's visits, and reports them after a minute without visits."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._handle = handle
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Count, and restart the timer."""
        (seen,) = self._count.get() or (0,)
        self._count.update((seen + sum(1 for _ in rows),))
        for timer in self._handle.listTimers():
            self._handle.deleteTimer(timer)
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 60_000)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Report the session that has ended."""
        (seen,) = self._count.get()
        self._count.clear()
        yield Row(user=key[0], visits=seen)

    def close(self) -> None:
        """Close nothing."""


def test_a_processor_with_timers(spark: SparkSession) -> None:
    """The processor's clock follows the tester's. The tester can read its variables and timers."""
    groups = stateful(lambda _: None, "user", config=FOR_PROCESSORS)
    frame = groups.transformWithState(Visits(), "user string, visits bigint", "Append", "ProcessingTime")
    frame = frame.select(functions.upper("user").alias("user"), "visits")
    with SparkJobTester(frame, "user string", spark=spark) as tester:
        assert tester.batch([("ann",), ("bob",), ("ann",)]) == []
        counted = {row["key"]["user"]: row["value"]["n"] for row in tester.state(variable="count")}
        assert counted == {"ann": 2, "bob": 1}
        assert tester.advance(seconds=30) == []
        assert tester.batch([("bob",)]) == []
        assert tester.advance(seconds=30) == [("ANN", 2)]
        assert [row["key"]["user"] for row in tester.state(timers=True)] == ["bob"]
        tester.crash()
        tester.restore("kafka-changelog")
        assert tester.advance(seconds=30) == [("BOB", 2)]
        assert tester.state(variable="count") == []


class Latest(StatefulProcessor):
    """Yields each user's newest amount after the watermark has passed its time."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._handle = handle
        self._amount = handle.getValueState("amount", "amount bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Keep the last row."""
        for row in rows:
            self._amount.update((row.amount,))
            self._handle.registerTimer(int(row.time.timestamp() * 1000))
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the amount when its timer expires."""
        yield Row(user=key[0], amount=self._amount.get()[0])

    def close(self) -> None:
        """Close nothing."""


def test_a_watermark_follows_the_rows_of_the_batches_before(spark: SparkSession) -> None:
    """Rows that are older than the watermark are dropped, and event-time timers expire."""
    groups = stateful(lambda _: None, "user", config=FOR_PROCESSORS)
    frame = groups.transformWithState(Latest(), "user string, amount bigint", "Append", "EventTime")
    at = [datetime(2024, 1, 1, 0, minute, tzinfo=UTC) for minute in range(30)]
    with SparkJobTester(
        frame, "user string, amount bigint, time timestamp", watermark=("time", 60), spark=spark
    ) as tester:
        assert tester.batch([("ann", 1, at[5])]) == []
        assert tester.batch([("ann", 2, at[10])]) == []
        assert tester.batch([("ann", 3, at[2]), ("bob", 4, at[20])]) == [("ann", 2)]  # 3 is late, 5 has expired
        assert sorted(tester.batch()) == [("ann", 2)]


class Forever(Visits):
    """Counts a user's visits, without an end."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Set a timer for "never"."""
        self._handle.registerTimer(2**63 - 1)
        yield Row(user=key[0], visits=len(list(self._handle.listTimers())))


def test_a_timer_for_never(spark: SparkSession) -> None:
    """It does not fire, even after the year 9999, and is read as the last time that Python has."""
    groups = stateful(lambda _: None, "user", config=FOR_PROCESSORS)
    frame = groups.transformWithState(Forever(), "user string, visits bigint", "Append", "ProcessingTime")
    with SparkJobTester(frame, "user string", spark=spark) as tester:
        for _ in range(2):
            assert tester.batch([("ann",)]) == [("ann", 1)]
            assert [row["expires"] for row in tester.state(timers=True)] == [datetime.max.replace(tzinfo=UTC)]
        assert tester.advance(seconds=3e11) == []  # the year 11530


class Counts(StatefulProcessor):
    """Yields the number of each user's rows, which the initial state may begin."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Count the rows."""
        self._count.update(((self._count.get() or (0,))[0] + sum(1 for _ in rows),))
        yield Row(user=key[0], count=self._count.get()[0])

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # noqa: N802, N803
        """Begin with the row's number."""
        self._count.update((initialState.n,))

    def close(self) -> None:
        """Close nothing."""


def counts(initial_state: Any = None) -> StatefulFrame:
    """Return a query that counts rows by the column ``user``."""
    groups = stateful(lambda _: None, "user", config=FOR_PROCESSORS)
    return groups.transformWithState(Counts(), "user string, count bigint", "Append", "None", initial_state)


def test_columns_whose_names_differ_in_case(spark: SparkSession) -> None:
    """In a session that tells them apart, the key is the column of exactly this name."""
    with (
        changed(spark, "spark.sql.caseSensitive", "true"),
        SparkJobTester(counts(), "User string, user string", spark=spark) as tester,
    ):
        assert sorted(tester.batch([("x", "ann"), ("x", "bob"), ("x", "ann")])) == [("ann", 2), ("bob", 1)]
        assert sorted(row["key"]["user"] for row in tester.state(variable="count")) == ["ann", "bob"]


def test_an_initial_state_is_grouped_by_columns(spark: SparkSession) -> None:
    """The rows of anything else would be read from a column that they do not have, or from another one."""
    rows = spark.createDataFrame([("ann", "x", ("ann",), 5)], "user string, u string, key struct<user: string>, n int")
    for grouped in (
        rows.groupBy(functions.upper("user").alias("user")),
        rows.groupBy(functions.col("u").alias("user")),
        rows.groupBy("key.user"),
        rows.drop("user").withColumn("account", functions.lit("x")).groupBy(functions.col("account").alias("user")),
        rows.rollup("user"),
    ):
        with pytest.raises(InvalidError, match="group by plain columns"):
            SparkJobTester(counts(grouped), "user string", spark=spark).__enter__()
    upper = rows.withColumn("user", functions.upper("user")).withColumnRenamed("user", "USER")
    for name in ("USER", "user"):
        with SparkJobTester(counts(upper.groupBy(name)), "user string", spark=spark) as tester:
            assert tester.batch([("ANN",)]) == [("ANN", 6)]


def test_an_initial_state_with_columns_that_are_not_null(spark: SparkSession) -> None:
    """A row of the input has nulls in place of the initial state's columns, and the reverse, at any depth."""
    rows = spark.range(1, 3).selectExpr(
        "id as n", "if(id = 1, 'ann', 'bob') as user", "named_struct('x', array(1)) as s", "map('a', 1) as m"
    )
    assert not any(field.nullable for field in rows.schema)
    schema = "user string, s struct<x: int not null>"
    with SparkJobTester(counts(rows.groupBy("user")), schema, spark=spark) as tester:
        assert sorted(tester.batch([("bob", (1,)), ("eve", None)])) == [("bob", 3), ("eve", 1)]
        assert {row["key"]["user"]: row["value"]["n"] for row in tester.state(variable="count")}["ann"] == 1


def test_files_get_the_rows_after_an_empty_start(spark: SparkSession, tmp_path: Path) -> None:
    """They skip the sequences that they have, so a job that begins again uses none of them."""
    output = FileOutput(str(tmp_path / "files"), "json", CONFIG.job_key)
    query = counts()._query.output(output)
    for lost, users in ((False, ["ann", "bob"]), (True, ["eve", "max", "zoe"])):
        with SparkJobTester(query, "user string", spark=spark, allow_empty_start=lost) as tester:
            for user in users:
                tester.batch([(user,)])
    found = spark.read.json(str(tmp_path / "files"))
    assert sorted(row.user for row in found.collect()) == ["ann", "bob", "eve", "max", "zoe"]


def tell_watermarks(batches: Iterator[pa.RecordBatch], stores: Any, context: Any) -> Iterator[pa.RecordBatch]:
    """Yield the watermarks in each key's place, and the number of rows."""
    if rows := sum(batch.num_rows for batch in batches):
        seen = f"{context.watermark} {context.previous_watermark}"
        yield pa.RecordBatch.from_pydict({"key": [seen], "total": [rows]})


def test_a_watermark_after_the_year_9999(spark: SparkSession) -> None:
    """The query goes on with it, and its function sees the last time that Python has."""
    told = query().process(tell_watermarks, "key string, total bigint")
    far = pa.array([1_700_000_000_000_000_000], pa.timestamp("us", "UTC"))  # milliseconds that were taken for seconds
    now = datetime(2024, 1, 1, tzinfo=UTC)
    with SparkJobTester(told, f"{ROWS}, time timestamp", watermark=("time", 60), spark=spark) as tester:
        assert tester.batch(pa.table({"key": ["a"], "amount": [1], "time": far})) == [("None None", 1)]
        last = datetime.max.replace(tzinfo=UTC)
        assert tester.batch([("a", 2, now)]) == [(f"{last} None", 1)]
        assert tester.batch([("a", 3, now)]) == [(f"{last} {last}", 1)]


def test_a_watermark_of_microseconds_and_of_windows(spark: SparkSession) -> None:
    """It is cut to milliseconds, a window counts by its end, and a time before 1970 gives none."""
    told = query().process(tell_watermarks, "key string, total bigint")
    at = datetime(2024, 1, 1, 0, 0, 10, 123_456, tzinfo=UTC)
    before, cut = at.replace(year=1960), str(at.replace(microsecond=123_000, second=8))
    windowed = f"{ROWS}, time struct<start timestamp, end timestamp>"
    for schema, times in ((f"{ROWS}, time timestamp", [before, at]), (windowed, [(before, before), (before, at)])):
        with SparkJobTester(told, schema, watermark=("time", 2), spark=spark) as tester:
            seen = [tester.batch([("a", 1, time)])[0].key for time in (*times, times[1])]
            assert seen == ["None None", "None None", f"{cut} None"]


def test_mistakes_are_named(spark: SparkSession) -> None:
    """Mistakes raise an error before any batch runs."""
    with pytest.raises(InvalidError, match="no such column for the watermark"):
        SparkJobTester(query(), ROWS, watermark=("time", 10), spark=spark)
    tester = SparkJobTester(query(), ROWS, spark=spark)
    with pytest.raises(InvalidError, match="the tester is not open"):
        tester.batch([("a", 1)])
    with tester:
        with pytest.raises(InvalidError, match="the clock cannot go back"):
            tester.advance(seconds=-1)
        with pytest.raises(InvalidError, match="the query is running"):
            tester.restore()
    with pytest.raises(InvalidError, match="call process before start"):
        SparkJobTester(StatefulQuery(CONFIG).key_by("key"), ROWS, spark=spark)


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--collect-only"], "3 tests collected"), pytest.param([], "3 passed", marks=pytest.mark.long)],
)
def test_the_example_passes(options: list[str], said: str) -> None:
    """`pytest examples/spark` passes without a server, as its README says."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "examples/spark"]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert said in done.stdout, f"{done.stdout}{done.stderr}"


def test_the_page_shows_the_example() -> None:
    """docs/testing.md quotes the tests of examples/spark/sessions.py."""
    (shown,) = blocks("docs/testing.md", "## A query on Spark")
    assert (ROOT / "examples" / "spark" / "test_sessions.py").read_text().endswith(shown)
