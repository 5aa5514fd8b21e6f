"""A changelog that has lost its last records, as after an unclean election of a leader, and was filled after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from statemgr import StateManager
from statemgr.backends.changelog.integrity import Losses
from statemgr.errors import MissingState
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.ports import TopicBounds
from statemgr.reader import JobReader
from statemgr.testing.memory_servers import MemoryServers
from tests.blob_faults import ManualClock
from tests.commits import TASK, write

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 8,
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


def test_a_look_asks_for_the_partitions_of_open_tasks(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with few tasks of many asks for their partitions only, and for all when it opens another task."""
    config = servers.on_disk(servers.config, "disk")
    with StateManager(config, services=servers.services) as manager:
        markers = []
        for name in ("Partition 2", "Partition 5"):
            with manager.open_task(name) as task:
                write(task, {b"a": b"1"})
                markers.append(task.commit({}).marker("kafka-changelog", "totals"))
    services, clock, asked = servers.services(config), ManualClock(), list[int]()
    survey = ChangelogTopics.survey

    def count(self: ChangelogTopics, *arguments: Any) -> Mapping[str, TopicBounds]:
        found = survey(self, *arguments)
        asked.append(sum(len(one.bounds) for one in found.values()))
        return found

    monkeypatch.setattr(ChangelogTopics, "survey", count)
    losses = Losses(services.changelog, [config.stores["totals"].changelog_topic], clock)
    for marker in (markers[0], markers[0], markers[1], markers[1]):
        assert isinstance(marker, ChangelogMarker)
        assert losses.of(marker) is None
        clock.now += 60
    # all at first and for the new task
    assert asked == [8, 1, 1, 8, 2]
    services.close()
