"""The backend ``blob-store`` on a real broker: segments on snapshots, from commit to restore."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.backends.blobs import clean_up, segment_batch, tables
from statemgr.engine.task import Task
from statemgr.errors import CorruptBlob, MissingBlob, RetryableError, UnavailableError
from statemgr.flows.committing.background_snapshots import materialize
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import BlobMarker, Checkpoint
from statemgr.phases import Phase, observed
from statemgr.ports import SegmentBackupManager
from statemgr.reader import JobReader
from statemgr.wiring import open_services
from tests.commits import TASK, blob_files, commit, failing, referenced, write
from tests.jobs import elsewhere, job_mapping, with_changes
from tests.servers import KafkaServer

FACTORY = "blob-store"
NEVER = ["1000000 commits"]
#: A value so large that its segment is never inline.
BIG = random.Random(0).randbytes(5000)


def config_of(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A job on a directory that commits segments, without snapshots unless the settings ask for them."""
    settings = {"backup": [FACTORY], "task__commit__snapshot__interval": NEVER, **more}
    return JobConfig.from_mapping(job_mapping(kafka, directory, **settings))  # type: ignore[arg-type]


def published(
    config: JobConfig, directory: Path, checkpoint_id: str | None = None, store: str = "totals"
) -> dict[bytes, bytes]:
    """A store at a checkpoint (by default the newest), as another machine restores it without disturbing the job."""
    other = elsewhere(config, directory, FACTORY)
    with JobReader(other) as reader, reader.open_store(TASK, store, checkpoint_id) as opened:
        return dict(opened.scan(None, None))


def chain_of(config: JobConfig, checkpoint: Checkpoint, store: str = "totals") -> SegmentChain:
    """The segment chain of a checkpoint."""
    services = open_services(config)
    try:
        manager = services.backup_manager(FACTORY)
        marker = checkpoint.marker(FACTORY, store)
        return manager._catalogue.chain(services.identity(TASK, store), marker)  # type: ignore
    finally:
        services.close()


def ranges(chain: SegmentChain) -> list[tuple[int, int]]:
    """The sequence numbers of a chain's segments."""
    return [(segment.first, segment.end) for segment in chain.segments]


def snapshot_now(task: Task, store: str = "totals") -> None:
    """Materialise a store, as the background thread does."""
    assert task.last_checkpoint is not None
    manager, marker = task._services.backup_manager(FACTORY), task.last_checkpoint.marker(FACTORY, store)
    assert isinstance(manager, SegmentBackupManager)
    assert marker is not None
    materialize(task._services, task._stores[store], manager, marker, nullcontext(), lambda: None)


def change(task: Task, chance: random.Random, state: dict[bytes, bytes], store: str = "totals") -> None:
    """Make some random puts and deletes."""
    opened = task.store(store)
    for _ in range(chance.choice([0, 1, 40])):
        key = b"%d" % chance.randrange(50)
        if chance.random() < 0.3:
            opened.delete(key)
            state.pop(key, None)
        else:
            state[key] = chance.randbytes(chance.choice([0, 5, 500]))
            opened.put(key, state[key])


def test_every_pair_of_snapshot_and_commit_comes_back(kafka: KafkaServer, tmp_path: Path) -> None:
    """B1, B2, B8: whatever snapshot a commit builds on, another machine restores every retained commit exactly."""
    config = config_of(kafka, tmp_path, task__checkpoint__retained=20)
    chance, state = random.Random(1), dict[bytes, bytes]()
    expected: dict[str, dict[bytes, bytes]] = {}
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in range(16):
            change(task, chance, state)
            expected[str(task.commit({"orders-0": number}).checkpoint_id)] = dict(state)
            if number % 5 == 4:
                snapshot_now(task)
    for number, (checkpoint_id, there) in enumerate(expected.items()):
        assert published(config, tmp_path / f"other-{number}", checkpoint_id) == there
    # a snapshot expires if no commit has taken it up, because nothing changed after it
    assert blob_files(tmp_path) - referenced(config) == blob_files(tmp_path, expiring=True)


def test_the_worked_example_of_generalised_incremental_checkpoints(kafka: KafkaServer, tmp_path: Path) -> None:
    """C1: a materialisation between two commits, a segment that straddles it, and the segment that its completion
    frees."""
    config = config_of(kafka, tmp_path, task__checkpoint__retained=1)
    taken, go_on = threading.Event(), threading.Event()

    def hold(phase: Phase, _: str) -> None:
        if phase is Phase.DIFF and threading.current_thread().name == "materialisation":
            taken.set()
            assert go_on.wait(30)

    with StateManager(config) as manager, observed(hold):
        task = manager.open_task(TASK)
        store = task.store("totals")
        task.commit({})  # T0
        store.put(b"a", BIG)
        first = chain_of(config, task.commit({"orders-0": 1}))
        assert ranges(first) == [(0, 1)]
        assert published(config, tmp_path / "1") == {b"a": BIG}
        store.put(b"b", BIG)
        background = threading.Thread(target=snapshot_now, args=(task,), name="materialisation")
        store._content.flush()
        background.start()  # T2
        assert taken.wait(30)
        store.put(b"c", BIG)
        second = chain_of(config, task.commit({"orders-0": 2}))
        assert ranges(second) == [(0, 1), (1, 3)]
        assert second.snapshot == first.snapshot
        assert published(config, tmp_path / "2") == {b"a": BIG, b"b": BIG, b"c": BIG}
        go_on.set()
        background.join()
        store.put(b"d", BIG)
        third = chain_of(config, task.commit({"orders-0": 3}))
    assert ranges(third) == [(1, 3), (3, 4)]
    assert third.snapshot.end == 2
    assert third.segments[0] == second.segments[1]
    assert published(config, tmp_path / "3") == dict.fromkeys((b"a", b"b", b"c", b"d"), BIG)
    left = blob_files(tmp_path)
    assert first.segments[0].blob is not None
    assert first.segments[0].blob.blob_id not in left
    assert second.segments[1].blob is not None
    assert second.segments[1].blob.blob_id in left
    assert left == referenced(config)


def test_a_snapshot_does_not_reach_a_commit_that_was_frozen_before_it(kafka: KafkaServer, tmp_path: Path) -> None:
    """C1: a snapshot may contain changes made after the commit in progress, so that commit does not build on it."""
    config = config_of(kafka, tmp_path)
    frozen, go_on = threading.Event(), threading.Event()

    def hold(phase: Phase, _: str) -> None:
        if phase is Phase.PUT_SEGMENTS and not go_on.is_set():
            frozen.set()
            assert go_on.wait(30)

    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        store = task.store("totals")
        store.put(b"before", BIG)
        task.commit({"orders-0": 1})
        with observed(hold):
            store.put(b"in it", BIG)
            future = task.commit_async({"orders-0": 2})
            assert frozen.wait(30)
            store.put(b"after", BIG)
            store._content.flush()
            snapshot_now(task)
            go_on.set()
            checkpoint = future.result(30)
        assert published(config, tmp_path / "other", str(checkpoint.checkpoint_id)) == {b"before": BIG, b"in it": BIG}
        after = chain_of(config, task.commit({"orders-0": 3}))
    assert after.snapshot.end > 0
    assert set(published(config, tmp_path / "last")) == {b"before", b"in it", b"after"}


def test_a_very_small_commit_travels_inline(kafka: KafkaServer, tmp_path: Path) -> None:
    """C5: a commit of few bytes puts no blob. When the inline segments grow too large, one blob takes them all."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        before = blob_files(tmp_path)
        inline = 0
        for number in range(40):
            task.store("totals").put(b"%d" % number, b"v" * 300)
            marker = task.commit({"orders-0": number}).marker(FACTORY, "totals")
            assert isinstance(marker, BlobMarker)
            inline += marker.inline is not None
        assert inline > 30
        assert len(blob_files(tmp_path) - before) == 40 - inline
        assert len(published(config, tmp_path / "other")) == 40


def test_all_stores_of_a_task_share_one_blob(kafka: KafkaServer, tmp_path: Path) -> None:
    """C5, C6: a commit of several stores takes one PUT. The blob is deleted when none of the stores needs it any
    more."""
    config = config_of(kafka, tmp_path, stores=("totals", "index"), task__checkpoint__retained=1)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        before = blob_files(tmp_path)
        for name in config.stores:
            task.store(name).put(b"k", BIG)
        task.commit({"orders-0": 1})
        added = blob_files(tmp_path) - before
        assert len(added) == 1
        task.store("totals").put(b"l", BIG)
        snapshot_now(task)
        task.commit({"orders-0": 2})
        assert added <= blob_files(tmp_path)  # the other store needs it
        task.store("index").put(b"l", BIG)
        snapshot_now(task, "index")
        task.commit({"orders-0": 3})
        assert not added & blob_files(tmp_path)
        assert blob_files(tmp_path) == referenced(config)
        for name in config.stores:
            assert published(config, tmp_path / name, store=name) == {b"k": BIG, b"l": BIG}


def test_a_stored_segment_is_used_by_the_next_commit(kafka: KafkaServer, tmp_path: Path) -> None:
    """C2, invariant 4: a commit that failed after its upload leaves a segment that the next commit uses again."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        with failing(Phase.BEGIN), pytest.raises(RetryableError):
            task.commit({"orders-0": 1})
        stored = {blob for blob in blob_files(tmp_path) if "/_segments/" in blob}
        assert len(stored) == 1
        task.store("totals").put(b"b", BIG)
        chain = chain_of(config, task.commit({"orders-0": 2}))
    assert ranges(chain) == [(0, 1), (1, 2)]
    assert chain.segments[0].blob is not None
    assert {chain.segments[0].blob.blob_id} == stored
    assert published(config, tmp_path / "other") == {b"a": BIG, b"b": BIG}
    assert blob_files(tmp_path, expiring=True) == set()


def test_a_failed_upload_is_repeated(kafka: KafkaServer, tmp_path: Path) -> None:
    """C2, C3: the next commit's segment contains the changes of a commit whose upload failed."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        with failing(Phase.PUT_SEGMENTS), pytest.raises(RetryableError):
            task.commit({"orders-0": 1})
        task.store("totals").put(b"a", BIG[::-1])
        assert ranges(chain_of(config, task.commit({"orders-0": 2}))) == [(0, 2)]
    assert published(config, tmp_path / "other") == {b"a": BIG[::-1]}


def test_snapshots_are_made_in_the_background(kafka: KafkaServer, tmp_path: Path) -> None:
    """B3, B5: the background makes snapshots at the interval, in parallel with commits. What they cover is deleted, but
    nothing that is retained."""
    config = config_of(kafka, tmp_path, task__commit__snapshot__interval=["4 commits"])
    chance, state = random.Random(2), dict[bytes, bytes]()
    done = threading.Semaphore(0)
    threads = set()

    def count(phase: Phase, _: str) -> None:
        if phase is Phase.MATERIALIZED:
            threads.add(threading.current_thread().name)
            done.release()

    with StateManager(config) as manager, observed(count):
        task = manager.open_task(TASK)
        longest = 0
        for number in range(30):
            task.store("totals").put(b"%d" % number, BIG)
            state[b"%d" % number] = BIG
            change(task, chance, state)
            checkpoint = task.commit({"orders-0": number})
            longest = max(longest, len(chain_of(config, checkpoint).segments))
            if number % 5 == 4:
                assert done.acquire(timeout=30)
    assert 2 <= longest <= 8
    assert all(name.startswith("statemgr-snapshot-") for name in threads)
    assert published(config, tmp_path / "other") == state
    # a snapshot that no commit has taken up yet still expires
    assert blob_files(tmp_path) - referenced(config) == blob_files(tmp_path, expiring=True)


def test_snapshots_that_fail_are_tolerated_up_to_a_limit(kafka: KafkaServer, tmp_path: Path) -> None:
    """C9: commits continue while snapshots fail, up to the limit. Then one commit reports the failures, and the
    segments still contain everything."""
    config = config_of(
        kafka,
        tmp_path,
        task__commit__snapshot__interval=["1 B"],
        task__commit__snapshot__tolerated__failures=2,
    )
    failed = threading.Semaphore(0)

    def fail(phase: Phase, _: str) -> None:
        if phase is Phase.MATERIALIZE:
            failed.release()
            raise RetryableError("no snapshot today")

    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        with observed(fail):
            for number in range(3):
                task.store("totals").put(b"%d" % number, BIG)
                task.commit({"orders-0": number})
                assert failed.acquire(timeout=30)
                task._coordinator.snapshots.worker.wait(30)
            with pytest.raises(RetryableError, match="3 snapshots in a row"):
                task.commit({"orders-0": 3})
            task.commit({"orders-0": 3})
        assert len(published(config, tmp_path / "other")) == 3


def test_a_clean_end_leaves_nothing_to_replay(kafka: KafkaServer, tmp_path: Path) -> None:
    """B4: after a clean end the next start on the machine has a local copy. A commit with ``materialize`` leaves a
    snapshot for all machines."""
    config = config_of(kafka, tmp_path)
    commit(config, {b"a": BIG}, 1)
    commit(config, {b"b": BIG}, 2)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        assert task.restored[0].factory == "local"
        task.store("totals").put(b"c", BIG)
        chain = chain_of(config, task.commit({"orders-0": 3}, materialize=True))
    assert chain.segments == ()
    with StateManager(elsewhere(config, tmp_path / "other", FACTORY)) as manager:
        restored = manager.open_task(TASK).restored[0]
        assert restored.factory == FACTORY
        assert restored.records == 0


@pytest.mark.parametrize("here", ["all", "none", "some", "altered"])
def test_recovery_with_the_local_copies_of_segments(kafka: KafkaServer, tmp_path: Path, here: str) -> None:
    """C11: after a crash, a restore fetches only the segments that the machine does not have, or has with altered
    content."""
    config = config_of(kafka, tmp_path)
    manager = StateManager(config)
    task = manager.open_task(TASK)
    for number in range(6):
        task.store("totals").put(b"%d" % number, BIG)
        task.commit({"orders-0": number})
    copies = sorted((tmp_path / "state").rglob("*.segment"))
    assert len(copies) == 5
    # a crash: only the files that were there remain
    crashed = with_changes(config, state__dir=str(tmp_path / "crashed"))
    for path in copies[: {"all": 5, "none": 0, "some": 2, "altered": 5}[here]]:
        target = tmp_path / "crashed" / path.relative_to(tmp_path / "state")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes() if here != "altered" else path.read_bytes()[::-1])
    with StateManager(crashed) as other:
        reopened = other.open_task(TASK)
        assert dict(reopened.store("totals").range()) == {b"%d" % number: BIG for number in range(6)}
        fetched = reopened.restored[0].bytes_fetched
        assert reopened.restored[0].records == 5
    size = len(BIG)
    fetched_segments = {"all": 0, "none": 5, "some": 3, "altered": 5}[here]
    assert fetched_segments * size <= fetched < fetched_segments * size + 3 * size
    manager.close()


def test_what_a_restore_ingests_is_committed_and_backed_up_again(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4, C11, invariant 5: ingested tables become files of the store. The local copies of the segments stay as they
    were, the next snapshots contain those files, and a restore from the snapshots alone is exact."""
    monkeypatch.setattr(tables, "_FEWEST", 2)
    config = config_of(kafka, tmp_path)
    state: dict[bytes, bytes] = {}
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in range(6):
            items = {b"%d" % number: BIG, b"same": b"%d" % number, b"%d" % (number - 2): None}
            write(task, items)
            state = {key: value for key, value in {**state, **items}.items() if value is not None}
            task.commit({"orders-0": number})
        crashed = with_changes(config, state__dir=str(tmp_path / "crashed"))
        for path in (tmp_path / "state").rglob("*.segment"):
            target = tmp_path / "crashed" / path.relative_to(tmp_path / "state")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    before = {path: path.read_bytes() for path in (tmp_path / "crashed").rglob("*.segment")}
    assert len(before) == 5
    with StateManager(crashed) as manager:
        task = manager.open_task(TASK)
        assert dict(task.store("totals").range()) == state
        assert {path: path.read_bytes() for path in before} == before
        for number in range(6, 8):
            write(task, {b"%d" % number: BIG, b"same": b"%d" % number})
            state |= {b"%d" % number: BIG, b"same": b"%d" % number}
            assert chain_of(config, task.commit({"orders-0": number}, materialize=True)).segments == ()
            assert published(config, tmp_path / f"other-{number}") == state


@pytest.mark.parametrize("damage", ["missing", "altered", "cut"])
def test_a_damaged_segment_is_never_a_shorter_history(kafka: KafkaServer, tmp_path: Path, damage: str) -> None:
    """B9, FAULT 12, FAULT 13: a missing, altered or truncated segment causes an error that names its blob."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in range(4):
            task.store("totals").put(b"%d" % number, BIG)
            chain = chain_of(config, task.commit({"orders-0": number}))
    segment = chain.segments[1]
    assert segment.blob is not None
    path = tmp_path / "blobs" / segment.blob.blob_id
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:1000] if damage == "cut" else data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises((CorruptBlob, MissingBlob, UnavailableError)) as caught:
        published(config, tmp_path / "other")
    assert caught.value.where["blob"] == segment.blob.blob_id
    assert not list((tmp_path / "other").rglob("CURRENT"))


def test_a_job_moves_between_backends(kafka: KafkaServer, tmp_path: Path) -> None:
    """B6: a job that started with another backend continues with segments, and moves back again without losing
    anything."""
    other = "kafka-changelog"
    config = config_of(kafka, tmp_path, backup=[other])
    commit(config, {b"1": BIG}, 1)
    both = with_changes(
        config,
        task__backup__factories=[other, FACTORY],
        task__restore__factories=[other],
        state__dir=str(tmp_path / "b"),
    )
    commit(both, {b"2": BIG}, 2)
    commit(both, {b"3": BIG}, 3)
    alone = with_changes(
        config, task__backup__factories=[FACTORY], task__restore__factories=[FACTORY], state__dir=str(tmp_path / "c")
    )
    commit(alone, {b"4": BIG, b"1": None}, 4)
    back = with_changes(both, task__restore__factories=[FACTORY], state__dir=str(tmp_path / "d"))
    commit(back, {b"5": BIG}, 5)
    last = with_changes(
        config, task__backup__factories=[other], task__restore__factories=[other], state__dir=str(tmp_path / "e")
    )
    commit(last, {b"6": BIG}, 6)
    with StateManager(with_changes(last, state__dir=str(tmp_path / "f"))) as manager:
        task = manager.open_task(TASK)
        assert set(task.store("totals").range()) == {(b"%d" % n, BIG) for n in (2, 3, 4, 5, 6)}
        assert task.restored[0].factory == other


def test_a_job_moves_between_snapshots_and_segments(kafka: KafkaServer, tmp_path: Path) -> None:
    """B6: the interval may change at any start, on this machine or another. The job continues from what was stored
    before, and the clean-up leaves nothing of it behind."""
    config = config_of(kafka, tmp_path, task__checkpoint__retained=1)
    state: dict[bytes, bytes] = {}
    for turn, interval in enumerate([["1 commit"], NEVER, ["1 commit"], NEVER]):
        machine = tmp_path / ("other" if turn == 1 else "state")
        known = with_changes(config, task__commit__snapshot__interval=interval, state__dir=str(machine))
        for number in range(2 * turn, 2 * turn + 2):
            state[b"%d" % number] = BIG
            segments = chain_of(config, commit(known, {b"%d" % number: BIG}, number)).segments
            assert len(segments) == (0 if interval != NEVER else number - 2 * turn + 1)
        assert published(known, tmp_path / f"elsewhere-{turn}") == state
        assert blob_files(tmp_path) == referenced(config)


def test_segments_and_changelog_together(kafka: KafkaServer, tmp_path: Path) -> None:
    """A46, B6: after dual commits, both backends restore the same state."""
    config = config_of(kafka, tmp_path, backup=["kafka-changelog", FACTORY])
    chance, state = random.Random(3), dict[bytes, bytes]()
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in range(5):
            change(task, chance, state)
            task.commit({"orders-0": number})
    for factory in ("kafka-changelog", FACTORY):
        with StateManager(elsewhere(config, tmp_path / factory, factory)) as manager:
            assert dict(manager.open_task(TASK).store("totals").range()) == state


def test_tasks_of_a_process_share_a_blob_until_none_needs_it(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5, C6: commits that come together take one PUT, and the blob is deleted after the last task has released it."""
    monkeypatch.setattr(clean_up, "_MANY", 1)
    config = config_of(kafka, tmp_path, tasks=2, task__checkpoint__retained=1)
    with StateManager(config) as manager:
        tasks = [manager.open_task(f"Partition {number}") for number in range(2)]
        for task in tasks:
            task.commit({})
        before = blob_files(tmp_path)
        batches = manager._services.backup_manager(FACTORY)._batches  # type: ignore[attr-defined]
        monkeypatch.setattr(segment_batch, "LINGER_S", 30)
        for task in tasks:
            task.store("totals").put(b"k", BIG)
        with batches.coming():
            futures = [task.commit_async({"orders-0": 1}) for task in tasks]
            while batches._open is None or len(batches._open.tasks) < 2:
                threading.Event().wait(0.001)
        for future in futures:
            future.result(30)
        monkeypatch.setattr(segment_batch, "LINGER_S", 0)
        (shared,) = blob_files(tmp_path) - before
        assert shared.startswith(f"{config.job_name}/1/_segments/")
        for number, task in enumerate(tasks):
            assert shared in blob_files(tmp_path)
            task.store("totals").put(b"l", BIG)
            snapshot_now(task)
            task.commit({"orders-0": 2})
            with JobReader(elsewhere(config, tmp_path / f"o{number}", FACTORY)) as reader:
                for name in ("Partition 0", "Partition 1"):
                    with reader.open_store(name, "totals") as store:
                        assert store.get(b"k") == BIG
        assert shared not in blob_files(tmp_path)
        assert blob_files(tmp_path) == referenced(config, "Partition 0") | referenced(config, "Partition 1")
