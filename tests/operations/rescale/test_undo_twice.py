"""Two people take the same rescale back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.errors import FencedError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.rescale import undo as undoing
from statemgr.operations.rescale.rescale import Workers, rescale
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": ["blob-store"],
    "task.restore.factories": ["blob-store", "kafka-changelog"],
    "stores.totals.value.serde": "bytes",
}


@pytest.mark.parametrize("before", ["JobTopics", "_with_output", "taken_over"])
def test_the_second_undo_does_not_undo_the_first(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Invariant 12: before a step of one undo, another one goes back, and fills the changelog. The first one ends with
    an error, and the old layout stays current. Its records from before the rescale are no longer there."""
    config = servers.on_disk(servers.config, "disk")

    def in_services(config: JobConfig, work: Callable[..., Any], *arguments: object, **more: object) -> Any:
        with (
            closing(servers.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=True)) as log,
        ):
            return work(services, log, *arguments, **more)

    def submit(function: Callable[..., Any], *arguments: object) -> Any:
        with servers.services(config).executors.pool("work", 1) as pool:
            return pool.submit(lambda: in_services(config, lambda services, _: function(services, *arguments)))

    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", b"1")
        task.commit({"orders-0": 1})
    workers = Workers(submit, 1, servers.services)
    in_services(config, rescale, 2, workers, no_progress, chosen="murmur2")
    both = {"task.backup.factories": ["blob-store", "kafka-changelog"]}
    new = JobConfig.from_mapping(config.to_mapping(), {"job.tasks": 2, **both})
    real = getattr(undoing, before)

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(undoing, before, real)
        in_services(new, undoing.undo, servers.services, no_progress)
        return real(*given)

    monkeypatch.setattr(undoing, before, overtaken)
    with pytest.raises(FencedError):
        in_services(new, undoing.undo, servers.services, no_progress)
    found, older = in_services(config, lambda services, log: (log.read(), log.read(generation=1)))
    assert [record.layout.tasks for record in found.values()] == [1]
    assert not older
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == {b"a": b"1"}
