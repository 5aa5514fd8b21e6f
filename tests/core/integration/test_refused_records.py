"""Records that Kafka refuses: what the error names, and that the commit after it works."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from statemgr import JobConfig, StateManager
from statemgr.errors import InvalidError, RetryableError
from statemgr.kafka import clients
from tests.core.integration.test_publisher import _publish, _ready
from tests.jobs import contents, elsewhere, job_mapping
from tests.kafka_jobs import alter_topic, committed, make_topic
from tests.servers import KafkaServer

LARGE = bytes(200_000)
HOUR_MS = 3_600_000


class StampingProducer(Producer):
    """A producer on a machine whose clock is wrong."""

    ahead_ms = 0

    def produce(self, *args: Any, **options: Any) -> None:
        super().produce(*args, **options, timestamp=time.time_ns() // 1_000_000 + self.ahead_ms)


@pytest.fixture
def clock_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how far the clock of this machine's producers is ahead, in milliseconds."""
    monkeypatch.setattr(clients, "Producer", StampingProducer)
    return lambda ahead_ms: monkeypatch.setattr(StampingProducer, "ahead_ms", ahead_ms)


def _job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    return JobConfig.from_mapping(job_mapping(kafka, directory, backup=["kafka-changelog"], **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, b"small"], ids=["deleted", "overwritten"])
def test_a_value_that_the_topic_refuses_can_be_replaced(
    kafka: KafkaServer, tmp_path: Path, value: bytes | None
) -> None:
    """J1.2: the error names store, topic, key and sizes; once the key has another value, commits go on, and nothing
    else is lost."""
    config = _job(kafka, tmp_path)
    topic = config.stores["totals"].changelog_topic
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        store = task.store("totals")
        store.put(b"before", b"1")
        task.commit({"orders-0": 1})
        alter_topic(config, topic, max__message__bytes="100000")
        store.put(b"k" * 50, LARGE)
        store.put(b"other", b"2")
        for _ in range(2):
            with pytest.raises(InvalidError, match="a record of 200050 bytes is larger than the 100000") as refused:
                task.commit({"orders-0": 2})
            where = refused.value.where
            assert (where["store"], where["topic"], where["task"]) == ("totals", topic, "Partition 0")
            assert where["key"] == f"{b'k' * 40!r}… (50 bytes)"
        if value is None:
            store.delete(b"k" * 50)
        else:
            store.put(b"k" * 50, value)
        task.commit({"orders-0": 3})
    state, offsets = contents(elsewhere(config, tmp_path / "other", "kafka-changelog"))
    kept = {} if value is None else {b"k" * 50: value}
    assert state == {"totals": {b"before": b"1", b"other": b"2", **kept}}
    assert offsets == {"orders-0": 3}
    assert sum(key == b"other" for key, _ in committed(config, topic)) == 1


def test_a_value_that_no_producer_sends_is_refused_at_once(kafka: KafkaServer, tmp_path: Path) -> None:
    """J1.2: a store with a changelog refuses the value at ``put``, alone or among many, and the next commit works; a
    store without one takes it."""
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, stores=["totals", "large"], stores__large__backup__factories=["blob-store"])
    )
    large = bytes(1_500_000)
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        store = task.store("totals")
        store.put(b"kept", b"1")
        with pytest.raises(InvalidError, match="1500003 bytes is larger than the 999964 bytes") as refused:
            store.put(b"big", large)
        assert (refused.value.where["store"], refused.value.where["key"]) == ("totals", "b'big'")
        for small in (b"a", b"b" * 1000):
            with pytest.raises(InvalidError, match="larger than"):
                store.put_many([(small, b"2"), (b"big", large)])
        task.store("large").put(b"big", large)
        with pytest.raises(InvalidError, match="larger than the 67108864 bytes"):
            task.store("large").put(b"huge", bytes(64 * 1024 * 1024))
        task.commit({"orders-0": 1})
        store.put(b"fits", bytes(999_960))
        task.commit({"orders-0": 2})
    found, _ = contents(elsewhere(config, tmp_path / "other", ["kafka-changelog", "blob-store"]))
    assert found == {"totals": {b"kept": b"1", b"fits": bytes(999_960)}, "large": {b"big": large}}


def test_output_that_is_refused_can_be_dropped(kafka: KafkaServer, tmp_path: Path) -> None:
    """J1.2: output that no producer sends is refused by ``produce``. Output that the topic refuses is named by the
    commit, and the changes are committed after the output was dropped."""
    config = _job(kafka, tmp_path)
    output = kafka.fresh_name("output")
    make_topic(config, output, max__message__bytes="100000")
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        with pytest.raises(InvalidError, match="larger than the 999964 bytes") as refused:
            task.produce(output, b"a", bytes(1_000_000))
        with pytest.raises(InvalidError, match="larger"):
            task.produce(output, b"a", b"", headers=[("h", bytes(1_000_000))])
        assert refused.value.where["topic"] == output
        task.store("totals").put(b"a", b"1")
        task.produce(output, b"small", b"1")
        task.produce(output, b"big", LARGE, headers=[("h", b"12345")])
        with pytest.raises(InvalidError, match="a record of 200009 bytes is larger than the 100000") as refused:
            task.commit({"orders-0": 1})
        assert (refused.value.where["topic"], refused.value.where["key"]) == (output, "b'big'")
        assert task.drop_output() == 2
        task.produce(output, b"after", b"2")
        task.commit({"orders-0": 1})
    assert contents(config) == ({"totals": {b"a": b"1"}}, {"orders-0": 1})
    assert committed(config, output) == [(b"after", b"2")]


def test_a_record_that_a_topic_does_not_take(kafka: KafkaServer, tmp_path: Path) -> None:
    """J1.4: a compacted output topic takes no record without a key. The error names the topic, and the next commit
    works without the record."""
    config = _job(kafka, tmp_path)
    output = kafka.fresh_name("output")
    make_topic(config, output, cleanup__policy="compact")
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.produce(output, None, b"1")
        with pytest.raises(InvalidError, match="the topic refuses a record") as refused:
            task.commit({"orders-0": 1})
        assert refused.value.where["topic"] == output
        assert task.drop_output() == 1
        task.produce(output, b"key", b"2")
        task.commit({"orders-0": 1})
    assert committed(config, output) == [(b"key", b"2")]


def test_refused_times_name_both_clocks(kafka: KafkaServer, tmp_path: Path, clock_ahead: Callable[[int], None]) -> None:
    """J1.4: this machine's clock is two hours ahead, and by default a topic takes one. The error names topic, both
    clocks and the settings, and the first commit after the cause is gone works."""
    config = _job(kafka, tmp_path)
    topic = config.stores["totals"].changelog_topic
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.commit({"orders-0": 1})
        clock_ahead(2 * HOUR_MS)
        task.store("totals").put(b"a", b"1")
        with pytest.raises(RetryableError, match="refuses the time") as refused:
            task.commit({"orders-0": 2})
        where = refused.value.where
        assert (where["topic"], where["message.timestamp.after.max.ms"]) == (topic, str(HOUR_MS))
        assert str(where["clock"])[:13] == str(where["broker_clock"])[:13]
        assert "message.timestamp.after.max.ms" in str(refused.value.hint)
        clock_ahead(0)
        task.commit({"orders-0": 2})
    assert contents(config) == ({"totals": {b"a": b"1"}}, {"orders-0": 2})


def test_a_refused_timestamp_of_output_is_named(kafka: KafkaServer, tmp_path: Path) -> None:
    """J1.4: the clocks are right, and the record was given a time that the topic does not take: the error names the
    topic, the times and the settings."""
    config = _job(kafka, tmp_path)
    output = kafka.fresh_name("output")
    make_topic(config, output, message__timestamp__before__max__ms=str(HOUR_MS))
    now = time.time_ns() // 1_000_000
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.note_input(now - 2 * HOUR_MS)
        task.produce(output, b"old", b"1")
        task.produce(output, b"new", b"2", timestamp_ms=now)
        with pytest.raises(InvalidError, match="refuses the timestamp of a record") as refused:
            task.commit({"orders-0": 1})
        where = refused.value.where
        assert (where["topic"], where["message.timestamp.before.max.ms"]) == (output, str(HOUR_MS))
        assert str(where["oldest"]) < str(where["newest"]) <= str(where["clock"])
        assert task.drop_output() == 2
        task.run_timers()
        task.produce(output, b"now", b"3")
        task.commit({"orders-0": 1})
    assert committed(config, output) == [(b"now", b"3")]


@pytest.mark.parametrize(
    ("why", "records"),
    [
        pytest.param("size", 200_000, id="size-among many"),
        pytest.param("time", 1, id="time-alone"),
        pytest.param("size", 1, id="size-alone", marks=pytest.mark.long),
        pytest.param("time", 200_000, id="time-among many", marks=pytest.mark.long),
    ],
)
def test_a_refused_batch_does_not_fail_the_next_commit(
    kafka: KafkaServer, why: str, records: int, clock_ahead: Callable[[int], None]
) -> None:
    """J1.4: the publisher takes a new producer, so that no commit fails with "skipped sequence numbers" after it."""
    config, topic, publisher = _ready(kafka)
    _publish(publisher, topic, b"first")
    if why == "time":
        clock_ahead(2 * HOUR_MS)
    else:
        alter_topic(config, topic, max__message__bytes="20000")
    with pytest.raises((InvalidError, RetryableError)) as refused, publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"a", b"v" * (30_000 if records == 1 else 1))] * records)
    assert refused.value.where["topic"] == topic
    assert refused.value.hint
    assert publisher.regained
    clock_ahead(0)
    alter_topic(config, topic, max__message__bytes=None)
    for key in (b"second", b"third"):
        _publish(publisher, topic, key)
    assert committed(config, topic) == [(b"first", b"v"), (b"second", b"v"), (b"third", b"v")]


def test_a_batch_that_is_larger_than_its_records(kafka: KafkaServer) -> None:
    """J1.4: if each record is small enough for the topic, the error names the size of the client's batches."""
    config, topic, publisher = _ready(kafka)
    alter_topic(config, topic, max__message__bytes="20000")
    expected = pytest.raises(InvalidError, match="a batch of records is larger than the 20000 bytes")
    with expected as refused, publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"%d" % n, bytes(1000)) for n in range(1000)])
    assert "kafka.producer.batch.size" in str(refused.value.hint)
