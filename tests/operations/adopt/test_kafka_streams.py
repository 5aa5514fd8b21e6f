"""``statemgr adopt --from kafka-streams``: adopts jobs that the real Kafka Streams ran, from its release jars."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from statemgr import JobConfig, StateManager
from statemgr.local.machine import SystemClock
from statemgr.operations.adopt.old_topics import OldTopics
from tests.kafka_jobs import committed, state_of, wait_until
from tests.old_jobs import Adopter, Changes, await_empty, ends, make, state, whole
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

    def command(self, kind: str, count: int, program: str = "StreamsJob") -> list[str]:
        """The command line of a run that processes this many rows."""
        given = [self.kafka.bootstrap_servers, self.name, self.topic, kind, str(count)]
        return [str(part) for part in (*streams_java(program), *given)]

    def run(self, kind: str, count: int, status: int = 0, program: str = "StreamsJob") -> None:
        """Process this many rows."""
        run(self.command(kind, count, program), status=status)
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


def send_as_java(kafka: KafkaServer, topic: str, rows: Changes) -> int:
    """Send rows to the partitions that Kafka's Java clients choose. Returns how many."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random"})
    for key, value in rows:
        producer.produce(topic, value, key)
    assert producer.flush(30) == 0
    return len(rows)


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


def test_a_kind_of_store_that_is_not_certain_is_refused_by_name(job: StreamsJob, tmp_path: Path) -> None:
    """The command names the kind of store, and adopts the other stores without it."""
    job.run("versioned", job.send(some_rows(b"first")))
    adopter = job.adopter(tmp_path)
    named = [option for store in STORES for option in ("--changelog", f"{store}={job.name}-{store}-changelog")]
    config = adopter.init(f"{job.name}-new", *named)
    refused = adopter.run("--write", status=2)
    assert "several versions of each value" in refused
    assert f"topic={job.name}-extra-changelog" in refused
    adopter.run("--write", *named)
    assert state(config)[0] == expected(job.rows)


def test_a_job_with_the_streams_protocol(job: StreamsJob, tmp_path: Path) -> None:
    """E8: librdkafka says of the group of a running job with the protocol of KIP-1071 that there is none. The command
    refuses to adopt the job while it runs, also with offsets given by hand, and adopts it when it has stopped."""
    count = job.send(some_rows(b"first"))
    running = subprocess.Popen(job.command("streams-protocol", count + 1), stderr=subprocess.DEVNULL)
    adopter = job.adopter(tmp_path)
    given = [option for n in (0, 1) for option in ("--offset", f"{job.topic}-{n}=0")]
    settings = JobConfig.from_mapping(
        {"job.name": job.name, "kafka.bootstrap.servers": job.kafka.bootstrap_servers, "stores.any.type": "memory"}
    )
    try:
        with OldTopics(settings, SystemClock()) as topics:
            wait_until(lambda: sum(topics.committed(job.name).values()) == count, 120)
            assert topics.group(job.name).state == "DEAD"
            servers = f"kafka.bootstrap.servers={job.kafka.bootstrap_servers}"
            for offsets in ([], given):
                refused = adopter.run("--init", "--name", "new", "--set", servers, *offsets, status=2)
                assert "is not stopped" in refused
            job.send([(0, b"last")])
            assert running.wait(120) == 0
            wait_until(lambda: not topics.has_members(job.name, job.topic), 60)
    finally:
        running.kill()
        running.wait()
    config = adopter.init(f"{job.name}-new")
    adopter.run("--write")
    assert state(config)[0] == expected(job.rows)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("suppress", "suppressed results"),
        ("join", "the subscriptions of a foreign-key join"),
        ("hopping", "windows or sessions"),
        ("versioned", "several versions of each value"),
    ],
)
def test_named_operators_are_recognised(job: StreamsJob, tmp_path: Path, kind: str, said: str) -> None:
    """E9: the application chose the names of its operators and the settings of its topics. The command still sees what
    the stores are, and adopts the others."""
    make(job.kafka, f"{job.topic}-left", cleanup__policy="delete")
    left = send_as_java(job.kafka, f"{job.topic}-left", [(b"left-%d" % n, b"key-%d" % n) for n in range(20)])
    count = send_as_java(job.kafka, job.topic, [(b"key-%d" % key, b"text") for key in range(KEYS)])
    job.run(kind, count + (left if kind == "join" else 0), program="StreamsShapes")
    adopter = job.adopter(tmp_path)
    servers = f"kafka.bootstrap.servers={job.kafka.bootstrap_servers}"
    assert said in adopter.run("--init", "--name", "new", "--set", servers, status=2)
    if kind == "join":
        stores = ("left", "right", "joined")
        named = [o for store in stores for o in ("--changelog", f"{store}={job.name}-{store}-changelog")]
        config = adopter.init(f"{job.name}-new", *named)
        assert config.inputs == [job.topic, f"{job.topic}-left"]
        adopter.run("--write", *named)
        joined = {b"left-%d" % n: b"key-%dtext" % n for n in range(20)}
        assert whole(config, "joined") == joined


def test_the_source_topic_of_a_table_is_its_changelog(job: StreamsJob, tmp_path: Path) -> None:
    """E10: under ``topology.optimization=all`` a table has no changelog of its own. The command says so, and adopts the
    source topic up to the adopted offsets, with the rest as input."""
    names, clicks = f"{job.name}.names", f"{job.name}.names-left"
    for topic, policy in ((names, "compact"), (clicks, "delete")):
        make(job.kafka, topic, cleanup__policy=policy)
    rows = [(b"key-%d" % key, b"name %d" % key) for key in range(KEYS)]
    count = send_as_java(job.kafka, names, rows) + send_as_java(job.kafka, clicks, [(key, b"x") for key, _ in rows])
    job.topic = names
    job.run("table", count, program="StreamsShapes")
    send_as_java(job.kafka, names, [(b"key-1", b"later")])
    adopter = job.adopter(tmp_path)
    servers = f"kafka.bootstrap.servers={job.kafka.bootstrap_servers}"
    refused = adopter.run("--init", "--name", "new", "--set", servers, status=2)
    both = ("--changelog", f"totals={job.name}-totals-changelog", "--changelog")
    assert f"{' '.join(both)} TABLE={names}" in refused
    config = adopter.init(f"{job.name}-new", *both, f"names={names}")
    adopter.run("--write", *both, f"names={names}")
    assert whole(config, "names") == dict(rows)
    assert whole(config, "totals") == {key: (1).to_bytes(8, "big") for key, _ in rows}


def test_a_store_that_was_filled_by_another_key(job: StreamsJob, tmp_path: Path) -> None:
    """E10: the state of ``groupBy`` has other keys than the input, so a loop on the input would not find them."""
    count = send_as_java(job.kafka, job.topic, [(b"key-%d" % n, b"city-%d" % (n % 9)) for n in range(200)])
    job.run("group", count, program="StreamsShapes")
    adopter = job.adopter(tmp_path)
    servers = f"kafka.bootstrap.servers={job.kafka.bootstrap_servers}"
    assert "other keys than the input" in adopter.run("--init", "--name", "new", "--set", servers, status=2)
    config = adopter.init(f"{job.name}-new", "--confirm", "totals")
    adopter.run("--write", "--confirm", "totals")
    cities = [n % 9 for n in range(200)]
    assert whole(config, "totals") == {b"city-%d" % n: cities.count(n).to_bytes(8, "big") for n in range(9)}


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
