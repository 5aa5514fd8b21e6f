"""Local states of tasks that a machine does not run any more. Needs no broker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.errors import DiskFull
from statemgr.flows.sweep import Sweep
from statemgr.local.directories import StoreDirectories
from statemgr.local.shared_directories import exclusive_if_free
from statemgr.testing.memory_servers import MemoryServers

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 2,
    "task.backup.factories": ["blob-store"],
    "task.commit.snapshot.interval": ["100 commits"],
    "state.cleanup.delay.ms": "1 h",
    "stores.totals.value.serde": "bytes",
}
STAYS, LEFT = "Partition 0", "Partition 1"
Look = Callable[[StateManager], None]


def states(config: JobConfig, task: str, store: str = "totals") -> list[str]:
    """The names of the store's local copies and segments."""
    root = Path(config.state_dir, "orders", "1", task.replace(" ", "_"), store)
    return [name for part in ("committed", "segments") if (root / part).is_dir() for name in os.listdir(root / part)]


def commit(manager: StateManager, task: str, value: bytes) -> None:
    """Commit, so that there are a local copy and a segment, and close the task."""
    with manager.open_task(task) as opened:
        for _ in range(2):
            opened.store("totals").put(b"k", value * 5_000)
            opened.commit({})


@pytest.fixture
def look(servers: MemoryServers) -> Look:
    """A look ten minutes after the last one."""

    def look(manager: StateManager) -> None:
        servers.clock.advance(600)
        manager._upkeep.look()
        manager._upkeep._sweep.worker.wait()

    return look


def test_the_state_of_a_task_that_is_gone_for_an_hour_is_removed(servers: MemoryServers, look: Look) -> None:
    """So is that of a task that the job does not have any more. An idle task that is open keeps its state, and what is
    not statemgr's stays. The machine remembers what it has published."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager:
        commit(manager, LEFT, b"1")
        commit(manager, STAYS, b"2")
        with manager.open_task(STAYS):
            job = Path(config.state_dir, "orders", "1")
            (job / "Partition_x" / "totals" / "committed").mkdir(parents=True)
            (job / "Partition_9").symlink_to(job / "Partition_0")
            shutil.copytree(job / "Partition_1", job / "Partition_2")
            for _ in range(6):
                look(manager)
                assert states(config, LEFT)
            look(manager)
            assert not states(config, LEFT)
            assert not states(config, "Partition 2")
            assert len(states(config, STAYS)) > 1
            assert (job / "Partition_1" / "PUBLISHED").exists()
            assert (job / "Partition_x" / "totals" / "committed").exists()
            for _ in range(8):
                look(manager)
        with manager.open_task(LEFT) as opened:
            assert opened.store("totals").get(b"k") == b"1" * 5_000


def test_a_removed_store_leaves_nothing_on_a_machine_that_has_the_task(servers: MemoryServers, look: Look) -> None:
    """Its directory goes when nobody has changed it for an hour; that of the other store stays."""
    config = servers.on_disk(servers.config, "one")
    both = JobConfig.from_mapping(config.to_mapping(), {"stores.old.value.serde": "bytes"})
    with servers.manager(both, "kafka-partition") as manager, manager.open_task(STAYS) as opened:
        for store in ("totals", "old"):
            opened.store(store).put(b"k", b"v")
        opened.commit({})
    with (
        servers.manager(config, "kafka-partition") as manager,
        manager.open_task(STAYS, allow_removed_stores=True) as opened,
    ):
        for _ in range(6):
            look(manager)
            assert states(config, STAYS, "old")
        look(manager)
        assert not states(config, STAYS, "old")
        assert states(config, STAYS)


def test_what_a_command_has_left_stays_for_a_day(servers: MemoryServers, look: Look) -> None:
    """Then it is removed, unless the command runs. Nothing behind a link is touched."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager:
        commit(manager, STAYS, b"1")
        job = Path(config.state_dir, "orders", "1")
        work = [job / "rescale", job / "materialize" / "Partition_0" / "totals"]
        for directory in (*work, job / "elsewhere"):
            (directory / "store").mkdir(parents=True)
            (directory / "lock").touch()
        (job / "materialize" / "Partition_1").symlink_to(job)
        look(manager)
        for _ in range(143):
            look(manager)
        assert all((directory / "store").exists() for directory in work)
        with exclusive_if_free(work[0] / "lock"):
            look(manager)
            assert [(directory / "store").exists() for directory in work] == [True, False]
        look(manager)
        assert not (work[0] / "store").exists()
        assert (job / "elsewhere" / "store").exists()


def test_a_machine_that_was_off_removes_nothing(servers: MemoryServers, look: Look) -> None:
    """Its tasks come back later than it does; and an hour means that of processes that run."""
    config = servers.on_disk(servers.config, "one")
    for _ in range(5):
        with servers.manager(config, "kafka-partition") as manager:
            commit(manager, LEFT, b"1")
            look(manager)
        servers.clock.advance(86_400)
        with servers.manager(config, "kafka-partition") as manager:
            look(manager)
            assert states(config, LEFT)


def test_processes_of_a_machine_share_the_looks(servers: MemoryServers, look: Look) -> None:
    """Two processes that look at different times do not look twice as often, and each one's tasks count."""
    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as one, servers.manager(config, "kafka-partition") as two:
        commit(one, LEFT, b"1")
        commit(one, STAYS, b"1")
        with two.open_task(STAYS):
            for _ in range(6):
                look(one)
                two._upkeep.look()
                two._upkeep._sweep.worker.wait()
                assert states(config, LEFT)
            for _ in range(3):
                look(two)
                look(one)
        assert not states(config, LEFT)
        assert states(config, STAYS)


def test_what_cannot_be_removed_is_tried_again(
    servers: MemoryServers, look: Look, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else fails for it. A note that somebody has damaged begins anew."""
    config = servers.on_disk(servers.config, "one")

    def fail(self: StoreDirectories, _: object) -> None:
        raise DiskFull("told to")

    with servers.manager(config, "kafka-partition") as manager:
        commit(manager, LEFT, b"1")
        look(manager)
        (Path(config.state_dir) / "orders" / "1" / "swept").write_bytes(b"?")
        with monkeypatch.context() as patch:
            patch.setattr(StoreDirectories, "keep_only", fail)
            for _ in range(9):
                look(manager)
        assert caplog.text.count("the local state, which nobody uses, was not removed: told to") == 3
        assert states(config, LEFT)
        look(manager)
        assert not states(config, LEFT)


def test_a_job_without_directories_has_nothing_to_sweep(servers: MemoryServers) -> None:
    """A look makes no directory."""
    config = servers.on_disk(servers.config, "one")
    with closing(servers.services(config)) as services:
        Sweep(services).look()
    assert not Path(config.state_dir).exists()
