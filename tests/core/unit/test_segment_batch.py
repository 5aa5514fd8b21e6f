"""segment_batch: commits of several tasks share one blob, and a failure of one does not affect the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from statemgr.backends.blobs import segment_batch
from statemgr.backends.blobs.segment_batch import SegmentBatches, Stored
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.config import JobConfig
from statemgr.errors import DiskFull, RetryableError, UnavailableError
from statemgr.local.machine import SystemClock, Threads
from statemgr.model.checkpoint import BlobRef
from statemgr.model.hashing import content_hash
from statemgr.ports import Body, FileSlice, StoreIdentity
from statemgr.services import Services
from statemgr.transfer import packs
from statemgr.transfer.transfer import Transfer
from statemgr.wiring import open_services
from tests.few_threads import no_new_threads
from tests.small_disks import fill


class SlowStore(MemoryBlobStore):
    """A store whose uploads can wait or fail."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.open = threading.Event()
        self.open.set()
        self.failing = False
        self.names: list[str] = []

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        self.names.append(blob_id)
        assert self.open.wait(30)
        if self.failing:
            raise UnavailableError("the store is away")
        super().put(blob_id, body, ttl_days=ttl_days)


@pytest.fixture
def store() -> SlowStore:
    """The store for the blobs."""
    return SlowStore()


@pytest.fixture
def batches(store: SlowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentBatches]:
    """Batches that wait for announced commits, however long it takes."""
    monkeypatch.setattr(segment_batch, "LINGER_S", 30)
    transfer = Transfer(store, SystemClock(), Threads(), parallelism=1, part_size=1000, ttl_days=30, hedged=True)
    batches = SegmentBatches(services_of(transfer, tmp_path))
    yield batches
    store.open.set()
    batches.close()
    transfer.close()


def services_of(transfer: Transfer, directory: Path) -> Services:
    """Return a job's services with this transfer engine."""
    settings = {"job.name": "j", "state.dir": str(directory / "state"), "task.commit.timeout.ms": 20_000}
    return replace(open_services(JobConfig.from_mapping(settings)), transfer=lambda: transfer)


def owner(task: int) -> StoreIdentity:
    """Return a task's store."""
    return StoreIdentity("j", "1", f"Partition {task}", "s")


def write(batches: SegmentBatches, task: int, data: bytes, fail: bool = False) -> tuple[BlobRef, Stored]:
    """Make one commit, and return its section and the result of the batch."""

    def section(sink: object) -> None:
        sink.write(data)  # type: ignore[attr-defined]
        if fail:
            raise RetryableError("half way")

    with batches.joined(owner(task), f"{task}-a", len(data)) as (blob, done):
        ref = blob.section(section)
    return ref, batches.wait(done)


def together(batches: SegmentBatches, *commits: Callable[[], object]) -> list[object]:
    """Run commits at the same time in one batch. Errors are results."""

    def tried(commit: Callable[[], object]) -> object:
        try:
            return commit()
        except RetryableError as error:
            return error

    with ThreadPoolExecutor(len(commits)) as pool:
        with batches.coming():
            running = [pool.submit(tried, commit) for commit in commits]
            while batches._open is None or len(batches._open.tasks) < len(commits) or batches._open.writers:
                threading.Event().wait(0.001)
        return [future.result() for future in running]


def content(store: SlowStore, name: str) -> bytes:
    """Return a blob's bytes."""
    with store.get(name) as reader:
        buffer = bytearray(1 << 20)
        return bytes(buffer[: reader.readinto(memoryview(buffer))])


def test_commits_that_come_together_share_a_blob(batches: SegmentBatches, store: SlowStore) -> None:
    """C5, C7: one PUT stores all commits, and each knows where its bytes are. The blob's name belongs to no task."""
    found = together(batches, *(lambda n=n: write(batches, n, b"%d" % n * 100) for n in range(4)))
    assert len(store.names) == 1
    assert store.names[0].startswith("j/1/_segments/")
    data = content(store, store.names[0])
    for number, (ref, stored) in enumerate(found):  # type: ignore[misc]
        assert len(stored.tasks) > 1
        assert stored.blob_id == store.names[0]
        assert data[ref.offset : ref.offset + ref.size] == b"%d" % number * 100
        assert ref.hash == content_hash(b"%d" % number * 100)


def test_a_commit_alone_waits_for_nobody(batches: SegmentBatches, store: SlowStore) -> None:
    """C7: if no other commit is coming, the upload starts at once, under the task's own name."""
    _, stored = write(batches, 3, b"x")
    assert stored.blob_id == "j/1/Partition_3/_segments/3-a"
    assert not stored.tasks


def test_a_batch_that_nobody_can_run_gets_no_commits(
    batches: SegmentBatches, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a thread for it, the commit fails, and can be repeated. The next one begins another batch."""
    with no_new_threads(monkeypatch), pytest.raises(RetryableError, match="new thread"):
        write(batches, 0, b"x")
    ref, stored = write(batches, 0, b"again")
    assert content(store, stored.blob_id)[ref.offset : ref.offset + ref.size] == b"again"


def test_one_that_fails_spoils_nothing_of_the_others(batches: SegmentBatches, store: SlowStore) -> None:
    """C5: the other commits' sections stay intact, even around the partial section of a failed commit."""
    found = together(
        batches,
        lambda: write(batches, 0, b"a" * 10),
        lambda: write(batches, 1, b"broken", fail=True),
        lambda: write(batches, 2, b"c" * 10),
    )
    assert isinstance(found[1], RetryableError)
    data = content(store, store.names[0])
    for number, expected in ((0, b"a" * 10), (2, b"c" * 10)):
        ref, _ = found[number]  # type: ignore[misc]
        assert data[ref.offset : ref.offset + ref.size] == expected
        assert ref.hash == content_hash(expected)


def test_a_failed_upload_fails_all_its_commits_and_no_later_one(batches: SegmentBatches, store: SlowStore) -> None:
    """C2: an upload error fails each commit of the batch. The next batch is a new one."""
    store.failing = True
    found = together(batches, *(lambda n=n: write(batches, n, b"x") for n in range(2)))
    assert all(isinstance(result, UnavailableError) for result in found)
    store.failing = False
    assert write(batches, 0, b"y")[1].blob_id in store.names


def test_a_batch_that_ends_when_the_wait_does_is_stored(batches: SegmentBatches) -> None:
    """A process was suspended for longer than a commit may take: the batch has ended, too, when it goes on."""

    class Late(Future[Stored]):
        def result(self, timeout: float | None = None) -> Stored:
            if self.done():
                return super().result()
            self.set_result(Stored("name", b""))
            raise TimeoutError

    assert batches.wait(Late()).blob_id == "name"


def test_a_batch_takes_no_more_than_a_limit(
    batches: SegmentBatches, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: a commit that would make a batch too large goes into another one."""
    monkeypatch.setattr(segment_batch, "_FULL", 100)
    store.open.clear()
    with ThreadPoolExecutor(2) as pool, batches.coming():
        first = pool.submit(write, batches, 0, b"x" * 80)
        while batches._open is None or batches._open.writers or not batches._open.blob.size:
            threading.Event().wait(0.001)
        second = pool.submit(write, batches, 1, b"y" * 80)
        while 1 not in {int(name.rpartition(" ")[2]) for name in (batches._open.tasks if batches._open else ())}:
            threading.Event().wait(0.001)
        store.open.set()
    assert first.result(30)[1].blob_id != second.result(30)[1].blob_id


def test_large_blobs_are_made_on_disk(
    batches: SegmentBatches, store: SlowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 13: a batch that is too large for memory goes to a scratch file, which is deleted afterwards."""
    monkeypatch.setattr(packs, "IN_MEMORY", 100)
    found = together(batches, *(lambda n=n: write(batches, n, b"%d" % n * 80) for n in range(3)))
    data = content(store, store.names[0])
    for number, (ref, stored) in enumerate(found):  # type: ignore[misc]
        assert data[ref.offset : ref.offset + ref.size] == b"%d" % number * 80
        assert not isinstance(stored.body, bytes)
    assert not list((tmp_path / "scratch").rglob("segments-*"))


def assert_whole(blob: packs.PackedBlob, *sections: BlobRef) -> None:
    """Check sections of a blob that is in a file, and close the blob."""
    body = blob.body()
    assert isinstance(body, FileSlice)
    data = body.path.read_bytes()
    for ref in sections:
        assert ref.offset is not None
        assert content_hash(data[ref.offset : ref.offset + ref.size]) == ref.hash
    blob.close()


def test_a_full_disk_spoils_only_the_section_that_met_it(small_disk: Path) -> None:
    """What a failed section has left in the file would move the sections after it. So these fail, too, and those before
    it stay whole."""
    blob = packs.PackedBlob(small_disk / "segments")
    first = blob.section(lambda sink: sink.write(b"1" * packs.IN_MEMORY))
    second = blob.section(lambda sink: sink.write(b"2" * 1000))
    ballast = small_disk / "ballast"
    fill(ballast, leave=1_500_000)
    with pytest.raises(DiskFull):
        blob.section(lambda sink: [sink.write(os.urandom(1_000_000)) for _ in range(3)])
    ballast.unlink()
    with pytest.raises(DiskFull):
        blob.section(lambda sink: sink.write(b"3" * 1000))
    assert_whole(blob, first, second)
    assert list(small_disk.iterdir()) == []


def test_a_blob_that_cannot_move_to_the_disk_stays_in_memory(small_disk: Path) -> None:
    """The section that needs the file fails. When there is room again, the next one moves the blob, and nothing is
    left."""
    blob = packs.PackedBlob(small_disk / "segments")
    first = blob.section(lambda sink: sink.write(b"1" * packs.IN_MEMORY))
    ballast = small_disk / "ballast"
    fill(ballast, leave=1_000_000)
    with pytest.raises(DiskFull):
        blob.section(lambda sink: sink.write(b"2" * 1000))
    assert list(small_disk.iterdir()) == [ballast]
    ballast.unlink()
    third = blob.section(lambda sink: sink.write(b"3" * 1000))
    assert_whole(blob, first, third)
    assert list(small_disk.iterdir()) == []
