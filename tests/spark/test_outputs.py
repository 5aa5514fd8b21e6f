"""Every sink (Kafka in the publishing transaction, files, tables, a view, foreach) gets each sequence once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's name for it
from pyspark.sql.streaming import StatefulProcessor

from spark_integration import StatefulQuery, stateful
from spark_integration.outputs import FileOutput, ForeachOutput, FormatOutput, MemoryOutput, TableOutput
from spark_integration.processors.frame import StatefulFrame
from spark_integration.writer import StatefulWriter
from statemgr.errors import InvalidError, StatemgrError, UnavailableError
from statemgr.phases import Phase, observed
from tests.kafka_jobs import committed, make_topic
from tests.spark.conftest import Pipeline

MakePipeline = Callable[..., Pipeline]


class Count(StatefulProcessor):
    """Counts rows per key."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "total bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        change = sum(1 for _ in rows)
        total = (self.total.get()[0] if self.total.exists() else 0) + change
        self.total.update((total,))
        yield Row(key=key[0] or "(null)", change=change, total=total)

    def close(self) -> None:
        pass


def counts(job: Pipeline) -> StatefulFrame:
    """Return a frame with rows per key and batch, counted by a processor."""
    rows = lambda offsets: job.rows(offsets, 40).selectExpr("cast(key as string) as key")  # noqa: E731
    groups = stateful(rows, "key", config=job.config)
    return groups.transformWithState(Count(), "key string, change bigint, total bigint", "Append", "None")


def run(job: Pipeline, writer: StatefulWriter, table: str | None = None) -> None:
    """Run the query to the end of its input."""
    writer = writer.trigger(availableNow=True).option("checkpointLocation", job.location.as_uri())
    (writer.toTable(table) if table else writer.start()).awaitTermination()


def added(rows: list[tuple[str, int]]) -> dict[str, int]:
    """Return key → sum of its changes."""
    total: dict[str, int] = {}
    for key, change in rows:
        total[key] = total.get(key, 0) + change
    return total


@pytest.fixture
def job(pipeline: MakePipeline) -> Pipeline:
    """Make a job of two tasks with some input."""
    made = pipeline(tasks=2, partitions=1)
    made.produce(100)
    return made


@pytest.mark.long
@pytest.mark.parametrize("phase", [Phase.COMMIT_TRANSACTION, Phase.OUTPUT])
def test_records_for_kafka_are_sent_with_the_state(job: Pipeline, phase: Phase) -> None:
    """A query that fails before or after the commit of its transaction sends each change once."""
    topic = job.kafka.fresh_name("out")
    make_topic(job.config, topic, 1)
    value = F.to_json(F.struct("key", "change")).alias("value")
    frame = counts(job).where("change > 0").select(F.col("key"), value)

    def writer() -> StatefulWriter:
        return frame.writeStream.format("kafka").option("topic", topic)

    class Killed(Exception):
        pass

    seen: list[str] = []

    def kill(at: Phase, subject: str) -> None:
        if at is phase:
            seen.append(subject)
            if len(seen) == 2:
                raise Killed

    with observed(kill), pytest.raises(Exception, match="Killed"):
        run(job, writer())
    job.produce(50)
    run(job, writer())
    shutil.rmtree(job.location)
    run(job, writer())

    sent = [(key, json.loads(value)) for key, value in committed(job.config, topic)]
    assert all(key.decode() == told["key"] for key, told in sent)
    assert added([(told["key"], told["change"]) for _, told in sent]) == job.produced


@pytest.mark.parametrize("kept", [True, False])
def test_kafka_gets_a_batch_that_the_former_output_did_not_get(job: Pipeline, kept: bool) -> None:
    """The output fails after a batch was published, and the next start has Kafka as the output, at the same location or
    at a new one. The rows are sent once, also if that start fails and later ones begin at new locations."""
    topic = job.kafka.fresh_name("out")
    make_topic(job.config, topic, 1)
    frame = counts(job).select(F.to_json(F.struct("key", "change")).alias("value"))

    def fail(rows: DataFrame, sequence: int) -> None:
        raise OSError("told to")

    def fail_at(phase: Phase, subject: str) -> None:
        if phase is Phase.COMMIT_TRANSACTION:
            raise UnavailableError("the broker is away")

    writer = frame.writeStream.format("kafka").option("topic", topic)
    with pytest.raises(Exception, match="told to"):
        run(job, frame.writeStream.foreachBatch(fail))
    for failing in (True, False, False):
        if not kept:
            shutil.rmtree(job.location, ignore_errors=True)
        with observed(fail_at) if failing else nullcontext(), pytest.raises(Exception) if failing else nullcontext():
            run(job, writer)
        kept = kept and failing
    sent = [json.loads(value) for _, value in committed(job.config, topic)]
    assert added([(told["key"], told["change"]) for told in sent]) == job.produced


@pytest.mark.long
def test_what_is_no_record_is_refused_at_the_start(pipeline: MakePipeline) -> None:
    """A frame that makes no Kafka record is rejected at the start, by column. A missing topic publishes nothing."""
    job = pipeline(tasks=2, partitions=1, task__commit__timeout__ms=4000)
    job.produce(100)
    for frame, topic, name in (
        (counts(job).drop("change", "total"), "t", "value"),
        (counts(job).withColumn("value", F.col("key")), "t", "change"),
        (counts(job).selectExpr("key as value"), None, "topic"),
        (counts(job).selectExpr("total as value"), "t", "value"),
    ):
        writer = frame.writeStream.format("kafka")
        with pytest.raises(InvalidError) as refused:
            run(job, writer.option("topic", topic) if topic else writer)
        assert refused.value.where["column"] == name
    with pytest.raises(AnalysisException, match="no_such_column"):
        run(job, counts(job).select("no_such_column").writeStream.format("kafka").option("topic", "t"))
    missing = counts(job).selectExpr("key as value").writeStream.format("kafka").option("topic", "no-such-topic")
    with pytest.raises(StatemgrError, match="no-such-topic"):
        run(job, missing)
    seen: list[Any] = []
    run(job, counts(job).writeStream.foreachBatch(lambda rows, sequence: seen.append((sequence, rows.count()))))
    assert seen[0][0] == 1, "nothing was published before"


@pytest.mark.long
def test_files_and_tables_hold_each_sequence_once(job: Pipeline, tmp_path: Path, spark: SparkSession) -> None:
    """Files, and a table that a next query writes from a lost location, each add up to their input."""
    path = str(tmp_path / "out put")
    run(job, counts(job).writeStream.format("parquet").partitionBy("key").option("path", path))
    shutil.rmtree(job.location)
    job.produce(50)
    run(job, counts(job).writeStream.format("parquet").partitionBy("key").option("path", path))
    found = spark.read.parquet(path)
    assert added([(row.key, row.change) for row in found.collect()]) == job.produced
    assert (tmp_path / "out put" / "_spark_metadata").is_dir()

    name = job.kafka.fresh_name("totals").replace("-", "_")
    before = dict(job.produced)
    job.produce(50)
    run(job, counts(job).select("key", "change").writeStream.format("json"), name)
    job.produce(50)
    run(job, counts(job).select("key", "change").writeStream, name)
    new = added([(row.key, row.change) for row in spark.table(name).collect()])
    # the first start delivers the last sequence of the files once more
    assert all(new[key] >= total - before.get(key, 0) for key, total in job.produced.items())


def test_a_sequence_that_is_given_again(tmp_path: Path, spark: SparkSession) -> None:
    """Files, a table and a view ignore a sequence that is repeated or older."""
    spark.sql("DROP TABLE IF EXISTS given_again")
    outputs = {
        "files": FileOutput(str(tmp_path / "files"), "json", "job/1"),
        "table": TableOutput("given_again", "job/1", "parquet"),
        "view": MemoryOutput("given_view", spark),
    }
    for output in outputs.values():
        for sequence in (3, 4, 6, 6, 4):
            output(spark.range(sequence), sequence)
    found = {"files": spark.read.json(str(tmp_path / "files")), "table": spark.table("given_again")}
    found["view"] = spark.table("given_view")
    assert {name: rows.count() for name, rows in found.items()} == dict.fromkeys(outputs, 13)
    spark.sql("DROP TABLE given_again")


def test_many_sequences_that_another_output_got(tmp_path: Path, spark: SparkSession) -> None:
    """The files get few batches for them. Each sequence is there once, however often it or an older one is given."""
    path = tmp_path / "files"
    output = FileOutput(str(path), "json", "job/1")
    for sequence in (3, 4, 60, 60, 50, 4, 61, 60):
        output(spark.range(sequence), sequence)
    assert spark.read.json(str(path)).count() == 3 + 4 + 60 + 61
    numbers = [int(found.name.removesuffix(".compact")) for found in (path / "_spark_metadata").glob("[0-9]*")]
    assert max(numbers) < 30


class Writes:
    """Rows that note the options with which they are written."""

    def __init__(self) -> None:
        self.noted: dict[str, str] = {}

    @property
    def write(self) -> Writes:
        return self

    def format(self, _: str) -> Writes:
        return self

    def mode(self, _: str) -> Writes:
        return self

    def options(self, **options: str) -> Writes:
        self.noted = options
        return self

    def save(self, _: str | None) -> None:
        pass


def test_the_options_of_a_sequence() -> None:
    """A format gets them with the user's own, because it may know them. A database's driver may refuse them."""
    user = {"url": "jdbc:db"}
    for name, own in (("delta", {"txnAppId": "job/1", "txnVersion": "3"}), ("jdbc", {}), ("JDBC", {})):
        rows: Any = Writes()
        FormatOutput(name, "job/1", options=user)(rows, 3)
        assert rows.noted == user | own


def test_a_directory_that_another_query_has_written(tmp_path: Path, spark: SparkSession) -> None:
    """The first sequences follow its batches, and each is there once, however often it is given."""
    source, path = str(tmp_path / "source"), str(tmp_path / "files")
    spark.range(7).write.parquet(source)
    stream = spark.readStream.schema("id bigint").parquet(source)
    writer = stream.writeStream.format("json").option("checkpointLocation", str(tmp_path / "location"))
    writer.trigger(availableNow=True).start(path).awaitTermination()
    output = FileOutput(path, "json", "job/1")
    for sequence in (1, 1, 2, 1, 4):
        output(spark.range(100 * sequence), sequence)
    assert spark.read.json(path).count() == 7 + 100 + 200 + 400


def test_a_directory_of_another_job(tmp_path: Path, spark: SparkSession) -> None:
    """A job that begins in it is refused. A directory whose record has no job yet belongs to any job."""
    path = tmp_path / "files"
    FileOutput(str(path), "json", "job/1")(spark.range(3), 5)
    other = FileOutput(str(path), "json", "job/2")
    with pytest.raises(InvalidError, match="another job writes to this directory"):
        other.check(spark)
    with pytest.raises(InvalidError, match="another job writes to this directory"):
        other(spark.range(3), 1)
    (path / "_statemgr_first").write_text("5")
    (path / "._statemgr_first.crc").unlink(missing_ok=True)
    for sequence in (5, 6):
        other(spark.range(3), sequence)
    assert spark.read.json(str(path)).count() == 6


class Noting:
    """Records the rows of each partition in its own file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rows: list[int] = []

    def open(self, partition: int, sequence: int) -> bool:
        self.file = self.directory / f"{sequence}-{partition}.json"
        self.again = self.file.exists()
        return True

    def process(self, row: Row) -> None:
        self.rows.append(row.id)

    def close(self, error: BaseException | None) -> None:
        rows = sorted(self.rows)
        if self.again:
            assert json.loads(self.file.read_text()) == [rows, None]
        self.file.write_text(json.dumps([rows, None if error is None else str(error)]))


def test_foreach(tmp_path: Path, spark: SparkSession) -> None:
    """Foreach takes an object's methods or a function. A sequence's partitions do not depend on Spark's parallelism.

    Nor do they depend on the number of tasks, which a rescale may have changed.
    """
    ForeachOutput(Noting(tmp_path), 2)(spark.range(0, 100, 1, 7), 5)
    ForeachOutput(Noting(tmp_path), 3)(spark.range(0, 100, 1, 2), 5)
    found = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert 20 < len(found) <= 32
    assert sorted(number for rows, _ in found for number in rows) == list(range(100))

    def fail(row: Row) -> None:
        raise ValueError(f"row {row.id}")

    with pytest.raises(Exception, match="row 7"):
        ForeachOutput(fail, 2)(spark.range(7, 8), 6)
    with pytest.raises(InvalidError, match="foreach"):
        ForeachOutput(object(), 2)


def test_foreach_with_columns_that_have_no_hash(tmp_path: Path, spark: SparkSession) -> None:
    """Columns with a map or a variant at any depth are left out. A name may contain a backtick."""
    nested = "named_struct('v', array(parse_json('1'))) as nested"
    rows = spark.range(20).selectExpr("id", "id as `a``b`", "array(map(id, 1)) as maps", nested)
    ForeachOutput(Noting(tmp_path), 2)(rows, 1)
    found = [json.loads(file.read_text())[0] for file in tmp_path.iterdir()]
    assert sorted(number for part in found for number in part) == list(range(20))
    assert sum(map(bool, found)) > 1


def test_a_view_and_foreach_of_a_query(job: Pipeline, spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    """``writeStream`` of a StatefulQuery writes to a view and to the console."""
    query: StatefulQuery = job.query(40)
    run(job, query.writeStream.format("memory").queryName("seen_counts"))
    assert added([(row.key, row["count"]) for row in spark.table("seen_counts").collect()]) == job.produced
    job.produce(10)
    run(job, query.writeStream.format("console").options(numRows=3, truncate=False))
    assert "Sequence: 4" in capfd.readouterr().out


def test_a_second_operator_with_state_is_named(job: Pipeline, spark: SparkSession) -> None:
    """Stateless operators may follow. Stateful operators and joins of two streams are rejected by name."""
    frame = counts(job)
    static = spark.createDataFrame([("key-1", "one")], "key string, name string")
    shaped = frame.join(static, "key").withColumn("more", F.col("change") + 1).transform(lambda one: one.drop("total"))
    assert shaped.columns == ["key", "change", "name", "more"]
    for call in (lambda: frame.groupBy("key"), lambda: frame.dropDuplicates(), lambda: frame.limit(3)):
        with pytest.raises(InvalidError, match="second operator with state"):
            call()
    for other in (frame, job.rows("earliest")):
        with pytest.raises(InvalidError, match="two streams"):
            frame.join(other, "key")
    with pytest.raises(AttributeError):
        frame.nothing  # noqa: B018
