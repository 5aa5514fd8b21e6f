"""Unchanged stateful processors give the batches of Spark's own engine with state in statemgr. Others are rejected."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_integration import stateful
from statemgr import JobConfig
from statemgr.errors import InvalidError
from tests.cli.test_running_job import write_toml
from tests.docs.blocks import blocks
from tests.jobs import DUAL
from tests.spark.conftest import Pipeline
from tests.spark.processors import (
    SEEN,
    Comparison,
    Counting,
    CountingInPandas,
    CountingOn,
    CountingOnInPandas,
    Events,
    Lists,
    Maps,
    Stamping,
    Timers,
)

MakePipeline = Callable[..., Pipeline]
COUNTS = "id string, count bigint, total bigint"
long = pytest.mark.long


@pytest.fixture
def comparison(pipeline: MakePipeline) -> Comparison:
    """Make a comparison with one partition and a job of two tasks."""
    return Comparison(pipeline(tasks=2, partitions=1))


def numbered(count: int) -> list[dict[str, Any]]:
    """Return rows with three keys, one of which is null."""
    return [{"id": ("a", "b", None)[i % 3], "n": (7 * i) % 23} for i in range(count)]


@pytest.mark.parametrize(
    ("processor", "output", "pandas"),
    [
        pytest.param(Counting(), COUNTS, False, id="value", marks=long),
        pytest.param(CountingInPandas(), COUNTS, True, id="pandas", marks=long),
        pytest.param(Lists(), SEEN, False, id="list", marks=long),
        pytest.param(Maps(), SEEN, False, id="map"),
    ],
)
def test_the_same_batches_as_on_spark(
    comparison: Comparison, processor: StatefulProcessor, output: str, pandas: bool
) -> None:
    """Every row of every batch is the same as on Spark."""
    comparison.produce(numbered(16))

    found = comparison.on_statemgr(processor, output, pandas=pandas)

    assert found == comparison.on_spark(processor, output, pandas=pandas)
    assert len(found) == 4


#: Counts to continue: two rows of one key, a null key, and a key without input.
INITIAL = "VALUES ('a', 100), ('a', 10), (null, 3), ('z', 50) AS initial(id, already)"


@pytest.mark.long
@pytest.mark.parametrize(
    ("processor", "pandas"),
    [pytest.param(CountingOn(), False, id="rows"), pytest.param(CountingOnInPandas(), True, id="pandas")],
)
def test_an_initial_state_as_on_spark(comparison: Comparison, processor: StatefulProcessor, pandas: bool) -> None:
    """The initial state is loaded exactly once, before the first batch, even if the location is lost afterwards."""
    comparison.initial = comparison.job.spark.sql(f"FROM {INITIAL}")
    comparison.produce(numbered(8))
    first = comparison.on_statemgr(processor, COUNTS, pandas=pandas)
    shutil.rmtree(comparison.job.location)
    comparison.produce([*numbered(4), {"id": "z", "n": 1}])

    again, *rest = comparison.on_statemgr(processor, COUNTS, pandas=pandas)
    assert again == first[-1]  # at a new location, the query delivers the last output again
    found = first + rest

    assert found == comparison.on_spark(processor, COUNTS, pandas=pandas)
    assert ("z", 51, 1) in found[-1]


@long
@pytest.mark.parametrize(("seconds", "fails"), [(18, True), (19, False)])
def test_output_that_is_not_newer_than_the_watermark_as_on_spark(
    pipeline: MakePipeline, seconds: int, fails: bool
) -> None:
    """With ``eventTimeColumnName``, the third batch has the watermark 18 and fails if it yields a row of that time."""
    comparison = Comparison(pipeline(tasks=1, partitions=1), rows_per_batch=1, watermark="2 seconds", output_time="at")
    numbers = [(20, 1), (30, 30), (40, seconds)]
    comparison.produce([{"id": "a", "n": n, "t": f"2024-01-01T00:00:{t}Z"} for t, n in numbers])
    failed = []
    for engine in (comparison.on_spark, comparison.on_statemgr):
        try:
            engine(Stamping(), "id string, at timestamp", "EventTime")
            failed.append(False)
        except (StreamingQueryException, InvalidError) as error:
            failed.append("older than" in str(error) or "not newer than" in str(error))

    assert failed == [fails, fails]


def test_an_initial_state_that_does_not_fit(comparison: Comparison) -> None:
    """Other grouping columns, another key type, a stream, or a DataFrame without groups are rejected at the start."""
    comparison.produce(numbered(1))
    spark = comparison.job.spark
    initial = spark.sql(f"FROM {INITIAL}")
    for given, message in (
        (initial.groupBy("already"), "grouped by already int, and the input by id string"),
        (initial.selectExpr("1 as id", "already").groupBy("id"), "grouped by id int"),
        (comparison.rows("earliest").groupBy("id"), "streaming"),
        (initial, "no grouped DataFrame"),
    ):
        comparison.initial_state = lambda given=given: given  # type: ignore[method-assign, misc]
        with pytest.raises(InvalidError, match=message):
            comparison.run(CountingOn(), COUNTS)


@long
def test_timers_fire_as_on_spark(comparison: Comparison) -> None:
    """Expired processing-time timers fire in the same batches, with the same lists.

    On Spark, batches continue without input.
    """
    comparison.produce(numbered(16))

    found = comparison.on_statemgr(Timers(), SEEN, "ProcessingTime")

    assert found == comparison.on_spark(Timers(), SEEN, "ProcessingTime")[:4]
    assert any("fired" in row[1] for row in found[1])


@long
def test_late_rows_and_timers_of_event_time_as_on_spark(pipeline: MakePipeline) -> None:
    """The same rows are late, and timers fire at the same watermark. Only Spark adds a last batch without rows."""
    comparison = Comparison(pipeline(tasks=2, partitions=1), watermark="2 seconds")
    seconds = [10, 11, 12, 20, 5, 30, 19, 18, 18, 19, 40, 10, 28, 38, 41, None, 29, 60, 39, 38]
    times = [None if s is None else f"2024-01-01T00:00:{s:02}Z" for s in seconds]
    comparison.produce([{"id": "ab"[i % 2], "n": i, "t": time} for i, time in enumerate(times)])

    found = comparison.on_statemgr(Events(), SEEN, "EventTime")

    rows = [row for batch in found for row in batch]
    assert any(not is_input for _, _, is_input in rows)
    assert sum(len(ast.literal_eval(seen)[1]) for _, seen, is_input in rows if is_input) < len(seconds)
    assert found == comparison.on_spark(Events(), SEEN, "EventTime")[:5]


@pytest.mark.parametrize("factory", [DUAL[0], pytest.param(DUAL[1], marks=long)])
def test_state_goes_on_elsewhere(comparison: Comparison, factory: str) -> None:
    """After the loss of the location and the machine, a processor finds its state in either backend."""
    rows: set[tuple[Any, ...]] = set()  # at a new location, the query delivers the last sequence again

    def write(df: Any, sequence: int) -> None:
        rows.update((sequence, *row) for row in df.collect())

    comparison.produce([{"id": "a", "n": 1}, {"id": "b", "n": 2}])
    comparison.run(Counting(), COUNTS, write=write)
    shutil.rmtree(comparison.job.location)
    comparison.produce([{"id": "b", "n": 3}])
    comparison.run(Counting(), COUNTS, write=write, config=comparison.job.elsewhere(factory))

    assert rows == {(1, "a", 1, 1), (1, "b", 1, 2), (2, "b", 2, 3)}


class Once(StatefulProcessor):
    """Records the batch's time in a file, and fails until another file exists."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("count", "count bigint", 1000)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        with (self.directory / "times").open("a") as file:
            file.write(f"{timerValues.getCurrentProcessingTimeInMs()}\n")
        self.state.update((len(list(rows)),))
        if not (self.directory / "go").exists():
            raise ValueError("not yet")
        yield Row(id=key[0], seen="", exists=self.state.exists())

    def close(self) -> None:
        pass


@pytest.mark.long
def test_a_batch_that_runs_again_sees_the_same_time(comparison: Comparison) -> None:
    """A repeated batch has the same time, even after a restart of the query, so its expiries are the same."""
    comparison.produce([{"id": "a", "n": 1}])
    processor = Once(comparison.job.directory)
    with pytest.raises(StreamingQueryException, match="not yet"):
        comparison.run(processor, SEEN, "ProcessingTime")
    (comparison.job.directory / "go").touch()

    comparison.run(processor, SEEN, "ProcessingTime")

    times = (comparison.job.directory / "times").read_text().splitlines()
    assert len(times) >= 2
    assert len(set(times)) == 1


class Declaring(Counting):
    """Counts with a differently typed state."""

    def __init__(self, *columns: StructField) -> None:
        self.columns = columns

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("count", StructType([*self.columns]))


@pytest.mark.long
def test_a_schema_that_changes(comparison: Comparison) -> None:
    """A schema that Avro's rules resolve continues. Any other is rejected before a batch, and publishes nothing."""
    count, note = StructField("count", LongType()), StructField("note", StringType())
    found: list[tuple[Any, ...]] = []

    def write(df: Any, sequence: int) -> None:
        found.extend(tuple(row) for row in df.collect())

    comparison.produce([{"id": "a", "n": 1}])
    comparison.run(Declaring(count), COUNTS, write=write)
    comparison.produce([{"id": "a", "n": 1}])

    with pytest.raises(InvalidError, match="count was bigint and is string"):
        comparison.run(Declaring(StructField("count", StringType())), COUNTS, write=write)
    with pytest.raises(InvalidError, match="time mode none, and the query has processingtime"):
        comparison.run(Declaring(count), COUNTS, "ProcessingTime", write=write)
    assert found == [("a", 1, 1)]

    class Wider(Declaring):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
            old, note = self.state.get()
            self.state.update((old + len(list(rows)), "noted"))
            yield Row(id=key[0], count=self.state.get()[0], total=None if note is None else 0)

    comparison.run(Wider(count, note), COUNTS, write=write)
    comparison.produce([{"id": "a", "n": 1}])
    comparison.run(Wider(count, note), COUNTS, write=write)
    assert found == [("a", 1, 1), ("a", 2, None), ("a", 3, 0)]


def test_a_store_that_no_processor_wrote(pipeline: MakePipeline) -> None:
    """A processor rejects a store that no processor wrote, since it would misread the keys."""
    job = pipeline(tasks=2, partitions=1)
    job.produce(5)
    job.run()
    groups = stateful(job.rows, "key", config=job.config)
    writer = groups.transformWithState(Counting(), COUNTS, "Update", "None").writeStream.foreachBatch(print)

    with pytest.raises(InvalidError, match="state that no processor wrote"):
        writer.option("checkpointLocation", job.location.as_uri()).start()


def test_what_is_not_there_yet_is_named(comparison: Comparison) -> None:
    """Every unsupported option is rejected by name."""
    groups = stateful(comparison.rows, "id", config=comparison.job.config)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: comparison.run(Counting(), COUNTS, "EventTime"), "watermark"),
        (lambda: groups.transformWithState(Counting(), COUNTS, "Update", "None", None, "t"), "no column 't'"),
        (lambda: groups.transformWithState(Counting(), COUNTS, "Update", "None", None, "ID"), "'ID' is of type string"),
        (lambda: groups.transformWithState(Counting(), COUNTS, "Complete", "None"), "Complete"),
        (lambda: groups.transformWithState(Counting(), COUNTS, "Update", "Sometimes"), "Sometimes"),
        (lambda: groups.applyInPandasWithState(print, COUNTS, "a int", "update", "Sometimes"), "timeout 'Sometimes'"),
        (lambda: groups.applyInPandasWithState(print, COUNTS, "a int", "complete", "NoTimeout"), "complete"),
        (lambda: stateful(comparison.rows, config=comparison.job.config), "column to group by"),
    ]
    frame = groups.transformWithState(Counting(), COUNTS, "Update", "None")
    function = groups.applyInPandasWithState(print, COUNTS, "a int", "update", "NoTimeout")
    calls += [
        (lambda: function.writeStream.outputMode("append"), "output mode"),
        (lambda: frame.writeStream.outputMode("complete"), "output mode"),
        (lambda: frame.writeStream.format("parquet").start(), "directory"),
        (lambda: frame.writeStream.format("memory").start(), "queryName|name for its view"),
    ]
    for call, name in calls:
        with pytest.raises(InvalidError, match=name):
            call()
    for bad, name in ((("nothing",), "nothing"), (("id", "m"), "m")):
        one = Comparison(comparison.job, keys=bad, input="id string, n bigint, m map<string,int>")
        with pytest.raises(InvalidError, match="column") as caught:
            one.run(Counting(), COUNTS)
        assert caught.value.where["column"] == name


@long
def test_the_documented_initial_state(pipeline: MakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/spark.md: the page's programs continue its processor from a table."""
    job = pipeline(tasks=2)
    job.produce(10, keys=2)
    table = (tmp_path / "totals").as_uri()
    job.spark.sql("FROM VALUES ('key-0', 100L) AS totals(user, visits)").write.parquet(table)
    write_toml(job.config, tmp_path / "job.toml")
    monkeypatch.chdir(tmp_path)
    visits = blocks("docs/spark.md", "## Processors")[0].partition("query = ")[0]
    (continued,) = blocks("docs/spark.md", "### An initial state")
    names: dict[str, Any] = {
        "__name__": "__main__",  # the program's classes are shipped by value
        "spark": job.spark,
        "JobConfig": JobConfig,
        "rows": lambda offsets: job.rows(offsets).selectExpr("cast(key as string) user", "cast(value as string) page"),
    }
    exec(visits + continued.replace("/data/old-totals", table), names)
    found: list[Row] = []
    writer = names["frame"].writeStream.foreachBatch(lambda df, sequence: found.extend(df.collect()))
    writer.option("checkpointLocation", job.location.as_uri()).trigger(availableNow=True).start().awaitTermination()

    assert {row.user: row.visits for row in found} == {"key-0": 105, "key-1": 4, None: 1}
