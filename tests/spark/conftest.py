"""A real Spark session, and jobs for it on the run's broker."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession

from spark_integration import RunningQuery, StateContext, StatefulQuery
from statemgr import JobConfig, StateManager, Store
from statemgr.engine import open_attempt
from statemgr_tools.demo.pipeline import java_options
from statemgr_tools.dev import connector_jars
from tests.jobs import job_mapping
from tests.servers import KafkaServer

ROOT = Path(__file__).parents[2]
PARTITIONER = "spark-hash(binary)"
OUTPUT = "key string, count bigint, attempt string"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start one session for all tests. Spark retries a failed task once, as a cluster would."""
    directory = tmp_path_factory.mktemp("spark with a space")
    before = dict(os.environ)
    os.environ |= {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        # workers import the test modules that define the process functions
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    settings = {
        "spark.jars": ",".join(str(jar) for jar in connector_jars()),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.driver.extraJavaOptions": java_options(str(directory)),
    }
    builder = SparkSession.builder.master("local[2,2]").appName("tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    os.environ.clear()
    os.environ.update(before)


def count(
    batches: Iterator[pa.RecordBatch], stores: Mapping[str, Store], context: StateContext
) -> Iterator[pa.RecordBatch]:
    """Count rows per key. The output names the attempt, so that two attempts never return equal rows."""
    counts: dict[bytes, int] = {}
    for batch in batches:
        for key in batch.column("key").to_pylist():
            counts[key or b"(null)"] = counts.get(key or b"(null)", 0) + 1
    totals = stores["totals"]
    for key, change in counts.items():
        totals.put(key, b"%d" % (int(totals.get(key) or b"0") + change))
    totals.put(b"!attempt", context.attempt.encode())
    if counts:
        keys = [key.decode() for key in counts]
        yield pa.RecordBatch.from_pydict(
            {"key": keys, "count": list(counts.values()), "attempt": [context.attempt] * len(keys)}
        )


@dataclass
class Outputs:
    """An output that records (sequence, rows) for every call."""

    calls: list[tuple[int, list[tuple[Any, ...]]]] = field(default_factory=list)

    def write(self, rows: DataFrame, sequence: int) -> None:
        """Record the rows."""
        self.calls.append((sequence, sorted(tuple(row) for row in rows.collect())))

    def counts(self) -> dict[str, int]:
        """Return key → sum over all sequences. A sequence that arrived twice counts once."""
        total: dict[str, int] = {}
        for rows in dict(self.calls).values():
            for key, change, *_ in rows:
                total[key] = total.get(key, 0) + change
        return total


@dataclass
class Pipeline:
    """A job with its own topic, configuration, checkpoint location and output."""

    spark: SparkSession | None
    kafka: KafkaServer
    directory: Path
    config: JobConfig
    topic: str
    outputs: Outputs = field(default_factory=Outputs)
    produced: dict[str, int] = field(default_factory=dict)

    @property
    def location(self) -> Path:
        """Return the directory in which Spark keeps its offsets."""
        return self.directory / "location"

    def produce(self, rows: int, *, keys: int = 20, partition: int | None = None) -> None:
        """Write rows to the topic. Every tenth row has no key."""
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap_servers})
        for i in range(rows):
            key = None if i % 10 == 9 else f"key-{i % keys}"
            self.produced[key or "(null)"] = self.produced.get(key or "(null)", 0) + 1
            where = {} if partition is None else {"partition": partition}
            producer.produce(self.topic, key=key, value=str(i), **where)
        assert producer.flush(30) == 0

    def rows(self, starting_offsets: str, per_batch: int = 1_000_000) -> DataFrame:
        """Return the streaming input."""
        return (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.kafka.bootstrap_servers)
            .option("subscribe", self.topic)
            .option("startingOffsets", starting_offsets)
            .option("maxOffsetsPerTrigger", per_batch)
            .load()
        )

    def query(self, per_batch: int = 1_000_000, config: JobConfig | None = None) -> StatefulQuery:
        """Return a query that counts rows per key, once over the available input."""
        return (
            StatefulQuery(config or self.config)
            .input(lambda offsets: self.rows(offsets, per_batch))
            .key_by("key")
            .process(count, OUTPUT)
            .output(self.outputs.write)
            .trigger(availableNow=True)
            .option("checkpointLocation", self.location.as_uri())
        )

    def run(self, query: StatefulQuery | None = None, **permissions: bool) -> RunningQuery:
        """Start the query and wait until it has processed everything."""
        running = (query or self.query()).start(**permissions)
        running.awaitTermination()
        return running

    def state(self, factory: str, partitioner: str = PARTITIONER) -> dict[str, int]:
        """Return key → count over all tasks, restored from one backend into an empty directory."""
        state: dict[str, int] = {}
        for contents in self.contents(factory, partitioner).values():
            for key, value in contents.items():
                if key != b"!attempt":
                    assert key.decode() not in state, "a key in two tasks"
                    state[key.decode()] = int(value)
        return state

    def contents(self, factory: str = "blob-store", partitioner: str = PARTITIONER) -> dict[str, dict[bytes, bytes]]:
        """Return task → content of the store, restored from one backend into an empty directory."""
        elsewhere = self.elsewhere(factory)
        found = {}
        with StateManager(elsewhere, partitioner) as manager:
            epoch = manager.acquire()
            for task, checkpoint in epoch.checkpoints.items():
                with open_attempt(elsewhere, task, checkpoint, epoch) as attempt:
                    found[task] = dict(attempt.store("totals").range())
        return found

    def elsewhere(self, factory: str) -> JobConfig:
        """Return the same job on an empty machine that restores from one backend."""
        machine = len(list(self.directory.glob("machine-*")))
        directory = self.directory / f"machine-{machine}"
        directory.mkdir()
        return JobConfig.from_mapping(
            {**self.config.to_mapping(), "task.restore.factories": [factory], "state.dir": str(directory)}
        )


def make_pipeline(
    spark: SparkSession | None, kafka: KafkaServer, directory: Path, tasks: int = 3, partitions: int = 3, **more: object
) -> Pipeline:
    """Create a pipeline and its topic. A pipeline without a session serves a query in another process."""
    mapping = job_mapping(kafka, directory, tasks=tasks, **more)  # type: ignore[arg-type]
    topic = kafka.fresh_name("rows")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for created in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        created.result(timeout=30)
    return Pipeline(spark, kafka, directory, JobConfig.from_mapping(mapping), topic)


@pytest.fixture
def pipeline(spark: SparkSession, kafka: KafkaServer, tmp_path: Path) -> Callable[..., Pipeline]:
    """Return a factory of pipelines: ``pipeline(tasks=3, partitions=3, **configuration)``."""
    return partial(make_pipeline, spark, kafka, tmp_path)
