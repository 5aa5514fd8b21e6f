"""A checkpoint topic that has lost its newest records, as after an unclean election of a leader."""

from __future__ import annotations

from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {"job.name": "orders", "task.inputs": ["orders"], "stores.totals.value.serde": "bytes"}


def test_records_at_the_offsets_of_lost_ones_are_read(servers: MemoryServers) -> None:
    """Invariant 1: a process has read the topic. Its newest records are lost, another owner's take their offsets, and
    another job's follow. When the process opens the task again, it finds what the other owner has published."""
    one, two = (servers.on_disk(servers.config, name) for name in ("one", "two"))
    topic, others_key = one.checkpoint_topic, codecs.encode_key(CheckpointKey("other", "1", 0, TASK, 2, 1))
    with servers.manager(one, "kafka-partition") as manager:
        with manager.open_task(TASK) as task:
            task.commit({"orders-0": 1})
            kept = servers.broker.end(topic, 0, only_settled=True)
            for number in (2, 3, 4):
                task.store("totals").put(b"a", b"lost")
                task.commit({"orders-0": number})
        with manager.open_task(TASK):  # reads what is about to be lost
            servers.broker.log(topic, 0).lose_from(kept)
        with servers.manager(two, "kafka-partition") as other, other.open_task(TASK) as task:
            task.store("totals").put(b"a", b"kept")
            task.commit({"orders-0": 2})
        for _ in range(20):
            servers.broker.append(topic, 0, others_key, None)
        with manager.open_task(TASK) as task:
            assert task.last_checkpoint is not None
            assert task.last_checkpoint.input_offsets == {"orders-0": 2}
            assert task.store("totals").get(b"a") == b"kept"
