"""Helpers for the tests of the Kafka adapters: small jobs, hand-made topics and their contents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from statemgr.config import JobConfig
from statemgr.ids import CheckpointId
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout
from statemgr.testing.memory_admin import MemoryAdmin
from tests.servers import KafkaServer

#: Settings of a topic that the broker compacts as soon as its segments are full.
EAGER = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.0001",
    "segment.bytes": "1048576",
    "segment.ms": "500",
    "min.compaction.lag.ms": "0",
    "delete.retention.ms": "2000",  # a replay that takes longer is refused
}


class _Broker(Protocol):
    @property
    def bootstrap_servers(self) -> str: ...


def job(kafka: _Broker, name: str | None = None, **more: object) -> JobConfig:
    """Return a job with one store ``totals`` on the broker. Keys in ``more`` use ``__`` for ``.``."""
    fresh = name or KafkaServer(bootstrap_servers="", kind="").fresh_name("job")
    mapping: dict[str, object] = {
        "job.name": fresh,
        "kafka.bootstrap.servers": kafka.bootstrap_servers,
        "stores.totals.type": "memory",
        "task.commit.timeout.ms": 20_000,
    }
    return JobConfig.from_mapping(mapping | {key.replace("__", "."): value for key, value in more.items()})


def make_topics(config: JobConfig) -> None:
    """Create the job's own topics with the right settings."""
    with TopicAdmin(config, SystemClock()) as admin:
        admin.create_missing([checkpoint_topic_spec(config), *changelog_topic_specs(config)])


def make_topic(config: JobConfig, topic: str, partitions: int = 1, **settings: str) -> None:
    """Create a topic with any settings (``__`` for ``.``) and wait until the broker lists it."""
    new = NewTopic(topic, partitions, 1, config={k.replace("__", "."): v for k, v in settings.items()})
    admin = client(config)
    admin.create_topics([new])[topic].result(30)
    wait_until(lambda: topic in admin.list_topics(timeout=60).topics)


def alter_topic(config: JobConfig, topic: str, **settings: str | None) -> None:
    """Change settings of a topic (``__`` for ``.``; None: back to the default) and wait until the broker has them."""
    admin = client(config)
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    operations = {True: AlterConfigOpType.DELETE, False: AlterConfigOpType.SET}
    entries = [ConfigEntry(k, v or "", incremental_operation=operations[v is None]) for k, v in changed.items()]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    admin.incremental_alter_configs([resource])[resource].result(30)
    with TopicAdmin(config, SystemClock()) as topics:
        wait_until(lambda: all(v in (None, topics.settings([topic])[topic][k]) for k, v in changed.items()))


def recreate(config: JobConfig, topic: str) -> None:
    """Delete a topic and create it again with the job's settings."""
    admin = client(config)
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in admin.list_topics(timeout=60).topics)
    make_topics(config)


def client(config: JobConfig) -> AdminClient:
    """Return an admin client of the Kafka library. Keep it until its answers have arrived."""
    return AdminClient({"bootstrap.servers": config.get("kafka.bootstrap.servers")})


def plain_producer(config: JobConfig, transactional_id: str | None = None) -> Producer:
    """Return a producer of the Kafka library. With an ID it is transactional and initialised."""
    settings: dict[str, object] = {"bootstrap.servers": config.get("kafka.bootstrap.servers"), "log_level": 2}
    if transactional_id is not None:
        settings |= {"transactional.id": transactional_id, "transaction.timeout.ms": 30_000}
    made = Producer(settings)
    if transactional_id is not None:
        for _ in range(2):  # without a connection, it would wait 500 ms before it asks for its coordinator again
            made.list_topics(config.checkpoint_topic, timeout=60)
        made.init_transactions(30)
    return made


def send(
    config: JobConfig, topic: str, records: Iterable[tuple[bytes | None, bytes | None]], timestamp_ms: int = 0
) -> None:
    """Write records to partition 0 without a transaction."""
    made = plain_producer(config)
    for key, value in records:
        made.produce(topic, value, key, 0, timestamp=timestamp_ms)
    assert made.flush(30) == 0


def committed(
    config: JobConfig, topic: str, partition: int = 0, *, settled: bool = True
) -> list[tuple[bytes | None, bytes | None]]:
    """Return every committed record of a partition, as the library's consumer reads it with its defaults.

    The broker answers a commit before it tells the partitions. With ``settled``, this waits until no transaction is
    open.
    """
    return [(found.key(), found.value()) for found in messages(config, topic, partition, settled=settled)]


def transactions(config: JobConfig, topic: str, partition: int = 0) -> list[list[tuple[bytes | None, bytes | None]]]:
    """Return the committed records of a partition, a list for each transaction.

    The marker that ends a transaction takes an offset, so the records of different transactions are not adjacent.
    """
    found: list[list[tuple[bytes | None, bytes | None]]] = []
    expected = None
    for message in messages(config, topic, partition, settled=True):
        if message.offset() != expected:
            found.append([])
        found[-1].append((message.key(), message.value()))
        expected = message.offset() + 1  # type: ignore[operator]
    return found


def messages(config: JobConfig, topic: str, partition: int = 0, *, settled: bool = True) -> list[Message]:
    """Return the messages that :func:`committed` reads."""
    reader = Consumer(
        {
            "bootstrap.servers": config.get("kafka.bootstrap.servers"),
            "group.id": "look",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the broker answers at the end of the topic after this
        }
    )
    place = TopicPartition(topic, partition, 0)
    reader.assign([place])
    found: list[Message] = []
    try:
        while True:
            message = reader.poll(30)
            assert message is not None, "the topic did not answer"
            if message.error() is not None:
                reached, end = message.offset(), reader.get_watermark_offsets(place, cached=True)[1]
                assert reached is not None
                if reached >= end or not settled:
                    return found
                continue
            found.append(message)
    finally:
        reader.close()


def state_of(records: Iterable[tuple[bytes | None, bytes | None]]) -> dict[bytes, bytes]:
    """Return the state that a changelog's records add up to."""
    state: dict[bytes, bytes] = {}
    for key, value in records:
        assert key is not None
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state


def a_record(config: JobConfig, number: int, task: str = "Partition 0", **fields: object) -> CheckpointRecord:
    """Return a checkpoint record whose ID, sequence and offsets derive from ``number``."""
    values: dict[str, object] = {
        "checkpoint_id": CheckpointId(1_700_000_000_000 + number, number),
        "sequence": number,
        "epoch": 1,
        "input_offsets": {"orders-0": number},
        "stores": {"totals": f"state-{number}"},
        "state_checkpoint_markers": {},
    }
    checkpoint = Checkpoint(**(values | fields))  # type: ignore[arg-type]
    return CheckpointRecord(
        config.job_name, config.job_id, task, Layout(0, config.tasks, "kafka-partition"), (checkpoint,)
    )


def wait_until(done: Callable[[], bool], deadline_s: float = 300.0) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def compacted(
    config: JobConfig,
    topic: str,
    fill: Callable[[int], None],
    rounds: int = 3,
    closing_key: bytes = b"closes the segment",
) -> None:
    """Write ``rounds`` times, then wait until the cleaner has removed records from partition 0."""
    for number in range(rounds):
        fill(number)
    before = len(committed(config, topic))

    def cleaned() -> bool:
        # Kafka never cleans the active segment. Another record closes it once it is older than segment.ms.
        time.sleep(0.6)
        send(config, topic, [(closing_key, b"")])
        return len(committed(config, topic)) < before

    wait_until(cleaned)


def delete_records(config: JobConfig, topic: str, before: int) -> None:
    """Remove the records below an offset (-1: all), as a temporary change of the topic's policy would."""
    admin = client(config)  # keep it: an answer is lost together with its client
    for policy in ("delete", "compact"):
        alter_topic(config, topic, cleanup__policy=policy)
        if policy == "delete":
            wait_until(lambda: _deleted(admin, TopicPartition(topic, 0, before)))


def _deleted(admin: AdminClient, before: TopicPartition) -> bool:
    """Try to delete. A broker learns a topic's new policy shortly after its answer, and refuses until then."""
    try:
        admin.delete_records([before])[before].result(30)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.POLICY_VIOLATION:
            raise
        return False
    return True


def coordinator_moves(
    monkeypatch: pytest.MonkeyPatch, method: str, code: int, times: float, *, in_answer: bool = False
) -> None:
    """Let the admin clients of brokers in memory answer a question about a group with an error, this many times.

    Args:
        in_answer: the error is that of a partition in the answer.
    """
    real, calls = getattr(MemoryAdmin, method), count()

    def answer(self: MemoryAdmin, asked: Any, **options: Any) -> Any:
        if next(calls) >= times:
            return real(self, asked, **options)
        found: Future[Any] = Future()
        if in_answer:
            place = SimpleNamespace(topic="rows", partition=0, offset=OFFSET_INVALID, error=KafkaError(code))
            found.set_result(SimpleNamespace(topic_partitions=[place]))
        else:
            found.set_exception(KafkaException(KafkaError(code)))
        (group,) = asked
        return {getattr(group, "group_id", group): found}

    monkeypatch.setattr(MemoryAdmin, method, answer)
