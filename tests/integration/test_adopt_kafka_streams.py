"""``statemgr adopt --from kafka-streams``: adopts jobs that the real Kafka Streams ran, from its release jars."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from statemgr import JobConfig, StateManager
from tests.kafka_jobs import committed, state_of
from tests.old_jobs import Adopter, await_empty, ends, make, state
from tests.peers.environments import run, streams_java
from tests.servers import KafkaServer

pytestmark = pytest.mark.long
STORES = ("headers", "plain", "timestamped")
KEYS = 40


class StreamsJob:
    """An application with an input topic of two partitions: key n is in partition n % 2."""

    def __init__(self, kafka: KafkaServer) -> None:
        self.kafka, self.name = kafka, kafka.fresh_name("streams")
        self.topic = f"{self.name}.in"
        make(kafka, self.topic, cleanup__policy="delete")
        self.rows: list[tuple[int, bytes]] = []

    def send(self, rows: Iterable[tuple[int, bytes]]) -> int:
        """Send rows of key and text. Returns how many."""
        producer, rows = Producer({"bootstrap.servers": self.kafka.bootstrap_servers}), list(rows)
        for key, row in rows:
            producer.produce(self.topic, row, b"key-%d" % key, key % 2)
        assert producer.flush(30) == 0
        self.rows += rows
        return len(rows)

    def run(self, kind: str, count: int, status: int = 0) -> None:
        """Process this many rows."""
        command = [*streams_java("StreamsJob"), self.kafka.bootstrap_servers, self.name, self.topic, kind, str(count)]
        run(command, status=status)
        if status == 0:
            await_empty(self.kafka, self.name)  # its members do not leave the group

    def changelogs(self) -> list[str]:
        return [f"{self.name}-{store}-changelog" for store in STORES]

    def adopter(self, directory: Path) -> Adopter:
        return Adopter(self.kafka, directory, "--from", "kafka-streams", "--job", self.name)


def expected(rows: Iterable[tuple[int, bytes]]) -> list[dict[str, dict[bytes, bytes]]]:
    """The state that the job keeps in each store: per partition, the number of rows of each key."""
    found: list[dict[bytes, bytes]] = [{}, {}]
    for number, row in rows:
        of, key = found[number % 2], b"key-%d" % number
        if row == b"0":
            of.pop(key, None)
        else:
            of[key] = b"%d" % (int(of.get(key, b"0")) + 1)
    return [dict.fromkeys(STORES, of) for of in found]


def some_rows(text: bytes) -> list[tuple[int, bytes]]:
    """Rows of all keys, and rows that delete every fifth key."""
    rows = [(key, text) for _ in range(3) for key in range(KEYS)]
    return rows + [(key, b"0") for key in range(0, KEYS, 5)] + [(0, text)]


@pytest.fixture
def job(kafka: KafkaServer) -> StreamsJob:
    """A job that has not run."""
    return StreamsJob(kafka)


@pytest.mark.parametrize("kind", ["plain", "exactly-once"])
def test_a_stopped_job_is_adopted_key_by_key(job: StreamsJob, tmp_path: Path, kind: str) -> None:
    """Stores with and without timestamps and headers give plain values, with the group's offsets. The command
    recognises an exactly-once job by its changelogs, and writes nothing to the old topics."""
    job.run(kind, job.send(some_rows(b"first")))
    job.run(kind, job.send(some_rows(b"second")))
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.name}-new")
    assert set(config.stores) == set(STORES)
    before = ends(job.kafka, *job.changelogs(), job.topic)
    job.send([(0, b"later"), (1, b"later")])
    found = adopter.json()
    assert sum(row["converted"] + row["left_out"] for row in found["changelogs"]) == 0
    assert found["doubled_at_most"] == (0 if kind == "exactly-once" else 2)
    said = "no input record is processed twice" if kind == "exactly-once" else "at most 2 input records"
    assert said in adopter.run("--write")
    states, offsets = state(config)
    assert states == expected(job.rows[:-2])
    assert offsets == [{f"{job.topic}-{n}": before[job.topic, n][1]} for n in (0, 1)]
    for topic in job.changelogs():
        assert ends(job.kafka, topic).items() <= before.items()


def test_a_job_that_died_may_have_doubled_its_tail(job: StreamsJob, tmp_path: Path) -> None:
    """An at-least-once job died after it wrote its changelogs and before it committed. The adopted state contains the
    effects of all rows, and the command reports how many rows may be processed twice."""
    job.run("plain", job.send(some_rows(b"first")))
    count = len(job.rows)
    job.run("crash", job.send([(key, b"tail") for key in range(10)]), status=9)
    await_empty(job.kafka, job.name)
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.name}-new")
    assert "at most 10 input records" in adopter.run()
    adopter.run("--write")
    states, offsets = state(config)
    assert states == expected(job.rows)
    assert sum(of[f"{job.topic}-{n}"] for n, of in enumerate(offsets)) == count


@pytest.mark.parametrize(("kind", "why"), [("window", "windows or sessions"), ("versioned", "a versioned store")])
def test_other_kinds_of_stores_are_refused_by_name(job: StreamsJob, tmp_path: Path, kind: str, why: str) -> None:
    """The command names the kind of store, and adopts the other stores without it."""
    job.run(kind, job.send(some_rows(b"first")))
    adopter = job.adopter(tmp_path)
    named = [option for store in STORES for option in ("--changelog", f"{store}={job.name}-{store}-changelog")]
    config = adopter.init(f"{job.name}-new", *named)
    refused = adopter.run("--write", status=2)
    assert why in refused
    assert f"topic={job.name}-extra-changelog" in refused
    adopter.run("--write", *named)
    assert state(config)[0] == expected(job.rows)


def test_in_place(job: StreamsJob, tmp_path: Path) -> None:
    """The new job continues the old changelogs in place once their settings are suitable."""
    job.run("plain", job.send(some_rows(b"first")))
    adopter = job.adopter(tmp_path)
    config = adopter.init(f"{job.name}-new", "--in-place")
    lags = {f"stores.{store}.changelog.min.compaction.lag.ms": 0 for store in STORES}
    adopter.run("--write", "--in-place", *(o for key in lags for o in ("--set", f"{key}=0")))
    mine = JobConfig.from_mapping(config.to_mapping(), lags)
    assert state(mine)[0] == expected(job.rows)
    with StateManager(mine) as manager, manager.open_task("Partition 1") as task:
        task.store("plain").put(b"key-1", b"ours")
        task.commit({f"{job.topic}-1": 1})
    assert state_of(committed(mine, f"{job.name}-plain-changelog", 1))[b"key-1"] == b"ours"
