"""How ``statemgr adopt`` reads the topics and the group of an old job."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from statemgr.config import JobConfig
from statemgr.errors import RetryableError
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
from tests.blob_faults import ManualClock
from tests.core.unit.test_kafka_clients import NOT_YET
from tests.kafka_jobs import coordinator_moves

CONFIG = JobConfig.from_mapping({"job.name": "j", "kafka.bootstrap.servers": "memory:old"})


@pytest.mark.parametrize("code", NOT_YET)
@pytest.mark.parametrize("in_answer", [False, True])
def test_a_group_whose_coordinator_moves_is_asked_again_for_members(
    monkeypatch: pytest.MonkeyPatch, code: int, in_answer: bool
) -> None:
    """The broker reports some errors for each partition of the answer. Others than these mean what they say."""
    broker, clock, method = MemoryBroker(), ManualClock(), "alter_consumer_group_offsets"
    broker.create("rows", 1, {})
    with served(broker, "memory:old"), OldTopics(CONFIG, clock) as old:
        with monkeypatch.context() as patch:
            coordinator_moves(patch, method, code, 30, in_answer=in_answer)
            assert not old.has_members("old", "rows")
        with monkeypatch.context() as patch:
            coordinator_moves(patch, method, KafkaError.REBALANCE_IN_PROGRESS, 1, in_answer=True)
            assert old.has_members("old", "rows")
        coordinator_moves(monkeypatch, method, code, float("inf"), in_answer=in_answer)
        begun = clock.now
        with pytest.raises(RetryableError, match="whether a consumer group has members"):
            old.has_members("old", "rows")
        assert 30 <= clock.now - begun < 31
