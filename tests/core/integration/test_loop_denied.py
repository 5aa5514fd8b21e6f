"""A consumer loop whose credentials the brokers refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message

from statemgr import JobConfig, StateManager, Task
from statemgr.errors import AccessDenied
from tests.secured import SecuredKafka


def never(task: Task, message: Message) -> None:
    """No message gets here."""
    raise AssertionError("a message was given out")


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_wrong_password_of_the_input_consumer_is_access_denied(
    secured_kafka: SecuredKafka, tmp_path: Path, by_hand: bool
) -> None:
    """A wrong password raises AccessDenied without showing the password, with config.consumer and with a consumer made
    by hand."""
    config = JobConfig.from_mapping(
        {
            "job.name": "denied",
            "task.inputs": ["orders"],
            "task.backup.factories": [],
            "stores.totals.value.serde": "bytes",
            "state.dir": str(tmp_path / "state"),
            **secured_kafka.settings,
            "kafka.sasl.password": "not-the-password",
        }
    )
    consumer = config.consumer("group")
    if by_hand:
        consumer.close()
        consumer = Consumer({**config.kafka_client("consumer"), "group.id": "group", "log_level": 0})
    try:
        with StateManager(config) as manager, pytest.raises(AccessDenied) as denied:
            manager.run(consumer, never)
    finally:
        consumer.close()
    assert "not-the-password" not in str(denied.value)
