# ruff: noqa: PT012 (the end of a transaction's block raises)
"""Partitions that have no leader for a while, because the only broker that has them is down (fault 15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from statemgr.config import JobConfig
from statemgr.errors import MissingState, UnavailableError
from statemgr.health.diagnosis import Diagnosis
from statemgr.health.overview import JobMonitor
from statemgr.health.problems import Fault, Problem
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.transactions.publisher import TransactionalPublisher, job_transactional_id
from statemgr.local.machine import SystemClock
from statemgr.model.commit import Change
from statemgr_tools.dev.kafka import KafkaBroker
from tests.kafka_jobs import committed, job, wait_until
from tests.second_broker import SecondBroker

pytestmark = pytest.mark.long
_TOPIC = "elsewhere"


@pytest.fixture
def second(own_kafka: Callable[..., KafkaBroker], tmp_path: Path) -> Iterator[SecondBroker]:
    """A second broker, which alone has a topic; the first broker coordinates transactions."""
    first = own_kafka()
    config = job(first)
    with closing(TransactionalPublisher(config, "makes the topic of transactions", SystemClock())) as publisher:
        publisher.fence()
    broker = SecondBroker(directory=tmp_path / "second", first=first)
    broker.start()
    broker.make_topic(_TOPIC)
    yield broker
    broker.delete()


def _lose(broker: SecondBroker) -> None:
    broker.kill()
    admin = AdminClient({"bootstrap.servers": broker.first.bootstrap_servers})
    wait_until(lambda: admin.list_topics(_TOPIC, timeout=60).topics[_TOPIC].partitions[0].leader == -1)


def _job(broker: SecondBroker) -> JobConfig:
    return job(broker.first, task__commit__timeout__ms=4000)


def test_a_partition_without_a_leader_is_not_missing(second: SecondBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of its offsets waits for the leader. A partition or topic that does not exist causes MissingState at
    once."""
    with TopicMetadata(_job(second), SystemClock()) as metadata:
        _lose(second)
        with monkeypatch.context() as patched:
            patched.setattr("statemgr.kafka.metadata.DEADLINE_S", 1.0)
            with pytest.raises(UnavailableError, match="no leader"):
                metadata.bounds(_TOPIC, 0)
            for place in ((_TOPIC, 1), ("nowhere", 0)):
                with pytest.raises(MissingState):
                    metadata.bounds(*place)
        second.start()
        assert metadata.bounds(_TOPIC, 0) == (0, 0)


def test_what_was_aborted_without_a_leader_is_never_committed(second: SecondBroker) -> None:
    """Kafka 4.3.1 forgets to end the transaction there (KAFKA-20734), and would commit its records with the next
    one."""
    config = _job(second)
    publisher = TransactionalPublisher(config, job_transactional_id(config), SystemClock())
    publisher.fence()
    with pytest.raises(ZeroDivisionError), publisher.transaction() as transaction:
        transaction.send_changes(_TOPIC, 0, [(b"lost", b"v")])
        transaction.flush()
        _lose(second)
        raise ZeroDivisionError
    second.start()
    published = [after for _ in range(2) if _published(publisher, after := (b"after", b"v"))]
    assert committed(config, _TOPIC, settled=False) == published


def _published(publisher: TransactionalPublisher, change: Change) -> bool:
    """Returns False if the publish was refused because the broker forgot the transaction."""
    publisher.confirmed()
    try:
        with publisher.transaction() as transaction:
            transaction.send_changes(_TOPIC, 0, [change])
    except UnavailableError:
        return False
    return True


@pytest.mark.long
def test_a_broker_that_is_gone_is_named_by_the_others(second: SecondBroker) -> None:
    """The diagnosis names the broker by its number, with its partitions, even if the client sends its requests to
    it."""
    config = job(second.first, task__inputs=[_TOPIC])
    with JobMonitor(config) as monitor, closing(Diagnosis(monitor)) as diagnosis:
        # the job has no checkpoint topic, which is another problem
        assert [one.fault for one in diagnosis.servers()] == [Fault.OTHER]
        _lose(second)
        expected = Problem(Fault.BROKER_GONE, "broker 2", f"Its replicas are not in sync: {_TOPIC}-0 (no leader).")
        wait_until(lambda: [one for one in diagnosis.servers() if one.fault is Fault.BROKER_GONE] == [expected])
