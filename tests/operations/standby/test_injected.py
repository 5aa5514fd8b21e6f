"""The clock, the IDs and the threads of a standby can be injected, so its loop can be tested without waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemgr.errors import InvalidError, MissingState
from statemgr.ids import task_name
from statemgr.operations.standby.process import Standby
from statemgr.operations.standby.standby import Followed
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.core.unit.test_injected import World

CONFIG: dict[str, object] = {"job.name": "orders", "job.tasks": 2, "stores.totals.value.serde": "bytes"}


def test_a_standby_uses_what_it_is_given(tmp_path: Path) -> None:
    """It makes no services of its own."""
    world = World(tmp_path)
    with Standby(world.config, services=world.services):
        assert len(world.made) == 1


def test_a_task_that_has_not_committed_is_no_failure(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standby reports the task once, and is ready with what there is: nothing alarms. A task that the job does not
    have is refused."""
    config = servers.on_disk(servers.config, "owner")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.commit({"orders-0": 1})
    other = servers.on_disk(servers.config, "standby")
    reports: list[Followed] = []
    with Standby(other, [TASK, task_name(1)], services=servers.services) as standby:
        turns = iter(range(3))
        monkeypatch.setattr(
            servers.clock, "wait", lambda changed, seconds: standby.stop() if next(turns, None) is None else True
        )
        standby.run(reports.append, 1.0)
        failures = standby.metrics.registry.get_sample_value("statemgr_standby_failures_total", {"job": "orders"})
        assert not standby._condition().unready
    assert [report.task for report in reports if report.waits] == [task_name(1)]
    assert {report.task for report in reports if report.checkpoint is not None} == {TASK}
    assert {report.error for report in reports} == {None}
    assert not failures
    with pytest.raises(InvalidError, match="the job has 2 tasks"):
        Standby(other, ["Partition 2"], services=servers.services)


def test_a_task_that_is_gone_is_a_failure(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rescale has removed the task that the standby has: it would wait for ever, and nobody would know."""
    config = servers.on_disk(servers.config, "owner")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.commit({"orders-0": 1})
    with Standby(servers.on_disk(servers.config, "standby"), [TASK], services=servers.services) as standby:
        standby.once()
        monkeypatch.setattr(standby._log, "read", lambda *_, **__: {})
        (gone,) = standby.once()
        failures = standby.metrics.registry.get_sample_value("statemgr_standby_failures_total", {"job": "orders"})
    assert isinstance(gone.error, MissingState)
    assert failures == 1
