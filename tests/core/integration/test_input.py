"""The job never skips input silently: gaps, truncated and recreated topics, more partitions, and invalid offsets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from statemgr import JobConfig, StateManager, Task
from statemgr.engine import open_attempt
from statemgr.errors import ConfigError, InvalidError, LayoutMismatch, MissingState, StatemgrError
from tests.commits import commit
from tests.jobs import contents, job_mapping, with_changes
from tests.kafka_jobs import EAGER, compacted, wait_until
from tests.loop_members import count, delete_topic, make_topic, member, produce
from tests.servers import KafkaServer

#: A client that has fetched little more than what it has returned.
NOT_AHEAD = {
    "kafka.consumer.queued.min.messages": 1,
    "kafka.consumer.max.partition.fetch.bytes": 20_000,
    "kafka.consumer.fetch.max.bytes": 20_000,
    "kafka.consumer.message.max.bytes": 20_000,
    # a consumer made by hand would wait a second before each of its fetches
    "kafka.consumer.fetch.queue.backoff.ms": 2,
}
ROW = 10_000


class AnyConsumer(Consumer):
    """A client with a user's own settings. ``asked``: how often it was asked for watermarks."""

    asked = 0

    def get_watermark_offsets(self, *args: Any, **kwargs: Any) -> Any:
        """Count the request."""
        self.asked += 1
        return super().get_watermark_offsets(*args, **kwargs)


def any_consumer(config: JobConfig, group: str, reset: str) -> AnyConsumer:
    """A consumer made by hand, with the group's usual settings."""
    settings = {**config.kafka_client("consumer"), "group.id": group, "enable.auto.commit": False}
    return AnyConsumer({**settings, "auto.offset.reset": reset, "session.timeout.ms": 6000})


class Holding:
    """A ``process`` that counts messages, and stops at one offset until it may continue."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.seen: list[int] = []

    def __call__(self, task: Task, message: Message) -> None:
        """Process one message."""
        offset = message.offset()
        assert offset is not None
        if offset == self.at:
            self.reached.set()
            assert self.go_on.wait(60)
        self.seen.append(offset)
        count(task, message)


def truncate(kafka: KafkaServer, topic: str, before: int) -> None:
    """Delete the records before an offset from partition 0."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    [deleted] = admin.delete_records([TopicPartition(topic, 0, before)]).values()
    deleted.result(15)


@pytest.mark.parametrize("reset", ["error", pytest.param("earliest", marks=pytest.mark.long), "latest"])
def test_input_that_is_truncated_under_a_running_loop(kafka: KafkaServer, tmp_path: Path, reset: str) -> None:
    """FAULT 51: if records are deleted before the loop reads them, the loop ends, whatever auto.offset.reset is."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(60), ROW)
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, backup=("blob-store",), task__commit__ms=100, **NOT_AHEAD)
    )
    process = Holding(10)
    consumer = None if reset == "error" else any_consumer(config, group, reset)
    stop, errors = member(config, group, topic, process, consumer)
    assert process.reached.wait(60)
    truncate(kafka, topic, 50)
    process.go_on.set()

    # a client that jumps to the end receives only later records
    def ended() -> bool:
        produce(kafka, topic, 1, [1], ROW)
        return bool(errors)

    wait_until(ended)
    stop()
    [error] = errors
    assert isinstance(error, MissingState)
    expected = error.where["offset"]
    assert isinstance(expected, int)
    assert (error.where["topic"], error.where["partition"]) == (topic, 0)
    assert process.seen == list(range(expected)), "no row after the gap was processed"
    if reset != "error":
        received = error.where["received"]
        assert isinstance(received, int)
        assert received == 50 if reset == "earliest" else received >= 60
    state, offsets = contents(config)
    committed = offsets.get(f"{topic}-0", 0)
    assert committed <= expected
    assert sum(int(value) for value in state["totals"].values()) == committed


def test_gaps_of_compaction_and_transactions_are_no_loss(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 51: from a compacted and transactional input with many gaps, the loop reads all records with few requests
    for watermarks."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), task__commit__ms=60_000))
    make_topic(kafka, topic, 1, **{name.replace(".", "__"): value for name, value in EAGER.items()})
    commit(config, {}, {f"{topic}-0": 0})
    compacted(config, topic, lambda _: produce(kafka, topic, 1, range(2000)))
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(30)
    for number in range(100):
        producer.begin_transaction()
        producer.produce(topic, b"last" if number == 99 else b"1", b"t%d" % number, 0)
        producer.flush(10)  # librdkafka ends with a fatal error if it aborts before the broker knows of the transaction
        producer.commit_transaction() if number % 10 != 5 else producer.abort_transaction()
    seen: list[bytes] = []
    consumer = any_consumer(config, group, "earliest")
    stop, errors = member(config, group, topic, lambda task, message: _note(seen, task, message), consumer)
    wait_until(lambda: b"last" in seen or bool(errors))
    stop()
    assert not errors
    assert seen.count(b"1") == 89
    assert consumer.asked < 10, "not one question for every gap"


def _note(seen: list[bytes], task: Task, message: Message) -> None:
    value = message.value()
    assert value is not None
    seen.append(value)
    count(task, message)


def test_input_that_was_recreated_is_refused_at_a_restart(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 51, invariant 17: the new topic also has the checkpoint's offset, but it is a different topic."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(30))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), task__commit__ms=100))
    process = Holding(-1)
    stop, errors = member(config, group, topic, process)
    wait_until(lambda: len(process.seen) == 30)
    stop()
    assert not errors
    delete_topic(kafka, topic)
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(70))
    process = Holding(-1)
    stop, errors = member(config, group, topic, process)
    wait_until(lambda: bool(errors))
    stop()
    [error] = errors
    assert isinstance(error, MissingState)
    assert "deleted and created again" in str(error)
    assert error.where["topic"] == topic
    assert process.seen == []
    with StateManager(config) as manager, pytest.raises(MissingState, match="created again"):
        manager.open_task("Partition 0")
    # with permission for this one start, the loop begins with the first record of the new topic
    stop, errors = member(config, group, topic, process, allow_skipped_input=True)
    wait_until(lambda: len(process.seen) == 70 or bool(errors))
    stop()
    assert not errors
    assert process.seen == list(range(70))
    state, offsets = contents(config)
    assert offsets == {f"{topic}-0": 70}
    assert sum(int(value) for value in state["totals"].values()) == 100


@pytest.mark.parametrize("reset", ["error", pytest.param("earliest", marks=pytest.mark.long)])
def test_input_that_is_recreated_under_a_running_loop(kafka: KafkaServer, tmp_path: Path, reset: str) -> None:
    """FAULT 51: rows of the new topic are never published under offsets of the old one."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(20))
    config = JobConfig.from_mapping(
        job_mapping(
            kafka,
            tmp_path,
            backup=("blob-store",),
            task__commit__ms=100,
            kafka__consumer__topic__metadata__refresh__interval__ms=1000,
        )
    )
    process = Holding(-1)
    stop, errors = member(
        config, group, topic, process, None if reset == "error" else any_consumer(config, group, reset)
    )
    wait_until(lambda: len(process.seen) == 20)
    wait_until(lambda: bool(errors) or told(config, group, topic) == 20)
    delete_topic(kafka, topic)
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(1000, 1060))
    wait_until(lambda: bool(errors))
    stop()
    [error] = errors
    assert isinstance(error, MissingState)
    assert error.where["topic"] == topic
    with StateManager(config) as manager, manager.open_task("Partition 0", allow_skipped_input=True) as task:
        assert sum(int(value) for _, value in task.store("totals").range()) == 20


def told(config: JobConfig, group: str, topic: str) -> int:
    """The published offset of partition 0 that the group has."""
    client = Consumer({**config.kafka_client("consumer"), "group.id": group})
    try:
        return client.committed([TopicPartition(topic, 0)], 10)[0].offset
    finally:
        client.close()


def test_input_that_is_gone_can_be_given_up_knowingly(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 51: after a truncation, a loop with permission continues at the first record that still exists."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(20))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), task__commit__ms=100))
    commit(config, {}, {f"{topic}-0": 3})
    truncate(kafka, topic, 15)
    process = Holding(-1)
    stop, errors = member(config, group, topic, process, allow_skipped_input=True)
    wait_until(lambda: len(process.seen) == 5 or bool(errors))
    stop()
    assert not errors
    assert process.seen == list(range(15, 20))
    assert contents(config)[1] == {f"{topic}-0": 20}


def test_more_partitions_get_one_message(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 51: at the start, with any job.tasks, the error suggests a rescale, and the failed start changes
    nothing."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 2)
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, tasks=2, backup=("kafka-changelog",), task__commit__ms=100)
    )
    produce(kafka, topic, 2, range(20))
    done: list[int] = []
    stop, errors = member(config, group, topic, lambda task, message: done.append(1) or count(task, message))
    wait_until(lambda: len(done) == 20)
    stop()
    assert not errors
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, 4)])[topic].result(15)
    wait_until(lambda: len(admin.list_topics(timeout=60).topics[topic].partitions) == 4)
    changelog = config.stores["totals"].changelog_topic
    for tasks in (2, 4):
        stop, errors = member(with_changes(config, job__tasks=tasks), group, topic)
        wait_until(lambda errors=errors: bool(errors))
        stop()
        [error] = errors
        assert isinstance(error, ConfigError)
        assert "4 partitions" in str(error)
        assert "state of 2 tasks" in str(error)
        assert "`statemgr rescale --tasks 4`" in str(error.hint)
        assert "--alter" not in str(error)
    assert len(admin.list_topics(timeout=60).topics[changelog].partitions) == 2
    with StateManager(with_changes(config, job__tasks=4)) as manager, pytest.raises(StatemgrError) as raised:
        manager.open_task("Partition 0")
    assert "--alter" not in str(raised.value)
    assert isinstance(raised.value, LayoutMismatch) or "job.tasks = 2" in str(raised.value)


def test_more_partitions_under_a_running_loop(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 51: a rebalance that brings a partition beyond job.tasks ends the loop with the same hint."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 2)
    config = JobConfig.from_mapping(
        job_mapping(
            kafka,
            tmp_path,
            tasks=2,
            backup=("blob-store",),
            task__commit__ms=100,
            kafka__consumer__topic__metadata__refresh__interval__ms=500,
        )
    )
    produce(kafka, topic, 2, range(20))
    done: list[int] = []
    stop, errors = member(config, group, topic, lambda task, message: done.append(1) or count(task, message))
    wait_until(lambda: len(done) == 20)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(15)
    wait_until(lambda: bool(errors))
    stop()
    [error] = errors
    assert isinstance(error, ConfigError)
    assert "`statemgr rescale --tasks 3`" in str(error.hint)
    assert sum(contents(config, f"Partition {index}")[1][f"{topic}-{index}"] for index in range(2)) == 20


#: What is no offset of an input.
NO_OFFSETS: tuple[Any, ...] = (
    {"orders-0": -1},
    {"orders-0": 1.5},
    {"orders-0": "5"},
    {"orders-0": True},
    {"orders": 1},
    {0: 1},
    [("orders-0", 1)],
)


def test_offsets_that_are_none_are_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 51: a commit and an attempt refuse such offsets before anything happens, and the task can continue."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.store("totals").put(b"a", b"1")
        for offsets in NO_OFFSETS:
            with pytest.raises(InvalidError):
                task.commit(offsets)
            assert task.last_checkpoint is None
        task.commit({"orders-0": 1})
    with StateManager(config) as manager:
        epoch = manager.acquire()
        with open_attempt(config, "Partition 0", epoch.checkpoints["Partition 0"], epoch) as attempt:
            for offsets in NO_OFFSETS:
                with pytest.raises(InvalidError):
                    attempt.prepare(offsets)
            manager.publish([attempt.prepare({"orders-0": 2})])
    assert contents(config)[1] == {"orders-0": 2}


def test_the_group_is_told_of_published_offsets(kafka: KafkaServer, tmp_path: Path) -> None:
    """Lag tools see the published offsets in the group. The loop never starts from the group's offsets."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(20))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), task__commit__ms=100))
    looking = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": group})
    place = TopicPartition(topic, 0)
    looking.commit(offsets=[TopicPartition(topic, 0, 15)], asynchronous=False)
    process = Holding(-1)
    stop, errors = member(config, group, topic, process)
    wait_until(lambda: looking.committed([place], 10)[0].offset == 20 or bool(errors))
    assert process.seen == list(range(20)), "the group's 15 was not where it began"
    stop()
    produce(kafka, topic, 1, range(5))
    stop_again, more = member(config, group, topic, process)
    wait_until(lambda: len(process.seen) == 25 or bool(more))
    stop_again()
    wait_until(lambda: looking.committed([place], 10)[0].offset == 25)  # the stop also updates the group
    assert not errors + more
    looking.close()


@pytest.mark.parametrize("serde", ["string", "bytes", pytest.param("integer", marks=pytest.mark.long)])
def test_a_key_that_the_serde_does_not_take_is_named(kafka: KafkaServer, tmp_path: Path, serde: str) -> None:
    """For a message without a key or with a key of another type, the error names the store, topic, partition and
    offset."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    producer.produce(topic, b"1", b"key" if serde == "bytes" else None, 0)
    producer.produce(topic, b"2", None if serde == "bytes" else b"key", 0)
    producer.flush(15)
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, backup=("blob-store",), stores__totals__key__serde=serde)
    )
    calls: list[Callable[[Task, Message], object]] = [
        lambda task, message: task.store("totals").get(message.key()),
        lambda task, message: task.store("totals").put(message.key(), b"1"),
        lambda task, message: task.store("totals").delete(message.key()),
        lambda task, message: task.store("totals").get_many([message.key()]),
    ]
    for call in calls:
        stop, errors = member(config, group, topic, lambda task, message, call=call: call(task, message) and None)
        wait_until(lambda errors=errors: bool(errors))
        stop()
        [error] = errors
        assert isinstance(error, InvalidError)
        offset = 1 if serde == "bytes" else 0
        assert error.where["store"] == "totals"
        assert (error.where["topic"], error.where["partition"], error.where["offset"]) == (topic, 0, offset)
