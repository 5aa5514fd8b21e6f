"""After a publish that failed, the owner compares the topic with what it knows, and goes on."""

from __future__ import annotations

import threading

import pytest

from statemgr.errors import UnavailableError
from statemgr.kafka.clients import producer
from statemgr.kafka.errors import ClientErrors
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey
from statemgr.phases import Phase, observed
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {"job.name": "orders", "task.inputs": ["orders"], "stores.totals.value.serde": "bytes"}


@pytest.mark.parametrize("hides", ["nothing", "the newest", "all"])
def test_an_open_transaction_of_another_job_hides_checkpoints(servers: MemoryServers, hides: str) -> None:
    """FAULT 19: jobs share the topic. What is hidden for a while is not lost."""
    other = producer(servers.config, ClientErrors(), transactional_id="other")
    key = codecs.encode_key(CheckpointKey("other", "1", 0, TASK, 2, 1))

    def begin(when: str) -> None:
        if when == hides:
            other.init_transactions(10)
            other.begin_transaction()
            other.produce(servers.config.checkpoint_topic, key=key, partition=0)
            other.flush(10)

    def fail(phase: Phase, subject: str) -> None:
        if phase is Phase.SEND_CHECKPOINT:
            raise UnavailableError("told to")

    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        begin("all")
        task.commit({"orders-0": 1})
        begin("the newest")
        task.commit({"orders-0": 2})
        with observed(fail), pytest.raises(UnavailableError):
            task.commit({"orders-0": 3})
        if hides != "nothing":
            ends = threading.Timer(0.2, other.commit_transaction, (10,))
            ends.start()
        task.commit({"orders-0": 3})
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 3}
