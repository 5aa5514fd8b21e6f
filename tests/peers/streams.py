"""Applications of the real Kafka Streams, described in Python.

A description is a list of steps, each a mapping: ``as`` names it, ``op`` says what it does, ``of`` (and ``with``) name
earlier steps, ``store`` names the store (without it Kafka Streams does). ``StreamsTopology.java`` builds them, and
:mod:`tests.peers.recount` knows their results. Topics in steps are short: each job adds its name. Keys and values are
strings.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Producer

from statemgr.model.keys.partitioners import murmur2
from tests.old_jobs import Adopter, await_empty, make
from tests.peers.environments import streams_java
from tests.servers import KafkaServer

Step = Mapping[str, Any]
PARTITIONS = 2
#: Kinds of steps: that make a table, aggregate, have a store, have a store of numbers.
TABLES = {"table", "to-table"}
AGGREGATES = {"count", "max", "sum"}
_STORED = TABLES | AGGREGATES | {"count-table", "filter"}
_NUMBERS = {"count", "sum", "count-table", "processor"}


class Row(NamedTuple):
    """A row of an input topic, with its time in milliseconds."""

    topic: str
    key: str
    value: str | None
    time: int

    @property
    def partition(self) -> int:
        """Return the partition that Java's clients choose."""
        return murmur2([self.key.encode()])[0] % PARTITIONS


class Streams:
    """One JVM that runs applications, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "streams.log"
        self._errors = self._log.open("a")
        command = [str(part) for part in streams_java("StreamsDescribed")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def run(self, described: Mapping[str, Any]) -> dict[str, dict[Any, str]]:
        """Run an application until it stops. Return what its stores had."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(described), file=self._process.stdin, flush=True)
        said = json.loads(self._process.stdout.readline() or '{"error": "it died"}')
        assert "stores" in said, f"{said}\n{self._log.read_text()[-5000:]}"
        return {
            store: {tuple(key) if len(key) > 1 else key[0]: value for *key, value in rows}
            for store, rows in said["stores"].items()
        }

    def kill(self) -> None:
        """Kill the JVM, with the application that it holds."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def close(self) -> None:
        """End the JVM."""
        try:
            self._process.communicate(timeout=30)
        finally:
            self.kill()


class Job:
    """An application with its topics."""

    def __init__(self, kafka: KafkaServer, steps: Sequence[Step], settings: Mapping[str, str]) -> None:
        self.kafka, self.name, self._settings = kafka, kafka.fresh_name("app"), settings
        self.steps = [
            {**step, "topic": f"{step['topic']}.{self.name}"} if "topic" in step else dict(step) for step in steps
        ]
        for step in self.steps:
            if "topic" in step:
                make(
                    kafka, step["topic"], PARTITIONS, cleanup__policy="delete" if step["op"] == "stream" else "compact"
                )
        self.rows: list[Row] = []
        self._open: list[Producer] = []

    def topic(self, short: str) -> str:
        """Return the job's own name of a topic."""
        return f"{short}.{self.name}"

    def send(self, rows: Iterable[Row]) -> None:
        """Send rows to the partitions that Java's clients choose. Their topics are short or the job's own."""
        self.rows += self._send(Producer({"bootstrap.servers": self.kafka.bootstrap_servers}), rows)

    def send_and_abort(self, rows: Iterable[Row], *, later: bool = False) -> None:
        """Send rows in a transaction, and abort it now or in :meth:`end_transactions`."""
        settings = {"bootstrap.servers": self.kafka.bootstrap_servers, "transactional.id": f"{self.name}-{later}"}
        producer = Producer(settings)
        producer.init_transactions(30)
        producer.begin_transaction()
        self._send(producer, rows)
        self._open.append(producer)
        if not later:
            self.end_transactions()

    def end_transactions(self) -> None:
        """Abort the transactions that are open."""
        while self._open:
            self._open.pop().abort_transaction(30)

    def _send(self, producer: Producer, rows: Iterable[Row]) -> list[Row]:
        sent = [row if self.name in row.topic else row._replace(topic=self.topic(row.topic)) for row in rows]
        for row in sent:
            producer.produce(row.topic, row.value, row.key, row.partition, timestamp=row.time)
        assert producer.flush(30) == 0
        return sent

    def run(self, streams: Streams, stop: int = 0, *, hold: bool = False, **more: str) -> dict[str, dict[Any, str]]:
        """Run it until it has read so many rows, or all, and stop it, unless it is held. Return what its stores had."""
        settings = {"bootstrap.servers": self.kafka.bootstrap_servers, **self._settings, **more}
        described = {"application": self.name, "settings": settings, "steps": self.steps, "stop": stop, "hold": hold}
        stores = streams.run(described)
        if not hold and "group.protocol" not in settings:
            await_empty(self.kafka, self.name)
        unnamed = sorted((name for name in stores if "-STATE-STORE-" in name), key=lambda name: name[-10:])
        stored = [step for step in self.steps if step["op"] in _STORED and "store" not in step]
        for step, name in zip(stored, unnamed, strict=True):
            step["found"] = name
        return stores

    @property
    def named(self) -> list[Step]:
        """Return the steps with the names of all stores, once it has run."""
        return [{"store": step["found"], **step} if "found" in step else step for step in self.steps]

    def counts(self, store: str) -> bool:
        """Whether the values of a store are numbers."""
        return any(step["op"] in _NUMBERS for step in self.named if step.get("store") == store)

    def adopter(self, directory: Path) -> Adopter:
        """Return a runner of ``statemgr adopt`` for the job."""
        return Adopter(self.kafka, directory, "--from", "kafka-streams", "--job", self.name)


def some_rows(topics: Iterable[str], batch: int, keys: int = 25, each: int = 8) -> list[Row]:
    """Rows of every key in each topic, in the order of time, some without a value. The last batch is in this minute."""
    begin = int(time.time()) // 60 * 60_000 - (3 - batch) * 600_000
    return [
        Row(topic, f"k\u00e9-{n * 7 % keys}", None if n % 19 == 7 else f"v{n * 5 % 12}", begin + n * 1500)
        for n in range(keys * each)
        for topic in topics
    ]
