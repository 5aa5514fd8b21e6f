"""How a consumer loop, while it runs, deals with its consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from statemgr import JobConfig
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.kafka.group_consumer import GroupConsumer
from statemgr.kafka.input_topics import InputTopics
from statemgr.testing.memory_admin import listed
from statemgr.testing.memory_clients import MemoryGroupConsumer
from statemgr.testing.memory_servers import MemoryServers
from tests.kafka_jobs import wait_until

CONFIG: dict[str, object] = {"job.name": "orders", "task.inputs": ["orders"], "stores.totals.value.serde": "bytes"}


@pytest.fixture
def config(servers: MemoryServers) -> JobConfig:
    """A job whose input topic exists."""
    servers.broker.create("orders", 1)
    return servers.on_disk(servers.config, "one")


def nothing(*_: object) -> None:
    """Process nothing."""


def test_a_poll_in_which_the_process_was_suspended(
    servers: MemoryServers, config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks learn for how long. Other polls do not count."""
    poll, suspended, leaps = MemoryGroupConsumer.poll, list[float](), [400.0]

    def suspend(self: MemoryGroupConsumer, timeout: float = -1) -> Message | None:
        if leaps and self.assignment():
            servers.clock.advance(leaps.pop())
        return poll(self, timeout)

    monkeypatch.setattr(MemoryGroupConsumer, "poll", suspend)
    monkeypatch.setattr(AssignedTask, "suspended", lambda self, seconds: suspended.append(seconds))
    with servers.manager(config, "kafka-partition") as manager:
        loop = manager.loop(config.consumer("g"), nothing)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            wait_until(lambda: manager.metrics.health.condition().open == 1 and not leaps)
        finally:
            loop.stop()
            thread.join(60)
    (seconds,) = suspended
    assert 400 <= seconds < 410


def test_what_was_refused_before_a_message_arrived_is_forgotten(servers: MemoryServers, config: JobConfig) -> None:
    """A later outage is not taken for wrong credentials."""
    consumer = config.consumer("g")
    assert isinstance(consumer, GroupConsumer)
    with servers.manager(config, "kafka-partition") as manager:
        loop = manager.loop(consumer, nothing)
        consumer.errors(KafkaError(KafkaError._AUTHENTICATION))
        loop._check_refused(Message(topic="orders", error=KafkaError(KafkaError._PARTITION_EOF)))
        assert consumer.errors.refused() is not None
        loop._check_refused(Message(topic="orders", value=b"v"))
        assert consumer.errors.refused() is None


@pytest.mark.parametrize("assigned", [[], [TopicPartition("orders", 0)]])
def test_a_check_of_the_topics_takes_no_message(
    servers: MemoryServers, config: JobConfig, assigned: list[TopicPartition]
) -> None:
    """A running loop asks again what the topics are, and brokers may answer late. What a poll returned then would never
    be processed. A consumer without partitions is polled, to learn whether it is refused."""
    late, polls = [KafkaException(KafkaError(KafkaError._TIMED_OUT))], list[float]()

    def list_topics(topic: str, timeout: float) -> Any:
        if late:
            raise late.pop()
        return listed(servers.broker, topic)

    polled: Callable[[float], None] = polls.append
    consumer: Any = SimpleNamespace(list_topics=list_topics, assignment=lambda: assigned, poll=polled)
    InputTopics(config, servers.clock).check(consumer, ["orders"], None)
    assert polls == ([] if assigned else [0])
