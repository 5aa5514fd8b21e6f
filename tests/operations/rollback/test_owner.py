"""What a rollback and a tag refuse before they fence the job, on servers in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.engine import attempts
from statemgr.engine.task import Task
from statemgr.errors import InvalidError, MissingBlob
from statemgr.flows.opening.open_job import JobTopics
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model import checkpoint as model
from statemgr.operations.rollback.owner import Goal, keep, plan
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.operations.rescale import test_undo_of_a_query
from tests.operations.rescale.test_undo_of_a_query import Query

CONFIG = test_undo_of_a_query.CONFIG | {"task.checkpoint.retained": 3, "stores.seen.type": "memory"}


class Loop:
    """A job of two tasks that have committed three times, with these serdes of the values."""

    def __init__(self, servers: MemoryServers, *value_serdes: str) -> None:
        self.servers, self.config = servers, servers.on_disk(servers.config, "disk")
        for number, serde in enumerate(value_serdes):
            with self.opened(number) as task:
                for offset in range(1, 4):
                    task.store("seen", "string", serde).put("a", f"{offset}")
                    task.commit({f"orders-{number}": offset})

    @contextmanager
    def opened(self, number: int) -> Iterator[Task]:
        """Open a task."""
        with (
            self.servers.manager(self.config, "kafka-partition") as manager,
            manager.open_task(task_name(number)) as it,
        ):
            yield it

    def work(self, function: Callable[..., Any], *arguments: object, **more: object) -> Any:
        """Call a function with the services and the log of a command."""
        with (
            closing(self.servers.services(self.config)) as services,
            closing(CheckpointTopic(self.config, services.clock, owned=True)) as log,
        ):
            return function(services, log, *arguments, **more)

    def ids(self, number: int = 0) -> list[str]:
        """The retained checkpoints of a task, newest first."""
        record = self.work(lambda _, log: log.read())[task_name(number)]
        return [str(one.checkpoint_id) for one in record.checkpoints]

    def tag(self, checkpoint_id: str, *, is_kept: bool) -> Any:
        """Keep a checkpoint, or release it."""
        return self.work(lambda services, log: keep(services, log, JobTopics(services), checkpoint_id, is_kept=is_kept))

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block in which the first task is open. It commits afterwards: nobody has fenced it, or published."""

        def end() -> int:
            return self.servers.broker.end(self.config.checkpoint_topic, 0, only_settled=False)

        with self.opened(0) as task:
            before = end()
            yield
            assert end() == before
            task.commit({"orders-0": 9})


def test_the_release_of_a_checkpoint_that_no_task_keeps(servers: MemoryServers) -> None:
    """It fences nobody, and publishes nothing."""
    job = Loop(servers, "json", "json")
    _, kept, other = job.ids()
    assert job.tag(kept, is_kept=True) == {TASK: (kept,)}
    with job.running():
        assert job.tag(other, is_kept=False) == {TASK: (kept,)}


def test_a_tag_too_many(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is known before the fence."""
    monkeypatch.setattr(model, "MOST_KEPT", 1)
    job = Loop(servers, "json", "json")
    _, kept, other = job.ids()
    job.tag(kept, is_kept=True)
    with job.running(), pytest.raises(InvalidError, match="would keep 2 checkpoints"):
        job.tag(other, is_kept=True)


def test_tasks_with_different_serdes(servers: MemoryServers) -> None:
    """The look refuses what could not be published."""
    job = Loop(servers, "json", "string")
    with pytest.raises(InvalidError, match="written with different serdes"):
        job.work(plan, Goal([job.ids(number)[1] for number in range(2)]))


@pytest.mark.parametrize("name", ["output-0", "processor-state"])
def test_an_attachment_is_gone(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The query could not continue there. The look asks for the blobs of attachments as well, and names the one."""
    monkeypatch.setattr(attempts, "inline_attachments_limit", lambda tasks: 0)
    query = Query(servers)
    config = JobConfig.from_mapping({k: v for k, v in servers.config.to_mapping().items() if "seen" not in k})
    query.run(config, 3)
    before = query.records(config)[TASK].checkpoints[1]
    goal = Goal([str(before.checkpoint_id)])
    assert len(query.work(config, plan, goal)) == 2
    lost = query.lose(config, before, name)
    for check_blobs in (True, False):
        with pytest.raises(MissingBlob, match=f"an attachment of checkpoint {before.checkpoint_id} is gone") as raised:
            query.work(config, plan, goal, check_blobs=check_blobs)
        assert (raised.value.where["blob"], raised.value.where["task"]) == (lost, TASK)
