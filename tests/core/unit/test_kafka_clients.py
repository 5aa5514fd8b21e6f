"""How librdkafka's errors become statemgr's kinds, and the settings of its clients. Needs no broker."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from confluent_kafka.cimpl import NewTopic

from statemgr.config import JobConfig
from statemgr.errors import (
    AccessDenied,
    ConfigError,
    FencedError,
    InvalidError,
    MissingState,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.kafka.admin_client import GuardedAdminClient
from statemgr.kafka.clients import INSTEAD, consumer, producer
from statemgr.kafka.errors import (
    FENCED,
    ClientErrors,
    fatal_cause,
    may_pass,
    translate,
    translated,
    turned_away,
    unmasked,
)
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.temporary_topic import BrokerTime, probe_transaction
from statemgr.kafka.topics import TopicAdmin
from statemgr.kafka.transactions.producer import TransactionalProducer
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.local.machine import SystemClock, system_ids
from statemgr.testing.memory_admin import MemoryAdmin
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import Group, MemoryBroker
from tests.blob_faults import ManualClock
from tests.kafka_jobs import coordinator_moves, wait_until

_SECRET = "correct-horse-battery"
#: Refusals that mean a missing right, which the error names.
_RIGHTS = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)


@pytest.mark.parametrize("kind", ["producer", "admin"])
def test_lines_of_an_idle_client_say_how_old_they_may_be(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """J2.14: a client hands its lines over when it is used again. They are past events then, and no new outage."""
    clock, config = ManualClock(), JobConfig.from_mapping({"job.name": "j", "kafka.bootstrap.servers": "127.0.0.1:1"})
    caplog.set_level("INFO", "statemgr.kafka.librdkafka")
    client: Producer | AdminClient
    if kind == "producer":
        transactional = TransactionalProducer(config, "id", clock, 10_000, ClientErrors())
        client, use = transactional.client, transactional.begin
    else:
        metadata = TopicMetadata(config, clock)
        client, use = metadata.client, lambda: metadata.ask("asking", dict)
    wait_until(lambda: len(client) > 0)
    assert caplog.records == []
    clock.now += 49
    with contextlib.suppress(KafkaException):  # the producer has no ID yet
        use()
    assert caplog.records[0].levelno == logging.INFO
    assert "(an old line: up to 49 s ago, while this client was idle)" in caplog.messages[0]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._FENCED, FencedError),
        (KafkaError.PRODUCER_FENCED, FencedError),
        (KafkaError.INVALID_PRODUCER_EPOCH, FencedError),
        (KafkaError._AUTHENTICATION, AccessDenied),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessDenied),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, AccessDenied),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, MissingState),
        (KafkaError._UNKNOWN_PARTITION, MissingState),
        (KafkaError._AUTO_OFFSET_RESET, MissingState),
        (KafkaError.MSG_SIZE_TOO_LARGE, InvalidError),
        (KafkaError.INVALID_TRANSACTION_TIMEOUT, ConfigError),
        (KafkaError.INVALID_REPLICATION_FACTOR, InvalidError),
        (KafkaError._TRANSPORT, UnavailableError),
        (KafkaError._MSG_TIMED_OUT, UnavailableError),
        (KafkaError.NOT_ENOUGH_REPLICAS, RetryableError),
        (KafkaError.NOT_LEADER_FOR_PARTITION, RetryableError),
        (KafkaError._PURGE_QUEUE, RetryableError),
    ],
)
def test_each_error_is_of_the_kind_that_says_what_to_do(code: int, kind: type[StatemgrError]) -> None:
    """The error has the right kind, says which action failed, and says where."""
    error = translate(KafkaError(code), "reading a topic", topic="orders", partition=3)
    assert type(error) is kind
    assert error.message.startswith("reading a topic: ")
    right = error.where.pop("missing_right", None)
    assert (right is not None) == (code in _RIGHTS)
    assert error.where == {"topic": "orders", "partition": 3}


@pytest.mark.parametrize(
    ("code", "passes"),
    [
        (KafkaError.NOT_LEADER_FOR_PARTITION, True),
        (KafkaError.LEADER_NOT_AVAILABLE, True),
        (KafkaError.FENCED_LEADER_EPOCH, True),
        (KafkaError.OFFSET_NOT_AVAILABLE, True),
        (KafkaError.KAFKA_STORAGE_ERROR, True),
        (KafkaError.NOT_CONTROLLER, True),
        (KafkaError._TRANSPORT, True),
        (KafkaError._DESTROY_BROKER, True),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, False),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, False),
    ],
)
def test_a_question_to_a_leader_that_moves_is_put_again(code: int, passes: bool) -> None:
    """FAULT 15: a new or moved partition briefly has no leader, and this must not make a job fail."""
    assert may_pass(KafkaError(code)) is passes


#: Why a broker does not say yet what a group has committed.
NOT_YET = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
)


@pytest.mark.parametrize("code", NOT_YET)
@pytest.mark.parametrize(
    ("method", "in_answer"),
    [
        ("describe_consumer_groups", False),
        ("list_consumer_group_offsets", False),
        ("list_consumer_group_offsets", True),
    ],
)
def test_a_group_is_asked_again_while_its_coordinator_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, in_answer: bool, code: int
) -> None:
    """A group whose coordinator is not ready yet has offsets: the question is put again for 30 s, and then fails."""
    broker, clock = MemoryBroker(), ManualClock()
    config = JobConfig.from_mapping({"job.name": "j", "kafka.bootstrap.servers": "memory:moving"})
    broker.create("rows", 1, {})
    broker.groups["old"] = Group(offsets={("rows", 0): 5})
    caplog.set_level("INFO")
    with served(broker, "memory:moving"), TopicMetadata(config, clock) as metadata:
        with monkeypatch.context() as patch:
            coordinator_moves(patch, method, code, 30, in_answer=in_answer)
            assert metadata.committed("old") == {"rows-0": 5}
        assert sum("waiting for Kafka" in line for line in caplog.messages) == 1
        coordinator_moves(monkeypatch, method, code, float("inf"), in_answer=in_answer)
        begun = clock.now
        with pytest.raises(RetryableError, match="a consumer group"):
            metadata.committed("old")
        assert 30 <= clock.now - begun < 31


def test_a_time_out_after_a_refusal_is_a_refusal() -> None:
    """Wrong credentials appear as time-outs of calls. The client's own report gives the reason."""
    reported = ClientErrors()
    timed_out = KafkaError(KafkaError._TIMED_OUT)
    assert type(translate(timed_out, "asking", reported=reported)) is UnavailableError
    reported(KafkaError(KafkaError._AUTHENTICATION, "SASL authentication error"))
    error = translate(timed_out, "asking", reported=reported)
    assert type(error) is AccessDenied
    assert "SASL authentication error" in error.message
    reported.clear()
    assert type(translate(timed_out, "asking", reported=reported)) is UnavailableError


def test_an_unreachable_broker_is_named() -> None:
    """The client's last report has the broker's address, which becomes part of the message."""
    reported = ClientErrors()
    reported(KafkaError(KafkaError._TRANSPORT, "broker-7:9092: connection refused"))
    error = translate(KafkaError(KafkaError._TIMED_OUT), "asking", reported=reported)
    assert "broker-7:9092" in error.message


def test_a_limit_of_this_process_is_named() -> None:
    """FAULT 24: without file descriptors the client reports brokers as down. The error names the real cause."""
    reported = ClientErrors()
    reported(KafkaError(KafkaError._TRANSPORT, "broker-7:9092: Failed to create socket: Too many open files"))
    reported(KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
    error = translate(KafkaError(KafkaError._TIMED_OUT), "asking", reported=reported)
    assert "Too many open files" in error.message
    assert "ulimit -n" in str(error)


def test_exceptions_in_a_block_are_translated() -> None:
    """The vendor's exception becomes the cause of a typed error."""
    with pytest.raises(UnavailableError) as raised, translated("asking", topic="t"):
        raise KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert isinstance(raised.value.__cause__, KafkaException)


def test_a_fatal_error_under_a_system_error_is_found() -> None:
    """A fatal error raised during a callback hides behind the interpreter's SystemError."""
    fatal = KafkaException(KafkaError(KafkaError._FENCED, fatal=True))
    with pytest.raises(KafkaException) as raised, unmasked():
        raise SystemError("returned a result with an exception set") from fatal
    assert raised.value is fatal
    with pytest.raises(SystemError), unmasked():
        raise SystemError("something else")


def test_a_fatal_error_that_the_client_lost_is_still_one() -> None:
    """A later callback can lose the exception. The client then knows only that the call failed."""
    with pytest.raises(KafkaException) as raised, unmasked():
        raise SystemError("<method 'flush' of 'cimpl.Producer' objects> returned NULL without setting an exception")
    assert raised.value.args[0].code() == KafkaError._FATAL
    assert type(translate(raised.value.args[0], "publishing")) is RetryableError


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.FENCED_INSTANCE_ID, FencedError),
        (KafkaError.UNRELEASED_INSTANCE_ID, RetryableError),
        (KafkaError.GROUP_MAX_SIZE_REACHED, RetryableError),
        (KafkaError.UNSUPPORTED_ASSIGNOR, ConfigError),
        (KafkaError.UNSUPPORTED_VERSION, ConfigError),
        (KafkaError._UNSUPPORTED_FEATURE, ConfigError),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, AccessDenied),
        (KafkaError.INVALID_REQUEST, RetryableError),
        (KafkaError.GROUP_ID_NOT_FOUND, RetryableError),
        (KafkaError.UNKNOWN, RetryableError),
    ],
)
def test_a_consumer_group_turns_a_member_away_for_good(code: int, kind: type[StatemgrError]) -> None:
    """J1.1: every fatal error of a consumer comes as one code, and its text names the cause. Each has a typed error."""
    cause = KafkaError(code).str()
    error = turned_away(KafkaError(KafkaError._FATAL, f"Fatal error: {cause}: Fatal consumer error: {cause}"), None)
    assert type(error) is kind
    assert fatal_cause(KafkaError(KafkaError._FATAL, "no cause")).code() == KafkaError._FATAL


#: Fatal errors of a transactional producer (``rd_kafka_set_fatal_error`` and its callers in librdkafka 2.16).
_FATAL_OF_PRODUCERS = (
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.UNKNOWN_PRODUCER_ID,
    KafkaError._GAPLESS_GUARANTEE,
    KafkaError._INCONSISTENT,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)


@pytest.mark.parametrize("code", _FATAL_OF_PRODUCERS)
@pytest.mark.parametrize("call", ["begin_transaction", "produce", "flush", "commit_transaction"])
def test_after_a_fatal_error_no_producer_is_used_again(code: int, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.1: whichever call reports it, the publisher ends for good (fenced) or goes on with a new producer."""
    broker, servers = MemoryBroker(), "memory:fatal"
    broker.create("out", 1)
    config = JobConfig.from_mapping({"job.name": "orders", "kafka.bootstrap.servers": servers})
    with served(broker, servers):
        publisher = TransactionalPublisher(config, "orders-owner", SystemClock())
        publisher.fence()
        old = publisher._producer
        assert old is not None

        def fatal(*arguments: object, **options: object) -> None:
            raise KafkaException(KafkaError(code, "fatal", True))

        for name in ("begin_transaction", "produce", "flush", "commit_transaction", "abort_transaction"):
            if name == call or name == "abort_transaction":
                monkeypatch.setattr(old.client, name, fatal)
        with pytest.raises(StatemgrError), publisher.transaction() as transaction:
            transaction.send("out", b"k", b"lost", partition=0)
        if code in FENCED:
            with pytest.raises(FencedError):
                publisher.settle()
            return
        publisher.settle()
        assert publisher.regained, "the owner compares the topic first"
        publisher.regain()
        publisher.confirmed()
        with publisher.transaction() as transaction:
            transaction.send("out", b"k", b"kept", partition=0)
        publisher.close()
    assert publisher._producer is not old


def test_a_setting_that_librdkafka_refuses_is_a_config_error() -> None:
    """The error names the setting and does not reveal other values."""
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "kafka.bootstrap.servers": "127.0.0.1:1",
            "kafka.no.such.setting": "1",
            "kafka.sasl.password": _SECRET,
        }
    )
    with pytest.raises(ConfigError, match=r"no\.such\.setting") as refused:
        consumer(config, ClientErrors())
    assert _SECRET not in str(refused.value) + repr(refused.value.__cause__) + repr(refused.value.__context__)


def test_a_certificate_that_is_not_on_this_machine_is_named(tmp_path: Path) -> None:
    """Librdkafka speaks of routines and libraries, and not of a missing file."""
    name = "ssl.ca.location"
    keys = {"kafka.security.protocol": "ssl", f"kafka.{name}": str(tmp_path / "ca.pem")}
    config = JobConfig.from_mapping({"job.name": "orders", "kafka.bootstrap.servers": "127.0.0.1:1", **keys})
    with pytest.raises(ConfigError) as refused:
        consumer(config, ClientErrors())
    assert f"does not have the file that {name} names" in str(refused.value.hint)


def test_secrets_reach_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The password never appears in the client's log, even in debug mode."""
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "kafka.bootstrap.servers": "127.0.0.1:1",
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.mechanism": "PLAIN",
            "kafka.sasl.username": "u",
            "kafka.sasl.password": _SECRET,
            "kafka.debug": "all",
        }
    )
    with caplog.at_level(logging.DEBUG):
        client = producer(config, ClientErrors())
        client.poll(0.3)
    assert caplog.records
    assert _SECRET not in caplog.text


def test_what_the_protocol_needs_wins_over_the_configuration() -> None:
    """Settings that the protocol needs override the configuration. A contradiction makes them visible."""
    config = JobConfig.from_mapping(
        {
            "job.name": "orders",
            "kafka.bootstrap.servers": "127.0.0.1:1",
            "kafka.producer.max.in.flight.requests.per.connection": 10,
        }
    )
    with pytest.raises(ConfigError, match="idempotence"):
        producer(config, ClientErrors(), enable_idempotence=True, transactional_id="x")


@pytest.mark.parametrize(
    ("given", "kbytes"),
    [
        ({}, 32 * 1024),
        ({"kafka.queue.buffering.max.kbytes": 1000}, 1000),
        ({"kafka.producer.queue.buffering.max.kbytes": "2000"}, "2000"),
        ({"kafka.message.max.bytes": 100 * 1024 * 1024}, 100 * 1024),
    ],
)
def test_records_that_wait_take_little_memory(
    given: dict[str, object], kbytes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has a producer for each task. The configuration can set another limit."""
    monkeypatch.setitem(INSTEAD, "settings:1", lambda _, settings: settings)
    config = JobConfig.from_mapping({"job.name": "orders", "kafka.bootstrap.servers": "settings:1", **given})
    transactional = TransactionalProducer(config, "id", SystemClock(), 10_000, ClientErrors())
    settings: dict[str, object] = transactional.client  # type: ignore[assignment]
    assert settings["queue.buffering.max.kbytes"] == kbytes


def test_the_largest_record_fits_into_the_queue() -> None:
    """librdkafka takes no value that is larger than its whole queue, however long one waits."""
    config = JobConfig.from_mapping(
        {"job.name": "orders", "kafka.bootstrap.servers": "127.0.0.1:1", "kafka.message.max.bytes": 50_000_000}
    )
    client = producer(config, ClientErrors())
    client.produce("orders", bytes(config.most_record_bytes))
    client.purge()


def test_a_temporary_topic_that_was_not_seen_in_time_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic may exist although its creation has failed."""
    broker = MemoryBroker()

    def late(self: TopicMetadata, topics: object) -> None:
        raise UnavailableError("the brokers do not know the topic yet")

    monkeypatch.setattr(TopicMetadata, "wait_for", late)
    config = JobConfig.from_mapping({"job.name": "j", "kafka.bootstrap.servers": "memory:late"})
    with served(broker, "memory:late"), pytest.raises(UnavailableError, match="do not know"):
        BrokerTime(config, SystemClock(), system_ids()).now_ms()
    assert not broker.topics


def test_a_creation_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic may exist, so it is deleted, and the error is the one for brokers that do not answer."""
    broker, create = MemoryBroker(), MemoryAdmin.create_topics

    def lost(self: MemoryAdmin, topics: Sequence[NewTopic], **options: object) -> dict[str, Future[object]]:
        return {name: Future() for name in create(self, topics)}

    monkeypatch.setattr(MemoryAdmin, "create_topics", lost)
    monkeypatch.setattr("statemgr.kafka.topics.DEADLINE_S", 0.05)
    config = JobConfig.from_mapping({"job.name": "j", "kafka.bootstrap.servers": "memory:lost"})
    with served(broker, "memory:lost"), pytest.raises(UnavailableError, match="creating a topic"):
        BrokerTime(config, SystemClock(), system_ids()).now_ms()
    assert not broker.topics


def test_temporary_topics_that_may_not_be_deleted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the topics and the right that is missing, and the time is known all the same. Topics with other
    names are none of these."""
    broker = MemoryBroker()
    old, other = "__statemgr_doctor_1700000000000-0123456789abcdef", "__statemgr_doctor_of_mine"
    for name in (old, "__statemgr_doctor_1700000000001-0123456789abcdef", other):
        broker.create(name, 1)
    asked = []

    def refused(self: TopicAdmin, topic: str) -> None:
        asked.append(topic)
        raise AccessDenied("refused")

    monkeypatch.setattr(TopicAdmin, "delete", refused)
    config = JobConfig.from_mapping({"job.name": "j", "kafka.bootstrap.servers": "memory:refused"})
    with served(broker, "memory:refused"):
        assert BrokerTime(config, SystemClock(), system_ids()).now_ms()
        with pytest.raises(AccessDenied, match="temporary topics stay") as caught:
            probe_transaction(config, SystemClock(), system_ids())
    first, mine, *_ = asked
    assert first == old
    assert {*broker.topics} >= {old, mine, other}
    (warning,) = [record.getMessage() for record in caplog.records if "temporary topics stay" in record.getMessage()]
    assert old in warning
    assert mine in warning
    assert caught.value.where["missing_right"] == "Delete on topic __statemgr_doctor_*"


def test_leaders_are_looked_for_one_request_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka crashes if an answer comes while it looks for others. A topic that it knows waits for nobody."""
    asked: list[Future[object]] = []

    def ask(self: AdminClient, places: Mapping[TopicPartition, object], **options: object) -> dict[object, object]:
        asked.append(Future())
        return dict.fromkeys(places, asked[-1])

    monkeypatch.setattr(AdminClient, "list_offsets", ask)
    client = GuardedAdminClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    place = {TopicPartition("orders", 0): OffsetSpec.latest()}  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(client.list_offsets, place) for _ in range(2)]
        wait_until(lambda: len(asked) == 1)
        time.sleep(0.1)
        assert len(asked) == 1, "the other one waits"
        asked[0].set_result(1)
        wait_until(lambda: len(asked) == 2)
        asked[1].set_result(2)
        assert {answer for one in both for answer in one.result().values()} == {*asked}
    client.list_offsets(place)
    assert not asked[2].done()
