"""The engine API on a real broker: attempts on other machines, one transaction for all tasks, and epochs as fences."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

from statemgr import JobConfig, StateManager
from statemgr.backends.blobs.local_notes import PendingNote
from statemgr.engine import MicroBatch, open_attempt, read_attachment
from statemgr.engine.host import _host, attempt_host
from statemgr.errors import (
    FencedError,
    InvalidError,
    LayoutMismatch,
    MissingBlob,
    OutcomeUnknownError,
    PermissionNeeded,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.kafka.transactions.publisher import TransactionalPublisher, _State
from statemgr.model.checkpoint import BlobRef, Checkpoint, CheckpointRecord, Layout, Marker
from statemgr.model.commit import PreparedStore
from statemgr.model.jobs.permissions import NO_PERMISSIONS
from statemgr.phases import Phase, observed
from statemgr.ports import SegmentBackupManager
from statemgr.wiring import open_services
from tests.commits import TASK, attempt, blob_files, commit, current, failing, published, referenced, totals
from tests.jobs import DUAL, SEGMENTS, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import committed, state_of
from tests.servers import KafkaServer

TASKS = ("Partition 0", "Partition 1")
FACTORY = "blob-store"


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A dual-commit job of two tasks."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **{"tasks": 2, **more}))  # type: ignore[arg-type]


@pytest.fixture
def driver(kafka: KafkaServer, tmp_path: Path) -> Iterator[StateManager]:
    """The driver of a new job of two tasks, on a machine of its own."""
    with StateManager(job(kafka, tmp_path)) as manager:
        yield manager


def executor(driver: StateManager, tmp_path: Path, number: int = 0, restore: str = "blob-store") -> JobConfig:
    """The driver's job on another machine."""
    return elsewhere(driver.config, tmp_path / f"executor-{number}", restore)


@pytest.mark.parametrize("lost", [True, False])
def test_sequence_numbers_after_an_empty_start(driver: StateManager, tmp_path: Path, lost: bool) -> None:
    """Outputs know the numbers of the lost state, so the next ones are above all of them. A new job counts from 1."""
    found, before_ms = [], time.time_ns() // 1_000_000
    for _ in range(3):
        epoch = driver.acquire(allow_empty_start=lost)
        prepared = [attempt(executor(driver, tmp_path), epoch, task, {b"key": b"1"}, 0) for task in TASKS]
        numbers = {one.sequence for one in driver.publish(prepared).values()}
        assert numbers == {epoch.sequence + 1}
        found += numbers
    assert found == [found[0], found[0] + 1, found[0] + 2]
    assert before_ms < found[0] <= time.time_ns() // 1_000_000 + 1 if lost else found[0] == 1


@pytest.mark.parametrize("restore", DUAL)
def test_attempts_elsewhere_are_published_in_one_transaction(
    driver: StateManager, tmp_path: Path, restore: str
) -> None:
    """Protocol 7: the driver acquires the job, attempts run on other machines, and one publish commits them. The next
    attempts continue from its result."""
    epoch = driver.acquire()
    assert epoch.checkpoints == dict.fromkeys(TASKS)
    model: dict[str, dict[bytes, bytes]] = {task: {} for task in TASKS}
    checkpoints = epoch.checkpoints
    for batch in range(3):
        prepared = []
        for number, task in enumerate(TASKS):
            there = executor(driver, tmp_path, 10 * batch + number, restore)
            items: dict[bytes, bytes | None] = {
                b"%s-%d" % (task.encode(), batch): b"%d" % batch,
                b"same": b"%d" % batch,
            }
            prepared.append(attempt(there, epoch, task, items, batch, checkpoints=checkpoints))
            model[task].update({k: v for k, v in items.items() if v is not None})
        checkpoints = driver.publish(prepared, MicroBatch("query", batch, "{}", f'{{"orders":{{"0":{batch}}}}}'))
        assert {c.sequence for c in checkpoints.values()} == {batch + 1}
        assert {c.checkpoint_id for c in checkpoints.values()} == {checkpoints[TASKS[0]].checkpoint_id}
    assert [r.batch for r in checkpoints.values() if r.batch] == [checkpoints[TASKS[0]].batch] * 2
    for factory in DUAL:
        assert totals(driver.config, factory) == model
    record = current(driver.config, TASKS[1])
    assert record is not None
    assert record.current == checkpoints[TASKS[1]]


def test_nothing_of_a_publish_is_seen_before_it_is_whole(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 1 and 7: after both attempts no topic has any record of them; after the publish all records are
    there."""
    config = driver.config
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    prepared = [attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS]
    changelog = config.stores["totals"].changelog_topic
    assert committed(config, config.checkpoint_topic) == []
    assert committed(config, changelog, 0) == committed(config, changelog, 1) == []
    driver.publish(prepared)
    assert len(committed(config, config.checkpoint_topic)) == 3, "one record of the job, one of each task"
    assert committed(config, changelog, 0) == committed(config, changelog, 1) == [(b"a", b"1")]


def test_of_two_attempts_only_the_published_one_counts(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 7, FAULT 36: of two attempts at one task with different results, state and output both come from the
    published attempt."""
    epoch = driver.acquire()
    other = attempt(executor(driver, tmp_path, 2), epoch, TASKS[1], {}, 1)
    lost = attempt(executor(driver, tmp_path, 0), epoch, TASK, {b"by": b"first", b"1": b""}, 1, {"output": b"first"})
    kept = attempt(executor(driver, tmp_path, 1), epoch, TASK, {b"by": b"second"}, 1, {"output": b"second"})
    assert not set(lost.added_blobs) & set(kept.added_blobs), "blob names are unique per attempt"
    checkpoints = driver.publish([kept, other])
    assert read_attachment(driver.config, checkpoints[TASK].attachments[0]) == b"second"
    for factory in DUAL:
        assert totals(driver.config, factory)[TASK] == {b"by": b"second"}
    left = blob_files(tmp_path, expiring=True)
    assert left == set(lost.added_blobs), "what the lost attempt made expires, and nothing else does"


def test_attempts_of_segments_are_one_version(kafka: KafkaServer, tmp_path: Path) -> None:
    """B7, B8: of two attempts at a batch exactly one becomes the version, and late attempts are refused. When a
    snapshot is due and no other attempt's machine has a pending one, an attempt sooner or later stores a snapshot in
    place of its segment."""
    config = job(
        kafka, tmp_path, backup=(FACTORY,), tasks=1, task__commit__snapshot__interval=["3 commits"],
        task__checkpoint__retained=1,
    )  # fmt: skip
    big, model = random.Random(0).randbytes(5000), dict[bytes, bytes]()
    backlogs, expiring = [], set[str]()
    with StateManager(config) as driver:
        epoch = driver.acquire()
        checkpoints = epoch.checkpoints
        for batch in range(7):
            items: dict[bytes, bytes | None] = {b"%d" % batch: big, b"%d" % (batch - 2): None, b"by": b"kept"}
            machines = [elsewhere(config, tmp_path / f"executor-{n}", FACTORY) for n in (batch % 2, batch, 99)]
            kept = attempt(machines[0], epoch, TASK, items, batch, checkpoints=checkpoints)
            lost = attempt(
                machines[1], epoch, TASK, {**items, b"by": b"lost", b"x": big}, batch, checkpoints=checkpoints
            )
            assert not set(lost.added_blobs) & set(kept.added_blobs)
            again = attempt(machines[2], epoch, TASK, {b"by": b"again"}, batch, checkpoints=checkpoints)
            checkpoints = driver.publish([kept])
            for late in (lost, again, kept):
                with pytest.raises(InvalidError):
                    driver.publish([late])
            expiring |= {*lost.added_blobs, *again.added_blobs}
            model |= {key: value for key, value in items.items() if value is not None}
            model.pop(b"%d" % (batch - 2), None)
            assert totals(config, FACTORY) == {TASK: model}
            assert blob_files(tmp_path, expiring=False) == referenced(config)
            marker = checkpoints[TASK].marker(FACTORY, "totals")
            assert marker is not None
            backlogs.append(backlog(config, marker))
    assert blob_files(tmp_path, expiring=True) >= expiring  # and the blobs of pending snapshots that nobody used
    assert backlogs[0] == 0
    assert any(after < before for before, after in itertools.pairwise(backlogs)), "a snapshot was due"
    assert 2 <= max(backlogs) <= 6


def test_a_snapshot_is_made_beside_the_attempts(kafka: KafkaServer, tmp_path: Path) -> None:
    """A snapshot that is due is stored in the background. The next attempt on the machine builds on it and uploads only
    its own changes."""
    config = job(
        kafka, tmp_path, backup=(FACTORY,), tasks=1, task__commit__snapshot__interval=["3 commits"],
        task__checkpoint__retained=1,
    )  # fmt: skip
    there, seen, model = elsewhere(config, tmp_path / "executor", FACTORY), list[str](), dict[bytes, bytes]()
    backlogs, chance = [], random.Random(0)

    def see(phase: Phase, subject: str) -> None:
        if phase in (Phase.UPLOAD, Phase.MATERIALIZED):
            seen.append(f"{phase} {threading.current_thread().name}")

    with StateManager(config) as driver, observed(see):
        epoch = driver.acquire()
        checkpoints = epoch.checkpoints
        for batch in range(8):
            items = {b"%d" % batch: chance.randbytes(30_000), b"same": b"%d" % batch}
            prepared = attempt(there, epoch, TASK, items, batch, checkpoints=checkpoints)
            checkpoints = driver.publish([prepared])
            model |= items
            assert totals(config, FACTORY) == {TASK: model}
            assert blob_files(tmp_path, expiring=False) == referenced(config)
            marker = checkpoints[TASK].marker(FACTORY, "totals")
            assert marker is not None
            backlogs.append(backlog(config, marker))
            attempt_host(there).snapshots.worker.wait()
    ended = attempt_host(there).snapshots.take_ended()
    assert seen.count("materialize.done statemgr-snapshot") == len(ended) >= 2
    assert {(task, store, kind) for task, store, _, kind in ended} == {(TASK, "totals", None)}
    assert all(one[2] for one in ended)
    assert not attempt_host(there).snapshots.take_ended()
    assert [step for step in seen[1:] if "MainThread" in step] == [], "no attempt has stored a snapshot but the first"
    assert backlogs[0] == 0
    assert any(after < before for before, after in itertools.pairwise(backlogs))
    assert max(backlogs) <= 4


def test_an_offer_that_has_lost_a_blob_is_not_taken(kafka: KafkaServer, tmp_path: Path) -> None:
    """Before a commit builds on a pending snapshot, it checks the snapshot's blobs, and removes the note of a snapshot
    that lost one. While another process makes a snapshot, nobody else does."""
    assert any(an_offer_loses_a_blob(kafka, tmp_path / str(number)) for number in range(5))


def an_offer_loses_a_blob(kafka: KafkaServer, tmp_path: Path) -> bool:
    """Returns False if the snapshot was ready so early that the commit of its own batch took it."""
    config = job(kafka, tmp_path, backup=(FACTORY,), tasks=1, task__commit__snapshot__interval=["2 commits"])
    there, model = elsewhere(config, tmp_path / "executor", FACTORY), dict[bytes, bytes]()
    snapshots, identity = attempt_host(there).snapshots, attempt_host(there).services.identity(TASK, "totals")
    note_path = tmp_path / "executor" / config.job_name / config.job_id / "Partition_0" / "totals" / "snapshot.pending"
    with StateManager(config) as driver:
        epoch = driver.acquire()
        checkpoints = epoch.checkpoints
        for batch in range(6):
            items = {b"%d" % batch: random.Random(batch).randbytes(30_000)}
            making = (
                contextlib.nullcontext() if batch != 2 else PendingNote(attempt_host(there).services, identity).making()
            )
            with making:
                prepared = attempt(there, epoch, TASK, items, batch, checkpoints=checkpoints)
                snapshots.worker.wait()
            checkpoints = driver.publish([prepared])
            model |= items
            assert totals(config, FACTORY) == {TASK: model}
            if batch == 2:
                assert not note_path.exists()
            if batch == 3:
                [*_, blob] = json.loads(note_path.read_bytes().partition(b"\n")[2])["blobs"]
                if blob in blob_files(tmp_path, expiring=False):
                    return False
                (tmp_path / "blobs" / blob).unlink()
    assert not note_path.exists()
    return True


def test_a_snapshot_whose_index_is_lost_is_made_anew(kafka: KafkaServer, tmp_path: Path) -> None:
    """With an interval in minutes, the index says when the snapshot was made. If the index is lost, a new snapshot is
    made."""
    config = job(kafka, tmp_path, backup=(FACTORY,), tasks=1, task__commit__snapshot__interval=["100 min"])
    there, model = elsewhere(config, tmp_path / "executor", FACTORY), dict[bytes, bytes]()
    with StateManager(config) as driver:
        epoch = driver.acquire()
        checkpoints = epoch.checkpoints
        for batch in range(5):
            items = {b"%d" % batch: random.Random(batch).randbytes(30_000)}
            checkpoints = driver.publish([attempt(there, epoch, TASK, items, batch, checkpoints=checkpoints)])
            model |= items
            if batch == 1:
                for name in blob_files(tmp_path):
                    if name.endswith("/index"):
                        (tmp_path / "blobs" / name).unlink()
                _host.cache_clear()  # another process remembers nothing of the index
            attempt_host(there).snapshots.worker.wait()
    assert totals(config, FACTORY) == {TASK: model}


def test_the_clean_up_goes_on_beside_the_next_batch(driver: StateManager, tmp_path: Path) -> None:
    """A publish returns before the clean-up, which runs in the background. The next publish and the close wait for
    it."""
    config, epoch, there = driver.config, driver.acquire(), executor(driver, tmp_path)
    go_on, waited = threading.Event(), list[str]()

    def hold(phase: Phase, subject: str) -> None:
        if phase is Phase.REMOVE_TTL:
            assert go_on.wait(60)
            waited.append(subject)

    checkpoints = epoch.checkpoints
    with observed(hold):
        for batch in range(2):
            prepared = [
                attempt(there, epoch, task, {b"%d" % batch: b"x" * 50_000}, batch, checkpoints=checkpoints)
                for task in TASKS
            ]
            if batch:
                threading.Timer(0.5, go_on.set).start()
            checkpoints = driver.publish(prepared, wait=False)
            if not batch:
                assert waited == []
                assert current(config) is not None
                assert {blob for commit in prepared for blob in commit.added_blobs} <= blob_files(
                    tmp_path, expiring=True
                )
        assert sorted(waited[:2]) == sorted(TASKS)
        driver.close()
    assert sorted(waited) == sorted(TASKS * 2)
    assert blob_files(tmp_path, expiring=False) == referenced(config, TASKS[0]) | referenced(config, TASKS[1])


def test_much_is_stored_ahead_of_an_attempts_commit(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt uploads changes before it prepares its commit. If the attempt fails, these blobs keep their TTL."""
    monkeypatch.setattr("statemgr.flows.committing.persist_ahead.AHEAD_BYTES", 20_000)
    config = job(kafka, tmp_path, backup=(FACTORY,), kind=SEGMENTS, tasks=1, stores__totals__write__batch__size=1)
    there, chance = elsewhere(config, tmp_path / "executor", FACTORY), random.Random(0)
    with StateManager(config) as driver:
        epoch = driver.acquire()
        checkpoints = driver.publish([attempt(there, epoch, TASK, {b"first": b"1"}, 1)])
        model, before = {b"first": b"1"}, blob_files(tmp_path)
        for fails in (True, False):
            items = {b"%d-%d" % (fails, n): chance.randbytes(1000) for n in range(100)}
            with open_attempt(there, TASK, checkpoints[TASK], epoch) as opened:
                for key, value in items.items():
                    opened.store("totals").put(key, value)
                    opened._ahead._worker.wait()
                ahead = blob_files(tmp_path) - before
                assert sum((tmp_path / "blobs" / name).stat().st_size for name in ahead) > 60_000
                assert blob_files(tmp_path, expiring=True) >= ahead
                if fails:
                    before |= ahead
                    continue
                prepared = opened.prepare({"orders-0": 2})
                assert prepared.added_bytes < 40_000
                assert set(prepared.added_blobs) >= ahead
            checkpoints = driver.publish([prepared])
            model |= items
    assert totals(config, FACTORY) == {TASK: model}
    assert blob_files(tmp_path, expiring=False) == referenced(config)


def backlog(config: JobConfig, marker: Marker) -> int:
    """How many segments a marker's chain has."""
    services = open_services(config)
    try:
        manager = services.backup_manager(FACTORY)
        assert isinstance(manager, SegmentBackupManager)
        return manager.backlog(services.identity(TASK, "totals"), marker).segments
    finally:
        services.close()


def test_an_attempt_of_an_older_epoch_is_refused(driver: StateManager, tmp_path: Path) -> None:
    """Invariant 7: after a publish and a new acquire, commits that were prepared before are fenced and not
    published."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    first = [attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS]
    done = driver.publish(first)
    stale = [attempt(there, epoch, task, {b"stale": b"1"}, 2, checkpoints=done) for task in TASKS]
    newer = driver.acquire()
    assert newer.number > epoch.number
    assert newer.checkpoints == done
    with pytest.raises(FencedError, match="epoch"):
        driver.publish(stale)
    assert totals(driver.config, "blob-store") == {task: {b"a": b"1"} for task in TASKS}


def test_an_attempt_of_an_owner_that_never_published_is_refused(driver: StateManager, tmp_path: Path) -> None:
    """Invariant 7: an epoch that published nothing still differs from the next epoch on the same base."""
    there = executor(driver, tmp_path)
    epoch = driver.acquire()
    stale = [attempt(there, epoch, task, {b"stale": b"1"}, 1) for task in TASKS]
    with StateManager(elsewhere(driver.config, tmp_path / "other", "blob-store")) as other:
        other.acquire()
        with pytest.raises(StatemgrError) as caught:
            driver.publish(stale)
        assert isinstance(caught.value, FencedError)


def test_prepared_commits_that_do_not_belong_are_refused(driver: StateManager, tmp_path: Path) -> None:
    """Invariants 14 and 15: a commit of another job, task, layout or base, or without a backup, is refused. Nothing is
    published."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    good = [attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS]
    for bad in (
        replace(good[0], job_name="another"),
        replace(good[0], job_id="2"),
        replace(good[0], task="Partition 7"),
        replace(good[0], layout=replace(good[0].layout, tasks=3)),
        replace(good[0], layout=Layout(9, 2, "kafka-partition")),
        replace(good[0], base_checkpoint_id="1700000000000-000001"),
        replace(good[0], stores={name: PreparedStore(one.state_id) for name, one in good[0].stores.items()}),
    ):
        with pytest.raises(InvalidError):
            driver.publish([bad, good[1]])
    assert committed(driver.config, driver.config.checkpoint_topic) == []
    driver.publish(good)


def test_duplicate_and_missing_tasks_are_refused(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 7: unless there are exactly N prepared commits, one for each task, nothing is published."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    one = attempt(there, epoch, TASKS[0], {b"a": b"1"}, 1)
    again = attempt(there, epoch, TASKS[0], {b"a": b"2"}, 1)
    two = attempt(there, epoch, TASKS[1], {b"a": b"1"}, 1)
    for commits in ([one], [one, again], [one, again, two], []):
        with pytest.raises(InvalidError):
            driver.publish(commits)
    assert committed(driver.config, driver.config.checkpoint_topic) == []
    driver.publish([two, one])


def test_a_commit_is_not_published_twice(driver: StateManager, tmp_path: Path) -> None:
    """Invariant 12: publishing the same prepared commits again is refused, because their base is no longer current."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    prepared = [attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS]
    done = driver.publish(prepared)
    with pytest.raises(InvalidError):
        driver.publish(prepared)
    assert driver.acquire().checkpoints == done


def test_acquiring_fences_the_tasks_of_a_consumer_loop(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 2: a writer of all tasks fences the owners of single tasks and sees the checkpoints that they
    published."""
    config = job(kafka, tmp_path)
    with StateManager(config) as loop, StateManager(elsewhere(config, tmp_path / "x", "blob-store")) as driver:
        task = loop.open_task(TASK)
        task.store("totals").put(b"a", b"1")
        checkpoint = task.commit({"orders-0": 1})
        epoch = driver.acquire()
        assert epoch.checkpoints == {TASK: checkpoint, TASKS[1]: None}
        assert epoch.number > checkpoint.epoch
        task.store("totals").put(b"zombie", b"1")
        for _ in range(2):
            with pytest.raises(FencedError):
                task.commit({"orders-0": 2})
        driver.publish([attempt(driver.config, epoch, name, {b"b": b"2"}, 2) for name in TASKS])
    assert totals(config, "blob-store")[TASK] == {b"a": b"1", b"b": b"2"}


def test_opening_a_task_fences_the_whole_job(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 2: the owner of a single task fences the driver, whose attempts are then never published."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    driver.publish([attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS])
    done = driver.acquire()
    prepared = [attempt(there, done, task, {b"zombie": b"1"}, 2) for task in TASKS]
    with StateManager(elsewhere(driver.config, tmp_path / "loop", "blob-store")) as loop:
        task = loop.open_task(TASK)
        assert task.store("totals").get(b"a") == b"1"
        for _ in range(2):
            with pytest.raises(FencedError):
                driver.publish(prepared)
        task.commit({"orders-0": 5})
    assert totals(driver.config, "kafka-changelog")[TASK] == {b"a": b"1"}
    record = current(driver.config)
    assert record is not None
    assert record.current.input_offsets == {"orders-0": 5}


def _break_at_the_commit(monkeypatch: pytest.MonkeyPatch, first: Callable[[], None] = lambda: None) -> None:
    """Run ``first`` before the next commit, lose the answer to the commit, and make the producer unusable."""

    def unusable(self: TransactionalPublisher, error: object) -> None:
        self._state = _State.UNUSABLE

    original = TransactionalPublisher._commit

    def lost(self: TransactionalPublisher, *args: object) -> None:
        monkeypatch.undo()
        first()
        with monkeypatch.context() as patch:
            patch.setattr(TransactionalPublisher, "_after_failed_commit", unusable)
            original(self, *args)  # type: ignore[arg-type]
        self._state = _State.UNUSABLE
        raise OutcomeUnknownError("told to")

    monkeypatch.setattr(TransactionalPublisher, "_commit", lost)


def test_a_driver_that_lost_the_job_while_unsure_fences_nobody(
    driver: StateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 39, protocol 2 and 3: a driver reads the topic before it takes over anything, so the newer owner can
    continue."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    prepared = [attempt(there, epoch, task, {b"zombie": b"1"}, 1) for task in TASKS]
    other = StateManager(elsewhere(driver.config, tmp_path / "other", "blob-store"))

    def overtake() -> None:
        nonlocal checkpoints, epoch
        epoch = other.acquire()
        checkpoints = other.publish([attempt(there, epoch, task, {b"a": b"2"}, 2) for task in TASKS])

    checkpoints: Mapping[str, Checkpoint] = {}
    _break_at_the_commit(monkeypatch, overtake)
    with other:
        for _ in range(3):
            with pytest.raises(FencedError):
                driver.publish(prepared)
        more = [attempt(there, epoch, task, {b"b": b"3"}, 3, checkpoints=checkpoints) for task in TASKS]
        other.publish(more)
    assert totals(driver.config, "blob-store") == {task: {b"a": b"2", b"b": b"3"} for task in TASKS}


def test_a_driver_that_is_unsure_publishes_nothing_before_the_others_are_fenced(
    driver: StateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol 2 and 3: while the driver has its own ID back but cannot fence the tasks' IDs, the outcome stays
    unknown."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    prepared = [attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS]
    job = driver._job
    assert job is not None
    fence_others, asked = job.owner.fence_others, []

    def fence_at_the_third_time() -> None:
        asked.append(1)
        if len(asked) < 3:
            raise UnavailableError("told to")
        fence_others()

    job.owner.fence_others = fence_at_the_third_time
    _break_at_the_commit(monkeypatch)
    for _ in range(2):
        with pytest.raises(OutcomeUnknownError):
            driver.publish(prepared)
    assert {c.sequence for c in driver.publish(prepared).values()} == {1}
    assert len(asked) == 3
    assert totals(driver.config, "blob-store") == {task: {b"a": b"1"} for task in TASKS}


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_producer_that_broke_is_replaced(
    driver: StateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    """FAULT 16, protocol 3: a driver survives a passing fault that ends its producer, but not the publish of another
    owner."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    prepared = [attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS]

    def broken(self: TransactionalPublisher, deadline: float | None = None) -> None:
        self._state = _State.UNUSABLE

    with monkeypatch.context() as patch, failing(Phase.SEND_CHECKPOINT):
        patch.setattr(TransactionalPublisher, "_abort", broken)
        with pytest.raises(RetryableError, match="told to"):
            driver.publish(prepared)
    if meanwhile:
        with StateManager(elsewhere(driver.config, tmp_path / "other", "blob-store")) as other:
            theirs = other.acquire()
            other.publish([attempt(there, theirs, task, {b"a": b"2"}, 2) for task in TASKS])
        for _ in range(2):
            with pytest.raises(FencedError):
                driver.publish(prepared)
    else:
        driver.publish(prepared)
    for factory in DUAL:
        assert totals(driver.config, factory) == {task: {b"a": b"2" if meanwhile else b"1"} for task in TASKS}


def test_an_attachment_that_nobody_could_read_is_refused(driver: StateManager, tmp_path: Path) -> None:
    """Invariant 15: an attachment above the limit is refused at the executor, with a hint, before anything is
    published."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(256 * 1024 * 1024 + 1)
    with (
        open_attempt(executor(driver, tmp_path), TASK, None, driver.acquire()) as opened,
        pytest.raises(InvalidError, match="the limit is") as caught,
    ):
        opened.attach("output", large)
    assert "maxOffsetsPerTrigger" in str(caught.value.hint)


def test_a_later_driver_fences_the_older_one(driver: StateManager, tmp_path: Path) -> None:
    """Invariant 7, FAULT 23: the older driver publishes nothing and deletes no blob that is in use."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    done = driver.publish([attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS])
    zombie = [attempt(there, epoch, task, {b"zombie": b"1"}, 2, checkpoints=done) for task in TASKS]
    other = elsewhere(driver.config, tmp_path / "other", "blob-store")
    with StateManager(other) as newer:
        next_epoch = newer.acquire()
        newer.publish([attempt(other, next_epoch, task, {b"b": b"2"}, 2) for task in TASKS])
        with pytest.raises(FencedError):
            driver.publish(zombie)
    for task in TASKS:
        assert referenced(driver.config, task) <= blob_files(tmp_path, expiring=False)
    assert totals(driver.config, "blob-store")[TASK] == {b"a": b"1", b"b": b"2"}


def test_a_confirmation_reads_only_if_something_was_written_since(
    kafka: KafkaServer, driver: StateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 42: a confirmation passes after another job's record and fails after another owner's. It does not read the
    driver's own records again."""
    reads = []
    read = CheckpointTopic.read

    def counted(self: CheckpointTopic, *tasks: Any, **more: Any) -> Mapping[str, CheckpointRecord]:
        reads.append(self)
        return read(self, *tasks, **more)

    monkeypatch.setattr(CheckpointTopic, "read", counted)
    there = executor(driver, tmp_path)
    epoch = driver.acquire()
    checkpoints: Mapping[str, Checkpoint] = {}
    for batch in (1, 2):
        done = [attempt(there, epoch, task, {b"a": b"1"}, batch, checkpoints=checkpoints) for task in TASKS]
        checkpoints = driver.publish(done)
        reads.clear()
        driver.confirm()
        assert reads == []

    topic = driver.config.checkpoint_topic
    commit(job(kafka, tmp_path / "another", tasks=1, task__checkpoint__topic=topic), {b"a": b"1"}, 1)
    reads.clear()
    driver.confirm()
    assert len(reads) == 1

    other = elsewhere(driver.config, tmp_path / "other", "blob-store")
    with StateManager(other) as newer:
        next_epoch = newer.acquire()
        newer.publish([attempt(other, next_epoch, task, {b"b": b"2"}, 3) for task in TASKS])
        with pytest.raises(FencedError):
            driver.confirm()


def test_attachments_stay_with_every_retained_checkpoint(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 7: the attempt stores its output inline or in a blob, and the output is kept as long as its
    checkpoint."""
    config = driver.config
    rows = tmp_path / "rows"
    rows.write_bytes(b"x" * 300_000)
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    prepared = [
        attempt(there, epoch, TASKS[0], {b"a": b"1"}, 1, {"small": b"rows", "large": b"y" * 100_000}),
        attempt(there, epoch, TASKS[1], {b"a": b"1"}, 1, {"file": rows}),
    ]
    first = driver.publish(prepared)
    attached = {a.name: a for task in TASKS for a in first[task].attachments}
    assert attached["small"].inline == b"rows"
    assert [read_attachment(config, attached[name]) for name in ("small", "large", "file")] == [
        b"rows",
        b"y" * 100_000,
        b"x" * 300_000,
    ]
    blobs = {a.blob.blob_id for a in attached.values() if a.blob}
    assert len(blobs) == 2
    assert blobs <= blob_files(tmp_path, expiring=False), "published output does not expire"
    epoch = epoch.after_publish()
    second = driver.publish([attempt(there, epoch, task, {b"b": b"2"}, 2, checkpoints=first) for task in TASKS])
    assert config.retained == 2
    assert blobs <= blob_files(tmp_path, expiring=False)
    for task in TASKS:
        record = current(config, task)
        assert record is not None
        assert [c.attachments for c in record.checkpoints] == [(), first[task].attachments]
    driver.publish([attempt(there, epoch, task, {b"c": b"3"}, 3, checkpoints=second) for task in TASKS])
    assert not blobs & blob_files(tmp_path)
    with pytest.raises(MissingBlob):
        read_attachment(config, attached["large"])
    assert blob_files(tmp_path) == referenced(config, TASKS[0]) | referenced(config, TASKS[1])


def test_an_attachment_that_was_altered_is_refused(driver: StateManager, tmp_path: Path) -> None:
    """FAULT 12: a read of altered output fails and names the blob."""
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    large = {"rows": b"y" * 50_000}
    done = driver.publish([attempt(there, epoch, task, {b"a": b"1"}, 1, large) for task in TASKS])
    attachment = done[TASK].attachments[0]
    assert isinstance(attachment.blob, BlobRef)
    (tmp_path / "blobs" / attachment.blob.blob_id).write_bytes(b"z" * 50_000)
    with pytest.raises(StatemgrError) as caught:
        read_attachment(driver.config, attachment)
    assert attachment.blob.blob_id in str(caught.value)


def test_large_changes_travel_as_a_blob_and_are_deleted(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 7: executors never write to Kafka. Changes that are too large to be inline wait in a blob for the
    driver."""
    config = driver.config
    epoch = driver.acquire()
    there = executor(driver, tmp_path)
    items: dict[bytes, bytes | None] = {b"%05d" % n: random.Random(n).randbytes(50) for n in range(2000)}
    first = driver.publish([attempt(there, epoch, task, {}, 1) for task in TASKS])
    prepared = [
        attempt(there, epoch, TASKS[0], items, 2, checkpoints=first),
        attempt(there, epoch, TASKS[1], {b"small": b"1"}, 2, checkpoints=first),
    ]
    changes = prepared[0].stores["totals"].changes["kafka-changelog"]
    assert changes.blob is not None
    assert prepared[1].stores["totals"].changes["kafka-changelog"].inline is not None
    assert changes.blob.blob_id in blob_files(tmp_path, expiring=True), "unpublished, so it expires"
    driver.publish(prepared)
    assert changes.blob.blob_id not in blob_files(tmp_path)
    assert state_of(committed(config, config.stores["totals"].changelog_topic)) == items
    assert totals(config, "kafka-changelog") == {TASKS[0]: items, TASKS[1]: {b"small": b"1"}}


def test_a_changelog_is_filled_through_executors(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 5, FAULT 35: after the changelog was switched off and on again, it gets the complete state and
    tombstones for deleted keys."""
    config = job(kafka, tmp_path)
    blobs_only = with_changes(config, task__backup__factories=["blob-store"], task__restore__factories=["blob-store"])
    with StateManager(config) as driver:
        epoch = driver.acquire()
        driver.publish([attempt(config, epoch, t, {b"kept": b"1", b"gone": b"1"}, 1) for t in TASKS])
    with StateManager(blobs_only) as driver:
        epoch = driver.acquire()
        driver.publish([attempt(blobs_only, epoch, t, {b"gone": None, b"new": b"2"}, 2) for t in TASKS])
    with StateManager(config) as driver:
        epoch = driver.acquire()
        checkpoints = driver.publish([attempt(config, epoch, t, {}, 3) for t in TASKS])
        assert all(c.marker("kafka-changelog", "totals") for c in checkpoints.values())
    expected = {b"kept": b"1", b"new": b"2"}
    assert totals(config, "kafka-changelog") == dict.fromkeys(TASKS, expected)
    for partition in (0, 1):
        assert state_of(committed(config, config.stores["totals"].changelog_topic, partition)) == expected


def test_segments_are_filled_through_executors(kafka: KafkaServer, tmp_path: Path) -> None:
    """B6, protocol 5, FAULT 35: each time the blob backend is switched on, executors upload the complete state, and
    segments continue from it."""
    config = job(kafka, tmp_path, backup=("kafka-changelog",), kind=SEGMENTS)
    both = with_changes(config, task__backup__factories=list(DUAL))
    alone = with_changes(config, task__backup__factories=[FACTORY], task__restore__factories=[FACTORY])
    model: dict[bytes, bytes] = {}
    offset = 0
    for turn, known in enumerate((config, both, config, both, alone)):
        there = with_changes(known, state__dir=str(tmp_path / f"executor-{turn}"))
        with StateManager(known) as driver:
            epoch = driver.acquire()
            checkpoints = epoch.checkpoints
            for _ in range(2):
                items: dict[bytes, bytes | None] = {b"%d" % offset: bytes(3000), b"%d" % (offset - 2): None}
                model = {key: value for key, value in {**model, **items}.items() if value is not None}
                commits = [attempt(there, epoch, task, items, offset, checkpoints=checkpoints) for task in TASKS]
                checkpoints = driver.publish(commits)
                epoch, offset = epoch.after_publish(), offset + 1
        for factory in known.stores["totals"].backup_factories:
            assert totals(known, factory) == dict.fromkeys(TASKS, model)
        chains = [checkpoint.marker(FACTORY, "totals") for checkpoint in checkpoints.values()]
        assert [chain is None for chain in chains] == [known is config] * 2


def test_an_attempt_needs_no_broker_to_commit(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 7: an executor that reaches no broker restores from blobs and prepares a dual commit."""
    epoch = driver.acquire()
    there = with_changes(executor(driver, tmp_path), kafka__bootstrap__servers="127.0.0.1:1")
    first = driver.publish([attempt(there, epoch, task, {b"a": b"1"}, 1) for task in TASKS])
    there = with_changes(there, state__dir=str(tmp_path / "yet-another"))
    driver.publish([attempt(there, epoch, task, {b"b": b"2"}, 2, checkpoints=first) for task in TASKS])
    assert totals(driver.config, "kafka-changelog")[TASKS[1]] == {b"a": b"1", b"b": b"2"}


def test_a_job_of_another_partitioner_or_number_of_tasks_is_not_acquired(driver: StateManager, tmp_path: Path) -> None:
    """Invariant 14: changing either is a rescale and is refused. A job of a consumer loop is not a Spark job."""
    epoch = driver.acquire()
    driver.publish([attempt(driver.config, epoch, task, {b"a": b"1"}, 1) for task in TASKS])
    with StateManager(driver.config, "spark-hash") as manager, pytest.raises(LayoutMismatch):
        manager.acquire()
    blobs_only = with_changes(
        driver.config, job__tasks=1, task__backup__factories=["blob-store"], task__restore__factories=["blob-store"]
    )
    with StateManager(blobs_only) as manager, pytest.raises(LayoutMismatch):
        manager.acquire()


def test_permissions_reach_the_attempts(driver: StateManager, tmp_path: Path) -> None:
    """Protocol 6: a store that the checkpoint does not list starts empty only if ``acquire`` permitted it."""
    epoch = driver.acquire()
    driver.publish([attempt(driver.config, epoch, task, {b"a": b"1"}, 1) for task in TASKS])
    more = with_changes(driver.config, stores__extra__value__serde="bytes")
    with StateManager(more) as manager:
        with pytest.raises(PermissionNeeded, match="extra"):
            manager.acquire()
        epoch = manager.acquire(allow_new_stores=True)
        with pytest.raises(PermissionNeeded, match="extra"):
            attempt(more, replace(epoch, permissions=NO_PERMISSIONS), TASK, {}, 2)
        manager.publish([attempt(more, epoch, task, {b"b": b"2"}, 2) for task in TASKS])
    assert published(more, "blob-store")[TASK] == {"totals": {b"a": b"1", b"b": b"2"}, "extra": {b"b": b"2"}}


def test_a_task_and_a_whole_job_take_turns(kafka: KafkaServer, tmp_path: Path) -> None:
    """Tasks and whole-job drivers publish the same kind of checkpoint, and each continues from the other's."""
    config = job(kafka, tmp_path)
    for turn in range(4):
        if turn % 2:
            commit(elsewhere(config, tmp_path / f"loop-{turn}", "blob-store"), {b"%d" % turn: b"loop"}, turn)
            continue
        with StateManager(elsewhere(config, tmp_path / f"driver-{turn}", "blob-store")) as driver:
            epoch = driver.acquire()
            driver.publish([attempt(driver.config, epoch, t, {b"%d" % turn: b"job"}, turn) for t in TASKS])
    record = current(config)
    assert record is not None
    assert record.current.sequence == 4
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"0": b"job", b"1": b"loop", b"2": b"job", b"3": b"loop"}


def test_a_consumer_reads_only_published_changes(driver: StateManager, tmp_path: Path) -> None:
    """Invariant 11: the changelog is never ahead of the checkpoint; it ends at the marker and a control record."""
    config = driver.config
    epoch = driver.acquire()
    done = driver.publish([attempt(config, epoch, task, {b"a": b"1", b"b": b"2"}, 1) for task in TASKS])
    reader = Consumer({"bootstrap.servers": config.get("kafka.bootstrap.servers"), "group.id": "look"})
    try:
        from confluent_kafka import TopicPartition

        topic = config.stores["totals"].changelog_topic
        for number, task in enumerate(TASKS):
            marker = done[task].marker("kafka-changelog", "totals")
            _, end = reader.get_watermark_offsets(TopicPartition(topic, number), 20)
            assert (marker.offset, end) == (2, 3)  # type: ignore[union-attr]
    finally:
        reader.close()
