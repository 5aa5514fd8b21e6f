"""A changelog that has lost its last records, as after an unclean election of a leader, and was filled after that."""

from __future__ import annotations

import pytest

from statemgr import StateManager
from statemgr.errors import MissingState
from statemgr.reader import JobReader
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK, write

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.checkpoint.retained": 3,
    "task.backup.factories": ["kafka-changelog"],
    "stores.totals.value.serde": "bytes",
}


def test_an_older_checkpoint_whose_records_are_gone_is_refused(servers: MemoryServers) -> None:
    """The fill takes the offsets of the lost records, so the older checkpoint's offset exists again, with others."""
    config = servers.on_disk(servers.config, "disk")
    old, new = ({b"%03d" % number: value for number in range(50)} for value in (b"old", b"new"))
    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        write(task, old)
        older = task.commit({"orders-0": 1})
        write(task, new)
        task.commit({"orders-0": 2})
        with servers.broker.changed:
            servers.broker.log(config.stores["totals"].changelog_topic, 0).lose_from(10)
        task.damage.found("kafka-changelog", "totals", "it was truncated")
        newest = task.commit({"orders-0": 3})
    with JobReader(servers.on_disk(servers.config, "elsewhere"), services=servers.services) as reader:
        with reader.open_store(TASK, "totals", str(newest.checkpoint_id)) as opened:
            assert dict(opened.scan(None, None)) == new
        with (
            pytest.raises(MissingState, match="records of the checkpoint are gone"),
            reader.open_store(TASK, "totals", str(older.checkpoint_id)),
        ):
            pass
