"""The readers of a partition, and of the checkpoint topic."""

from __future__ import annotations

import logging
import re
from itertools import chain
from typing import Any

import pytest

from statemgr import JobConfig, JobReader
from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.errors import ConfigError, MissingState
from statemgr.flows.state_diff import Pair
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.reader import PartitionReader
from statemgr.ports import Restored
from statemgr.testing.clock import ControlledClock
from statemgr.testing.memory_clients import MemoryConsumer, served
from statemgr.testing.memory_kafka import MemoryBroker
from statemgr.testing.memory_producer import MemoryProducer
from statemgr.testing.memory_servers import START_MS, MemoryServers
from tests.commits import TASK
from tests.jobs import with_changes

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.checkpoint.retained": 1,
    "stores.totals.value.serde": "bytes",
}


def test_a_process_that_was_suspended_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sleeps in a read for longer than any deadline, and the first answer after that is empty. This is no
    damage of the log, and no open transaction: the read goes on."""
    clock = ControlledClock(START_MS)
    broker = MemoryBroker(clock)
    broker.append("records", 0, b"key", b"value")
    suspended, consume = [700.0, 700.0], MemoryConsumer.consume

    def consume_late(self: MemoryConsumer, *args: Any) -> Any:
        if not suspended:
            return consume(self, *args)
        clock.advance(suspended.pop())
        return []

    monkeypatch.setattr(MemoryConsumer, "consume", consume_late)
    config = JobConfig.from_mapping(
        {"job.name": "reads", "kafka.bootstrap.servers": "memory:reads", "stores.totals.value.serde": "bytes"}
    )
    with served(broker, "memory:reads"):
        found = [record for batch in PartitionReader(config, clock).read("records", 0, 0, 1) for record in batch]
    assert [record.value() for record in found] == [b"value"]


def test_a_read_that_waits_says_for_what(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A dead owner's transaction is open. Lines in the log say so, a few seconds after the last progress, until the
    brokers abort it."""
    clock = ControlledClock(START_MS)
    broker = MemoryBroker(clock)
    dead = MemoryProducer(broker, {"transactional.id": "dead"})
    dead.init_transactions()
    dead.begin_transaction()
    dead.produce("records", b"key", b"value", partition=0)
    pauses, consume = [1.0] * 17, MemoryConsumer.consume

    def consume_slowly(self: MemoryConsumer, *args: Any) -> Any:
        if pauses:
            clock.advance(pauses.pop())
        else:
            dead.abort_transaction()
        return consume(self, *args)

    monkeypatch.setattr(MemoryConsumer, "consume", consume_slowly)
    caplog.set_level(logging.INFO, "statemgr.kafka.reader")
    config = JobConfig.from_mapping(
        {"job.name": "reads", "kafka.bootstrap.servers": "memory:reads", "stores.totals.value.serde": "bytes"}
    )
    with served(broker, "memory:reads"):
        assert list(PartitionReader(config, clock, 60.0).read("records", 0, 0, 1)) == []
    stops = "the topic has not been read to its end at 1: an open transaction of another owner stops it at 0"
    assert [re.sub(r"most \d+ s", "most N s", message) for message in caplog.messages] == [
        f"waiting for Kafka, for at most N s more: records-0: {stops}"
    ] * 2


def test_compaction_during_a_long_read(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sleeps after it has asked where the topic ends. What it would have read there is compacted, because
    newer records have come after it. They are read, too."""
    consume, config = MemoryConsumer.consume, servers.on_disk(servers.config, "one")
    log = CheckpointTopic(config, servers.clock)
    with servers.manager(config, "kafka-partition") as manager:
        task = manager.open_task(TASK)
        task.commit({"orders-0": 1})

        def consume_late(self: MemoryConsumer, *args: Any) -> Any:
            monkeypatch.undo()
            task.commit({"orders-0": 2})
            servers.broker.compact(config.checkpoint_topic, 0)
            servers.clock.advance(700.0)
            return consume(self, *args)

        monkeypatch.setattr(MemoryConsumer, "consume", consume_late)
        assert log.read()[TASK].current.input_offsets == {"orders-0": 2}
    log.close()


def test_a_store_that_the_job_does_not_have(servers: MemoryServers) -> None:
    """Each way of reading refuses its name. Nothing would look like an empty store."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager:
        manager.open_task(TASK).commit({"orders-0": 1})
    with JobReader(config, services=servers.services) as reader:
        record = reader.retaining()[0]
        with pytest.raises(ConfigError, match="no store 'typo'"), reader.open_store(TASK, "typo"):
            pass
        with pytest.raises(ConfigError, match="no store 'typo'"):
            next(reader.scan(record, record.current, "typo"))
        with pytest.raises(ConfigError, match="no store 'typo'"):
            reader.changes(Pair(record, record.current, record.current), "typo")


def test_a_record_that_was_read_long_ago(servers: MemoryServers) -> None:
    """Compaction has removed a key that its checkpoint had, and a day later the delete. Everything that follows the
    checkpoint in the changelog is young again, so only the checkpoint topic shows that the key is missing."""
    config = servers.on_disk(with_changes(servers.config, task__backup__factories=["kafka-changelog"]), "one")
    topic = config.stores["totals"].changelog_topic
    with (
        JobReader(config, services=servers.services) as reader,
        servers.manager(config, "kafka-partition") as manager,
        manager.open_task(TASK) as task,
    ):
        task.store("totals").put(b"gone", b"1")
        task.store("totals").put(b"other", b"1")
        task.commit({"orders-0": 1})
        record = reader.retaining()[0]
        found = dict(chain.from_iterable(reader.scan(record, record.current, "totals")))
        assert found == {b"gone": b"1", b"other": b"1"}
        task.store("totals").delete(b"gone")
        for number in range(4):
            task.store("totals").put(b"other", b"%d" % number)
            task.commit({"orders-0": 2 + number})
            servers.clock.advance(25 * 3600)
            servers.broker.compact(topic, 0)
        task.store("totals").put(b"other", b"9")
        task.commit({"orders-0": 9})
        with pytest.raises(MissingState, match="an exact rewind is impossible"):
            list(reader.scan(record, record.current, "totals"))
        with pytest.raises(MissingState, match="an exact rewind is impossible"):
            list(reader.changes(Pair(record, record.current, reader.retaining()[0].current), "totals"))


@pytest.mark.parametrize(("hours", "reads"), [(1, 0), (13, 1)])
def test_a_record_that_was_read_a_while_ago(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, hours: int, reads: int
) -> None:
    """The job goes on beside a long query. Its checkpoint is read as long as the changelog supplies it, although the
    topic retains others by now. The topic is read only for a record that may be old."""
    lag = {"stores__totals__changelog__min__compaction__lag__ms": 86_400_000}
    config = servers.on_disk(with_changes(servers.config, task__backup__factories=["kafka-changelog"], **lag), "one")
    with (
        JobReader(config, services=servers.services) as reader,
        servers.manager(config, "kafka-partition") as manager,
        manager.open_task(TASK) as task,
    ):
        task.store("totals").put(b"key", b"old")
        task.commit({"orders-0": 1})
        record = reader.retaining()[0]
        for number in range(3):
            servers.clock.advance(hours * 1200)
            task.store("totals").put(b"key", b"%d" % number)
            task.commit({"orders-0": 2 + number})
        read, asked = CheckpointTopic.read, list[bool]()
        monkeypatch.setattr(CheckpointTopic, "read", lambda *of, **more: (asked.append(True), read(*of, **more))[1])
        found = dict(chain.from_iterable(reader.scan(record, record.current, "totals")))
        assert (found, len(asked)) == ({b"key": b"old"}, reads)


@pytest.mark.parametrize(("lag_s", "took_s", "is_exact"), [(0, 1, False), (14_400, 14_401, False), (14_400, 60, True)])
def test_a_job_that_goes_on_during_a_long_replay(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, lag_s: int, took_s: int, is_exact: bool
) -> None:
    """The job overwrites a value while a reader replays the changelog, and compaction drops the old value before the
    replay reaches it. The reader says so, and does not return a state without the key."""
    lag = {"stores__totals__changelog__min__compaction__lag__ms": lag_s * 1000}
    config = servers.on_disk(with_changes(servers.config, task__backup__factories=["kafka-changelog"], **lag), "one")
    with (
        JobReader(config, services=servers.services) as reader,
        servers.manager(config, "kafka-partition") as manager,
        manager.open_task(TASK) as task,
    ):

        def commit(key: bytes, value: bytes, offset: int) -> None:
            task.store("totals").put(key, value)
            task.commit({"orders-0": offset})

        commit(b"key", b"old", 1)
        commit(b"other", b"1", 2)
        apply = ChangelogRestore._apply

        def late(*given: Any) -> Restored:
            commit(b"key", b"new", 3)
            servers.clock.advance(took_s)
            commit(b"other", b"2", 4)
            servers.broker.compact(config.stores["totals"].changelog_topic, 0)
            return apply(*given)

        monkeypatch.setattr(ChangelogRestore, "_apply", late)
        if is_exact:
            with reader.open_store(TASK, "totals") as opened:
                assert dict(opened.scan(None, None)) == {b"key": b"old", b"other": b"1"}
        else:
            with pytest.raises(MissingState, match="an exact rewind is impossible") as caught:
                reader.open_store(TASK, "totals").__enter__()
            assert "min.compaction.lag.ms" in str(caught.value.hint)


@pytest.mark.parametrize("store", ["work", "parts", "content", "lock"])
def test_a_store_has_the_name_of_nothing_that_a_read_makes(servers: MemoryServers, store: str) -> None:
    """Any name of a store can be read, as a whole too."""
    config = servers.on_disk(with_changes(servers.config, **{f"stores.{store}.value.serde": "bytes"}), "one")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store(store).put(b"k", b"v")
        task.commit({"orders-0": 1})
        with (
            JobReader(config, services=servers.services) as reader,
            reader.open_store(TASK, store, whole=True) as opened,
        ):
            assert dict(opened.scan(None, None)) == {b"k": b"v"}
