"""Commits store a state where no restore looks for it."""

from __future__ import annotations

import pytest

from statemgr import JobConfig
from statemgr.errors import ConfigError
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {"job.name": "orders", "stores.totals.value.serde": "bytes"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"task.restore.factories": ["blob-store"]}, "task.restore.factories"),
        ({"stores.totals.restore.factories": ["blob-store"]}, "stores.totals.restore.factories"),
    ],
)
def test_a_new_job_does_not_open(servers: MemoryServers, changes: dict[str, object], key: str) -> None:
    """Its second opening would find nothing that it can restore."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(JobConfig.from_mapping(config.to_mapping(), changes), "kafka-partition") as manager:
        with pytest.raises(ConfigError, match="nothing could restore it") as refused:
            manager.open_task(TASK)
        assert refused.value.where["key"] == key


def test_a_migration_may_go_on_with_the_old_backend(servers: MemoryServers) -> None:
    """The state is there, and the next commit fills the other backend. A store that is added is refused."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"k", b"1")
        task.commit({"in-0": 1})
    step = {"task.backup.factories": ["blob-store"], "task.restore.factories": ["kafka-changelog"]}
    changed = JobConfig.from_mapping(config.to_mapping(), step)
    with servers.manager(changed, "kafka-partition") as manager, manager.open_task(TASK) as task:
        assert task.store("totals").get(b"k") == b"1"
    more = JobConfig.from_mapping(changed.to_mapping(), {"stores.more.value.serde": "bytes"})
    with servers.manager(more, "kafka-partition") as manager, pytest.raises(ConfigError, match="nothing could restore"):
        manager.open_task(TASK, allow_new_stores=True)
