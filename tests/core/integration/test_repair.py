"""A damaged snapshot or chain is rebuilt immediately after it is found, in a separate commit and without any input."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import CorruptError, FencedError, MissingError, RetryableError, UnavailableError
from statemgr.flows.upkeep import find_damage
from statemgr.model.checkpoint import CheckpointRecord
from tests.commits import TASK, blob_files, commit, current, referenced, totals, write
from tests.jobs import INTERVALS, SEGMENTS, SNAPSHOTS, contents, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.servers import KafkaServer

FACTORY = "blob-store"
NEVER = ["1000000 commits"]
#: Snapshot intervals of the two kinds of commits.
KINDS = {SNAPSHOTS: INTERVALS[SNAPSHOTS], SEGMENTS: NEVER}
LONG = pytest.mark.long
#: One kind for `make test`, and both for the long tests.
OF_SNAPSHOTS = [SNAPSHOTS, pytest.param(SEGMENTS, marks=LONG)]
OF_SEGMENTS = [pytest.param(SNAPSHOTS, marks=LONG), SEGMENTS]
BIG = random.Random(0).randbytes(60_000)
STATE = {b"a": BIG, b"b": BIG[::-1]}


def dual(kafka: KafkaServer, directory: Path, kind: str, **more: object) -> JobConfig:
    """Create a job in dual commit that restores from its changelog, so that nothing reads the blobs."""
    return JobConfig.from_mapping(
        job_mapping(
            kafka,
            directory,
            backup=("kafka-changelog", FACTORY),
            restore=("kafka-changelog",),
            task__commit__snapshot__interval=KINDS[kind],
            **more,  # type: ignore[arg-type]
        )
    )


def record_of(config: JobConfig) -> CheckpointRecord:
    """Return the task's record on the topic."""
    record = current(config)
    assert record is not None
    return record


def is_whole(config: JobConfig, expected: dict[bytes, bytes] = STATE) -> bool:
    """Return whether a machine that has only the blobs of the current checkpoint gets exactly the published state."""
    try:
        found = totals(config, FACTORY)[TASK]
    except (MissingError, CorruptError, RetryableError):
        return False
    assert found == expected
    return True


def delete(config: JobConfig, directory: Path, what: str) -> None:
    """Delete some of the current checkpoint's blobs."""
    for name in sorted(referenced(config)):
        kind = "index" if name.endswith("/index") else "segments" if "/_segments/" in name else "part"
        if kind == what:
            (directory / "blobs" / name).unlink()


def assert_nothing_else_changed(before: CheckpointRecord, after: CheckpointRecord) -> None:
    """A repair publishes the same state and the same input offsets, under a new checkpoint."""
    assert after.current.checkpoint_id != before.current.checkpoint_id
    assert after.current.sequence == before.current.sequence + 1
    assert after.current.input_offsets == before.current.input_offsets
    assert after.current.stores == before.current.stores


CASES = [
    pytest.param(SNAPSHOTS, "index", marks=LONG),
    (SNAPSHOTS, "part"),
    (SEGMENTS, "index"),
    pytest.param(SEGMENTS, "part", marks=LONG),
    (SEGMENTS, "segments"),
]


@pytest.mark.parametrize(("kind", "what"), CASES)
def test_a_lost_blob_is_rebuilt_at_an_opening(kafka: KafkaServer, tmp_path: Path, kind: str, what: str) -> None:
    """FAULT 45: the partition is idle and its restore reads no blob. The opening still rebuilds the lost one, and any
    machine can restore from blobs afterwards."""
    config = dual(kafka, tmp_path, kind)
    commit(config, {b"a": STATE[b"a"]}, 1)
    commit(config, {b"b": STATE[b"b"]}, 2)
    # the case "part" includes a blob that an earlier commit added
    delete(config, tmp_path, what)
    before = record_of(config)
    assert not is_whole(config)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        wait_until(lambda: record_of(config).current.checkpoint_id != before.current.checkpoint_id)
        assert dict(task.store("totals").range()) == STATE
    assert_nothing_else_changed(before, record_of(config))
    assert is_whole(config)
    # the last migration step: blobs alone, on another machine
    alone = with_changes(
        elsewhere(config, tmp_path / "other", FACTORY), task__backup__factories=[FACTORY], task__checkpoint__retained=1
    )
    with StateManager(alone) as manager, manager.open_task(TASK) as task:
        assert dict(task.store("totals").range()) == STATE


def test_a_store_that_only_a_left_backend_has_keeps_a_backup(kafka: KafkaServer, tmp_path: Path) -> None:
    """One store has lost a blob. The changelogs have the other store, and the configuration has left them: the repair
    fills the blobs of both."""
    both = dual(
        kafka, tmp_path, SEGMENTS, stores=("totals", "other"), stores__other__backup__factories=["kafka-changelog"]
    )
    with StateManager(both) as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", BIG)
        task.store("other").put(b"b", b"2")
        task.commit({"orders-0": 1})
    delete(both, tmp_path, "index")
    before = record_of(both)
    left = with_changes(both, task__backup__factories=[FACTORY], stores__other__backup__factories=[FACTORY])
    with StateManager(left) as manager, manager.open_task(TASK):
        wait_until(lambda: record_of(both).current.checkpoint_id != before.current.checkpoint_id)
    assert_nothing_else_changed(before, record_of(both))
    moved = elsewhere(left, tmp_path / "other", FACTORY)
    assert contents(moved) == ({"totals": {b"a": BIG}, "other": {b"b": b"2"}}, {"orders-0": 1})


def test_an_inline_chain_whose_snapshot_is_gone(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 45: the chain is readable, but the snapshot that it starts from is gone."""
    config = dual(kafka, tmp_path, SEGMENTS)
    commit(config, {b"a": BIG}, 1)
    commit(config, {b"b": b"small"}, 2)
    assert getattr(record_of(config).current.marker(FACTORY, "totals"), "inline", None)
    delete(config, tmp_path, "index")
    before = record_of(config)
    with StateManager(config) as manager, manager.open_task(TASK):
        wait_until(lambda: is_whole(config, {b"a": BIG, b"b": b"small"}))
    assert_nothing_else_changed(before, record_of(config))


@pytest.mark.parametrize("kind", OF_SEGMENTS)
def test_what_a_restore_fell_back_from_is_rebuilt(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """FAULT 45: only the restore sees a flipped bit. It falls back to the changelog, and the blobs are rebuilt."""
    config = with_changes(dual(kafka, tmp_path, kind), task__restore__factories=[FACTORY, "kafka-changelog"])
    commit(config, STATE, 1)
    part = next(name for name in sorted(referenced(config)) if ".sst" in name or "/packs/" in name)
    path = tmp_path / "blobs" / part
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    before = record_of(config)
    moved = with_changes(config, state__dir=str(tmp_path / "other"))
    with StateManager(moved) as manager, manager.open_task(TASK) as task:
        assert task.restored[0].factory == "kafka-changelog"
        wait_until(lambda: is_whole(config))
    assert_nothing_else_changed(before, record_of(config))


@pytest.mark.parametrize("kind", OF_SNAPSHOTS)
def test_a_blob_store_that_was_away_at_the_opening(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """FAULT 45: blobs that could not be checked at the opening are checked when the store answers, and are rebuilt."""
    config = dual(kafka, tmp_path, kind, blob__store__retry__policy__max__retries=0)
    commit(config, STATE, 1)
    delete(config, tmp_path, "index")
    before = record_of(config)
    away, asked = threading.Event(), threading.Event()
    away.set()

    def failing(original: Callable[..., object]) -> Callable[..., object]:
        def fails(*args: object, **more: object) -> object:
            if away.is_set():
                asked.set()
                raise UnavailableError("told to")
            return original(*args, **more)

        return fails

    for method in ("get", "stat", "put", "remove_ttl"):
        monkeypatch.setattr(FileBlobStore, method, failing(getattr(FileBlobStore, method)))
    with StateManager(config) as manager, manager.open_task(TASK):
        assert asked.wait(30)
        away.clear()
        wait_until(lambda: is_whole(config))
    assert_nothing_else_changed(before, record_of(config))


@pytest.mark.parametrize("kind", OF_SEGMENTS)
def test_writes_that_are_not_committed_are_no_part_of_a_repair(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """FAULT 45, invariant 11: the task has uncommitted writes. A repair publishes the state without them, and the next
    commit publishes all of them."""
    config = dual(kafka, tmp_path, kind)
    commit(config, STATE, 1)
    delete(config, tmp_path, "part")
    before = record_of(config)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        for number in range(200):
            write(task, {b"c": b"%d" % number})
            if record_of(config).current.checkpoint_id != before.current.checkpoint_id:
                break
            time.sleep(0.02)
        if record_of(config).current.checkpoint_id != before.current.checkpoint_id:
            assert_nothing_else_changed(before, record_of(config))
            assert is_whole(config)
        task.commit({"orders-0": 9})
    assert is_whole(config, STATE | {b"c": b"%d" % number})
    assert totals(config, "kafka-changelog")[TASK] == STATE | {b"c": b"%d" % number}


@pytest.mark.parametrize("kind", OF_SNAPSHOTS)
def test_a_fenced_owner_repairs_nothing(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """FAULTS 23, 45: of two owners, the older one cannot publish its repair, and its clean-up deletes nothing."""
    config = dual(kafka, tmp_path, kind)
    commit(config, STATE, 1)
    delete(config, tmp_path, "index")
    found, go_on = threading.Event(), threading.Event()

    def held(*args: object) -> object:
        result = find_damage(*args)  # type: ignore[arg-type]
        if threading.current_thread().name.startswith("statemgr-repair") and not found.is_set():
            found.set()
            assert go_on.wait(60)
        return result

    monkeypatch.setattr("statemgr.engine.coordinator.find_damage", held)
    with StateManager(config) as zombies, zombies.open_task(TASK) as zombie:
        assert found.wait(30)
        with StateManager(with_changes(config, state__dir=str(tmp_path / "other"))) as manager:
            task = manager.open_task(TASK)
            write(task, {b"c": b"3"})
            task.commit({"orders-0": 2})
            newer, blobs = record_of(config), blob_files(tmp_path)
            go_on.set()
            with pytest.raises(FencedError):
                wait_until(lambda: zombie.commit({"orders-0": 1}) is None)
        assert record_of(config) == newer
    assert is_whole(config, STATE | {b"c": b"3"})
    assert blob_files(tmp_path) >= blobs


def test_a_store_that_stays_broken_is_not_tried_for_ever(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULT 45: the task stops after a limited number of tries and logs it. The next commit rebuilds the blobs."""
    monkeypatch.setattr("statemgr.flows.worker.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("statemgr.flows.worker.TRIES", 5)
    config = dual(kafka, tmp_path, SNAPSHOTS, blob__store__retry__policy__max__retries=0)
    commit(config, STATE, 1)
    delete(config, tmp_path, "index")
    puts = []

    def fails(self: FileBlobStore, blob_id: str, *args: object, **more: object) -> None:
        puts.append(blob_id)
        raise UnavailableError("told to")

    original = FileBlobStore.put
    with monkeypatch.context() as patch, StateManager(config) as manager:
        patch.setattr(FileBlobStore, "put", fails)
        task = manager.open_task(TASK)
        wait_until(lambda: "times in a row" in caplog.text)
        tried = len(puts)
        assert tried
        patch.setattr(FileBlobStore, "put", original)
        # the next commit rebuilds the blobs all the same
        task.commit({"orders-0": 2})
    assert is_whole(config)
