"""The owners of tasks and of whole jobs: failures of a commit, and of what follows a publish. Needs no broker."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from statemgr.backends.changelog import backup
from statemgr.blobs import open_raw_blob_store
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.engine import coordinator, job_coordinator
from statemgr.engine.coordinator import UpkeepThread
from statemgr.engine.job_coordinator import JobCoordinator
from statemgr.errors import (
    AccessDenied,
    FencedError,
    InvalidError,
    LocalStateLost,
    MissingBlob,
    OutcomeUnknownError,
    RetryableError,
    UnavailableError,
)
from statemgr.flows import worker
from statemgr.flows.committing import clean_up
from statemgr.flows.committing.clean_up import CleanUp
from statemgr.flows.owner import Owner
from statemgr.flows.upkeep import order_check
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import Checkpoint
from statemgr.model.commit import Change
from statemgr.phases import Phase, observed
from statemgr.ports import list_blobs
from statemgr.services import Services
from statemgr.stores.open_store import OpenStore
from statemgr.testing.memory_servers import MemoryServers
from tests.commits import TASK, attempt, lose_acknowledgements
from tests.core.integration.test_local_loss import flip, tables
from tests.jobs import with_changes
from tests.kafka_jobs import wait_until

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 3,
    "task.backup.factories": ["blob-store"],
    "task.commit.snapshot.interval": ["1 commit"],
    "stores.totals.value.serde": "bytes",
}
NAMES = [f"Partition {index}" for index in range(3)]


def with_ttl(servers: MemoryServers) -> int:
    """The number of blobs that will expire."""
    blobs = open_raw_blob_store(servers.config, SystemClock())
    return sum(blobs.stat(blob.blob_id).expires_ms is not None for blob in list_blobs(blobs, ""))


def refuse_request(self: MemoryBlobStore, blob_id: str, *_: object) -> NoReturn:
    """A request to the blob store that nobody may send."""
    raise AccessDenied("told to", blob=blob_id)


def publish_first(servers: MemoryServers) -> None:
    """Publish a first commit of each task."""
    driver, executor = (servers.on_disk(servers.config, name) for name in ("driver", "executor"))
    with servers.manager(driver, "kafka-partition") as manager:
        epoch = manager.acquire()
        manager.publish([attempt(executor, epoch, name, {b"k": b"1"}, 1) for name in NAMES])


def test_a_commit_without_a_thread_leaves_no_directory(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories of its stores are removed, and the next commit has its changes."""

    def refused(*_: object) -> None:
        raise RetryableError("can't start new thread")

    config = servers.on_disk(servers.config, "one")
    with servers.manager(config, "kafka-partition") as manager:
        task = manager.open_task(TASK)
        task.store("totals").put(b"k", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(task._pending._worker._executor, "submit", refused)
            with pytest.raises(RetryableError, match="new thread"):
                task.commit({"orders-0": 1})
        assert not list(Path(config.state_dir).rglob("staging/*"))
        task.commit({"orders-0": 1})
        assert not task.has_changes


def test_a_failed_clean_up_forgets_no_ttl(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol 8: if the clean-up of one task fails, the others are cleaned up, and the next publish removes the TTLs
    that are left."""
    after_publish = CleanUp.after_publish

    def fail_once(self: CleanUp, *args: object) -> None:
        if self._task == NAMES[0]:
            monkeypatch.setattr(CleanUp, "after_publish", after_publish)
            raise MemoryError
        after_publish(self, *args)  # type: ignore[arg-type]

    def refuse(services: Services, task: str) -> None:
        raise InvalidError("a symbolic link is on the way", task=task)

    monkeypatch.setattr(job_coordinator, "_PARALLELISM", 1)
    monkeypatch.setattr(job_coordinator, "remember_published", refuse)
    monkeypatch.setattr(CleanUp, "after_publish", fail_once)
    driver, executor = (servers.on_disk(servers.config, name) for name in ("driver", "executor"))
    with servers.manager(driver, "kafka-partition") as manager:
        epoch = manager.acquire()
        checkpoints = manager.publish([attempt(executor, epoch, name, {b"k": b"1"}, 1) for name in NAMES], wait=False)
        assert manager._job is not None
        with pytest.raises(MemoryError):
            manager._job._cleaner.take()
        assert [one.count_outstanding > 0 for one in manager._job.clean_ups.values()] == [True, False, False]
        assert with_ttl(servers)
        epoch = epoch.after_publish()
        manager.publish([attempt(executor, epoch, name, {b"k": b"2"}, 2, checkpoints=checkpoints) for name in NAMES])
        assert not with_ttl(servers)


def test_a_ttl_that_cannot_be_removed_costs_few_requests(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Protocol 8, invariant 13: a commit tries its own blobs, and all others after longer and longer pauses. It logs
    one line. None is forgotten."""
    monkeypatch.setattr(coordinator, "LOOK_S", 1e9)
    asked = list[str]()

    def refuse(self: MemoryBlobStore, blob_id: str) -> None:
        asked.append(blob_id)
        raise AccessDenied("no right to delete tags", blob=blob_id)

    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)

        def commit(number: int) -> None:
            caplog.clear()
            servers.clock.advance(10)
            task.store("totals").put(b"k", b"%d" % number)
            task.commit({"orders-0": number})

        with monkeypatch.context() as patch:
            patch.setattr(MemoryBlobStore, "remove_ttl", refuse)
            for number in range(50):
                commit(number)
                assert caplog.text.count("could not be removed") == 1
        assert len(set(asked)) >= 50
        assert len(asked) < 10 * len(set(asked))
        for number in range(50, 57):
            commit(number)
        assert not with_ttl(servers)


def test_a_blob_that_is_only_called_missing_stays_outstanding(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Protocol 8: a blob store, or what is in front of it, may call a published blob missing for a moment. Its TTL is
    removed later, and does not let it expire."""

    def missing(self: MemoryBlobStore, blob_id: str) -> None:
        raise MissingBlob("told to", blob=blob_id)

    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        for number in (1, 2):
            task.store("totals").put(b"k", bytes([number]) * 10_000)
            with monkeypatch.context() as patch:
                patch.setattr(MemoryBlobStore, "remove_ttl", missing)
                assert len(task.commit({"orders-0": number}).outstanding_ttl) == number - 1
                assert with_ttl(servers) == number
        servers.clock.advance(100)
        task.store("totals").put(b"k", b"3")
        task.commit({"orders-0": 3})
        assert not with_ttl(servers)
        assert "disappeared" not in caplog.text


def test_blobs_that_were_deleted_need_no_ttl_removed(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 13: their TTLs count towards no limit, no checkpoint lists them, and nobody takes them for lost."""

    monkeypatch.setattr(clean_up, "MOST_OUTSTANDING", 20)
    config = with_changes(servers.on_disk(servers.config, "one"), task__checkpoint__retained=2)
    with servers.manager(config, "kafka-partition") as manager:
        task, blobs = manager.open_task(TASK), manager._services.blobs()

        def commit(number: int) -> Checkpoint:
            servers.clock.advance(10)
            task.store("totals").put(b"k", b"%d" % number)
            return task.commit({"orders-0": number})

        with monkeypatch.context() as patch:
            patch.setattr(MemoryBlobStore, "remove_ttl", refuse_request)
            for number in range(30):
                before = {blob.blob_id for blob in list_blobs(blobs, "")}
                assert {one.blob_id for one in commit(number).outstanding_ttl} <= before
        wait_until(lambda: task.damage.suspicion is None)
        for number in range(30, 37):
            commit(number)
        assert not with_ttl(servers)
        assert "disappeared" not in caplog.text
        assert task.damage.suspicion is None


def test_ttls_that_a_dead_owner_has_left_are_counted(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blob store is away while the next owner opens the task from its local copy: it cannot read which blobs they
    are, but the metric does not say that there are none."""

    config = with_changes(servers.on_disk(servers.config, "one"), task__commit__snapshot__interval=["10 commits"])
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBlobStore, "remove_ttl", refuse_request)
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            task.store("totals").put(b"k", bytes(10_000))
            task.commit({"orders-0": 1})
    assert with_ttl(servers)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBlobStore, "get", refuse_request)
        with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
            assert [of for (_,), of in task.owner.blobs_with_ttl()] == [1]
            patch.undo()
            task.commit({"orders-0": 2})
            assert [of for (_,), of in task.owner.blobs_with_ttl()] == [0]
    assert not with_ttl(servers)


@pytest.mark.parametrize("of_dead_owner", [False, True])
def test_the_ttls_of_a_task_without_input_are_tried_again(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, of_dead_owner: bool
) -> None:
    """Protocol 8: no later commit removes them, so upkeep does, also those that an opening could not remove."""

    config = servers.on_disk(servers.config, "one")
    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setattr(MemoryBlobStore, "remove_ttl", refuse_request)
        manager = stack.enter_context(servers.manager(config, "kafka-partition"))
        task = manager.open_task(TASK)
        task.store("totals").put(b"k", b"1")
        task.commit({"orders-0": 1})
        if of_dead_owner:
            stack.close()
            manager = stack.enter_context(servers.manager(config, "kafka-partition"))
            manager.open_task(TASK)
        assert with_ttl(servers)
        patch.undo()
        servers.clock.advance(60)
        manager._upkeep.look()
        assert not with_ttl(servers)


def test_a_look_waits_once_for_a_blob_store_that_is_away(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task could wait as long as requests are repeated. The next look begins with another task."""
    asked: list[str] = []

    def refuse(self: MemoryBlobStore, blob_id: str) -> None:
        asked.append(blob_id.split("/")[2])
        raise AccessDenied("told to", blob=blob_id)

    monkeypatch.setattr(UpkeepThread, "start", lambda self: None)
    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryBlobStore, "remove_ttl", refuse)
            for number in range(2):
                task = manager.open_task(f"Partition {number}")
                task.store("totals").put(b"k", bytes(10_000))
                task.commit({f"orders-{number}": 1})
            for looks in (1, 2):
                servers.clock.advance(60)
                asked.clear()
                manager._upkeep.look()
                assert set(asked) == {f"Partition_{looks - 1}"}
        servers.clock.advance(600)
        manager._upkeep.look()
        assert not with_ttl(servers)


def test_the_ttls_of_all_tasks_are_tried_next_to_each_other(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish does not wait for one task after the other, and if nothing is left it waits for none."""
    together = threading.Barrier(len(NAMES))

    monkeypatch.setattr(MemoryBlobStore, "remove_ttl", refuse_request)
    asked = list[str]()

    def retry(self: CleanUp) -> None:
        asked.append(self._task)
        together.wait(30)

    monkeypatch.setattr(CleanUp, "retry_ttls", retry)
    driver, executor = (servers.on_disk(servers.config, name) for name in ("driver", "executor"))
    with servers.manager(driver, "kafka-partition") as manager:
        epoch = manager.acquire()
        checkpoints = manager.publish([attempt(executor, epoch, name, {b"k": b"1"}, 1) for name in NAMES])
        assert not asked
        epoch = epoch.after_publish()
        manager.publish([attempt(executor, epoch, name, {b"k": b"2"}, 2, checkpoints=checkpoints) for name in NAMES])
    assert not together.broken


def test_no_failure_after_a_publish_sends_output_twice(servers: MemoryServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol 1, protocol 8: published output is forgotten before anything else that may fail, and the TTLs of
    published blobs are not."""
    servers.broker.create("out", 1)

    def fail(*_: object) -> None:
        raise OSError("told to")

    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        task.store("totals").put(b"k", b"1")
        task.produce("out", b"k", b"once")
        with monkeypatch.context() as patch:
            patch.setattr(OpenStore, "acknowledged", fail)
            with pytest.raises(OSError, match="told to"):
                task.commit({"orders-0": 1})
        task.commit({"orders-0": 2})
    assert [entry.value for _, _, entry in servers.broker.committed("out")] == [b"once"]
    assert not with_ttl(servers)


def test_a_publish_repairs_only_what_its_attempts_were_told(servers: MemoryServers) -> None:
    """Invariant 12: damage that is found while commits are prepared is made again by the next ones."""
    driver, executor = (servers.on_disk(servers.config, name) for name in ("driver", "executor"))
    with servers.manager(driver, "kafka-partition") as manager:
        epoch, checkpoints = manager.acquire(), None
        assert manager._job is not None
        for number, late in enumerate((*NAMES[:2], None)):
            epoch = replace(epoch, refill=manager.damaged())
            prepared = [attempt(executor, epoch, name, {b"k": b"1"}, number, None, checkpoints) for name in NAMES]
            if late is not None:
                manager._job.damage_of(late).found("blob-store", "totals", "told to")
            checkpoints = manager.publish(prepared, refill=epoch.refill)
            assert {name for name, pairs in manager.damaged().items() if pairs} == {late} - {None}


def test_a_repair_that_is_not_answered_is_settled_before_the_next_attempts(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol 1: they continue the checkpoints of the repair. Without such a repair, nothing asks the broker."""
    driver, executor = (servers.on_disk(servers.config, name) for name in ("driver", "executor"))
    with servers.manager(driver, "kafka-partition") as manager:
        epoch = manager.acquire()
        first = manager.publish([attempt(executor, epoch, name, {b"k": b"1"}, 1) for name in NAMES])
        assert manager._job is not None
        manager._job.damage_of(TASK).found("blob-store", "totals", "told to")
        with monkeypatch.context() as patch:
            lose_acknowledgements(patch)
            with pytest.raises(OutcomeUnknownError):
                manager.repair()
        repaired = dict(manager.settle())
        assert repaired[TASK].sequence == first[TASK].sequence + 1
        assert not any(manager.damaged().values())
        with monkeypatch.context() as patch:
            patch.setattr(Owner, "settle", None)
            assert manager.settle() == repaired
        epoch = epoch.after_publish()
        manager.publish([attempt(executor, epoch, name, {b"k": b"2"}, 2, checkpoints=repaired) for name in NAMES])


@pytest.mark.parametrize("of_job", [True, False])
def test_a_check_that_was_given_up_is_tried_again_after_the_next_publish(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, of_job: bool
) -> None:
    """FAULT 45: the blob store was away for longer than all tries took."""
    publish_first(servers)
    checked = list[str]()

    def refuse(*_: object) -> NoReturn:
        raise UnavailableError("told to")

    def check(services: Services, task: str, checkpoint: Checkpoint) -> Mapping[tuple[str, str], str]:
        checked.append(task)
        return {}

    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(worker, "TRIES", 2)
    monkeypatch.setattr(coordinator, "find_damage", refuse)
    driver, executor = (servers.on_disk(servers.config, name) for name in ("driver", "executor"))
    with servers.manager(driver, "kafka-partition") as manager:
        epoch = manager.acquire() if of_job else None
        task = None if of_job else manager.open_task(TASK)
        repairs = manager._job._repairs if manager._job is not None else task._repairs  # type: ignore[union-attr]
        wait_until(lambda: "times in a row" in caplog.text and not repairs.busy)
        monkeypatch.setattr(coordinator, "find_damage", check)
        if epoch is not None:
            manager.publish([attempt(executor, epoch, name, {b"k": b"2"}, 2) for name in NAMES])
        elif task is not None:
            task.commit({"orders-0": 2})
        wait_until(lambda: set(checked) == (set(NAMES) if of_job else {TASK}))


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_repair_that_was_given_up_is_tried_again_without_a_commit(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_ordered: bool
) -> None:
    """FAULT 45: within an hour, and in the next look after `snapshots verify --repair`. Not in each look, because a
    repair may upload the whole store."""

    def refuse(*_: object, **more: object) -> NoReturn:
        raise AccessDenied("told to")

    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(worker, "TRIES", 2)
    with servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager:
        task = manager.open_task(TASK)
        task.store("totals").put(b"k", b"1")
        before = task.commit({"orders-0": 1})
        with monkeypatch.context() as patch:
            patch.setattr(MemoryBlobStore, "put", refuse)
            task.damage.found("blob-store", "totals", "told to")
            wait_until(lambda: "times in a row" in caplog.text and not task._repairs.busy)
        manager._upkeep.look()
        assert not task._repairs.busy
        assert task.damage.pairs
        if is_ordered:
            order_check(manager._services, [next(list_blobs(manager._services.blobs(), "")).blob_id])
        else:
            servers.clock.advance(3600)
        manager._upkeep.look()
        wait_until(lambda: not task.damage.pairs)
        assert task.last_checkpoint is not before


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_a_repair_of_a_changelog_gives_way(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch, reads: bool, ends: bool
) -> None:
    """A commit, or a close, does not wait until the repair has read the changelog for its tombstones, or has sent the
    state. The thread that polls would wait with it."""
    seen, begun = list[Phase](), threading.Event()
    config = servers.on_disk(with_changes(servers.config, task__backup__factories=["kafka-changelog"]), "one")
    with servers.manager(config, "kafka-partition") as manager:
        task = manager.open_task(TASK)

        def wait_once() -> None:
            if not begun.is_set():
                begun.set()
                wait_until(lambda: task._turn._waiting > 0)

        def deletes_of(*of: object) -> Iterator[Sequence[Change]]:
            if reads:
                wait_once()
            yield ()

        def note(phase: Phase, subject: str) -> None:
            seen.append(phase)
            if phase is Phase.SEND_CHANGELOG:
                wait_once()

        task.store("totals").put(b"k", b"1")
        task.commit({"orders-0": 1})
        monkeypatch.setattr(backup, "deletes_of", deletes_of)
        with observed(note):
            task.damage.found("kafka-changelog", "totals", "told to")
            assert begun.wait(30)
            if ends:
                task.close()
            else:
                task.commit({"orders-0": 2})
                assert not task.damage.pairs
        assert seen.count(Phase.COMMIT_TRANSACTION) == (0 if ends else 1)
        assert not manager.metrics.failures(), "nothing has failed"


def test_a_repair_of_a_changelog_meets_a_damaged_local_file(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again with the state from the blob store. The task is opened again, because its files are damaged,
    too."""
    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.001)
    both = {"task__backup__factories": ["blob-store", "kafka-changelog"]}
    config = servers.on_disk(with_changes(servers.config, task__restore__factories=["blob-store"], **both), "one")
    source = random.Random(1)
    state = {b"%05d" % number: source.randbytes(100) for number in range(2000)}
    with servers.manager(config, "kafka-partition") as manager:
        task = manager.open_task(TASK)
        task.store("totals").put_many(state)
        task.commit({"orders-0": 1})
        for table in tables(config):
            flip(table)
        task.damage.found("kafka-changelog", "totals", "told to")
        wait_until(lambda: not task.damage.pairs)
        task.store("totals").put(b"k", b"1")
        with pytest.raises(LocalStateLost):
            task.commit({"orders-0": 2})
        task.close()
        with manager.open_task(TASK) as again:
            assert dict(again.store("totals").range()) == state
    servers.lose_disk()
    config = with_changes(config, task__restore__factories=["kafka-changelog"])
    with servers.manager(config, "kafka-partition") as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == state


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """What lets the checks of backups end, and the tasks whose checks have begun."""
    gate, begun = threading.Event(), list[str]()

    def held(services: Services, task: str, checkpoint: Checkpoint) -> Mapping[tuple[str, str], str]:
        begun.append(task)
        gate.wait(60)
        return {}

    monkeypatch.setattr(coordinator, "find_damage", held)
    yield gate, begun
    gate.set()


def test_the_close_of_a_job_waits_for_no_check(
    servers: MemoryServers, checks: tuple[threading.Event, list[str]]
) -> None:
    """The check that runs is the last one."""
    gate, begun = checks
    gate.set()
    publish_first(servers)
    gate.clear()
    with servers.manager(servers.on_disk(servers.config, "driver"), "kafka-partition") as manager:
        begun.clear()
        manager.acquire()
        wait_until(lambda: bool(begun))
        assert manager._job is not None
        closing = threading.Thread(target=manager._job.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        gate.set()
    assert len(begun) == 1


def test_a_failed_acquisition_checks_nothing_any_more(
    servers: MemoryServers, checks: tuple[threading.Event, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver has taken over after the checks had begun."""
    gate, begun = checks
    gate.set()
    publish_first(servers)
    gate.clear()

    def fenced(self: JobCoordinator, refill: object) -> None:
        wait_until(lambda: bool(begun))
        raise FencedError("another driver has taken over")

    monkeypatch.setattr(JobCoordinator, "adopt_offers", fenced)
    with servers.manager(servers.on_disk(servers.config, "driver"), "kafka-partition") as manager:
        begun.clear()
        with pytest.raises(FencedError):
            manager.acquire()
        gate.set()
    assert len(begun) == 1
