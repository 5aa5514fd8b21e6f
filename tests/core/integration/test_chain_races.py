"""Races, garbage and recovery of segments on snapshots."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import pytest

import statemgr.local.memory as memory
import statemgr.local.rocksdb.store as rocksdb
from statemgr import JobConfig, StateManager
from statemgr.backends.blobs import clean_up, segment_cache
from statemgr.backends.blobs.backup import BlobBackup
from statemgr.backends.blobs.writer_state import WriterState
from statemgr.engine import open_attempt
from statemgr.errors import DiskFull, RetryableError, StatemgrError
from statemgr.flows.committing.attempt_snapshots import AttemptSnapshots
from statemgr.local import hash_file
from statemgr.local.change_buffer import ChangeBuffer, FrozenChanges
from statemgr.local.rocksdb.store import RocksDbStore
from statemgr.model.checkpoint import Checkpoint
from statemgr.phases import Phase, observed
from statemgr.ports import Moment
from statemgr.reader import JobReader
from statemgr.transfer.transfer import Transfer
from tests.commits import TASK, blob_files, commit, current, failing, referenced
from tests.core.integration.test_blob_changelog import (
    BIG,
    FACTORY,
    chain_of,
    config_of,
    published,
    snapshot_now,
)
from tests.jobs import elsewhere, with_changes
from tests.servers import KafkaServer


class Held:
    """Stops the thread called ``materialisation`` at a phase until it may continue."""

    def __init__(self, phase: Phase) -> None:
        self.phase, self.there, self.go_on = phase, threading.Event(), threading.Event()

    def __call__(self, phase: Phase, _: str) -> None:
        if phase is self.phase and threading.current_thread().name == "materialisation":
            self.there.set()
            assert self.go_on.wait(30)


def test_directory_of_a_snapshot_under_way(kafka: KafkaServer, tmp_path: Path) -> None:
    """A commit that makes a directory does not remove the directory that a materialisation uploads from."""
    config = config_of(kafka, tmp_path)
    held, errors = Held(Phase.DIFF), []

    def run() -> None:
        try:
            snapshot_now(task)
        except BaseException as error:
            errors.append(error)

    with StateManager(config) as manager, observed(held):
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        task.commit({"orders-0": 1})
        background = threading.Thread(target=run, name="materialisation")
        background.start()
        assert held.there.wait(30)
        task.store("totals").put(b"b", BIG)
        task.commit({"orders-0": 2}, materialize=True)
        held.go_on.set()
        background.join()
    assert errors == []


def reuse_a_covered_segment(config: JobConfig) -> None:
    """A commit fails after its upload, a snapshot covers the segment that it stored, and the next commit has both."""
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        with failing(Phase.BEGIN), pytest.raises(RetryableError):
            task.commit({"orders-0": 1})
        snapshot_now(task)
        task.store("totals").put(b"b", BIG)
        task.commit({"orders-0": 2})


def test_a_reused_segment_that_the_snapshot_covers(kafka: KafkaServer, tmp_path: Path) -> None:
    """A blob that no commit refers to keeps its TTL."""
    config = config_of(kafka, tmp_path)
    reuse_a_covered_segment(config)
    garbage = blob_files(tmp_path) - referenced(config)
    assert garbage == garbage & blob_files(tmp_path, expiring=True)


def test_its_collection_is_no_loss(kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After garbage collection has deleted such a blob, the next start finds no damage."""
    config = config_of(kafka, tmp_path)
    reuse_a_covered_segment(config)
    for blob in blob_files(tmp_path) - referenced(config):
        (tmp_path / "blobs" / blob).unlink()
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        assert task.damage.pairs == frozenset()


def test_a_late_snapshot_on_an_old_base(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a snapshot completes in the middle of a commit, the commit still checks it before it refers to it."""
    config = config_of(kafka, tmp_path, task__checkpoint__retained=1)
    held = Held(Phase.PUT_INDEX)
    chance = random.Random(5)
    with StateManager(config) as manager, observed(held):
        task = manager.open_task(TASK)
        store = task.store("totals")
        for number in range(200):
            store.put(b"old-%d" % number, chance.randbytes(2000))
        task.commit({})
        store.put(b"a", BIG)
        task.commit({"orders-0": 1})
        for number in range(200):
            store.put(b"old-%d" % number, chance.randbytes(2000))
        task._stores["totals"].content.flush()
        background = threading.Thread(target=snapshot_now, args=(task,), name="materialisation")
        background.start()
        assert held.there.wait(30)
        task._stores["totals"].local.compact()  # type: ignore[attr-defined]
        task.commit({"orders-0": 2}, materialize=True)  # another snapshot; the old one's blobs are deleted
        store.put(b"b", BIG)
        original = WriterState.unpersisted

        def unpersisted(self, changes):  # type: ignore[no-untyped-def]
            held.go_on.set()
            background.join()
            return original(self, changes)

        monkeypatch.setattr(WriterState, "unpersisted", unpersisted)
        task.commit({"orders-0": 3})
    assert referenced(config) <= blob_files(tmp_path)
    assert len(published(config, tmp_path / "other")) == 202


def test_a_memory_store_flushed_by_two_threads(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flush of a materialisation never puts an older state into a commit's directory."""
    config = config_of(kafka, tmp_path, stores__totals__type="memory")
    there, go_on = threading.Event(), threading.Event()
    write, link = memory.write_segment, memory.durable.link_or_copy
    background = threading.Thread(name="materialisation")

    def slow_write(changes, sink, first=0):  # type: ignore[no-untyped-def]
        write(changes, sink, first)
        if threading.current_thread() is background:
            there.set()
            assert go_on.wait(30)

    def link_after(source, target):  # type: ignore[no-untyped-def]
        if threading.current_thread() is threading.main_thread():
            go_on.set()
            background.join(30)
        return link(source, target)

    def run() -> None:
        try:
            snapshot_now(task)
        except Exception as error:
            print("materialisation:", repr(error))

    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        store = task.store("totals")
        store.put(b"k", b"old")
        task.commit({})
        store.put(b"k", b"mid")
        store._content.flush()
        background = threading.Thread(target=run, name="materialisation")
        monkeypatch.setattr(memory, "write_segment", slow_write)
        background.start()
        assert there.wait(30)
        monkeypatch.setattr(memory.durable, "link_or_copy", link_after)
        store.put(b"k", b"new")
        # if the commit waits for the other flush, this lets the flush continue
        threading.Timer(0.5, go_on.set).start()
        task.commit({"orders-0": 1}, materialize=True)
        monkeypatch.undo()
    other = elsewhere(config, tmp_path / "other", "blob-store")
    with JobReader(other) as reader, reader.open_store(TASK, "totals") as opened:
        assert dict(opened.scan(None, None)) == {b"k": b"new"}


def test_no_store_starves(kafka: KafkaServer, tmp_path: Path) -> None:
    """Each store gets its turn, even if all stores are due all the time."""
    stores = ("s0", "s1", "s2", "s3")
    config = config_of(kafka, tmp_path, stores=stores, task__commit__snapshot__interval=["1 B"])
    seen: dict[str, int] = dict.fromkeys(stores, 0)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)

        def count(phase: Phase, subject: str) -> None:
            if phase is Phase.MATERIALIZED:
                seen[subject.rpartition("/")[2]] += 1

        with observed(count):
            for number in range(24):
                for name in stores:
                    task.store(name).put(b"%d" % number, BIG)
                checkpoint = task.commit({"orders-0": number})
                task._coordinator.snapshots.worker.wait(30)
        longest = max(len(chain_of(config, checkpoint, name).segments) for name in stores)
    assert min(seen.values()) > 0
    assert longest < 20


def test_materialize_where_nothing_changed(kafka: KafkaServer, tmp_path: Path) -> None:
    """A last commit that asks for complete states leaves no segments."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        task.commit({"orders-0": 1})
        chain = chain_of(config, task.commit({"orders-0": 1}, materialize=True))
    assert chain.segments == ()


@pytest.mark.parametrize("number", [4, 40])
def test_reads_of_a_commit(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A commit of one store reads nothing back, however many stores there are."""
    stores = tuple(f"s{n}" for n in range(number))
    config = config_of(kafka, tmp_path, stores=stores)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for turn in range(4):
            for name in stores:
                task.store(name).put(b"%d" % turn, BIG)
            task.commit({"orders-0": turn})
        reads: list[str] = []
        get = Transfer.get_bytes

        def counted(self, ref, limit):  # type: ignore[no-untyped-def]
            reads.append(ref.blob_id)
            return get(self, ref, limit)

        monkeypatch.setattr(Transfer, "get_bytes", counted)
        for turn in range(4):
            reads.clear()
            task.store("s0").put(b"x%d" % turn, BIG)
            task.commit({"orders-0": 10 + turn})
    assert len(reads) == 0


def test_a_cached_segment_that_vanishes(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 10: if another owner tidies the cache between the check and the use, the result is a cache miss, not an
    error."""
    config = config_of(kafka, tmp_path)
    manager = StateManager(config)
    task = manager.open_task(TASK)
    task.commit({})
    task.store("totals").put(b"a", BIG)
    task.commit({"orders-0": 1})

    def then_gone(path: Path) -> tuple[int, bytes]:
        found = hash_file(path)
        for copy in (tmp_path / "state").rglob("*.segment"):
            copy.unlink()
        return found

    monkeypatch.setattr(segment_cache, "hash_file", then_gone)
    with StateManager(config) as other:
        assert dict(other.open_task(TASK).store("totals").range()) == {b"a": BIG}
    manager.close()


def test_an_unexpected_error_of_a_snapshot_is_not_swallowed(kafka: KafkaServer, tmp_path: Path) -> None:
    """C9: an unexpected error of a materialisation also counts as a failure, and a commit reports it."""
    config = config_of(
        kafka, tmp_path, task__commit__snapshot__interval=["1 B"], task__commit__snapshot__tolerated__failures=1
    )

    def fail(phase: Phase, _: str) -> None:
        if phase is Phase.MATERIALIZE:
            raise RuntimeError("dictionary changed size during iteration")

    raised = 0
    with StateManager(config) as manager, observed(fail):
        task = manager.open_task(TASK)
        for number in range(6):
            task.store("totals").put(b"%d" % number, BIG)
            try:
                task.commit({"orders-0": number})
            except StatemgrError:
                raised += 1
            task._coordinator.snapshots.worker.wait(30)
    assert raised


def test_bytes_of_a_fill_are_counted(kafka: KafkaServer, tmp_path: Path) -> None:
    """B11: the bytes of a commit include the snapshot that it uploads."""
    config = config_of(kafka, tmp_path)
    uploaded: list[int] = []
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        count = task.metrics.uploaded
        task.metrics.uploaded = lambda size: (uploaded.append(size), count(size))  # type: ignore
        for number in range(100):
            task.store("totals").put(b"%d" % number, BIG)
        task.commit({})
    assert uploaded[0] > 0


def test_attempts_in_one_process(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that opens does not remove what another attempt in the same process uploads from."""
    monkeypatch.setattr("statemgr.flows.committing.background_snapshots._OVERDUE", 1)
    monkeypatch.setattr(AttemptSnapshots, "start", lambda *_: None)  # so the attempt itself makes the snapshot
    config = config_of(kafka, tmp_path, task__commit__snapshot__interval=["1 B"])
    with StateManager(config) as manager:
        epoch = manager.acquire()
        with open_attempt(config, TASK, None, epoch) as first:
            first.store("totals").put(b"a", BIG)
            manager.publish([first.prepare({"orders-0": 1})])
        epoch = epoch.after_publish()
        checkpoint = manager_checkpoint(config)
        with open_attempt(config, TASK, checkpoint, epoch) as second:
            second.store("totals").put(b"b", BIG)
            manager.publish([second.prepare({"orders-0": 2})])
        checkpoint = manager_checkpoint(config)
        held, errors = Held(Phase.DIFF), []
        one = open_attempt(config, TASK, checkpoint, epoch)
        one.store("totals").put(b"c", BIG)

        def run() -> None:
            try:
                one.prepare({"orders-0": 3})
            except BaseException as error:
                errors.append(error)

        with observed(held):
            background = threading.Thread(target=run, name="materialisation")
            background.start()
            assert held.there.wait(30)
            open_attempt(config, TASK, checkpoint, epoch).close()
            held.go_on.set()
            background.join()
        one.close()
    assert errors == []


def manager_checkpoint(config: JobConfig) -> Checkpoint:
    """The current checkpoint."""
    record = current(config)
    assert record is not None
    return record.current


def test_size_beside_a_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread can ask for the size of frozen changes while the task's thread spills them."""
    sys.setswitchinterval(1e-6)
    errors: list[BaseException] = []
    try:
        for turn in range(300):
            buffer = ChangeBuffer(tmp_path / f"{turn}", 1)
            buffer._budget = 1 << 30
            buffer.extend([(b"%d" % n, b"v") for n in range(20)])
            buffer.extend([(b"%d" % n, b"w") for n in range(20)])
            frozen = buffer.freeze()
            start = threading.Barrier(2)

            def ask(start: threading.Barrier = start, frozen: FrozenChanges = frozen) -> None:
                start.wait()
                try:
                    for generation in frozen._generations:
                        for _ in range(50):
                            generation._at_most = generation._size + 1
                            _ = generation.size
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            buffer._budget = 1
            start.wait()
            buffer.extend([(b"x", b"y")])
            thread.join()
            buffer.close()
    finally:
        sys.setswitchinterval(0.005)
    assert errors == []


def test_old_blobs_of_a_long_materialisation(kafka: KafkaServer, tmp_path: Path) -> None:
    """A publish refers to no blob whose upload is older than half the shortest grace period."""
    config = config_of(kafka, tmp_path)
    hours = 3600
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        task.commit({"orders-0": 1})
        backup: BlobBackup = task._services.backup_manager(FACTORY)  # type: ignore[assignment]
        chains = backup._chains
        now, late = chains.now, [0]

        def later() -> Moment:
            moment = now()
            return Moment(moment.boot, moment.monotonic_s + late[0], moment.wall_ms + late[0] * 1000)

        chains.now = later  # type: ignore[method-assign]

        def slow(phase: Phase, _: str) -> None:
            if phase is Phase.PUT_INDEX:
                late[0] = 10 * hours  # the uploads took this long

        with observed(slow):
            snapshot_now(task)
        late[0] = 15 * hours
        task.store("totals").put(b"b", BIG)
        chain = chain_of(config, task.commit({"orders-0": 2}))
    assert chain.snapshot.end == 0  # its files are 15 hours old, half the grace period is 12


def test_scratch_after_a_failed_restore(kafka: KafkaServer, tmp_path: Path) -> None:
    """A restore that fails leaves no fetched segments behind."""
    config = config_of(kafka, tmp_path)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in range(6):
            task.store("totals").put(b"%d" % number, BIG)
            chain = chain_of(config, task.commit({"orders-0": number}))
    segment = chain.segments[4]
    assert segment.blob is not None
    (tmp_path / "blobs" / segment.blob.blob_id).unlink()
    other = elsewhere(config, tmp_path / "other", FACTORY)
    with StateManager(other) as manager, pytest.raises(StatemgrError):
        manager.open_task(TASK)
    assert not list((tmp_path / "other").rglob("segments-*"))


def test_evicted_and_read_again(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete that fails once is tried again after a while, so that no garbage remains."""
    monkeypatch.setattr(clean_up, "_SECONDS", 0)
    config = config_of(kafka, tmp_path, task__checkpoint__retained=1)
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        task.commit({"orders-0": 1})
        snapshot_now(task)
        task.store("totals").put(b"b", BIG)
        delete = Transfer.delete_all
        monkeypatch.setattr(
            Transfer, "delete_all", lambda self, blobs: {blob: RetryableError("away") for blob in blobs}
        )
        task.commit({"orders-0": 2})
        monkeypatch.setattr(Transfer, "delete_all", delete)
        for number in range(3, 6):
            task.store("totals").put(b"c", BIG)
            task.commit({"orders-0": number})
    assert blob_files(tmp_path) == referenced(config)


def check_filled_again(config: JobConfig, directory: Path) -> None:
    """Check that the blobs alone give the three keys, and that they do not expire."""
    assert published(config, directory / "blobs-alone") == dict.fromkeys((b"a", b"b", b"c"), BIG)
    chain = chain_of(config, manager_checkpoint(config))
    assert {ref.blob_id for ref in chain.blobs()} <= blob_files(directory, expiring=False)


def test_an_attempt_whose_chain_is_lost(kafka: KafkaServer, tmp_path: Path) -> None:
    """In dual commit an attempt can commit although its chain of segments is lost, and fills the chain again: the blobs
    alone give the whole state."""
    config = config_of(kafka, tmp_path, backup=["kafka-changelog", FACTORY], restore=["kafka-changelog"])
    with StateManager(config) as manager:
        epoch = manager.acquire()
        with open_attempt(config, TASK, None, epoch) as first:
            first.store("totals").put(b"a", BIG)
            manager.publish([first.prepare({"orders-0": 1})])
        epoch = epoch.after_publish()
        with open_attempt(config, TASK, manager_checkpoint(config), epoch) as second:
            second.store("totals").put(b"b", BIG)
            manager.publish([second.prepare({"orders-0": 2})])
    for blob in blob_files(tmp_path):
        if "/_segments/" in blob:
            (tmp_path / "blobs" / blob).unlink()
    other = with_changes(config, state__dir=str(tmp_path / "other"))
    with StateManager(other) as manager:
        epoch = manager.acquire()
        with open_attempt(other, TASK, epoch.checkpoints[TASK], epoch) as third:
            third.store("totals").put(b"c", BIG)
            manager.publish([third.prepare({"orders-0": 3})])
    check_filled_again(config, tmp_path)


def test_a_task_whose_chain_is_lost(kafka: KafkaServer, tmp_path: Path) -> None:
    """A task whose chain is lost can also commit, at the second try at the latest, and fills the chain again."""
    config = config_of(kafka, tmp_path, backup=["kafka-changelog", FACTORY], restore=["kafka-changelog"])
    commit(config, {b"a": BIG}, 1)
    commit(config, {b"b": BIG}, 2)
    for blob in blob_files(tmp_path):
        if "/_segments/" in blob:
            (tmp_path / "blobs" / blob).unlink()
    other = with_changes(config, state__dir=str(tmp_path / "other"))
    with StateManager(other) as manager:
        task = manager.open_task(TASK)
        task.store("totals").put(b"c", BIG)
        try:
            task.commit({"orders-0": 3})
        except RetryableError as error:
            print(repr(error))
            task.commit({"orders-0": 3})
    check_filled_again(config, tmp_path)


def test_a_full_disk_is_mended_by_the_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT 24: after a full disk, a concurrent snapshot recovers nothing, and no recovery closes the database during
    one."""
    store = RocksDbStore.open(tmp_path / "db", {})
    store.write([(b"a", b"1")])
    store._stuck = DiskFull("the disk is full")  # the state after a full disk
    with pytest.raises(DiskFull):
        store.concurrent_checkpoint(tmp_path / "refused")
    store.write([(b"b", b"2")])
    made, there, go_on = rocksdb.Checkpoint, threading.Event(), threading.Event()

    def slow(database: object) -> object:
        there.set()
        assert go_on.wait(30)
        return made(database)  # type: ignore[arg-type]

    monkeypatch.setattr(rocksdb, "Checkpoint", slow)
    background = threading.Thread(target=store.concurrent_checkpoint, args=(tmp_path / "copy",))
    background.start()
    assert there.wait(30)
    store._stuck = DiskFull("the disk is full")
    owner = threading.Thread(target=store.write, args=([(b"c", b"3")],))
    owner.start()
    owner.join(0.2)
    assert owner.is_alive()  # it waits for the copy
    go_on.set()
    owner.join(30)
    background.join(30)
    assert store.get_many([b"a", b"b", b"c"]) == [b"1", b"2", b"3"]
    store.close()


def test_a_task_closes_beside_a_long_snapshot(kafka: KafkaServer, tmp_path: Path) -> None:
    """Closing a task (its partition was revoked) does not wait for the upload of a complete snapshot."""
    config = config_of(kafka, tmp_path, task__commit__snapshot__interval=["1 B"])
    there, go_on = threading.Event(), threading.Event()

    def hold(phase: Phase, _: str) -> None:
        if phase is Phase.UPLOAD and threading.current_thread().name.startswith("statemgr-snapshot"):
            there.set()
            assert go_on.wait(30)

    with StateManager(config) as manager, observed(hold):
        task = manager.open_task(TASK)
        task.commit({})
        task.store("totals").put(b"a", BIG)
        task.commit({"orders-0": 1})
        assert there.wait(30)
        closing = threading.Thread(target=task.close)
        closing.start()
        closing.join(5)
        waited = closing.is_alive()
        go_on.set()
        closing.join(30)
    assert not waited


def test_failures_are_counted_by_store(kafka: KafkaServer, tmp_path: Path) -> None:
    """C9: a commit reports a store whose snapshots always fail, whatever the other stores do. The failing store does
    not hold the others up."""
    config = config_of(
        kafka,
        tmp_path,
        stores=("bad", "good"),
        task__commit__snapshot__interval=["1 B"],
        task__commit__snapshot__tolerated__failures=2,
    )
    seen: list[str] = []

    def fail(phase: Phase, subject: str) -> None:
        if phase is Phase.MATERIALIZED:
            seen.append(subject)
        if phase is Phase.MATERIALIZE and subject.endswith("/bad"):
            raise RetryableError("no snapshot today")

    raised = 0
    with StateManager(config) as manager, observed(fail):
        task = manager.open_task(TASK)
        for number in range(12):
            for name in config.stores:
                task.store(name).put(b"%d" % number, BIG)
            try:
                task.commit({"orders-0": number})
            except RetryableError:
                raised += 1
            task._coordinator.snapshots.worker.wait(30)
    assert raised
    assert seen
