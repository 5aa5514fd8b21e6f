"""Blobs of a commit are deleted while it is published: it counts as a success when the backup is whole again. And a
blob store that is away does not stop a job whose commits no longer store state there."""

from __future__ import annotations

from contextlib import closing
from typing import NoReturn

import pytest

from statemgr import JobConfig
from statemgr.blobs import open_raw_blob_store
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.errors import OutcomeUnknownError, StatemgrError, UnavailableError
from statemgr.flows.committing import clean_up
from statemgr.kafka.checkpoint_topic import CheckpointTopic
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
        assert (task.last_checkpoint.sequence, task.last_checkpoint.output_sequence) == ((2, 1) if repaired else (1, 1))
        if not repaired:
            task.commit({"orders-0": 1})
    with servers.manager(servers.on_disk(servers.config, "two"), "kafka-partition") as manager:
        assert dict(manager.open_task(TASK).store("totals").range()) == {b"key": b"1"}


@pytest.mark.parametrize("in_between", [0, 1])
def test_commits_go_on_without_a_blob_store_that_they_no_longer_need(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, in_between: int
) -> None:
    """The runbook's way out of an outage: `blob-store` leaves the backup factories. Only the opening asks the store,
    once. An opening after the outage removes the TTLs that a dead owner has left, so older checkpoints stay."""
    asked: list[str] = []

    def fail(self: MemoryBlobStore, blob_id: str, *args: object, **more: object) -> NoReturn:
        asked.append(blob_id)
        raise UnavailableError("told to")

    def expiring() -> list[str]:
        blobs = open_raw_blob_store(servers.config, SystemClock())
        return [b.blob_id for b in list_blobs(blobs, "") if blobs.stat(b.blob_id).expires_ms is not None]

    def commit(config: JobConfig, number: int) -> None:
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            asked.clear()
            for offset in (number, number + 1):
                if offset < 3:
                    task.store("totals").put(b"%d" % offset, b"1")
                task.commit({"orders-0": offset})

    retries = {"task.checkpoint.retained": 9, "blob.store.retry.policy.max.retries": 0}
    dual = JobConfig.from_mapping(
        servers.on_disk(servers.config, "one").to_mapping(),
        {"task.backup.factories": ["kafka-changelog", "blob-store"], **retries},
    )
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBlobStore, "remove_ttl", fail)
        commit(dual, 1)
        for number in range(in_between):  # so that a checkpoint lists outstanding TTLs
            commit(dual, 3 + 2 * number)
    assert expiring()
    alone = JobConfig.from_mapping(
        dual.to_mapping(),
        {"task.backup.factories": ["kafka-changelog"], "task.restore.factories": ["blob-store", "kafka-changelog"]},
    )
    with monkeypatch.context() as patch:
        for method in ("get", "put", "remove_ttl", "delete", "delete_many", "stat", "list"):
            patch.setattr(MemoryBlobStore, method, fail)
        patch.setattr(clean_up, "DAY_MS", 0)
        with (
            closing(servers.services(alone)) as services,
            closing(CheckpointTopic(alone, services.clock)) as topic,
            pytest.raises(UnavailableError),  # a rescale or a rollback waits for the store
        ):
            clean_up.taken_over(services, topic.read()[TASK])
        commit(alone, 5)
        assert asked == []
        commit(alone, 7)
        assert asked == []
    commit(alone, 9)
    assert expiring() == []
