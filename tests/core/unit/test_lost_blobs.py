"""Blobs of a commit are deleted while it is published: it counts as a success when the backup is whole again."""

from __future__ import annotations

import pytest

from statemgr import JobConfig
from statemgr.blobs import open_raw_blob_store
from statemgr.errors import OutcomeUnknownError, StatemgrError, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.phases import Phase, observed
from statemgr.ports import list_blobs
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": ["blob-store"],
    "task.commit.snapshot.interval": ["1 commit"],
    "stores.totals.value.serde": "bytes",
}


def delete_new(config: JobConfig) -> None:
    """Delete all blobs that still have a TTL."""
    blobs = open_raw_blob_store(config, SystemClock())
    for blob in list_blobs(blobs, ""):
        if blobs.stat(blob.blob_id).expires_ms is not None:
            blobs.delete(blob.blob_id)


@pytest.mark.parametrize("repaired", [True, False])
def test_a_commit_is_published_and_its_blobs_are_deleted(servers: MemoryServers, repaired: bool) -> None:
    """J0.3: the backup is made again before the commit succeeds. If that fails, the commit never says that it changed
    nothing: it is published, and the next one makes the backup again."""
    seen = []

    def strike(phase: Phase, subject: str) -> None:
        seen.append(phase)
        if phase is Phase.REMOVE_TTL and seen.count(phase) == 1:
            delete_new(servers.config)
        elif phase is Phase.SEND_CHECKPOINT and seen.count(phase) == 2 and not repaired:
            raise UnavailableError("told to")

    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        store = task.store("totals")
        store.put(b"key", b"1")
        caught: StatemgrError | None = None
        with observed(strike):
            try:
                task.commit({"orders-0": 1})
            except StatemgrError as error:
                caught = error
        assert seen.count(Phase.SEND_CHECKPOINT) == 2
        assert type(caught) is (type(None) if repaired else OutcomeUnknownError), caught
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 1}
        if not repaired:
            task.commit({"orders-0": 1})
    with servers.manager(servers.on_disk(servers.config, "two"), "kafka-partition") as manager:
        assert dict(manager.open_task(TASK).store("totals").range()) == {b"key": b"1"}
