"""Commands that write blobs and read changelogs, on a machine without the disk of the job's blobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemgr.config.factories import BLOB_STORE, KAFKA_CHANGELOG
from statemgr.errors import UnavailableError
from statemgr.ids import task_name
from statemgr.operations.materialize.materialize import materialize_store
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.jobs import with_changes
from tests.operations.rescale import test_undo
from tests.operations.rescale.test_undo import Job

CONFIG = {
    **test_undo.CONFIG,
    "task.backup.factories": [KAFKA_CHANGELOG, BLOB_STORE],
    "task.restore.factories": [KAFKA_CHANGELOG],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory on which the disk is mounted."""
    return tmp_path / "mount"


@pytest.fixture
def job(servers: MemoryServers, root: Path) -> Job:
    """A job of one task in dual commit, whose blobs are in the directory."""
    return Job(servers, with_changes(servers.config, blob__store__uri=root.as_uri()))


def test_a_rescale_writes_no_blobs_below_the_mount_point(job: Job, root: Path) -> None:
    """Invariant 1: they would be gone as soon as the disk is mounted again."""
    root.rename(root.with_name("disk"))
    (root / "another-job").mkdir(parents=True)
    with pytest.raises(UnavailableError, match="has no orders"):
        job.rescale()
    assert [path.name for path in root.iterdir()] == ["another-job"]
    assert job.tasks() == {1}


def test_materialize_writes_no_blobs_below_the_mount_point(job: Job, root: Path) -> None:
    """The same, for a task that is in the stage before. Others have blobs already."""
    dual = with_changes(job.config, job__id="2", job__tasks=2)
    stages = with_changes(dual, task__backup__factories=[KAFKA_CHANGELOG]), dual
    for number, config in zip((1, 0), stages, strict=True):
        with job.servers.manager(config, "kafka-partition") as manager, manager.open_task(task_name(number)) as task:
            task.store("totals").put(b"a", b"1")
            task.commit({f"orders-{number}": 1})
    root.rename(root.with_name("disk"))
    (root / "another-job").mkdir(parents=True)
    with pytest.raises(UnavailableError, match="has no orders"):
        job.work(dual, materialize_store, task_name(1), "totals", no_progress)
    assert [path.name for path in root.iterdir()] == ["another-job"]
