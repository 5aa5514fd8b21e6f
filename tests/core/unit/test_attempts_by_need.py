"""Attempts begin while most of the state is still in the blob store, and share what is here. Needs no broker."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from statemgr import StateManager
from statemgr.backends.blobs import snapshots
from statemgr.backends.blobs.partial_tables import PartialTables
from statemgr.backends.blobs.segment_cache import SegmentCache
from statemgr.blobs.counting import counts_of
from statemgr.engine import Attempt, PreparedCommit, open_attempt
from statemgr.engine.host import AttemptHost
from statemgr.errors import (
    DiskFull,
    FencedError,
    LocalStateLost,
    PrerequisiteMissing,
    RetryableError,
    StatemgrError,
    StateUnreachable,
    UnavailableError,
)
from statemgr.flows.opening import by_need as flow
from statemgr.local.directories import StoreDirectories
from statemgr.model.chain import ChainSegment
from statemgr.model.checkpoint import Checkpoint
from statemgr.ports import PartialState, list_blobs
from statemgr.stores import open_store
from statemgr.testing.memory_servers import MemoryServers
from statemgr.transfer.downloads import Downloads
from tests.by_need import SMALL_STORES, Gate, State, fetched_sizes, key
from tests.commits import TASK
from tests.kafka_jobs import wait_until

Changes = Mapping[bytes, bytes | None]


class Worker:
    """A process that runs attempts, on a disk that it may share."""

    def __init__(self, servers: MemoryServers, disk: str) -> None:
        self.config = servers.on_disk(servers.config, disk)
        self.host = AttemptHost(servers.services(self.config))

    def close(self) -> None:
        """End as a process does that is killed: its files stay, and nobody owns them."""
        if (state := self.shared) is not None:
            next(iter(self.host.shared._states.values()))._stop()
            state.store.close()
        self.host.services.close()

    @property
    def shared(self) -> PartialState | None:
        """What its attempts share."""
        found = [one._opened for one in self.host.shared._states.values() if one._opened is not None]
        return found[0].state if found else None

    def unfinished(self) -> list[Path]:
        """The directories of stores that are not whole."""
        return list(Path(self.config.state_dir).rglob("staging/*"))

    def has_copy(self) -> bool:
        """Whether there is a local copy."""
        return any(Path(self.config.state_dir).rglob("committed/*.manifest"))


class Job:
    """A driver, and the state that it has published."""

    def __init__(self, servers: MemoryServers, manager: StateManager) -> None:
        self.servers = servers
        self.manager = manager
        self.epoch = manager.acquire()
        self.checkpoints: Mapping[str, Checkpoint | None] = self.epoch.checkpoints
        self.state: State = {}
        self.offset = 0
        source = random.Random(1)
        with self.worker("first") as worker:
            self.batch(worker, {key(number): source.randbytes(100) for number in range(6_000)})
            self.batch(worker, {key(7): b"seven", key(8): None})
        servers.lose_disk()

    @contextmanager
    def worker(self, disk: str) -> Iterator[Worker]:
        """A process that is killed in the end."""
        with closing(Worker(self.servers, disk)) as worker:
            yield worker

    def open(self, worker: Worker) -> Attempt:
        """Open an attempt at the newest checkpoint."""
        return open_attempt(worker.config, TASK, self.checkpoints[TASK], self.epoch, host=worker.host, by_need=True)

    def prepared(self, opened: Attempt, changes: Changes) -> PreparedCommit:
        """Write, and prepare a commit."""
        for name, value in changes.items():
            store = opened.store("totals")
            store.delete(name) if value is None else store.put(name, value)
        self.offset += 1
        return opened.prepare({"orders-0": self.offset})

    def publish(self, prepared: PreparedCommit, changes: Changes) -> None:
        """Make a commit the current one."""
        self.checkpoints = self.manager.publish([prepared])
        self.epoch = self.epoch.after_publish()
        changed: dict[bytes, bytes | None] = {**self.state, **changes}
        self.state = {name: value for name, value in changed.items() if value is not None}

    def batch(self, worker: Worker, changes: Changes) -> None:
        """Run and publish a batch."""
        with self.open(worker) as opened:
            prepared = self.prepared(opened, changes)
        self.publish(prepared, changes)

    def check(self, opened: Attempt) -> None:
        """Compare everything."""
        assert dict(opened.store("totals").range()) == self.state


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Let small tables be fetched by need, hold the rest back, and let what cannot be fetched be tried again soon."""
    monkeypatch.setattr(snapshots, "_LARGE", 4 * 1024)
    monkeypatch.setattr(flow, "_PAUSE_S", 0.01)
    return Gate(monkeypatch)


@pytest.fixture
def job(gate: Gate) -> Iterator[Job]:
    """A job that has published a snapshot and a segment, on machines that are gone."""
    with (
        closing_servers(MemoryServers(SMALL_STORES)) as servers,
        servers.manager(servers.on_disk(servers.config, "driver"), "spark-hash(bigint)") as manager,
    ):
        yield Job(servers, manager)


@contextmanager
def closing_servers(servers: MemoryServers) -> Iterator[MemoryServers]:
    """Open servers for a block."""
    servers.open()
    try:
        yield servers
    finally:
        servers.close()


def test_an_attempt_that_cannot_be_made_leaves_no_store_open(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores are open when a serde turns out to be impossible on this machine."""

    def fail(*_: object) -> None:
        raise PrerequisiteMissing("the package fastavro is not installed")

    with job.worker("second") as worker:
        monkeypatch.setattr("statemgr.stores.open_store.value_serde", fail)
        with pytest.raises(PrerequisiteMissing):
            job.open(worker)
        assert not list(Path(worker.config.state_dir).rglob("live/*"))
        assert worker.host.attempts == set()
        assert not next(iter(worker.host.shared._states.values()))._branches


def test_batches_begin_before_the_state_is_here(job: Job, gate: Gate) -> None:
    """Attempts of a worker share what they fetch. When everything is here there is a local copy, and nothing is
    fetched twice."""
    with job.worker("second") as worker:
        arrived, name = counts_of(worker.config.job_key).read, ("restored", "blob-store")
        before = arrived().get(name, 0)
        with job.open(worker) as opened:
            (restored,) = opened.restored
            assert restored.factory == "blob-store"
            assert restored.bytes_to_come > 10 * restored.bytes_fetched
            assert opened.store("totals").get(key(100)) == job.state[key(100)]
            changes = {key(1): b"one", key(2): None}
            prepared = job.prepared(opened, changes)
        job.publish(prepared, changes)
        shared = worker.shared
        assert shared is not None
        faults, fetched = shared.faults, shared.fetched
        for number in range(3):
            with job.open(worker) as opened:
                assert opened.restored[0].bytes_fetched < 1_000  # the segment at most
                assert opened.store("totals").get(key(100)) == job.state[key(100)]
                assert opened.store("totals").get(key(1)) == b"one"
                assert opened.store("totals").get(key(2)) is None
                prepared = job.prepared(opened, changes := {key(100): b"%d" % number})
            job.publish(prepared, changes)
        assert (shared.faults, shared.fetched) == (faults, fetched)
        with job.open(worker) as opened:
            job.check(opened)
        assert not worker.has_copy()
        gate.open.set()
        wait_until(worker.has_copy)
        assert shared.fetched < 1.5 * restored.bytes_to_come  # blocks that reads needed are fetched again with the rest
        later = shared.fetched - restored.bytes_fetched
        wait_until(lambda: arrived().get(name, 0) - before == later)  # which the next report has for the driver
        with job.open(worker) as opened:
            assert opened.restored[0].factory == "local"
            job.check(opened)
        assert worker.shared is None
        job.batch(worker, {key(3): b"three"})
        with job.open(worker) as opened:
            job.check(opened)


def test_of_two_attempts_only_the_published_one_counts(job: Job) -> None:
    """A retry, and an attempt that runs somewhere else, see what was published and nothing else."""
    with job.worker("second") as worker, job.worker("third") as other:
        with job.open(worker) as opened:
            job.prepared(opened, {key(1): b"never published"})
        with job.open(worker) as opened, job.open(worker) as second:
            job.check(opened)
            job.prepared(opened, {key(2): b"never published"})
            job.check(second)
        job.batch(other, {key(3): b"elsewhere"})
        with job.open(worker) as opened:
            assert opened.restored[0].bytes_to_come
            job.check(opened)
        job.batch(worker, {key(4): b"here"})
        with job.open(other) as opened:
            job.check(opened)


def test_a_snapshot_that_another_executor_has_made(job: Job) -> None:
    """The segments before it are gone, so the state is opened again from the new snapshot."""
    with job.worker("second") as worker:
        job.batch(worker, {key(1): b"one"})
        before = worker.shared
        job.servers.reconfigure({"task.commit.snapshot.interval": "1 commit"})
        with job.worker("third") as other:
            job.batch(other, {key(2): b"two"})
            job.batch(other, {key(3): b"three"})
        with job.open(worker) as opened:
            assert opened.restored[0].bytes_to_come
            assert worker.shared is not before
            job.check(opened)


def test_a_takeover_and_an_older_checkpoint(job: Job) -> None:
    """Between two batches, another driver takes the job over and publishes from another machine. Then somebody goes
    back to an older checkpoint. Each attempt of the worker sees the checkpoint that it is given."""
    with job.worker("second") as worker, job.worker("third") as other:
        job.batch(worker, {key(1): b"one"})
        before, state = dict(job.checkpoints), dict(job.state)
        late = job.open(worker)
        prepared = job.prepared(late, {key(1): b"too late"})
        with job.servers.manager(job.servers.on_disk(job.servers.config, "driver 2"), "spark-hash(bigint)") as second:
            older, job.manager = job.manager, second
            job.epoch = second.acquire()
            job.checkpoints = job.epoch.checkpoints
            job.batch(other, {key(1): b"of the new driver"})
            with pytest.raises(FencedError):
                older.publish([prepared])
            late.close()
            with job.open(worker) as opened:
                job.check(opened)
            with open_attempt(worker.config, TASK, before[TASK], job.epoch, host=worker.host, by_need=True) as opened:
                assert opened.restored[0].bytes_to_come
                assert dict(opened.store("totals").range()) == state
            with job.open(worker) as opened:
                job.check(opened)


def test_the_checkpoint_topic_loses_what_a_worker_has_followed(job: Job) -> None:
    """After an unclean election, other changes have the numbers of those that were lost. The state is opened again."""
    servers, topic = job.servers, job.servers.config.checkpoint_topic
    with job.worker("second") as worker:
        with job.worker("third") as other:
            job.batch(worker, {key(1): b"one"})
            before, end = dict(job.state), servers.broker.end(topic, 0, only_settled=True)
            job.batch(other, {key(10): b"lost"})
            with job.open(worker) as opened:
                job.check(opened)
        job.manager.close()
        servers.broker.log(topic, 0).lose_from(end)
        with servers.manager(servers.on_disk(servers.config, "driver 2"), "spark-hash(bigint)") as job.manager:
            job.epoch = job.manager.acquire()
            job.checkpoints, job.state = job.epoch.checkpoints, before
            with job.worker("fourth") as other:
                job.batch(other, {key(11): b"new"})
                with job.open(worker) as opened:
                    job.check(opened)
                job.batch(other, {key(12): b"newer"})
            with job.open(worker) as opened:
                job.check(opened)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_state_that_has_followed_half_of_the_way(
    job: Job, gate: Gate, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """The blob store fails between two groups of segments, and then perhaps the last file comes. The state is that of
    no checkpoint: no local copy of the older one, to which somebody goes back, and not open at it."""
    fetch = SegmentCache._fetch

    def fails(self: SegmentCache, segments: Sequence[ChainSegment], scratch: Path) -> object:
        if len(segments) < 16:
            raise UnavailableError("no answer")
        return fetch(self, segments, scratch)

    with job.worker("second") as worker, job.worker("third") as other:
        job.batch(worker, {key(1): b"one"})
        job.open(worker).close()
        older, state = job.checkpoints[TASK], dict(job.state)
        for number in range(20):
            job.batch(other, {key(100 + number): b"later"})
        with monkeypatch.context() as cut:
            cut.setattr(SegmentCache, "_fetch", fails)
            with pytest.raises(UnavailableError):
                job.open(worker)
        if is_whole:
            gate.open.set()
            wait_until(lambda: worker.shared is None or not worker.shared.missing)
        with open_attempt(worker.config, TASK, older, job.epoch, host=worker.host, by_need=True) as opened:
            assert dict(opened.store("totals").range()) == state
        with job.open(worker) as opened:
            job.check(opened)
        gate.open.set()
        wait_until(worker.has_copy)


def test_a_worker_dies_during_the_fill(job: Job, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one on the machine takes over what was fetched."""
    fetch_part, begun, parts = Downloads.fetch_part, list[object](), list[object]()

    def counted(*arguments: object) -> None:
        if len(begun) == most:
            raise UnavailableError("no answer")
        begun.append(arguments)
        fetch_part(*arguments)  # type: ignore[arg-type]
        parts.append((arguments[3].path.name, arguments[4]))  # type: ignore[attr-defined]

    monkeypatch.setattr(Downloads, "fetch_part", counted)
    most = 3
    gate.open.set()
    with job.worker("second") as worker:
        job.batch(worker, {key(1): b"one"})
        wait_until(lambda: len(begun) == most)
        opened = job.open(worker)  # it is open when the worker dies, and links the files
        assert opened.store("totals").get(key(1)) == b"one"
        opened.store("totals").put(key(2), b"lost")
    most = 1_000
    with job.worker("second") as worker:
        with job.open(worker) as opened:
            job.check(opened)
        wait_until(worker.has_copy)
        with job.open(worker) as opened:
            assert opened.restored[0].factory == "local"
            job.check(opened)
    assert len(parts) == len(set(parts)) > 3


def test_one_process_of_a_machine_fetches_the_rest(job: Job, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others read by need meanwhile, and begin from the copy of the first one. If that dies, another one goes on with
    its files."""
    fetch_part, parts = Downloads.fetch_part, list[object]()

    def counted(*arguments: object) -> None:
        parts.append((arguments[3].path.name, arguments[4]))  # type: ignore[attr-defined]
        fetch_part(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Downloads, "fetch_part", counted)
    with job.worker("second") as second:
        with job.worker("second") as first:
            job.batch(first, {key(1): b"one"})
            with job.open(second) as opened:
                job.check(opened)
        job.batch(second, {key(2): b"two"})
        gate.open.set()
        wait_until(second.has_copy)
        with job.worker("second") as third, job.open(third) as opened:
            assert opened.restored[0].bytes_reused > 0
            job.check(opened)
    assert len(parts) == len(set(parts))


def test_a_copy_that_fails_is_tried_again(job: Job, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is here, and RocksDB has replaced files meanwhile: they are not missing."""
    adopt, failed = StoreDirectories.adopt, list[PartialState]()

    def fails_once(self: StoreDirectories, *given: object, **more: object) -> None:
        state = worker.shared
        if not failed and state is not None:
            failed.append(state)
            state.store.compact()
            raise RetryableError("not now")
        adopt(self, *given, **more)  # type: ignore[arg-type]

    with job.worker("second") as worker:
        job.batch(worker, {key(1): b"one"})
        with job.open(worker) as opened:
            job.check(opened)
        monkeypatch.setattr(StoreDirectories, "adopt", fails_once)
        gate.open.set()
        wait_until(worker.has_copy)
        assert failed
        with job.open(worker) as opened:
            assert opened.restored[0].factory == "local"
            job.check(opened)


def test_the_process_that_fetches_the_rest_needs_room_for_it(
    job: Job, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others that read by need open all the same. The rest is fetched when there is room for it."""
    free = 200_000
    with monkeypatch.context() as patch, job.worker("second") as first, job.worker("second") as second:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        gate.open.set()
        for worker in (first, second):
            with job.open(worker) as opened:
                assert opened.restored[0].bytes_to_come > free
                assert opened.store("totals").get(key(100)) == job.state[key(100)]
        wait_until(lambda: "200000 are free" in caplog.text)
        assert not first.has_copy()
        free = 2_000_000
        wait_until(first.has_copy)


@pytest.mark.parametrize("why", ["a new snapshot", "a process that has died"])
def test_a_state_that_is_opened_again_keeps_what_was_fetched(
    job: Job, gate: Gate, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Its own files are among those that the new one takes over."""
    fetched = fetched_sizes(monkeypatch)
    monkeypatch.setattr(flow, "_PAUSE_S", 60)  # this one does not try to fetch the rest before the attempt
    with job.worker("second") as worker:
        with job.worker("second") as dies:
            if why == "a process that has died":  # it fetches the rest
                job.open(dies).close()
                wait_until(lambda: next(iter(dies.host.shared._states.values()))._fetches)
            with job.open(worker) as opened:
                job.check(opened)
        before = worker.shared
        assert fetched
        fetched.clear()
        if why == "a new snapshot":
            job.servers.reconfigure({"task.commit.snapshot.interval": "1 commit"})
            with job.worker("third") as other:
                job.batch(other, {key(2): b"two"})
        with job.open(worker) as opened:
            job.check(opened)
        assert worker.shared is not before
        assert not fetched


def test_a_process_closes_what_another_one_has_fetched(job: Job, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """It keeps the state while an attempt works on it, and nothing of it afterwards."""
    caplog.set_level("INFO")
    with job.worker("second") as first, job.worker("second") as second:
        job.batch(first, {key(1): b"one"})
        with job.open(second) as opened:
            gate.open.set()
            wait_until(lambda: "another process of this machine has fetched all of it" in caplog.text, 60)
            assert second.shared is not None
            job.check(opened)
        assert second.shared is None
        wait_until(lambda: first.shared is None and not any(Path(first.config.state_dir).rglob("staging/*")), 60)
        with job.open(second) as opened:
            assert opened.restored[0].bytes_reused > 0
            job.check(opened)
    assert caplog.text.count("all of it is here") == 1


def test_an_attempt_that_cannot_open_leaves_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch counts no more, so the state can be opened again for an attempt at another checkpoint."""

    def refused(*_: object) -> object:
        raise DiskFull("full")

    with job.worker("second") as worker:
        with monkeypatch.context() as patch:
            patch.setattr(open_store, "ChangeBuffer", refused)
            with pytest.raises(DiskFull):
                job.open(worker)
        (state,) = worker.host.shared._states.values()
        assert not state._branches
        with job.open(worker) as opened:
            job.check(opened)


def test_a_part_that_is_lost(job: Job, gate: Gate) -> None:
    """The attempt that needs it fails, and the next one restores the whole state, which says which blob is missing."""
    with job.worker("second") as worker:
        with job.open(worker) as opened:
            blobs = worker.host.services.blobs()
            for found in list(list_blobs(blobs, "orders/1/")):
                if found.blob_id.endswith(".0") and found.size > 100_000:
                    blobs.delete(found.blob_id)
            with pytest.raises(LocalStateLost):
                dict(opened.store("totals").range())
        with pytest.raises(StatemgrError, match="blob"):
            job.open(worker)
    with job.worker("second") as worker, pytest.raises(StatemgrError, match="blob"):
        job.open(worker)  # Spark ends a worker after an error, so another process has to know it, too


def test_a_state_whose_rest_is_lost_does_not_stay(job: Job, gate: Gate) -> None:
    """The task has moved away when the loss is found, so no attempt closes the state. An attempt that is open when that
    happens goes on, and nothing stays after it."""
    with job.worker("second") as worker, job.worker("third") as other:
        job.open(worker).close()
        with job.open(other) as opened:
            blobs = worker.host.services.blobs()
            for found in list(list_blobs(blobs, "orders/1/")):
                if found.blob_id.endswith(".0") and found.size > 100_000:
                    blobs.delete(found.blob_id)
            gate.open.set()
            wait_until(lambda: worker.shared is None and not worker.unfinished(), 60)
            shared = other.shared
            wait_until(lambda: shared is not None and shared.is_damaged, 60)
            assert other.unfinished()
            opened.store("totals").put(key(1), b"one")
            assert opened.store("totals").get(key(1)) == b"one"
        wait_until(lambda: other.shared is None and not other.unfinished(), 60)


@pytest.mark.parametrize("reachable", [True, False])
def test_a_state_whose_task_has_moved_away(
    job: Job, reachable: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed and removed after ``state.cleanup.delay.ms``, whether the rest arrives slowly or not at all.
    Attempts of all processes of the machine count."""
    caplog.set_level("INFO")

    def unreachable(*_: object) -> None:
        raise UnavailableError("no answer")

    if not reachable:
        monkeypatch.setattr(PartialTables, "fetch_rest", unreachable)
    clock, minutes = job.servers.clock, 60
    with job.worker("second") as worker, job.worker("second") as other:
        with job.open(worker) as opened:
            clock.advance(90 * minutes)
            time.sleep(0.3)
            job.check(opened)
        for process in (worker, other):
            clock.advance(20 * minutes)
            job.open(process).close()
            clock.advance(20 * minutes)
            time.sleep(0.3)
            assert worker.shared is not None
        assert worker.unfinished()
        clock.advance(60 * minutes)
        wait_until(lambda: worker.shared is None and other.shared is None and not worker.unfinished(), 60)
        assert "no process of this machine uses it" in caplog.text
        with job.open(worker) as opened:
            assert opened.restored[0].bytes_to_come
            job.check(opened)


def test_a_blob_store_that_cannot_be_reached(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt fails with an error that may pass, and the next one continues."""

    def unreachable(*_: object) -> memoryview:
        raise UnavailableError("no answer")

    with job.worker("second") as worker:
        with job.open(worker) as opened, monkeypatch.context() as cut:
            cut.setattr(Downloads, "get_range", unreachable)
            with pytest.raises(StateUnreachable, match="no answer"):
                opened.store("totals").get(key(3_000))
        with job.open(worker) as opened:
            job.check(opened)


def test_a_commit_that_fills_another_backend(job: Job) -> None:
    """It needs all files, so the attempt restores the whole state. So does one whose driver says that a backup has to
    be made again."""
    job.servers.reconfigure({"task.backup.factories": ["blob-store", "kafka-changelog"]})
    with job.worker("second") as worker, job.open(worker) as opened:
        assert not opened.restored[0].bytes_to_come
        assert job.prepared(opened, {key(1): b"one"}) is not None
    job.servers.reconfigure({"task.backup.factories": ["blob-store"]})
    job.epoch = replace(job.epoch, refill={TASK: frozenset({("blob-store", "totals")})})
    with job.worker("third") as worker, job.open(worker) as opened:
        assert not opened.restored[0].bytes_to_come
        job.check(opened)
