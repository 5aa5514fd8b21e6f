"""Tasks that own Kafka partitions, jobs that move between a consumer loop and Spark, and topics that grow."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import DataFrame

from spark_integration import StateContext
from spark_integration.sources import StartingOffsets
from statemgr import StateManager, Store
from statemgr.errors import BatchMismatch, InvalidError
from tests.spark.conftest import OUTPUT, Pipeline, count

MakePipeline = Callable[..., Pipeline]


def test_a_job_moves_from_a_consumer_loop_to_spark_and_back(pipeline: MakePipeline) -> None:
    """Spark continues from the position of each task that a loop committed, and a loop then continues from Spark's."""
    job = pipeline(tasks=2, partitions=2)
    job.produce(30, partition=0)
    job.produce(20, partition=1)
    with StateManager(job.config) as manager:
        for partition, read in ((0, 10), (1, 5)):
            with manager.open_task(f"Partition {partition}") as task:
                task.store("totals").put(b"from-loop-%d" % partition, b"%d" % read)
                task.commit({f"{job.topic}-{partition}": read})

    job.run(job.query().partition_by_kafka_partition())

    contents = job.contents("kafka-changelog", "kafka-partition")
    assert contents["Partition 0"][b"from-loop-0"] == b"10"
    assert contents["Partition 1"][b"from-loop-1"] == b"5"
    assert sum(job.outputs.counts().values()) == 50 - 15
    with StateManager(job.config) as manager:
        offsets = {}
        for partition in (0, 1):
            with manager.open_task(f"Partition {partition}") as task:
                assert task.last_checkpoint is not None
                offsets |= task.last_checkpoint.input_offsets
        assert offsets == {f"{job.topic}-0": 30, f"{job.topic}-1": 20}


class Placed:
    """A process function that yields the partitions that each task sees."""

    def __call__(
        self, batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
    ) -> Iterator[pa.RecordBatch]:
        """Yield one row per partition."""
        for batch in batches:
            for partition in sorted(set(batch.column("partition").to_pylist())):
                yield pa.RecordBatch.from_pydict({"key": [context.task], "count": [partition], "attempt": [""]})


def test_each_task_sees_its_own_partition_only(pipeline: MakePipeline) -> None:
    """Task i gets the rows of partition i, and a task without a partition gets none."""
    job = pipeline(tasks=3, partitions=2)
    job.produce(40)
    job.run(job.query().partition_by_kafka_partition().process(Placed(), OUTPUT))
    assert job.outputs.calls[0][1] == [("Partition 0", 0, ""), ("Partition 1", 1, "")]


@pytest.mark.long
def test_a_topic_that_grew(pipeline: MakePipeline) -> None:
    """New partitions are read from their beginning, also at a new location. ``including`` names those that statemgr
    cannot know."""
    job = pipeline(partitions=1)
    job.produce(30)
    job.run()
    admin = AdminClient({"bootstrap.servers": job.kafka.bootstrap_servers})
    for grown in admin.create_partitions([NewPartitions(job.topic, 2)]).values():
        grown.result(timeout=30)
    job.produce(30, partition=1)
    shutil.rmtree(job.location)

    unknown = StartingOffsets.of({f"{job.topic}-0": 30})  # as if the topic was on another cluster
    with pytest.raises(InvalidError, match="including"):
        job.run(job.query().input(lambda offsets: job.rows(unknown)))
    shutil.rmtree(job.location)
    job.run(job.query().input(lambda offsets: job.rows(unknown.including(f"{job.topic}-1"))))
    assert job.state("blob-store") == job.outputs.counts() == job.produced
    for grown in admin.create_partitions([NewPartitions(job.topic, 3)]).values():
        grown.result(timeout=30)
    job.produce(30, partition=2)
    shutil.rmtree(job.location)
    job.run()

    assert job.state("blob-store") == job.outputs.counts() == job.produced


def test_an_input_that_leaves_out_a_topic(pipeline: MakePipeline) -> None:
    """It is refused by name, and needs a permission for one start. The other topic goes on where it was."""
    job, prices = (pipeline(tasks=1, partitions=1) for _ in range(2))

    def orders(offsets: StartingOffsets) -> DataFrame:
        return job.rows(offsets.for_topics(job.topic))

    job.produce(20)
    prices.produce(10)
    job.run(job.query().input(lambda offsets: orders(offsets).union(prices.rows(offsets.for_topics(prices.topic)))))
    for wrong, error, message in (
        (orders, BatchMismatch, f"no longer reads the topic {prices.topic}"),
        (job.rows, InvalidError, "does not read all partitions of the checkpoint"),
    ):
        shutil.rmtree(job.location)
        with pytest.raises(error, match=message):
            job.run(job.query().input(wrong))
    for permission in ({"allow_skipped_input": True}, {}):
        shutil.rmtree(job.location)
        job.produce(20)
        job.run(job.query().input(orders), **permission)
    totals = {key: job.produced.get(key, 0) + prices.produced.get(key, 0) for key in job.produced}
    assert job.state("blob-store") == job.outputs.counts() == totals


def only_first(
    batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
) -> Iterator[pa.RecordBatch]:
    """Read only the first batch of rows."""
    yield from count(iter([batch for batch in [next(batches, None)] if batch is not None]), stores, context)


def test_all_keys_of_a_task_and_of_null_stay_together(pipeline: MakePipeline) -> None:
    """A key stays in one task over batches, and rows without a key share a task. Unread rows are no error."""
    job = pipeline(tasks=4)
    job.produce(200)
    job.run(job.query(per_batch=100).process(only_first, OUTPUT))
    homes: dict[bytes, set[str]] = {}
    for task, content in job.contents().items():
        for key in content:
            homes.setdefault(key, set()).add(task)
    assert {len(tasks) for key, tasks in homes.items() if key != b"!attempt"} == {1}
    assert b"(null)" in homes
