"""What the look at a job that is to be copied refuses, on servers in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial

import pytest

from statemgr import JobConfig
from statemgr.errors import InvalidError
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.copy import look as looking
from statemgr.operations.copy.look import TaskCopy, beginning_at, look
from statemgr.testing.memory_servers import MemoryServers
from tests.jobs import with_changes

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders", "payments"],
    "stores.totals.type": "memory",
    "task.backup.factories": ["blob-store"],
    "task.restore.factories": ["blob-store"],
}
Begin = Callable[[Mapping[str, int]], list[TaskCopy]]


def commit(servers: MemoryServers, config: JobConfig, number: int, value_serde: str = "json") -> None:
    """Commit with a task that has read both topics."""
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(task_name(number)) as task:
        task.store("totals", "string", value_serde).put("a", "b")
        task.commit({f"orders-{number}": 100, f"payments-{number}": 5000})


def looked(servers: MemoryServers, config: JobConfig, **changes: object) -> tuple[list[TaskCopy], JobConfig]:
    """Look at a copy to a new job with these changes."""
    new = with_changes(config, job__name="new", task__checkpoint__topic="new-checkpoints", **changes)
    target = servers.on_disk(new, "new")
    with (
        closing(servers.services(config)) as source,
        closing(servers.services(target)) as services,
        closing(CheckpointTopic(config, servers.clock)) as old,
        closing(CheckpointTopic(target, servers.clock)) as log,
    ):
        return look(source, services, old.read(), log, ()), target


@pytest.fixture
def begin(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Give a copy of a job, whose two inputs have other names in the new cluster, offsets of that cluster."""
    monkeypatch.setattr(looking, "missing_input", lambda *_: [])
    config = servers.on_disk(servers.config, "disk")
    commit(servers, config, 0)
    tasks, target = looked(servers, config, task__inputs=["src.orders", "src.payments"])
    with closing(servers.services(target)) as services:
        yield partial(beginning_at, services, tasks)


def test_one_of_two_renamed_topics(begin: Begin) -> None:
    """Without offsets, the new job would read the other one from its first offset, and count all of it once more."""
    with pytest.raises(InvalidError, match=r"offsets for src\.orders, but none for src\.payments") as raised:
        begin({"src.orders-0": 90})
    assert "src.payments-0=0 if it is to read all of it" in str(raised.value.hint)
    (moved,) = begin({"src.orders-0": 90, "src.payments-0": 0})
    assert moved.checkpoint.input_offsets == {"src.orders-0": 90, "src.payments-0": 0}


def test_tasks_with_different_serdes(servers: MemoryServers) -> None:
    """The copy publishes all tasks together, and would be refused after it has copied everything."""
    config = with_changes(servers.on_disk(servers.config, "disk"), job__tasks=2)
    for number, serde in enumerate(("json", "string")):
        commit(servers, config, number, serde)
    with pytest.raises(InvalidError, match="written with different serdes"):
        looked(servers, config)
