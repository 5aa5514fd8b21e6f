"""Two people adopt the same job at the same time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from statemgr.errors import FencedError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.adopt.adopt import adopt
from statemgr.operations.adopt.copying import Copy
from statemgr.operations.adopt.found import Request
from statemgr.operations.adopt.old_topics import OldTopics
from statemgr.operations.adopt.origins import ORIGINS
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": ["kafka-changelog"],
    "stores.totals.value.serde": "bytes",
}


@pytest.mark.parametrize("after", ["has_begun", "_done"])
def test_a_run_that_is_overtaken_is_fenced(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """After a look of one run at its copy, another run adopts the job. The first one ends with an error, and the job
    has the old state once."""
    config = servers.on_disk(servers.config, "disk")
    servers.broker.create("old-totals", 1, {"cleanup.policy": "compact"})
    servers.broker.append("old-totals", 0, b"a", b"1")
    servers.broker.append("orders", 0, b"a", b"")

    def run() -> bool:
        request = Request(
            ORIGINS["raw"], None, {"totals": "old-totals"}, {"orders-0": 1}, config.inputs, tasks=1, settle_s=0.0
        )
        with (
            closing(servers.services(config)) as services,
            closing(CheckpointTopic(config, services.clock, owned=True)) as log,
            OldTopics(config, services.clock) as old,
        ):
            return adopt(services, log, old, request, in_place=False, progress=no_progress).old is not None

    real: Callable[[Copy], Any] = getattr(Copy, after)

    def overtaken(self: Copy) -> Any:
        found = real(self)
        monkeypatch.setattr(Copy, after, real)
        assert run()
        return found

    monkeypatch.setattr(Copy, after, overtaken)
    with pytest.raises(FencedError):
        run()
    assert not run()
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == {b"a": b"1"}
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 1}


def test_an_old_changelog_that_begins_like_those_of_the_new_job(servers: MemoryServers) -> None:
    """E11: it stays the old job's when the adoption has created the new job's topics. The changelogs of other jobs of
    statemgr are left out as before."""
    config = servers.on_disk(servers.config, "disk")
    of_old, own = "orders-1-counts-changelog", config.stores["totals"].changelog_topic
    for topic in (of_old, own, config.checkpoint_topic, "__statemgr_checkpoints_orders-2", "orders-2-totals-changelog"):
        servers.broker.create(topic, 1, {})
    with OldTopics(config, servers.clock) as old:
        assert [topic for topic in old.names() if topic.endswith("-changelog")] == [of_old]
