"""Owners that live for a commit or two: segments, snapshots that no checkpoint names, and memory stay bounded."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from statemgr import StateManager, Task
from statemgr.backends.blobs.catalogue import Catalogue
from statemgr.backends.blobs.names import is_index_blob
from statemgr.errors import DiskFull
from statemgr.flows.committing import background_snapshots
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.codecs import decode_chain
from statemgr.phases import Phase, observed
from statemgr.ports import list_blobs
from statemgr.services import Services
from statemgr.stores.open_store import OpenStore
from statemgr.testing import JobTester
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK
from tests.jobs import with_changes
from tests.kafka_jobs import wait_until

#: Commits after which a snapshot is due. For this task and store it is due after all of them.
INTERVAL = 5
CONFIG: dict[str, object] = {
    "job.name": "orders",
    "task.inputs": ["orders"],
    "task.backup.factories": ["blob-store"],
    "task.commit.snapshot.interval": f"{INTERVAL} commits",
    "stores.totals.value.serde": "bytes",
}


@pytest.fixture
def services(servers: MemoryServers) -> Iterator[Services]:
    """Services that look at the job from elsewhere."""
    made = servers.services(servers.config)
    yield made
    made.close()


def chain_of(services: Services, checkpoint: Checkpoint | None) -> SegmentChain:
    """Return the chain of a checkpoint."""
    marker = checkpoint.marker("blob-store", "totals") if checkpoint is not None else None
    assert marker is not None
    return Catalogue(services.transfer).chain(services.identity(TASK, "totals"), marker)


def snapshots(services: Services) -> set[str]:
    """Return the indexes of all snapshots in the blob store."""
    names = (found.blob_id for found in list_blobs(services.blobs(), "orders/1/"))
    return {name for name in names if is_index_blob(name)}


def add(task: Task, number: int) -> Checkpoint:
    """Commit one more key."""
    task.store("totals").put(b"%d" % number, bytes(3_000))
    return task.commit({"orders-0": number})


def held() -> int:
    """Return how many objects of statemgr are alive in this process."""
    gc.collect()
    modules = [str(type(found).__module__) for found in gc.get_objects()]
    return sum(1 for name in modules if name.startswith("statemgr.") and not name.startswith("statemgr.testing."))


@pytest.mark.parametrize("commits", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("machine", ["the same", pytest.param("a new one", marks=pytest.mark.long)])
def test_segments_and_unnamed_snapshots_stay_few(
    servers: MemoryServers, services: Services, machine: str, commits: int
) -> None:
    """A snapshot of a session that has ended is taken up on the same machine. Elsewhere the first commit of an owner
    makes the snapshot at twice the interval. The state is whole in each session, and the process keeps nothing of a
    session."""
    number, longest, objects = 0, 0, list[int]()
    named, found = set[str](), set[str]()
    for session in range(16):
        config = servers.on_disk(servers.config, "disk" if machine == "the same" else f"disk-{session}")
        with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
            assert {key for key, _ in task.store("totals").range()} == {b"%d" % n for n in range(number)}
            for _ in range(commits):
                chain = chain_of(services, add(task, number))
                number += 1
                longest = max(longest, len(chain.segments))
                named.add(chain.snapshot.index.blob_id)
        found |= snapshots(services)
        objects.append(held())
    assert longest <= 2 * INTERVAL + commits
    assert len(named) > 1
    assert max(objects[8:]) < max(objects[:8]) + 100
    # on the same machine, one may wait for the next session
    assert len(found - named) <= (2 if machine == "the same" else INTERVAL * len(named))


def test_a_limit_of_time_counts_for_owners_that_live_for_less(servers: MemoryServers, services: Services) -> None:
    """At twice the limit, an owner makes a snapshot in the background after its first commit."""
    number, longest = 0, 0
    for session in range(20):
        config = with_changes(
            servers.on_disk(servers.config, f"{session}"), task__commit__snapshot__interval=["10 min"]
        )
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            for _ in range(2):
                longest = max(longest, len(chain_of(services, add(task, number)).segments))
                assert task._coordinator.snapshots.worker.wait(60)
                servers.clock.advance(60)
                number += 1
    assert longest <= 22
    assert number == 40


@pytest.mark.parametrize("commits", [1, 20])
def test_a_limit_of_time_leaves_a_bound_of_segments(
    servers: MemoryServers, services: Services, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many commits within the limit: a snapshot is due long before the chain is too long for a restore."""
    monkeypatch.setattr(background_snapshots, "_MOST_SEGMENTS", INTERVAL)
    number, longest = 0, 0
    for session in range(20 // commits):
        config = with_changes(
            servers.on_disk(servers.config, f"{session}"), task__commit__snapshot__interval=["10 min"]
        )
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            for _ in range(commits):
                longest = max(longest, len(chain_of(services, add(task, number)).segments))
                assert task._coordinator.snapshots.worker.wait(60)
                number += 1
    assert longest <= 2 * INTERVAL + 1


def test_restarts_of_a_loop_keep_segments_few() -> None:
    """Members that crash, or stop, after each commit, with and without their disks: as with single tasks."""

    def remember(task: Task, message: object) -> None:
        store = task.store("totals")
        store.put(b"%d" % sum(1 for _ in store.range()), b"1")

    longest, starts = 0, set[str]()
    with JobTester(CONFIG, remember) as tester:
        for number in range(16):
            tester.send("orders", b"a", b"1")
            tester.commit()
            checkpoint = tester.checkpoint()
            assert checkpoint is not None
            marker = checkpoint.marker("blob-store", "totals")
            chain = decode_chain(marker.inline)  # type: ignore[union-attr, arg-type]
            longest = max(longest, len(chain.segments))
            starts.add(chain.snapshot.index.blob_id)
            if number % 3 == 0:
                tester.stop()
            else:
                tester.crash(lose_disk=number % 3 == 1)
            tester.restore()
            assert sum(1 for _ in tester.store("totals").range()) == number + 1
    assert longest <= 2 * INTERVAL + 1
    assert len(starts) > 1


def test_a_snapshot_survives_the_death_of_its_owner(servers: MemoryServers, services: Services) -> None:
    """The owner never closes. The next one on its machine begins its first commit with the snapshot."""
    config = servers.on_disk(servers.config, "disk")
    made = threading.Event()
    dead = StateManager(config, services=servers.services)
    with observed(lambda phase, _: made.set() if phase is Phase.MATERIALIZED else None):
        task = dead.open_task(TASK)
        for number in range(INTERVAL + 1):
            last = add(task, number)
        assert made.wait(60)
    wait_until(lambda: any(config.state_dir.rglob("snapshot.pending")))
    assert len(chain_of(services, last).segments) == INTERVAL
    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        assert len(chain_of(services, add(task, 100)).segments) == 1
    assert snapshots(services) == {
        chain.snapshot.index.blob_id for chain in (chain_of(services, last), chain_of(services, task.last_checkpoint))
    }
    dead.close()


@pytest.mark.parametrize("published", [False, True])
def test_a_snapshot_with_changes_that_were_not_committed(
    servers: MemoryServers, services: Services, published: bool
) -> None:
    """A change that was made before RocksDB's checkpoint is in the snapshot. If it is never committed, nobody takes the
    snapshot up; if a commit that began earlier publishes it, the next owner does. Either state is exact elsewhere."""
    config = servers.on_disk(servers.config, "disk")
    begun, go_on, made, committed = (threading.Event() for _ in range(4))

    def hold(phase: Phase, _: str) -> None:
        if phase is Phase.MATERIALIZE:
            begun.set()
            assert go_on.wait(60)
        elif phase is Phase.PUT_INDEX and begun.is_set():
            made.set()
            assert not published or committed.wait(60)

    with (
        observed(hold),
        StateManager(config, services=servers.services) as manager,
        manager.open_task(TASK) as task,
    ):
        for number in range(INTERVAL + 1):
            add(task, number)
        assert begun.wait(60)
        task.store("totals").put(b"later", b"1")
        assert list(task.store("totals").range())  # which flushes the write buffer
        go_on.set()
        assert made.wait(60)
        if published:
            task.commit({"orders-0": 50})
            committed.set()
    is_left = any(config.state_dir.rglob("snapshot.pending"))
    assert is_left == published
    expected = {b"%d" % number for number in range(INTERVAL + 1)} | ({b"later"} if published else set())
    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        assert {key for key, _ in task.store("totals").range()} == expected
        segments = len(chain_of(services, add(task, 100)).segments)
        assert (segments <= 2) == published
    elsewhere = servers.on_disk(servers.config, "elsewhere")
    with StateManager(elsewhere, services=servers.services) as manager, manager.open_task(TASK) as task:
        assert {key for key, _ in task.store("totals").range()} == expected | {b"100"}


def test_a_snapshot_that_fails_after_its_upload_is_not_left(
    servers: MemoryServers, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier snapshot of the owner says nothing about a later one, which has a change that is never committed."""
    config = servers.on_disk(servers.config, "disk")
    begun, go_on, failed = (threading.Event() for _ in range(3))

    def hold(phase: Phase, _: str) -> None:
        if phase is Phase.MATERIALIZE:
            begun.set()
            assert go_on.wait(60)

    def full(*_: object) -> None:
        failed.set()
        raise DiskFull("no space is left")

    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        for number in range(INTERVAL + 1):
            first = chain_of(services, add(task, number)).snapshot
        wait_until(lambda: any(config.state_dir.rglob("snapshot.pending")))
        monkeypatch.setattr(OpenStore, "keep_snapshot", full)
        with observed(hold):
            for number in range(INTERVAL + 1, 2 * INTERVAL + 2):
                last = add(task, number)
            assert begun.wait(60)
            task.store("totals").put(b"later", b"1")
            assert list(task.store("totals").range())  # which flushes the write buffer
            go_on.set()
            assert failed.wait(60)
    monkeypatch.undo()
    assert chain_of(services, last).snapshot != first, "the first snapshot was published"
    with StateManager(config, services=servers.services) as manager, manager.open_task(TASK) as task:
        add(task, 100)
    elsewhere = servers.on_disk(servers.config, "elsewhere")
    with StateManager(elsewhere, services=servers.services) as manager, manager.open_task(TASK) as task:
        found = {key for key, _ in task.store("totals").range()}
    assert found == {b"%d" % number for number in (*range(2 * INTERVAL + 2), 100)}
