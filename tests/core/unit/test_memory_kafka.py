"""What the broker in memory does when it is told to: time-outs, forgotten IDs and compaction, by its own clock; and how
members of a group share topics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaException

from statemgr.kafka.errors import ClientErrors
from statemgr.testing.clock import ControlledClock
from statemgr.testing.memory_clients import MemoryGroupConsumer
from statemgr.testing.memory_kafka import MemoryBroker, ProducerId

Txn = tuple[str, ProducerId]


@pytest.fixture
def clock() -> ControlledClock:
    """The clock of the broker."""
    return ControlledClock(1_000_000)


@pytest.fixture
def broker(clock: ControlledClock) -> Iterator[MemoryBroker]:
    """A broker with a compacted topic ``log``, whose deletes stay for ten seconds."""
    made = MemoryBroker(clock)
    made.create("log", 1, {"cleanup.policy": "compact", "delete.retention.ms": "10000"})
    return made


def write(broker: MemoryBroker, *records: tuple[bytes, bytes | None], owner: Txn | None = None) -> None:
    """Write records to the topic."""
    for key, value in records:
        broker.append("log", 0, key, value, owner=owner)


def kept(broker: MemoryBroker) -> list[tuple[int, Any, Any]]:
    """Offset, key and value of what is left, where a marker has neither."""
    log = broker.log("log", 0)
    return [(offset, entry.key, entry.value) for offset, entry in log.records(len(log.entries))]


def test_only_late_transactions_expire(broker: MemoryBroker, clock: ControlledClock) -> None:
    """A transaction begins with its first record. When it is over time, it is aborted and its producer is fenced."""
    early, late = (("early", broker.fence("early", 5000)), ("late", broker.fence("late", 5000)))
    write(broker, (b"k", b"1"), owner=early)
    clock.advance(1)
    write(broker, (b"k", b"2"), owner=late)
    clock.advance(4)
    assert broker.expire_transactions() == []
    clock.advance(0.001)
    assert broker.expire_transactions() == ["early"]
    assert (broker.end("log", 0, only_settled=True), broker.end("log", 0, only_settled=False)) == (1, 3)
    with pytest.raises(KafkaException) as fenced:
        broker.finish(*early, committed=True)
    assert fenced.value.args[0].fatal()
    broker.finish(*late, committed=True)
    assert [entry.value for *_, entry in broker.committed("log")] == [b"2"]


def test_an_id_with_an_open_transaction_is_not_forgotten(broker: MemoryBroker) -> None:
    """Other IDs are, and their producers get an error that asks for an abort."""
    idle, busy = (("idle", broker.fence("idle")), ("busy", broker.fence("busy")))
    write(broker, (b"k", b"1"), owner=busy)
    assert broker.forget_ids() == ["idle"]
    with pytest.raises(KafkaException) as unknown:
        write(broker, (b"k", b"2"), owner=idle)
    assert unknown.value.args[0].txn_requires_abort()
    broker.finish(*busy, committed=True)


def test_compaction_keeps_the_newest_records_and_their_offsets(broker: MemoryBroker, clock: ControlledClock) -> None:
    """Deletes, and markers without records, go when their time since the first compaction has passed."""
    owner = ("a", broker.fence("a"))
    write(broker, (b"k", b"1"), (b"gone", b"1"))
    write(broker, (b"k", b"2"), (b"gone", None), owner=owner)
    broker.finish(*owner, committed=True)
    write(broker, (b"k", b"aborted"), owner=owner)
    broker.finish(*owner, committed=False)
    deletes = [(3, b"gone", None), (4, None, None)]
    for seconds, there in [
        (0, [*deletes, (6, None, None)]),
        (9.999, [*deletes, (6, None, None)]),
        (0.001, deletes[1:]),
    ]:
        clock.advance(seconds)
        broker.compact("log", 0)
        assert kept(broker) == [(2, b"k", b"2"), *there]
    assert broker.end("log", 0, only_settled=True) == 7


def test_compaction_leaves_open_transactions_and_young_records_alone(
    broker: MemoryBroker, clock: ControlledClock
) -> None:
    """It ends before the last stable offset, and before the first record that is younger than the lag."""
    owner = ("a", broker.fence("a"))
    write(broker, (b"k", b"1"), (b"k", b"2"))
    write(broker, (b"k", b"3"), owner=owner)
    write(broker, (b"k", b"4"))
    broker.configure("log", {"min.compaction.lag.ms": "5000"})
    broker.compact("log", 0)
    assert len(kept(broker)) == 4
    clock.advance(5)
    broker.compact("log", 0)
    assert [value for *_, value in kept(broker)] == [b"2", b"3", b"4"]
    broker.finish(*owner, committed=True)
    broker.compact("log", 0)
    assert [value for *_, value in kept(broker)] == [b"4", None]


def test_a_topic_that_is_not_compacted_is_left_alone(broker: MemoryBroker) -> None:
    """Only topics with the policy are compacted. Only others let records be deleted."""
    broker.create("all")
    for value in (b"1", b"2"):
        broker.append("all", 0, b"k", value)
    broker.compact("all", 0)
    assert len(broker.committed("all")) == 2
    assert broker.delete_records("all", 0, 1) == 1
    assert [(offset, entry.value) for _, offset, entry in broker.committed("all")] == [(1, b"2")]
    with pytest.raises(KafkaException):
        broker.delete_records("log", 0, 0)


def test_members_share_the_topics_that_they_have_subscribed_to(broker: MemoryBroker) -> None:
    """The strategy range gives a topic to its subscribers. A member of the group that reads another topic gets nothing
    of it."""
    broker.create("wide", 2)
    topics = {"one": ["log"], "other": ["wide"]}
    members = {name: MemoryGroupConsumer(broker, {"group.id": "g", "error_cb": ClientErrors()}) for name in topics}
    for name, member in members.items():
        member.subscribe(topics[name])
    shared = {name: broker.share("g", member, topics[name]) for name, member in members.items()}
    assert {name: [(at.topic, at.partition) for at in places] for name, places in shared.items()} == {
        "one": [("log", 0)],
        "other": [("wide", 0), ("wide", 1)],
    }
