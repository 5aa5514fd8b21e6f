"""What the examples share on this machine: a Spark session, topics with rows, and configurations of jobs."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from statemgr import JobConfig
from statemgr_tools.dev import connector_jars


class Local:
    """One run of an example: everything that it makes has a name of its own."""

    def __init__(self, name: str, spark: SparkSession, broker: str, directory: Path) -> None:
        self.name, self.spark, self.broker, self.directory = name, spark, broker, directory

    @classmethod
    def from_arguments(cls, example: str) -> Local:
        """What the command line says, and a new session."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--broker", default="localhost:9092", help="such as that of `statemgr dev up --no-s3`")
        broker = parser.parse_args().broker
        name = f"{example}-{time.time_ns() // 1_000_000}"
        directory = Path(".statemgr/examples/spark", name).resolve()
        directory.mkdir(parents=True)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.jars", ",".join(str(jar) for jar in connector_jars()))
            .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        return cls(name, spark, broker, directory)

    def config(self, store: str, **more: object) -> JobConfig:
        """A job of two tasks with one store (``__`` for ``.`` in the names of settings)."""
        mapping: dict[str, object] = {
            "job.name": f"{self.name}-{store}",
            "job.tasks": 2,
            "kafka.bootstrap.servers": self.broker,
            "blob.store.uri": (self.directory / "blobs").as_uri(),
            "state.dir": str(self.directory / "state"),
            "task.backup.factories": ["blob-store"],
            f"stores.{store}.value.serde": "bytes",
        }
        return JobConfig.from_mapping(mapping | {key.replace("__", "."): value for key, value in more.items()})

    def topic(self, name: str) -> str:
        """A new topic."""
        topic = f"{self.name}-{name}"
        admin = AdminClient({"bootstrap.servers": self.broker})
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        return topic

    def send(self, topic: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Put rows on a topic as JSON."""
        producer = Producer({"bootstrap.servers": self.broker})
        for row in rows:
            producer.produce(topic, json.dumps(row))
        producer.flush(30)
