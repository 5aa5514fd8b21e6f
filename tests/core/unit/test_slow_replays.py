"""A process stands still while it reads a changelog, for so long that the brokers compact deletes away meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
from confluent_kafka import Message

from statemgr import JobConfig
from statemgr.errors import UnavailableError
from statemgr.kafka.reader import PartitionReader
from statemgr.reader import JobReader
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK, write

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 1,
    "task.checkpoint.retained": 10,
    "task.backup.factories": ["kafka-changelog"],
    "stores.totals.value.serde": "bytes",
}
#: More records than the reader takes at once.
STATE = {b"%05d" % number: b"value" for number in range(1500)}
DAY_S = 24 * 3600.0


def compact_twice(servers: MemoryServers, config: JobConfig) -> None:
    """Let the cleaner drop values that are deleted, and a day later their deletes."""
    for seconds in (DAY_S / 4, DAY_S + 60):
        servers.clock.advance(seconds)
        servers.broker.compact(config.stores["totals"].changelog_topic, 0)


@pytest.fixture
def stand_still(monkeypatch: pytest.MonkeyPatch) -> Callable[[JobConfig, Callable[[], None]], None]:
    """Make something happen after the first records of the next read of the whole changelog."""
    read = PartitionReader.read

    def between(config: JobConfig, work: Callable[[], None]) -> None:
        def slow(
            self: PartitionReader, topic: str, partition: int, start: int, end: int
        ) -> Iterator[Sequence[Message]]:
            batches = read(self, topic, partition, start, end)
            if topic == config.stores["totals"].changelog_topic and start == 0:
                yield next(batches)
                monkeypatch.setattr(PartitionReader, "read", read)
                work()
            yield from batches

        monkeypatch.setattr(PartitionReader, "read", slow)

    return between


def test_deleted_keys_do_not_come_back(
    servers: MemoryServers, stand_still: Callable[[JobConfig, Callable[[], None]], None]
) -> None:
    """The value was read before, and its delete is gone: the opening fails and leaves nothing, and the next one is
    exact."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        for number, items in enumerate([{b"": b"dead"}, STATE, {b"": None}, {b"z": b"last"}]):
            write(task, items)
            task.commit({"orders-0": number})
    servers.clock.advance(DAY_S)
    stand_still(config, lambda: compact_twice(servers, config))
    with servers.manager(servers.on_disk(servers.config, "two"), "kafka-partition") as manager:
        with pytest.raises(UnavailableError, match=r"the changelog was read for .* delete\.retention\.ms"):
            manager.open_task(TASK)
        assert manager._services.directories(TASK, "totals").leftovers() == []
        assert dict(manager.open_task(TASK).store("totals").range()) == {**STATE, b"z": b"last"}


def test_keys_that_are_deleted_meanwhile_are_not_missing(
    servers: MemoryServers, stand_still: Callable[[JobConfig, Callable[[], None]], None]
) -> None:
    """A reader reads the newest checkpoint. The owner deletes a key after that, and both records are gone before the
    reader reaches them: nothing after the checkpoint shows it."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        write(task, {**STATE, b"victim": b"value"})
        task.commit({"orders-0": 1})

        def delete() -> None:
            write(task, {b"victim": None})
            task.commit({"orders-0": 2})
            compact_twice(servers, config)

        stand_still(config, delete)
        with (
            closing(JobReader(servers.on_disk(servers.config, "two"), services=servers.services)) as reader,
            pytest.raises(UnavailableError, match="the changelog was read for"),
            reader.open_store(TASK, "totals"),
        ):
            pass
