"""Records of a query's input that its topic no longer has: whom the driver asks, and how a query goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import DataFrame

from statemgr.errors import MissingState
from tests.servers import KafkaServer
from tests.spark.conftest import Pipeline
from tests.spark.test_other_sources import Files

MakePipeline = Callable[..., Pipeline]
pytestmark = [pytest.mark.spark, pytest.mark.long]


def delete_before(servers: str, topic: str, offset: int) -> None:
    """Delete the first records of partition 0."""
    admin = AdminClient({"bootstrap.servers": servers})
    admin.delete_records([TopicPartition(topic, 0, offset)])[TopicPartition(topic, 0)].result(30)


def test_next_to_another_source(pipeline: MakePipeline, tmp_path: Path) -> None:
    """Only the kept location can position the files, so the query goes on there, once it is permitted."""
    job = pipeline(tasks=2, partitions=1)
    files = Files(job, tmp_path / "in")
    files.add(["a", "b"])

    def rows(offsets: str) -> DataFrame:
        assert job.spark is not None
        kafka = job.spark.readStream.format("kafka").option("kafka.bootstrap.servers", job.kafka.bootstrap_servers)
        given = kafka.options(subscribe=job.topic, startingOffsets=offsets, failOnDataLoss="false").load()
        of_files = job.spark.readStream.schema("key string").json(str(files.directory))
        return of_files.selectExpr("cast(key as binary) as key").union(given.select("key"))

    query = job.query().input(rows)
    job.produce(40)
    job.run(query)
    job.produce(40)
    delete_before(job.kafka.bootstrap_servers, job.topic, 70)
    with pytest.raises(MissingState, match="offset 40 is next, and the first one is 70"):
        job.run(query)
    job.run(query, allow_skipped_input=True)
    assert sum(job.state("blob-store").values()) == 2 + 40 + 10


def test_a_topic_of_the_same_name_on_the_brokers_of_the_job(
    pipeline: MakePipeline, own_kafka: Callable[..., KafkaServer]
) -> None:
    """The input is on another cluster, whose offsets say nothing about the job's own topic of that name."""
    job = pipeline(tasks=2, partitions=1)
    upstream = own_kafka().bootstrap_servers
    admin = AdminClient({"bootstrap.servers": upstream})
    admin.create_topics([NewTopic(job.topic, 1, 1)])[job.topic].result(30)
    producer = Producer({"bootstrap.servers": upstream})

    def rows(offsets: str) -> DataFrame:
        assert job.spark is not None
        kafka = job.spark.readStream.format("kafka").option("kafka.bootstrap.servers", upstream)
        return kafka.options(subscribe=job.topic, startingOffsets=offsets).load()

    job.produce(200)
    delete_before(job.kafka.bootstrap_servers, job.topic, 100)
    query = job.query().input(rows)
    for _ in range(2):
        for number in range(40):
            producer.produce(job.topic, key=f"key-{number % 5}")
        assert producer.flush(30) == 0
        job.run(query)
    new = query.option("checkpointLocation", (job.directory / "new").as_uri())
    job.run(new, allow_skipped_input=True)
    assert sum(job.state("blob-store").values()) == 80
