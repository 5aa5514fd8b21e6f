"""The clock, the IDs and the threads can be injected, so that complete histories run deterministically."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from statemgr import JobConfig, StateManager
from statemgr.engine import Epoch, open_attempt
from statemgr.engine.host import AttemptHost
from statemgr.ids import IdSource
from statemgr.local.machine import Threads
from statemgr.model.checkpoint import Layout
from statemgr.reader import JobReader
from statemgr.services import Services
from statemgr.wiring import open_services
from tests.blob_faults import ManualClock


class World:
    """A clock that stands still, and IDs that count up."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.config = JobConfig.from_mapping(
            {
                "job.name": "orders",
                "kafka.bootstrap.servers": "127.0.0.1:9",
                "task.backup.factories": ["blob-store"],
                "task.restore.factories": ["blob-store"],
                "blob.store.uri": (directory / "blobs").as_uri(),
                "state.dir": str(directory / "state"),
                "stores.totals.value.serde": "bytes",
            }
        )
        self.made: list[Services] = []

    def services(self, config: JobConfig) -> Services:
        """Return new services with this world's clock and IDs."""
        numbers = count(1)
        ids = IdSource(time_ns=lambda: 7_000_000, token=lambda: f"{next(numbers):032}")
        self.made.append(open_services(config, self.clock, ids, Threads()))
        return self.made[-1]


def test_managers_and_readers_use_what_they_are_given(tmp_path: Path) -> None:
    """Neither makes its own services."""
    world = World(tmp_path)
    with StateManager(world.config, services=world.services) as manager:
        assert manager.clock is world.clock
        assert manager.metrics.clock is world.clock
    with JobReader(world.config, services=world.services):
        pass
    assert len(world.made) == 2


def test_the_same_history_gives_the_same_commit(tmp_path: Path) -> None:
    """An attempt with injected IDs gives its blobs the same names on every run."""
    prepared = []
    for name in ("first", "second"):
        world = World(tmp_path / name)
        epoch = Epoch(3, Layout(1, world.config.tasks, "kafka-partition"), {})
        host = AttemptHost(world.services(world.config))
        with open_attempt(world.config, "Partition 0", None, epoch, host=host) as attempt:
            attempt.store("totals").put(b"a", b"1")
            prepared.append(attempt.prepare({"orders-0": 1}))
        host.services.close()
    assert prepared[0].attempt == prepared[1].attempt == "7-0000000000000000"
    assert prepared[0].added_blobs == prepared[1].added_blobs
    assert prepared[0].added_blobs
