"""A changelog loses its newest records, as in an unclean election of a leader, and others take their offsets.

It is as long as the checkpoint says, so only the timestamp of its newest record shows the loss.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from statemgr import JobConfig
from statemgr.backends.changelog.restore import ChangelogRestore
from statemgr.errors import AccessDenied, MissingState, UnavailableError
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.kafka.clients import producer
from statemgr.kafka.errors import ClientErrors
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.phases import Phase
from statemgr.ports import BackupLost
from statemgr.testing.memory_kafka import MemoryBroker
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK, failing, write
from tests.jobs import with_changes

CHANGELOG = "kafka-changelog"
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": [CHANGELOG],
    "stores.totals.value.serde": "bytes",
}
STATE = {b"%03d" % number: b"value" for number in range(20)}
HOUR_S = 3600.0


@pytest.fixture
def config(servers: MemoryServers) -> JobConfig:
    """Return the job on a machine that has its local copy."""
    return servers.on_disk(servers.config, "one")


def committed(servers: MemoryServers, config: JobConfig, *changes: dict[bytes, bytes | None]) -> ChangelogMarker:
    """Commit changes, and return the newest marker."""
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        for number, items in enumerate(changes):
            write(task, items)
            checkpoint = task.commit({"orders-0": number})
    marker = checkpoint.marker(CHANGELOG, "totals")
    assert isinstance(marker, ChangelogMarker)
    return marker


def lose(servers: MemoryServers, marker: ChangelogMarker, records: int = 5) -> None:
    """Lose the end mark of the newest transaction, and some of its records."""
    with servers.broker.changed:
        servers.broker.log(marker.topic, 0).lose_from(marker.offset - records)


def replace_lost(servers: MemoryServers, marker: ChangelogMarker, *, commit: bool = False) -> None:
    """Let a transaction write so many records that the changelog ends where it did."""
    writer = producer(servers.config, ClientErrors(), transactional_id="other")
    writer.init_transactions(10)
    writer.begin_transaction()
    for _ in range(servers.broker.end(marker.topic, 0, only_settled=False), marker.offset):
        writer.produce(marker.topic, b"other", b"000", partition=0)
    writer.flush(10)
    (writer.commit_transaction if commit else writer.abort_transaction)(10)
    assert servers.broker.end(marker.topic, 0, only_settled=True) == marker.offset + 1


def found(servers: MemoryServers, name: str, config: JobConfig | None = None) -> dict[bytes, bytes]:
    """Return what another machine restores."""
    with servers.manager(servers.on_disk(config or servers.config, name), "kafka-partition") as manager:
        return dict(manager.open_task(TASK).store("totals").range())


def test_a_hidden_loss_is_no_state(servers: MemoryServers, config: JobConfig) -> None:
    """Aborted records have taken the lost offsets. Another machine refuses the changelog, and the one with the local
    copy writes the whole state again."""
    marker = committed(servers, config, STATE)
    assert found(servers, "before") == STATE
    lose(servers, marker)
    replace_lost(servers, marker)
    with pytest.raises(
        MissingState, match="the newest record of the checkpoint is gone, and nothing is at its offset 19"
    ):
        found(servers, "two")
    assert committed(servers, config, {}).start > marker.offset
    assert found(servers, "three") == STATE


def test_a_loss_while_the_owner_lives(servers: MemoryServers, config: JobConfig) -> None:
    """A commit of the owner fails and takes the lost offsets. The next one notices that and is not published, and the
    one after it writes the whole state again."""
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        write(task, STATE)
        marker = task.commit({"orders-0": 1}).marker(CHANGELOG, "totals")
        assert isinstance(marker, ChangelogMarker)
        lose(servers, marker)
        write(task, {b"%03d" % number: b"new" for number in range(5)})
        with failing(Phase.SEND_CHECKPOINT), pytest.raises(UnavailableError):
            task.commit({"orders-0": 2})
        with pytest.raises(BackupLost, match="nothing is at its offset 19"):
            task.commit({"orders-0": 2})
        task.commit({"orders-0": 2})
    assert found(servers, "two") == {**STATE, **{b"%03d" % number: b"new" for number in range(5)}}


def test_a_loss_during_a_replay(servers: MemoryServers, config: JobConfig) -> None:
    """A process is suspended before it reads. Meanwhile the newest records are lost, and others are committed in their
    place."""
    marker = committed(servers, config, STATE)

    def read(*_: object) -> None:
        lose(servers, marker)
        servers.clock.advance(1.0)
        replace_lost(servers, marker, commit=True)

    with closing(servers.services(config)) as services:
        ChangelogRestore(services).exactly(TASK, marker, None, lambda *_: None)
        with pytest.raises(MissingState, match="another one is at its offset 19"):
            ChangelogRestore(services).exactly(TASK, marker, None, read)


def test_an_expired_delete_is_no_loss(
    servers: MemoryServers, config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction removes a delete that is older than delete.retention.ms, also the newest record of a checkpoint. Who
    may not ask for the broker's time learns which right is missing."""
    marker = committed(servers, config, STATE, {b"000": None})
    assert marker.newest_deletes
    for hours in (200.0, 30.0):
        servers.clock.advance(hours * HOUR_S)
        servers.broker.compact(marker.topic, 0)
    log = servers.broker.log(marker.topic, 0)
    assert log.entries[marker.offset - 1] is None
    assert found(servers, "two") == {key: value for key, value in STATE.items() if key != b"000"}

    def refuse(self: ChangelogTopics) -> int:
        raise AccessDenied("not authorized to create a topic")

    monkeypatch.setattr(ChangelogTopics, "time_ms", refuse)
    with pytest.raises(MissingState, match=r"not authorized to create a topic\. Allow this user to create"):
        found(servers, "three")


def test_a_delete_of_a_clock_that_was_ahead_expires_earlier(
    servers: MemoryServers, config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers take records from clocks that are up to an hour ahead, and count the age of a delete themselves."""
    append = MemoryBroker.append

    def ahead(self: MemoryBroker, topic: str, *record: Any, timestamp_ms: int | None = None, **more: Any) -> Any:
        return append(self, topic, *record, timestamp_ms=timestamp_ms or self.now_ms + 50 * 60_000, **more)

    monkeypatch.setattr(MemoryBroker, "append", ahead)
    config = with_changes(config, stores__totals__changelog__min__compaction__lag__ms=0)
    marker = committed(servers, config, STATE, {b"000": None})
    servers.broker.compact(marker.topic, 0)
    servers.clock.advance(24 * HOUR_S + 1)
    servers.broker.compact(marker.topic, 0)
    assert servers.broker.log(marker.topic, 0).entries[marker.offset - 1] is None
    assert found(servers, "two", config) == {key: value for key, value in STATE.items() if key != b"000"}
