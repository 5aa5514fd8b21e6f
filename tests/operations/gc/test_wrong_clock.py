"""A garbage collection next to a commit, with a blob store whose clock is two days ahead."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest

from statemgr import JobConfig, StateManager
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.operations.gc import gc
from statemgr.operations.gc.gc import GarbageReport
from statemgr.phases import Phase, observed
from statemgr.ports import no_progress
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.kafka_jobs import wait_until

DAY_MS = 24 * 3_600_000
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.backup.factories": ["blob-store"],
    "stores.totals.value.serde": "bytes",
}


class Collection:
    """A garbage collection on another thread. It looks at once, and deletes when it is let go.

    Attributes:
        report: its result.
        begun: whether it has looked.
    """

    def __init__(self, servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.report: GarbageReport | None = None
        self.begun = False
        self._looked, self._may_delete = threading.Event(), threading.Event()
        delete = gc._delete_orphans

        def later(*args: Any) -> None:
            self._looked.set()
            assert self._may_delete.wait(60)
            delete(*args)

        monkeypatch.setattr(gc, "_delete_orphans", later)
        self._thread = threading.Thread(target=self._run, args=(servers,))

    def _run(self, servers: MemoryServers) -> None:
        with (
            closing(servers.services(servers.config)) as services,
            closing(CheckpointTopic(services.config, services.clock)) as log,
        ):
            administration = services.blobs().administration
            right_ms = administration.time_ms
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(administration), "time_ms", lambda _: right_ms() + 2 * DAY_MS)
                self.report = gc.collect_garbage(services, log, no_progress, delete=True)

    def look(self) -> None:
        """Begin, up to the deletion."""
        self.begun = True
        self._thread.start()
        assert self._looked.wait(60)

    def delete(self) -> None:
        """Delete, and end."""
        self._may_delete.set()
        self._thread.join(60)


@pytest.fixture
def collection(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> Collection:
    """A garbage collection that has not begun."""
    return Collection(servers, monkeypatch)


def commit_next_to(collection: Collection, config: JobConfig, servers: MemoryServers, at: Phase, kind: str) -> None:
    """Commit twice. The collection looks when the second commit has prepared its blobs, and deletes at a phase."""

    def observe(phase: Phase, _: str) -> None:
        if phase is Phase.PREPARED and not collection.begun:
            collection.look()
        if phase is at and collection.report is None:
            collection.delete()

    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", bytes(5_000))
        task.commit({"orders-0": 1})
        task.store("totals").put(b"b", bytes(5_000))
        with observed(observe):
            assert task.commit({"orders-0": 2}, materialize=kind == "snapshot") == task.last_checkpoint


def content(config: JobConfig, servers: MemoryServers) -> set[object]:
    """Open the task, wait until its backups are whole, and return its keys."""
    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        assert task.start_offsets == {"orders-0": 2}
        wait_until(task.check_up)
        return {key for key, _ in task.store("totals").range()}


@pytest.mark.parametrize("at", [Phase.PREPARED, Phase.SEND_CHECKPOINT, Phase.ACKNOWLEDGED])
@pytest.mark.parametrize("kind", ["segment", "snapshot"])
def test_blobs_of_a_commit_in_progress_are_deleted(
    servers: MemoryServers, collection: Collection, at: Phase, kind: str
) -> None:
    """Invariant 2: before the transaction, in it, and after it: the commit that reports success can be restored
    elsewhere."""
    commit_next_to(collection, servers.on_disk(servers.config, "disk"), servers, at, kind)
    assert collection.report is not None
    assert collection.report.deleted.blobs > 0
    assert content(servers.on_disk(servers.config, "elsewhere"), servers) == {b"a", b"b"}


def test_blobs_are_deleted_after_the_commit_has_looked(servers: MemoryServers, collection: Collection) -> None:
    """The collection looks before the publish, and deletes when the TTLs are removed: it reports what it has done, and
    the next opening with the local copy makes the backup again."""
    config = servers.on_disk(servers.config, "disk")
    commit_next_to(collection, config, servers, Phase.CLEANED_UP, "segment")
    assert collection.report is not None
    assert collection.report.missing
    assert content(config, servers) == {b"a", b"b"}
    assert content(servers.on_disk(servers.config, "elsewhere"), servers) == {b"a", b"b"}
