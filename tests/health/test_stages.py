"""How large the state of a store is, by what its backends hold."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from statemgr.health.stages import StoreStatus, positions, survey
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.reader import JobReader
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CHANGELOG, BLOBS = "kafka-changelog", "blob-store"
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": [CHANGELOG, BLOBS],
    "task.restore.factories": [CHANGELOG],
    "stores.totals.value.serde": "bytes",
}
KEYS, VALUE, HOUR_S = 100, 95, 3600.0
RECORD = 5 + VALUE


@pytest.fixture
def old_job(servers: MemoryServers) -> tuple[StoreStatus, int]:
    """A hundred keys that were written again and again, most of the times before the last compaction. Returns: what the
    backends hold, and how many records the changelog has."""
    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        for time in range(105):
            if time == 100:
                servers.clock.advance(5 * HOUR_S)
            task.store("totals").put_many((b"%05d" % key, b"%03d" % time + bytes(VALUE - 3)) for key in range(KEYS))
            marker = task.commit({"orders-0": time}).marker(CHANGELOG, "totals")
    assert isinstance(marker, ChangelogMarker)
    servers.broker.compact(marker.topic, 0)
    with (
        closing(servers.services(servers.config)) as services,
        JobReader(servers.config, services=servers.services) as reader,
    ):
        found = survey(services, positions(services, reader.retaining()))
    return found[0], len(servers.broker.committed(marker.topic))


def test_the_size_of_a_changelog_leaves_out_what_compaction_has_removed(old_job: tuple[StoreStatus, int]) -> None:
    """It is estimated, from samples close to both ends. By the newest records alone it would be five times as large."""
    status, records = old_job
    assert records == 6 * KEYS
    assert records / 2 < (status.held[CHANGELOG].size or 0) / RECORD < records * 2


def test_the_size_of_a_state_is_that_of_its_newest_snapshot(old_job: tuple[StoreStatus, int]) -> None:
    """A changelog also has records that newer ones replace. It counts if the blob store lacks the newest state."""
    status, _ = old_job
    assert status.size == status.held[BLOBS].size < (status.held[CHANGELOG].size or 0)
    behind = tuple(replace(one, behind=1) for one in status.position.backends)
    older = replace(status, position=replace(status.position, backends=behind))
    assert older.size == status.held[CHANGELOG].size
