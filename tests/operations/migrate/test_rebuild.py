"""The way back from stage 4 of jobs on servers in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

from statemgr import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.flows.opening.open_job import JobTopics
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.model.jobs.stages import Stage, published_together
from statemgr.operations.migrate.rebuild import rebuild
from statemgr.operations.rollback.owner import Goal, roll_back
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.jobs import with_changes

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 2,
    "task.inputs": ["orders"],
    "stores.totals.type": "memory",
    "task.backup.factories": list(Stage.BLOBS.backup),
    "task.restore.factories": list(Stage.BLOBS.restore),
}


@pytest.fixture
def config(servers: MemoryServers) -> JobConfig:
    """A consumer loop in stage 4 that names its serdes in code. A rollback has published its tasks together."""
    config = servers.on_disk(servers.config, "disk")
    with servers.manager(config, "kafka-partition") as manager:
        for number in range(2):
            with manager.open_task(task_name(number)) as task:
                task.store("totals", "string", "json").put("a", {"b": number})
                task.commit({f"orders-{number}": 1})
    with closing(servers.services(config)) as services, closing(CheckpointTopic(config, servers.clock)) as log:
        ids = [str(record.current.checkpoint_id) for record in log.read().values()]
        roll_back(services, log, JobTopics(services), Goal(ids))
    return config


def records(servers: MemoryServers, config: JobConfig) -> Sequence[CheckpointRecord]:
    """The records of the tasks."""
    with closing(CheckpointTopic(config, servers.clock)) as log:
        return [*log.read().values()]


def test_tasks_of_a_loop_that_were_published_together(servers: MemoryServers, config: JobConfig) -> None:
    """They have one ID, as on Spark, but each has an owner of its own, whose code names the serdes."""
    before = records(servers, config)
    assert len({record.current.checkpoint_id for record in before}) == 1
    assert not published_together(before)
    stage = Stage.BLOBS_FIRST
    back = with_changes(config, task__backup__factories=stage.backup, task__restore__factories=stage.restore)
    rebuild(back, before, published_together(before), no_progress, servers.services)
    after = records(servers, config)
    assert [record.current.serdes for record in after] == [record.current.serdes for record in before]
    assert all(record.current.marker(KAFKA_CHANGELOG, "totals") is not None for record in after)
    with servers.manager(back, "kafka-partition") as manager, manager.open_task(task_name(1)) as task:
        assert task.store("totals", "string", "json").get("a") == {"b": 1}
