"""A store that no task has asked for, and whose serdes the application names in code: an operation on all tasks leaves
them open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from statemgr import JobConfig
from statemgr.flows.opening.open_job import JobTopics
from statemgr.ids import task_name
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.copy.copy import copy
from statemgr.operations.copy.look import look
from statemgr.operations.rollback.owner import Goal, keep, roll_back
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.operations.rescale import test_undo
from tests.operations.rescale.test_undo import Job

CONFIG = {**test_undo.CONFIG, "stores.errors.type": "memory"}


def tagged(job: Job) -> JobConfig:
    """Keep the current checkpoint."""
    wanted = job.current()
    job.work(job.config, lambda services, log: keep(services, log, JobTopics(services), wanted, is_kept=True))
    return job.config


def rolled_back(job: Job) -> JobConfig:
    """Go back to the current checkpoint."""
    goal = Goal((job.current(),))
    job.work(job.config, lambda services, log: roll_back(services, log, JobTopics(services), goal))
    return job.config


def rescaled(job: Job) -> JobConfig:
    """Rescale to two tasks."""
    job.rescale()
    return job.in_force()


def undone(job: Job) -> JobConfig:
    """Rescale, and go back."""
    job.undo(rescaled(job))
    return job.in_force()


def copied(job: Job) -> JobConfig:
    """Copy the job."""
    new = {"job.name": "new", "task.checkpoint.topic": "new-checkpoints"}
    target = job.servers.on_disk(JobConfig.from_mapping(job.config.to_mapping(), new), "new")
    with (
        closing(job.servers.services(job.config)) as source,
        closing(job.servers.services(target)) as services,
        closing(CheckpointTopic(job.config, job.servers.clock)) as old,
        closing(CheckpointTopic(target, job.servers.clock, owned=True)) as log,
    ):
        copy(source, services, log, look(source, services, old.read(), log, ()), no_progress)
    return target


@pytest.mark.parametrize("operation", [tagged, rolled_back, rescaled, undone, copied])
def test_the_application_names_the_serdes_later(servers: MemoryServers, operation: Callable[[Job], JobConfig]) -> None:
    """The configuration's defaults are not recorded, and so the application's own are not refused as a change. Those of
    the other store stay."""
    job = Job(servers)
    before = job.work(job.config, lambda _, log: log.read())[task_name(0)].current.serdes
    job.config = operation(job)
    for record in job.work(job.config, lambda _, log: log.read()).values():
        assert record.current.serdes == before
    with servers.manager(job.config, "kafka-partition") as manager, manager.open_task(task_name(0)) as task:
        task.store("errors", "string", "json").put("a", {"b": 1})
        task.commit({"orders-0": 2})
    assert "errors" not in before
