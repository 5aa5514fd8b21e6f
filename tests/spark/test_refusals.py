"""A stateful query rejects invalid starts and batches with typed errors before it changes anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.errors import StreamingQueryException

from spark_integration import StatefulQuery
from statemgr import JobConfig, StateManager
from statemgr.errors import (
    BatchMismatch,
    ConfigError,
    FencedError,
    InvalidError,
    LayoutMismatch,
    MissingState,
    PermissionNeeded,
)
from tests.kafka_jobs import wait_until
from tests.spark.conftest import OUTPUT, PARTITIONER, Pipeline

MakePipeline = Callable[..., Pipeline]


def fail_to_write(rows: object, sequence: int) -> None:
    """Fail as an output that is down."""
    raise ValueError("the sink is down")


def test_other_ends_of_a_published_batch(pipeline: MakePipeline) -> None:
    """A batch with other end offsets is neither a replay nor a continuation, so the query changes nothing."""
    job = pipeline(partitions=1)
    job.produce(60)
    with pytest.raises(StreamingQueryException, match="the sink is down"):
        job.run(job.query().output(fail_to_write))
    log = job.location / "offsets" / "0"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:-1], json.dumps({job.topic: {"0": 50}})]))
    (log.parent / ".0.crc").unlink()
    before = job.contents()

    with pytest.raises(BatchMismatch, match="other offsets"):
        job.run()
    assert job.contents() == before
    assert job.outputs.calls == []


@pytest.mark.long
def test_an_older_checkpoint_location(pipeline: MakePipeline) -> None:
    """An old copy of a location would count rows twice. The error names both positions of the partition."""
    job = pipeline(partitions=1)
    job.produce(40)
    job.run()
    old = job.directory / "old"
    shutil.copytree(job.location, old)
    for _ in range(2):
        job.produce(40)
        job.run()

    with pytest.raises(BatchMismatch, match=r"starts at offset 40, the checkpoint is at offset 120.*twice"):
        job.run(job.query().option("checkpointLocation", old.as_uri()))
    assert job.state("blob-store") == job.produced


def test_an_input_topic_that_was_created_again(pipeline: MakePipeline) -> None:
    """FAULT 51: a recreated topic that is longer than the old one is rejected, at the old location and at a new one.

    With the permission and a new location, the query reads the topic from its beginning.
    """
    job = pipeline(tasks=2, partitions=1)
    job.produce(40)
    job.run()
    recreate(job)
    job.produce(90)
    at_new = job.query().option("checkpointLocation", (job.directory / "new").as_uri())

    for query in (job.query(), at_new):
        with pytest.raises(MissingState, match="deleted and created again"):
            job.run(query)
        assert sum(job.state("blob-store").values()) == 40
    with pytest.raises(BatchMismatch, match="new location"):
        job.run(allow_skipped_input=True)
    job.run(at_new, allow_skipped_input=True)
    assert job.state("blob-store") == job.outputs.counts() == job.produced


@pytest.mark.long
def test_an_input_topic_that_is_created_again_while_the_query_runs(pipeline: MakePipeline) -> None:
    """FAULT 51: if the topic is recreated while the query runs, the next batch ends the query and publishes nothing."""
    job = pipeline(tasks=2, partitions=1)
    job.produce(40)
    running = job.query().trigger(processingTime="100 milliseconds").start()
    try:
        running.processAllAvailable()
        before = dict(job.produced)
        recreate(job)
        job.produce(90)
        with pytest.raises((MissingState, StreamingQueryException)):
            running.processAllAvailable()
    finally:
        running.stop()
    assert job.state("blob-store") == before


@pytest.mark.parametrize("fails", ["true", "false"])
def test_input_that_is_gone(pipeline: MakePipeline, fails: str) -> None:
    """Records that were deleted before a batch are an error, also if Spark would skip them.

    With the permission and a new location, the query begins at the first record that is left.
    """
    job = pipeline(tasks=2, partitions=1)
    job.produce(40)
    job.run()
    job.produce(40)
    admin = AdminClient({"bootstrap.servers": job.kafka.bootstrap_servers})
    admin.delete_records([TopicPartition(job.topic, 0, 70)])[TopicPartition(job.topic, 0)].result(30)

    def rows(offsets: str) -> Any:
        source = job.spark.readStream.format("kafka").option("kafka.bootstrap.servers", job.kafka.bootstrap_servers)
        return source.options(subscribe=job.topic, startingOffsets=offsets, failOnDataLoss=fails).load()

    query = job.query().input(rows)
    at_new = query.option("checkpointLocation", (job.directory / "new").as_uri())
    for refused in (query, at_new):
        with pytest.raises(MissingState, match="offset 40 is next, and the first one is 70"):
            job.run(refused)
    with pytest.raises(BatchMismatch, match="new location"):
        job.run(query, allow_skipped_input=True)
    assert sum(job.state("blob-store").values()) == 40
    newest = job.query().input(rows).option("checkpointLocation", (job.directory / "newest").as_uri())
    job.run(newest, allow_skipped_input=True)
    assert sum(job.state("blob-store").values()) == sum(job.outputs.counts().values()) == 50


def recreate(job: Pipeline) -> None:
    """Delete the input topic and create it again."""
    admin = AdminClient({"bootstrap.servers": job.kafka.bootstrap_servers})
    admin.delete_topics([job.topic])[job.topic].result(30)
    wait_until(lambda: job.topic not in admin.list_topics(timeout=60).topics)
    admin.create_topics([NewTopic(job.topic, 1, 1)])[job.topic].result(30)
    wait_until(lambda: job.topic in admin.list_topics(timeout=60).topics)


def test_a_location_with_a_history_that_the_topic_lacks(pipeline: MakePipeline) -> None:
    """A location of another job is rejected, since the state would lack the rows before it."""
    job = pipeline()
    job.produce(40)
    job.run()
    job.produce(40)
    other = JobConfig.from_mapping({**job.config.to_mapping(), "job.name": job.config.job_name + "-x"})

    with pytest.raises(BatchMismatch, match="has nothing"):
        job.run(job.query(config=other))


def test_a_kafka_partition_that_no_task_owns(pipeline: MakePipeline) -> None:
    """Three partitions and two tasks are rejected. Spark would give the third partition to task 0."""
    job = pipeline(tasks=2, partitions=3)
    job.produce(60)

    with pytest.raises(LayoutMismatch, match="Kafka partition 2"):
        job.run(job.query().partition_by_kafka_partition())


@pytest.mark.long
def test_rows_that_are_not_of_their_partition(pipeline: MakePipeline) -> None:
    """If the partition column is too large or null, the worker rejects the row."""
    job = pipeline(tasks=3, partitions=3)
    job.produce(60)
    for expression, message in (("offset + 7", "tasks"), ("cast(null as int)", "no partition")):
        query = job.query().partition_by_kafka_partition("wrong")
        with pytest.raises(InvalidError, match=message):
            job.run(query.input(lambda offsets, e=expression: job.rows(offsets).selectExpr("*", f"{e} as wrong")))
    assert job.outputs.calls == []


def test_another_number_of_tasks_or_partitioner(pipeline: MakePipeline) -> None:
    """Another number of tasks or partitioner is rejected, since keys would be in the wrong task."""
    job = pipeline(tasks=3, backup=["blob-store"])
    job.produce(40)
    job.run()
    more = JobConfig.from_mapping({**job.config.to_mapping(), "job.tasks": 4})

    with pytest.raises(LayoutMismatch):
        job.run(job.query(config=more))
    with pytest.raises(LayoutMismatch):
        job.run(job.query().partition_by_kafka_partition())


def test_a_key_of_another_type(pipeline: MakePipeline) -> None:
    """An int and an equal bigint have different hashes, so a changed key type would send rows to the wrong tasks."""
    job = pipeline(tasks=2, backup=["blob-store"])
    job.produce(40)

    def by(kind: str) -> StatefulQuery:
        number = f"cast(offset as {kind}) as number"
        query = job.query().input(lambda offsets: job.rows(offsets).selectExpr("*", number))
        return query.key_by("number", "Key")

    job.run(by("int"))
    before = job.contents("blob-store", "spark-hash(int,binary)")
    job.produce(40)

    with pytest.raises(LayoutMismatch, match=r"spark-hash\(bigint,binary\)"):
        by("bigint").start()
    assert job.contents("blob-store", "spark-hash(int,binary)") == before
    assert len(job.outputs.calls) == 1


def wrong_schema(batches: Iterator[pa.RecordBatch], stores: object, context: object) -> Iterator[pa.RecordBatch]:
    """Yield a column that was not declared."""
    yield pa.RecordBatch.from_pydict({"surprise": [1]})


def null_key(batches: Iterator[pa.RecordBatch], stores: object, context: object) -> Iterator[pa.RecordBatch]:
    """Yield a null in a column that does not allow one."""
    schema = pa.schema([("key", pa.string()), ("count", pa.int64()), ("attempt", pa.string())])
    yield pa.RecordBatch.from_pylist([{"key": None, "count": 1, "attempt": ""}], schema=schema)


def no_iterator(batches: Iterator[pa.RecordBatch], stores: object, context: object) -> None:
    """Return no iterator."""


def broken(batches: Iterator[pa.RecordBatch], stores: object, context: object) -> Iterator[pa.RecordBatch]:
    """Raise an exception of the application."""
    raise KeyError("a bug of the user's")
    yield


@pytest.mark.long
def test_what_a_process_function_does_wrong(pipeline: MakePipeline) -> None:
    """Rows of another schema and a missing iterator raise typed errors. Spark reports the application's exception."""
    job = pipeline(tasks=2)
    job.produce(20)
    cases: list[tuple[Any, type[Exception], str]] = [
        (wrong_schema, InvalidError, "not of the output schema"),
        (no_iterator, InvalidError, "use yield"),
        (broken, StreamingQueryException, "a bug of the user's"),
    ]
    for process, kind, message in cases:
        running = job.query().process(process, OUTPUT).start()
        with pytest.raises(kind, match=message):
            running.awaitTermination()
        assert isinstance(running.exception(), kind)
    with pytest.raises(InvalidError, match="NOT NULL") as caught:
        job.run(job.query().process(null_key, "key string not null, count bigint, attempt string"))
    assert caught.value.where["column"] == "key"
    assert str(caught.value.where["task"]).startswith("Partition ")
    job.run()
    assert job.state("blob-store") == job.produced


def test_a_query_that_was_taken_over(pipeline: MakePipeline) -> None:
    """When another owner acquires the job, the running query's next batch is fenced and publishes nothing."""
    job = pipeline(tasks=2)
    job.produce(20)
    running = job.query().trigger(processingTime="100 milliseconds").start()
    try:
        running.processAllAvailable()
        before = dict(job.produced)
        with StateManager(job.config, PARTITIONER) as other:
            other.acquire()
            job.produce(20)
            with pytest.raises(FencedError):
                running.processAllAvailable()
    finally:
        running.stop()
    assert job.state("blob-store") == before


@contextmanager
def goes_on(job: Pipeline, query: Any) -> Iterator[None]:
    """A block in which the query runs. It processes what comes before the block, and what comes after it."""
    job.produce(20)
    running = query.trigger(processingTime="100 milliseconds").start()
    try:
        running.processAllAvailable()
        yield
        job.produce(20)
        running.processAllAvailable()
    finally:
        running.stop()
    assert job.state("blob-store") == job.produced


def test_what_spark_refuses_does_not_end_the_running_query(pipeline: MakePipeline) -> None:
    """A wrong trigger, a name that is taken and an impossible location are found before the job is taken over."""
    job = pipeline(tasks=1, partitions=1)
    name = job.config.job_name
    with goes_on(job, job.query().queryName(name)):
        for wrong, message in (
            (job.query().trigger(processingTime="10 secondz"), "secondz"),
            (job.query().trigger(processingtime="10 seconds"), "processingtime"),
            (job.query().queryName(""), "queryName"),
            (job.query().queryName(name), "already running"),
            (job.query().option("checkpointLocation", "nowhere://location"), "nowhere"),
        ):
            with pytest.raises(InvalidError, match=message):
                wrong.start()


def test_a_query_that_is_refused_does_not_end_the_running_one(pipeline: MakePipeline) -> None:
    """What contradicts the published state is found before the job is taken over."""
    job = pipeline(tasks=2, partitions=1, backup=["blob-store"])
    mapping, new = job.config.to_mapping(), (job.directory / "new").as_uri()
    with goes_on(job, job.query()):
        for wrong, error in (
            (job.query(config=JobConfig.from_mapping({**mapping, "job.tasks": 3})), LayoutMismatch),
            (
                job.query(config=JobConfig.from_mapping({**mapping, "stores.more.value.serde": "bytes"})),
                PermissionNeeded,
            ),
            (job.query().input(job.rows("earliest")).option("checkpointLocation", new), BatchMismatch),
        ):
            with pytest.raises(error):
                wrong.start()


def test_an_incomplete_query(pipeline: MakePipeline) -> None:
    """Each missing part of a query is named before the query changes the job."""
    job = pipeline()
    with pytest.raises(InvalidError, match="call input"):
        StatefulQuery(job.config).option("checkpointLocation", "file:///x").start()
    bare = {key: value for key, value in job.config.to_mapping().items() if key != "blob.store.uri"}
    changelog = JobConfig.from_mapping(
        {**bare, "task.backup.factories": ["kafka-changelog"], "task.restore.factories": ["kafka-changelog"]}
    )
    with pytest.raises(InvalidError, match=r"set blob\.store\.uri"):
        job.query(config=changelog).start()
    scratch = JobConfig.from_mapping({**job.config.to_mapping(), "stores.scratch.backup.factories": []})
    with pytest.raises(ConfigError, match="empty at the beginning of every batch"):
        job.query(config=scratch).start()
    with pytest.raises(InvalidError, match="micro-batches"):
        job.query().trigger(continuous="1 second")
    job.produce(1)
    with pytest.raises(InvalidError, match="no such column"):
        job.run(job.query().key_by("tailnum"))
    with pytest.raises(InvalidError, match="allow_nothing"):
        job.query().start(allow_nothing=True)
    with pytest.raises(InvalidError, match="schema"):
        job.query().process(wrong_schema, "not a schema ,,").start()
