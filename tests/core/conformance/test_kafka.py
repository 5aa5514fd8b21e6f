"""The in-memory broker behaves like a real one: each test runs on both, through the production adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from secrets import token_hex
from typing import Any

import pytest

from statemgr.config import JobConfig
from statemgr.errors import FencedError, InvalidError, MissingState
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
from statemgr.kafka.transactions.publisher import TransactionalPublisher, task_transactional_id
from statemgr.local.machine import SystemClock, system_ids
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer


@pytest.fixture(params=["memory", "kafka"])
def config(request: pytest.FixtureRequest) -> Iterator[JobConfig]:
    """Create a new job with its topics."""
    name = f"memory:{token_hex(8)}"
    with served(MemoryBroker(), name):
        server: KafkaServer | None = None if request.param == "memory" else request.getfixturevalue("kafka")
        made = JobConfig.from_mapping(
            {
                "job.name": f"conformance-{token_hex(8)}",
                "kafka.bootstrap.servers": name if server is None else server.bootstrap_servers,
                "task.backup.factories": ["kafka-changelog"],
                "stores.totals.value.serde": "bytes",
            }
        )
        specs = [checkpoint_topic_spec(made), *changelog_topic_specs(made)]
        topics = TopicAdmin(made, SystemClock())
        assert sorted(topics.create_missing(specs)) == sorted(spec.name for spec in specs)
        assert topics.create_missing(specs) == []
        topics.verify(specs)
        yield made


@pytest.fixture
def changelog(config: JobConfig) -> Iterator[ChangelogTopics]:
    """Return a reader of the job's changelog."""
    topics = ChangelogTopics(config, SystemClock(), system_ids())
    yield topics
    topics.close()


def publisher(config: JobConfig) -> TransactionalPublisher:
    """Return a fenced publisher for the job's task."""
    made = TransactionalPublisher(config, task_transactional_id(config, "Partition 0"), SystemClock())
    made.fence()
    return made


def publish(by: TransactionalPublisher, topic: str, *keys: bytes) -> tuple[int, int, int]:
    """Publish one record per key. Return the offset of the first, the one after the last, and their number."""
    with by.transaction() as transaction:
        transaction.send_changes(topic, 0, [(key, b"v") for key in keys])
        start, end, records, _, _ = transaction.flush()[topic, 0]
        return start, end, records


def keys(changelog: ChangelogTopics, topic: str) -> list[bytes]:
    """Return the keys of all committed records, in order."""
    return [record.key for batch in changelog.read(topic, 0, *changelog.bounds(topic, 0)) for record in batch]


def test_a_transaction_is_published_whole(config: JobConfig, changelog: ChangelogTopics) -> None:
    """A reader finds the delivered offsets. The transaction's marker takes the offset after them."""
    topic = config.stores["totals"].changelog_topic
    by = publisher(config)
    assert publish(by, topic, b"a", b"b", b"c") == (0, 3, 3)
    assert publish(by, topic, b"d") == (4, 5, 1)
    assert keys(changelog, topic) == [b"a", b"b", b"c", b"d"]
    assert changelog.bounds(topic, 0) == (0, 6)
    assert changelog.settled_end(topic, 0) == 6
    by.close()


def test_the_newest_record_is_recognised(config: JobConfig, changelog: ChangelogTopics) -> None:
    """A reader finds the newest delivered record with the timestamp that the producer was told, whether the client or
    the broker has set it."""
    by = publisher(config)
    for topic in (config.stores["totals"].changelog_topic, config.checkpoint_topic):
        for changes, deletes in (
            (((b"a", b"1"), (b"b", None)), True),
            (((b"c", None), (b"d", b"2"), (b"e", b"3")), False),
        ):
            with by.transaction() as transaction:
                transaction.send_changes(topic, 0, changes)
                found = transaction.flush()[topic, 0]
            (record,) = next(iter(changelog.read(topic, 0, found.end - 1, found.end)))
            assert (record.timestamp_ms, record.value is None) == (found.newest_ms, deletes)
            assert found.newest_deletes == deletes
    by.close()


def test_an_open_transaction_is_not_settled(config: JobConfig, changelog: ChangelogTopics) -> None:
    """While a transaction is open, the watermark is after its records and the settled end is before them."""
    topic = config.stores["totals"].changelog_topic
    by = publisher(config)
    publish(by, topic, b"a")
    with by.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"b", b"v")])
        transaction.flush()
        assert (changelog.bounds(topic, 0)[1], changelog.settled_end(topic, 0)) == (3, 2)
    wait_until(lambda: changelog.settled_end(topic, 0) == 4)  # a broker answers a commit before it writes the marker
    by.close()


def test_an_aborted_transaction_is_not_read(config: JobConfig, changelog: ChangelogTopics) -> None:
    """Records of an aborted transaction keep their offsets, but no reader of committed records gets them."""
    topic = config.stores["totals"].changelog_topic
    by = publisher(config)
    publish(by, topic, b"a")
    with pytest.raises(ZeroDivisionError), by.transaction() as transaction:  # noqa: PT012 - the end of the block aborts
        transaction.send_changes(topic, 0, [(b"lost", b"v")])
        transaction.flush()
        raise ZeroDivisionError
    by.settle()
    again = publisher(config)
    publish(again, topic, b"b")
    assert keys(changelog, topic) == [b"a", b"b"]
    again.close()


def test_a_newer_owner_fences_an_older_one(config: JobConfig, changelog: ChangelogTopics) -> None:
    """A newer owner fences an older one even in the middle of a transaction, whose records stay unpublished."""
    topic = config.stores["totals"].changelog_topic
    old = publisher(config)
    with pytest.raises(FencedError), old.transaction() as transaction:  # noqa: PT012 - the end of the block commits
        transaction.send_changes(topic, 0, [(b"lost", b"v")])
        transaction.flush()
        new = publisher(config)
    publish(new, topic, b"a")
    assert keys(changelog, topic) == [b"a"]
    new.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("topic", "value", "headers", "error"),
    [
        (None, "text", [("a", "text"), ("b", None)], None),
        (None, b"x" * 1_000_001, [], InvalidError),
        ("no such topic!", b"v", [], InvalidError),
        (None, b"v", {"a": b"v"}, TypeError),
        (None, ["v"], [], TypeError),
    ],
)
def test_records_are_encoded_or_refused(
    config: JobConfig, changelog: ChangelogTopics, topic: str | None, value: Any, headers: Any, error: Any
) -> None:
    """Text becomes UTF-8. A record that a client or broker rejects ends the transaction with the same kind of error."""
    known, by = config.stores["totals"].changelog_topic, publisher(config)
    with pytest.raises(error) if error else nullcontext(), by.transaction() as transaction:
        transaction.send(topic or known, b"a", value, partition=0, headers=headers)
        transaction.flush()
    by.close()
    assert keys(changelog, known) == ([] if error else [b"a"])


def test_a_missing_topic_is_missing(config: JobConfig, changelog: ChangelogTopics) -> None:
    """A missing topic raises its own error and does not look like an empty topic."""
    with pytest.raises(MissingState):
        changelog.describe("no-such-topic")
    with pytest.raises(MissingState):
        changelog.bounds("no-such-topic", 0)


def test_records_have_the_time_of_the_broker(config: JobConfig, changelog: ChangelogTopics) -> None:
    """The time that the broker gives to records is within a minute of this machine's time."""
    assert abs(changelog.time_ms() - SystemClock().time_ns() // 1_000_000) < 60_000
