"""Jobs of the real Quix Streams in many shapes, and what comes of adopting each. Starts processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer

from statemgr.model.keys.partitioners import murmur2
from tests.old_jobs import Adopter, await_empty, make
from tests.operations.adopt.test_quix import MESSAGE_KEYS
from tests.peers import environments
from tests.peers.environments import HERE, run
from tests.peers.shapes import told
from tests.servers import KafkaServer

PARTITIONS = 2
#: Changelog and key → value.
Content = dict[tuple[str, bytes], bytes]


@dataclass(frozen=True)
class QuixShape:
    """A job.

    Attributes:
        shape: what ``quix_shapes.py`` does.
        keys: the deserializer of keys.
        topics: number of input topics.
        refused: the store or topic that the refusal names, and why; None if the job is adopted as it is.
        options: with these it is adopted all the same. ``TOPIC`` is the input topic.
    """

    shape: str
    keys: str = "bytes"
    topics: int = 1
    exactly_once: bool = False
    refused: tuple[str, str] | None = None
    options: Sequence[str] = ()

    @property
    def outcome(self) -> str:
        """Return what comes of it, as the page about migrations has it."""
        return told(self.refused, self.options)

    @property
    def counts(self) -> bool:
        """Whether the job counts by the key of the input, without windows."""
        return self.shape in ("count", "bytes", "nested", "ttl", "concat")


QUIX: dict[str, QuixShape] = {
    "count": QuixShape("count"),
    "count, bytes as values": QuixShape("bytes"),
    "count, nested values": QuixShape("nested"),
    "count, values with a time to live": QuixShape("ttl"),
    "count, exactly-once": QuixShape("count", exactly_once=True),
    "count, keys read as `str`": QuixShape("count", keys="str"),
    "count, keys read as `int`": QuixShape("count", keys="int"),
    "count, keys read as `double`": QuixShape("count", keys="double"),
    "count, keys read as `json`": QuixShape("count", keys="json"),
    "two topics, each with a store": QuixShape("count", topics=2),
    "two topics, concatenated": QuixShape("concat", topics=2),
    "group_by": QuixShape(
        "group_by",
        keys="str",
        refused=("repartition__", "other keys than the input"),
        options=["--confirm", "repartition_TOPIC_g"],
    ),
    "tumbling windows": QuixShape("tumbling"),
    "tumbling windows, named": QuixShape("named"),
    "hopping windows": QuixShape("hopping"),
    "sliding windows": QuixShape("sliding"),
}


class QuixApplication:
    """A job with its topics."""

    def __init__(self, kafka: KafkaServer, shape: QuixShape) -> None:
        self.kafka, self.shape, self.group = kafka, shape, kafka.fresh_name("quix")
        self.topics = [f"{self.group}-in{number}" for number in range(shape.topics)]
        for topic in self.topics:
            make(kafka, topic, PARTITIONS, cleanup__policy="delete")
        self.rows: list[int] = []

    def send(self, rows: Iterable[int]) -> int:
        """Send rows to each topic. Return their number in all topics."""
        producer, rows = Producer({"bootstrap.servers": self.kafka.bootstrap_servers}), list(rows)
        for topic in self.topics:
            for row in rows:
                key = MESSAGE_KEYS[self.shape.keys](abs(row))
                value, partition = row.to_bytes(4, "big", signed=True), murmur2([key])[0] % PARTITIONS
                producer.produce(topic, value, key, partition)
        assert producer.flush(30) == 0
        self.rows += rows
        return len(rows) * len(self.topics)

    def run(self, count: int) -> Content:
        """Process this many rows. Return what Quix Streams then reads from its stores, without expiries."""
        described = {
            "broker": self.kafka.bootstrap_servers,
            "group": self.group,
            "topics": self.topics,
            "keys": self.shape.keys,
            "shape": self.shape.shape,
            "exactly_once": self.shape.exactly_once,
            "count": count,
        }
        said = run([environments.quix_python(), HERE / "quix_shapes.py", json.dumps(described)])
        await_empty(self.kafka, self.group)
        return {
            (f"changelog__{self.group}--{self._stream(stream)}--{store}", bytes.fromhex(key)): bytes.fromhex(value)
            for (store, stream, _), key, value in json.loads(said.splitlines()[-1])
        }

    def _stream(self, name: str) -> str:
        """Return the name that a changelog has for a stream."""
        prefix = f"repartition__{self.group}--"
        return f"repartition.{name.removeprefix(prefix).replace('--', '.')}" if name.startswith(prefix) else name

    def adopter(self, directory: Path) -> Adopter:
        """Return a runner of ``statemgr adopt`` for the job."""
        return Adopter(self.kafka, directory, "--from", "quix", "--job", self.group)
