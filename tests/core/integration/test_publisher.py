# ruff: noqa: PT012 (the end of a transaction's block is what raises)
"""The transactional publisher on a real broker: what it publishes, what it surely does not, and who is fenced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient

from statemgr.config import JobConfig
from statemgr.errors import (
    ClosedError,
    FencedError,
    InvalidError,
    MissingState,
    OutcomeUnknownError,
    RetryableError,
    UnavailableError,
)
from statemgr.kafka.transactions.publisher import TransactionalPublisher, job_transactional_id, task_transactional_id
from statemgr.local.machine import SystemClock
from statemgr_tools.dev.kafka import KafkaBroker
from tests.clocks import SuspendedClock
from tests.kafka_jobs import committed, job, make_topics, wait_until
from tests.servers import KafkaServer


def _publisher(config: JobConfig, task: str = "Partition 0") -> TransactionalPublisher:
    return TransactionalPublisher(config, task_transactional_id(config, task), SystemClock())


def _ready(kafka: KafkaServer | KafkaBroker, **more: object) -> tuple[JobConfig, str, TransactionalPublisher]:
    config = job(kafka, **more)
    make_topics(config)
    publisher = _publisher(config)
    publisher.fence()
    return config, config.stores["totals"].changelog_topic, publisher


def _publish(publisher: TransactionalPublisher, topic: str, *keys: bytes) -> None:
    """Publish. After an abort, first do what an owner does, as if it had compared the topic."""
    publisher.settle()
    if publisher.regained:
        publisher.regain()
        publisher.confirmed()
    with publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(key, b"v") for key in keys])


def _abort(publisher: TransactionalPublisher, topic: str) -> None:
    """Deliver a record, then raise in the block. The block's own error comes through."""
    with pytest.raises(ZeroDivisionError), publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"lost", b"v")])
        transaction.flush()
        raise ZeroDivisionError


def test_ids_tell_jobs_tasks_and_owners_apart(kafka: KafkaServer) -> None:
    """Each task and each job has an ID of its own, which depends on the names alone."""
    config = job(kafka, "orders", job__id="7")
    assert task_transactional_id(config, "Partition 12") == "statemgr.orders.7.Partition_12"
    assert job_transactional_id(config) == "statemgr.orders.7.job"


def test_what_is_delivered_is_told_by_partition(kafka: KafkaServer) -> None:
    """``flush`` reports where the records of each partition lie; the control record comes after them."""
    config, topic, publisher = _ready(kafka, job__tasks=2)
    for expected in (((3, 3), (1, 1)), ((7, 3), (3, 1))):
        with publisher.transaction() as transaction:
            transaction.send_changes(topic, 0, [(b"a", b"1"), (b"b", None), (b"a", b"2")])
            transaction.send(topic, b"c", b"3", partition=1, headers=[("h", b"x"), ("n", None)])
            delivered = transaction.flush()
        places = {(topic, number): (end - records, end, records) for number, (end, records) in enumerate(expected)}
        assert {place: found[:3] for place, found in delivered.items()} == places
    assert committed(config, topic)[:3] == [(b"a", b"1"), (b"b", None), (b"a", b"2")]


def test_a_transaction_without_records_is_committed(kafka: KafkaServer) -> None:
    """A transaction without records delivers nothing, and the publisher continues."""
    config, topic, publisher = _ready(kafka)
    with publisher.transaction() as transaction:
        assert transaction.flush() == {}
    _publish(publisher, topic, b"a")
    assert committed(config, topic) == [(b"a", b"v")]


def test_a_block_that_raises_publishes_nothing(kafka: KafkaServer) -> None:
    """The transaction is aborted, the caller's own error comes through, and the next transaction works."""
    config, topic, publisher = _ready(kafka)
    _abort(publisher, topic)
    _publish(publisher, topic, b"kept")
    assert committed(config, topic) == [(b"kept", b"v")]


def test_many_changes_go_through_a_small_queue(kafka: KafkaServer) -> None:
    """Back-pressure: a queue of 1,000 records takes 30,000 without loss and in order."""
    config, topic, publisher = _ready(kafka, kafka__producer__queue__buffering__max__messages=1000)
    changes = [(b"%05d" % number, b"v%d" % number) for number in range(30_000)]
    with publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, iter(changes))
        assert transaction.flush()[topic, 0][:3] == (0, 30_000, 30_000)
    assert committed(config, topic) == changes


def test_an_older_owner_is_fenced(kafka: KafkaServer) -> None:
    """Two owners of one ID (fault 23): the older one can never publish again, and the newer one can."""
    config, topic, older = _ready(kafka)
    _publish(older, topic, b"first")
    newer = _publisher(config)
    newer.fence()
    for _ in range(2):
        with pytest.raises(FencedError):
            _publish(older, topic, b"zombie")
    with pytest.raises(FencedError):
        older.settle()
    with pytest.raises(FencedError):
        older.fence()
    _publish(newer, topic, b"second")
    assert committed(config, topic) == [(b"first", b"v"), (b"second", b"v")]


@pytest.mark.parametrize("delivered", [True, False], ids=["all delivered", "some in the queue"])
def test_an_owner_is_fenced_in_the_middle_of_its_transaction(kafka: KafkaServer, delivered: bool) -> None:
    """A newer owner that opens meanwhile aborts the transaction, and readers never see any of it."""
    config, topic, older = _ready(kafka)
    newer = _publisher(config)
    with pytest.raises(FencedError), older.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"zombie", b"1")])
        transaction.flush()
        newer.fence()
        if not delivered:
            transaction.send(topic, b"zombie", b"2", partition=0)
    _publish(newer, topic, b"newer")
    assert committed(config, topic) == [(b"newer", b"v")]


def test_the_next_owner_settles_what_a_dead_one_left_open(kafka: KafkaServer) -> None:
    """An owner dies in its transaction. Fencing aborts the transaction, and readers do not wait for it."""
    config, topic, dead = _ready(kafka)
    left_open = dead.transaction()
    transaction = left_open.__enter__()
    transaction.send_changes(topic, 0, [(b"dead", b"v")])
    transaction.flush()
    dead.close()
    newer = _publisher(config)
    newer.fence()
    _publish(newer, topic, b"alive")
    assert committed(config, topic) == [(b"alive", b"v")]
    with pytest.raises(ClosedError):
        dead.fence()


def test_a_record_that_is_too_large_is_refused_and_the_next_commit_works(kafka: KafkaServer) -> None:
    """The error names the limit, and the transaction is aborted."""
    config, topic, publisher = _ready(kafka)
    with pytest.raises(InvalidError, match="larger than"), publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"a", b"v"), (b"big", b"x" * 3_000_000)])
    _publish(publisher, topic, b"small")
    assert committed(config, topic) == [(b"small", b"v")]


def test_a_topic_that_does_not_exist_publishes_nothing(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """J2.21: an output topic, or a changelog under a running job, does not exist. The log and a typed error name it,
    and nothing of the transaction is visible."""
    monkeypatch.setattr("statemgr.kafka.transactions.producer._PATIENCE_S", 0.5)
    config, topic, publisher = _ready(kafka, kafka__producer__topic__metadata__propagation__max__ms=2500)
    with pytest.raises(MissingState) as missing, publisher.transaction() as transaction, caplog.at_level("INFO"):
        transaction.send_changes(topic, 0, [(b"a", b"v")])
        transaction.send_changes("no-such-topic", 0, [(b"a", b"v")])
        transaction.flush()
    assert missing.value.where["topic"] == "no-such-topic"
    assert "waiting for Kafka to take records for no-such-topic: check that the topic exists" in caplog.messages
    assert committed(config, topic) == []


def test_a_broker_that_is_not_there_is_named(kafka: KafkaServer) -> None:
    """Fencing keeps its deadline, and the error names the broker."""
    config = job(kafka, kafka__bootstrap__servers="127.0.0.1:1", task__commit__timeout__ms=1500)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        _publisher(config).fence()


@pytest.mark.long
def test_an_outage_in_an_idle_time_is_logged_as_a_past_one(
    own_kafka: Callable[..., KafkaBroker], caplog: pytest.LogCaptureFixture
) -> None:
    """J2.14: the broker is away between two commits. The lines about it come with the second one, and do not look like
    an outage of that moment."""
    broker = own_kafka()
    _, topic, publisher = _ready(broker)
    _publish(publisher, topic, b"before")
    broker.kill()
    assert publisher._producer is not None
    client = publisher._producer.client
    wait_until(lambda: len(client) > 0)
    broker.restart()
    caplog.clear()
    with caplog.at_level("INFO"):
        _publish(publisher, topic, b"after")
    lines = [record for record in caplog.records if record.name == "statemgr.kafka.librdkafka"]
    assert any("an old line: up to" in record.getMessage() for record in lines)
    assert {record.levelname for record in lines} == {"INFO"}


@pytest.mark.long
def test_a_lost_acknowledgement_is_settled(own_kafka: Callable[..., KafkaBroker]) -> None:
    """The broker hangs at the commit (fault 4). The outcome is unknown, the publisher does not repeat the commit
    blindly, and then settles it with the same producer."""
    broker = own_kafka()
    config, topic, publisher = _ready(broker, task__commit__timeout__ms=2500)
    _publish(publisher, topic, b"before")
    assert broker.process is not None
    with pytest.raises(OutcomeUnknownError), publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"unknown", b"v")])
        transaction.flush()
        broker.process.suspend()
    with pytest.raises(OutcomeUnknownError), publisher.transaction():
        pytest.fail("a transaction was opened over one that is not settled")
    with pytest.raises(UnavailableError):
        publisher.settle()
    broker.process.resume()
    publisher.settle()
    _publish(publisher, topic, b"after")
    keys = [key for key, _ in committed(config, topic)]
    assert keys in ([b"before", b"unknown", b"after"], [b"before", b"after"])


@pytest.mark.long
def test_a_fenced_owner_learns_it_when_it_settles(own_kafka: Callable[..., KafkaBroker]) -> None:
    """A newer owner opens while the outcome is unknown. Settling never fences it, and the older owner cannot
    publish."""
    broker = own_kafka()
    config, topic, older = _ready(broker, task__commit__timeout__ms=2500)
    assert broker.process is not None
    with pytest.raises(OutcomeUnknownError), older.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"unknown", b"v")])
        transaction.flush()
        broker.process.suspend()
    broker.process.resume()
    newer = _publisher(config)
    newer.fence()
    _publish(newer, topic, b"newer")
    # the lost answer may be there now; the transaction was then published before the newer owner opened
    with contextlib.suppress(FencedError):
        older.settle()
    # the transaction was open for longer than its timeout: the brokers may have fenced it, and only the topic can tell
    with pytest.raises((FencedError, RetryableError)), older.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"zombie", b"v")])
    _publish(newer, topic, b"newest")
    assert [key for key, _ in committed(config, topic)][-2:] == [b"newer", b"newest"]


@pytest.mark.parametrize("suspended_s", [0.0, 3600.0])
def test_a_suspended_machine_does_not_claim_to_know_who_fenced_it(kafka: KafkaServer, suspended_s: float) -> None:
    """After the timeout of a transaction the brokers fence its producer themselves. Only the topic can tell."""
    config, topic, _ = _ready(kafka)
    clock = SuspendedClock()
    publisher = TransactionalPublisher(config, task_transactional_id(config, "Partition 0"), clock)
    publisher.fence()
    expected = pytest.raises(RetryableError, match="was open for 36") if suspended_s else pytest.raises(FencedError)
    with expected, publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"a", b"v")])
        transaction.flush()
        _publisher(config).fence()
        clock.suspended_s = suspended_s
        transaction.send_changes(topic, 0, [(b"b", b"v")])
        transaction.flush()


@pytest.mark.long
def test_a_restarted_broker_delays_a_commit_and_loses_nothing(own_kafka: Callable[..., KafkaBroker]) -> None:
    """The broker is killed inside the transaction and comes back (fault 15). The records are published once."""
    broker = own_kafka()
    config, topic, publisher = _ready(broker, task__commit__timeout__ms=60_000)
    with publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"a", b"v")])
        transaction.flush()
        broker.kill()
        broker.start()
        transaction.send_changes(topic, 0, [(b"b", b"v")])
    assert committed(config, topic) == [(b"a", b"v"), (b"b", b"v")]


@pytest.mark.long
def test_a_transaction_that_cannot_be_aborted_now_is_aborted_before_the_next(
    own_kafka: Callable[..., KafkaBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker hangs before the commit, so nothing is published. Later commits fail until the abort, and then
    work."""
    monkeypatch.setattr("statemgr.kafka.transactions.publisher._ABORT_TIMEOUT_S", 1.0)
    # the abort would skip a partition without a leader (KAFKA-20734), so the partition keeps its leader over the pause
    broker = own_kafka(**{"broker.session.timeout.ms": "60000"})
    config, topic, publisher = _ready(broker, task__commit__timeout__ms=2000)
    assert broker.process is not None
    with pytest.raises(RetryableError), publisher.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"lost", b"v")])
        transaction.flush()
        broker.process.suspend()
        transaction.send_changes(topic, 0, [(b"lost", b"w")])
        transaction.flush()
    with pytest.raises(UnavailableError):
        _publish(publisher, topic, b"too early")
    publisher.close()
    broker.process.resume()
    newer = _publisher(config)  # as a restart does; the older transaction may have timed out by now
    newer.fence()
    _publish(newer, topic, b"after")
    assert committed(config, topic) == [(b"after", b"v")]


def test_nothing_begins_where_an_aborted_transaction_may_be_open(kafka: KafkaServer) -> None:
    """A partition that never saw the end of a transaction (KAFKA-20734) would commit its open records with the next
    one. The publisher refuses to begin that one while another producer's transaction hides the end, and does not take
    that for its own."""
    config, topic, publisher = _ready(kafka, task__commit__timeout__ms=2000)
    other = _publisher(job(kafka))
    other.fence()
    with contextlib.ExitStack() as open_until:
        transaction = open_until.enter_context(other.transaction())
        transaction.send_changes(topic, 0, [(b"open", b"v")])
        transaction.flush()
        _abort(publisher, topic)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="another producer's transaction is open") as refused:
                _publish(publisher, topic, b"too early")
            assert refused.value.where == {"topic": topic, "partition": 0, "offset": 0}
    _publish(publisher, topic, b"after")
    assert committed(config, topic) == [(b"open", b"v"), (b"after", b"v")]


def test_a_transaction_that_began_after_an_aborted_one_hinders_nobody(kafka: KafkaServer) -> None:
    """Others may write to an output topic. What is open behind the records of an aborted transaction is another one."""
    config, topic, publisher = _ready(kafka)
    other = _publisher(job(kafka))
    other.fence()
    _abort(publisher, topic)
    with other.transaction() as transaction:
        transaction.send_changes(topic, 0, [(b"open", b"v")])
        transaction.flush()
        _publish(publisher, topic, b"after")
    assert committed(config, topic) == [(b"open", b"v"), (b"after", b"v")]


def test_an_aborted_transaction_in_a_topic_that_is_gone_hinders_nobody(kafka: KafkaServer) -> None:
    """A topic that was deleted holds no transaction open."""
    _, topic, publisher = _ready(kafka)
    _abort(publisher, topic)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(30)
    other = job(kafka)
    make_topics(other)
    _publish(publisher, other.stores["totals"].changelog_topic, b"after")
    assert committed(other, other.stores["totals"].changelog_topic) == [(b"after", b"v")]
