"""Changelog topics on a real broker: a read ends exactly at an offset, whatever gaps the topic has."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from confluent_kafka import TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord, MissingState, UnavailableError
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.kafka.temporary_topic import BrokerTime
from statemgr.kafka.topics import TopicAdmin
from statemgr.local.machine import SystemClock, system_ids
from tests.clocks import SuspendedClock
from tests.kafka_jobs import (
    EAGER,
    client,
    compacted,
    job,
    make_topic,
    make_topics,
    plain_producer,
    recreate,
    send,
    state_of,
    wait_until,
)
from tests.servers import KafkaServer


def _new(kafka: KafkaServer, **settings: str) -> tuple[JobConfig, str, ChangelogTopics]:
    config = job(kafka)
    topic = config.stores["totals"].changelog_topic
    make_topic(config, topic, **(settings or {"cleanup.policy": "compact"}))
    return config, topic, ChangelogTopics(config, SystemClock(), system_ids(), stall_s=20)


def _read(changelog: ChangelogTopics, topic: str, start: int, end: int) -> list[tuple[bytes, bytes | None]]:
    return [(r.key, r.value) for batch in changelog.read(topic, 0, start, end) for r in batch]


def _transact(config: JobConfig, topic: str, *keys: bytes, commit: bool = True) -> None:
    producer = plain_producer(config, f"other-{keys[0]!r}")
    producer.begin_transaction()
    for key in keys:
        producer.produce(topic, b"v", key, 0)
    producer.flush(30)
    producer.commit_transaction(30) if commit else producer.abort_transaction(30)


def test_the_brokers_time_after_the_machine_was_suspended(kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that the time is measured with stood still meanwhile, so the broker is asked again."""
    clock, system = SuspendedClock(), SystemClock()
    broker = BrokerTime(job(kafka), clock, system_ids())
    first = broker.now_ms()
    assert 0 <= first - system.time_ns() // 1_000_000 + 1000 < 6000
    clock.suspended_s = 3600.0
    asked: list[str] = []
    real = broker._ask
    monkeypatch.setattr(broker, "_ask", lambda: asked.append("again") or real())
    assert broker.now_ms() >= first
    assert broker.now_ms() >= first
    assert asked == ["again"]


def test_a_range_is_read_to_exactly_its_end(kafka: KafkaServer) -> None:
    """A read returns the records with start ≤ offset < end, with offsets and timestamps. An empty range gives no
    records."""
    config, topic, changelog = _new(kafka)
    send(config, topic, [(b"k%d" % n, b"v%d" % n if n % 2 else None) for n in range(10)], timestamp_ms=1234)
    assert changelog.bounds(topic, 0) == (0, 10)
    assert _read(changelog, topic, 0, 10) == [(b"k%d" % n, b"v%d" % n if n % 2 else None) for n in range(10)]
    assert _read(changelog, topic, 4, 6) == [(b"k4", None), (b"k5", b"v5")]
    assert _read(changelog, topic, 7, 7) == []
    record = next(iter(changelog.read(topic, 0, 3, 4)))[0]
    assert (record.offset, record.timestamp_ms) == (3, 1234)
    (batch,) = changelog.changes(topic, 0, 3, 6)
    assert batch.changes == [(b"k3", b"v3"), (b"k4", None), (b"k5", b"v5")]
    assert (batch.size, batch.end) == (10, 6)
    assert list(changelog.changes(topic, 0, 7, 7)) == []


def test_aborted_records_and_control_records_are_not_state(kafka: KafkaServer) -> None:
    """A topic that ends in an aborted transaction and in control records is read to its end (fault 19)."""
    config, topic, changelog = _new(kafka)
    _transact(config, topic, b"a", b"b")
    _transact(config, topic, b"lost", commit=False)
    wait_until(lambda: changelog.bounds(topic, 0) == (0, 5))  # the broker writes the marker after it has answered
    start, end = 0, 5
    assert _read(changelog, topic, start, end) == [(b"a", b"v"), (b"b", b"v")]
    assert _read(changelog, topic, 2, end) == []
    assert _read(changelog, topic, 4, end) == []


def test_gaps_left_by_compaction_do_not_end_a_read(kafka: KafkaServer) -> None:
    """After compaction most offsets are gone. A read still reaches the end by position, and the state is complete."""
    config, topic, changelog = _new(kafka, **EAGER)

    def fill(number: int) -> None:
        send(config, topic, [(b"k%d" % n, b"%d" % number * 200) for n in range(500)])

    compacted(config, topic, fill)
    start, end = changelog.bounds(topic, 0)
    records = _read(changelog, topic, start, end)
    assert len(records) < end - start
    state = state_of(records)
    assert state.pop(b"closes the segment") == b""
    assert state == {b"k%d" % n: b"2" * 200 for n in range(500)}


def test_an_open_transaction_below_the_end_is_waited_for(kafka: KafkaServer) -> None:
    """A read reaches committed records behind another owner's open transaction only after that transaction ends. The
    error at the deadline names the transaction."""
    config, topic, _ = _new(kafka)
    other = plain_producer(config, "other")
    other.begin_transaction()
    other.produce(topic, b"v", b"open", 0)
    other.flush(30)
    send(config, topic, [(b"beyond", b"v")])
    changelog = ChangelogTopics(config, SystemClock(), system_ids(), stall_s=1)
    start, end = changelog.bounds(topic, 0)
    with pytest.raises(UnavailableError, match="an open transaction of another owner stops it at 0"):
        _read(changelog, topic, start, end)
    other.abort_transaction(30)
    assert _read(changelog, topic, start, end) == [(b"beyond", b"v")]


def test_offsets_that_are_not_there_are_missing_state(kafka: KafkaServer) -> None:
    """A range that starts below the first offset or ends beyond the last one (fault 21) causes a typed error with topic
    and partition."""
    config, topic, changelog = _new(kafka, cleanup__policy="compact,delete")
    send(config, topic, [(b"k%d" % n, b"v") for n in range(10)])
    admin = client(config)
    admin.delete_records([TopicPartition(topic, 0, 4)])[TopicPartition(topic, 0)].result(30)
    assert changelog.bounds(topic, 0) == (4, 10)
    assert sum(len(batch.changes) for batch in changelog.changes(topic, 0, 4, 10)) == 6
    with pytest.raises(MissingState, match="offsets 4 to 10"):
        list(changelog.changes(topic, 0, 0, 10))
    for start, end in ((0, 10), (4, 11)):
        with pytest.raises(MissingState, match="offsets 4 to 10") as refused:
            _read(changelog, topic, start, end)
        assert refused.value.where == {"topic": topic, "partition": 0}
    assert len(_read(changelog, topic, 4, 10)) == 6


def test_a_record_without_a_key_is_corrupt(kafka: KafkaServer) -> None:
    """If somebody else wrote to the changelog, the error has topic, partition and offset."""
    config, topic, changelog = _new(kafka, cleanup__policy="delete")
    send(config, topic, [(b"", b"v"), (None, b"stray")])
    with pytest.raises(CorruptRecord) as refused:
        _read(changelog, topic, 0, 2)
    assert refused.value.where == {"topic": topic, "partition": 0, "offset": 1}
    with pytest.raises(CorruptRecord) as refused:
        list(changelog.changes(topic, 0, 0, 2))
    assert refused.value.where == {"topic": topic, "partition": 0, "offset": 1}


def test_a_topic_that_is_gone_is_missing_state(kafka: KafkaServer) -> None:
    """Asking for a topic that does not exist never creates it."""
    config = job(kafka)
    changelog = ChangelogTopics(config, SystemClock(), system_ids())
    for ask in (lambda: changelog.describe("not-there"), lambda: changelog.bounds("not-there", 0)):
        with pytest.raises(MissingState):
            ask()
    assert "not-there" not in client(config).list_topics(timeout=60).topics


def test_a_topic_made_anew_has_another_id(kafka: KafkaServer) -> None:
    """A recreated topic has the same name and another ID, which is how a deleted changelog is recognised."""
    config = job(kafka)
    make_topics(config)
    changelog, topic = ChangelogTopics(config, SystemClock(), system_ids()), config.stores["totals"].changelog_topic
    before = changelog.describe(topic)
    assert (before.partitions, before.config["cleanup.policy"]) == (1, "compact")
    assert changelog.describe(topic).topic_id == before.topic_id
    recreate(config, topic)
    assert changelog.describe(topic).topic_id != before.topic_id


#: A process that asks for the broker's time some hours ago, and dies with its temporary topic.
DIES = """
import os, signal, sys, time
from statemgr import JobConfig
from statemgr.ids import IdSource
from statemgr.kafka import temporary_topic
from statemgr.local.machine import SystemClock, system_ids
temporary_topic.write_plainly = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
config = JobConfig.from_mapping({"job.name": "j", "kafka.bootstrap.servers": sys.argv[1]})
ids = IdSource(lambda: time.time_ns() - int(sys.argv[2]) * 3_600_000_000_000, system_ids().token)
temporary_topic.BrokerTime(config, SystemClock(), ids).now_ms()
"""


def test_the_temporary_topics_of_processes_that_died(kafka: KafkaServer) -> None:
    """After an hour, the next experiment deletes them. Until then nobody knows whether their owners live."""
    config = job(kafka)

    def there() -> set[str]:
        with TopicAdmin(config, SystemClock()) as topics:
            return set(topics.names("__statemgr_doctor_"))

    def left_by(hours: int) -> str:
        before = there()
        died = subprocess.run([sys.executable, "-c", DIES, kafka.bootstrap_servers, str(hours)], timeout=120)
        assert died.returncode == -signal.SIGKILL
        oldest = sorted(there() - before)
        return oldest[0]

    new, old = left_by(0), left_by(2)
    assert {new, old} <= there()
    BrokerTime(config, SystemClock(), system_ids()).now_ms()
    wait_until(lambda: old not in there())
    assert new in there()
    with TopicAdmin(config, SystemClock()) as topics:
        topics.delete(new)
