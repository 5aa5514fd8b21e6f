"""Garbage collection of jobs on servers in memory: idle tasks, and a job that is removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.backends.blobs.names import is_index_blob
from statemgr.errors import MissingState, UnavailableError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.model.keys.partitioners import murmur2
from statemgr.operations.gc.gc import GarbageReport, collect_garbage
from statemgr.ports import list_blobs, no_progress
from statemgr.services import Services
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 2,
    "task.inputs": ["orders"],
    "task.backup.factories": ["kafka-changelog", "blob-store"],
    "stores.totals.value.serde": "bytes",
}
DAY_S = 24 * 3600


@contextmanager
def opened(servers: MemoryServers, config: JobConfig) -> Iterator[tuple[Services, CheckpointTopic]]:
    """Open the services and the log of a configuration."""
    with (
        closing(servers.services(config)) as services,
        closing(CheckpointTopic(config, services.clock, owned=True)) as log,
    ):
        yield services, log


def commit(servers: MemoryServers, config: JobConfig, task: str = TASK) -> None:
    """Commit one small key of the task."""
    number = int(task[-1])
    key = next(key for key in (b"a", b"b", b"c", b"d") if murmur2([key])[0] % config.tasks == number)
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(task) as opened:
        opened.store("totals").put(key, b"1")
        opened.commit({f"orders-{number}": 1})


def collect(servers: MemoryServers, config: JobConfig, **options: bool) -> GarbageReport:
    """Run one collection."""
    with opened(servers, config) as (services, log):
        return collect_garbage(services, log, no_progress, **options)


def names(servers: MemoryServers, config: JobConfig) -> set[str]:
    """Return the names of the job's blobs."""
    with opened(servers, config) as (services, _):
        return {blob.blob_id for blob in list_blobs(services.blobs(), "orders/1/")}


@pytest.mark.parametrize("before", ["blob-store", "kafka-changelog"])
def test_a_first_backup_has_a_blob_of_its_own(servers: MemoryServers, before: str) -> None:
    """Collections rely on it when a task has no checkpoint. It holds for a new task and for one that is filled, however
    small their changes are."""
    for factories in ([before], ["kafka-changelog", "blob-store"]):
        config = servers.on_disk(servers.reconfigure({"task.backup.factories": factories}), "disk")
        commit(servers, config)
    indexes = filter(is_index_blob, names(servers, config))
    assert any(name.startswith("orders/1/Partition_0/totals/") for name in indexes)


def test_an_idle_partition_keeps_no_shared_garbage(servers: MemoryServers) -> None:
    """One of two tasks has never had a message. What a dead process left is deleted, and nothing else."""
    config = servers.on_disk(servers.config, "disk")
    commit(servers, config)
    needed = names(servers, config)
    with opened(servers, config) as (services, _):
        services.blobs().put("orders/1/_segments/1700000000000-0123456789abcdef", b"x", ttl_days=None)
    servers.clock.advance(2 * DAY_S)
    assert collect(servers, config, delete=True).deleted.blobs == 1
    assert names(servers, config) == needed


def test_all_blobs_of_a_job_are_deleted_when_its_topic_is_gone(servers: MemoryServers) -> None:
    """The last step of a job that nobody needs any more, a day after its last commit."""
    commit(servers, servers.on_disk(servers.config, "disk"))
    gone = servers.reconfigure({"task.checkpoint.topic": "deleted"})

    def allowed() -> GarbageReport:
        return collect(servers, gone, delete=True, allow_no_checkpoints=True)

    with pytest.raises(MissingState):
        collect(servers, gone, delete=True)
    assert allowed().deleted.blobs == 0, "they are young"
    servers.clock.advance(2 * DAY_S)
    assert allowed().deleted.blobs > 0
    assert names(servers, gone) == set()


def test_a_directory_that_nobody_had_to_make_yet_has_no_garbage(servers: MemoryServers, tmp_path: Path) -> None:
    """It has no clock. If a checkpoint needs a blob of it, its disk is not mounted."""
    root = tmp_path / "blobs"
    for factories in (["kafka-changelog"], ["kafka-changelog", "blob-store"]):
        config = servers.on_disk(servers.reconfigure({"task.backup.factories": factories}), "disk")
        changes = {"blob.store.uri": root.as_uri(), "blob.store.retry.policy.max.retries": 0}
        config = JobConfig.from_mapping(config.to_mapping(), changes)
        commit(servers, config)
        if len(factories) == 1:
            report = collect(servers, config, delete=True)
            assert not report.missing
            assert not report.deleted.blobs
            assert not root.exists()
    root.rename(tmp_path / "disk")
    with pytest.raises(UnavailableError, match="does not exist"):
        collect(servers, config, delete=True)
