"""Garbage collection on a blob store in memory, with the records that a test puts on the topic."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from statemgr.backends.blobs.backup import BlobBackup
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.config import JobConfig
from statemgr.errors import (
    AccessDenied,
    CorruptBlob,
    InvalidError,
    MissingBlob,
    MissingState,
    PermissionNeeded,
    RetryableError,
)
from statemgr.flows.committing.limits import SHORTEST_GRACE_MS, check_young
from statemgr.health.verify_blobs import verify_blobs
from statemgr.ids import CheckpointId, IdSource
from statemgr.model.checkpoint import (
    Attachment,
    BlobRef,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Layout,
    Marker,
    OpaqueMarker,
    OutstandingTtl,
)
from statemgr.model.commit import PreparedCommit
from statemgr.model.jobs.layouts import RetiredLayout
from statemgr.model.jobs.offers import Offer, OfferKey
from statemgr.operations.gc import gc as collecting
from statemgr.operations.gc.gc import BlobStatus, GarbageReport, collect_garbage
from statemgr.ports import BackupManager, PreparedBackup, StoreIdentity, StoreSnapshot, list_blobs, no_progress
from statemgr.wiring import open_services
from tests.blob_faults import ManualClock
from tests.blob_snapshots import IDENTITY, Snapshots, Tree, index_of

DAY_S = 24 * 3600
#: A blob of segments that several tasks may share.
SHARED = "orders/1/_segments/1700000000000-0123456789abcdef"


def tree(number: int) -> Tree:
    """Return a directory with one file that all trees share and one file of its own, both too large to be inline.

    The shared file is also too large for a pack, with parts of 50,000 bytes."""
    return {"shared.sst": b"shared" * 10_000, f"{number:06}.sst": b"%d" % number * 30_000}


class Topic:
    """The records that a test puts on the topic. ``meanwhile`` holds what happens before each read."""

    def __init__(self) -> None:
        self.records: dict[str, CheckpointRecord] = {}
        self.gone = False
        self.meanwhile: list[Callable[[], object] | None] = []

    def read(self, tasks: Collection[str] | None = None) -> Mapping[str, CheckpointRecord]:
        """Read the records, after the next event in ``meanwhile``."""
        happens = self.meanwhile.pop(0) if self.meanwhile else None
        if happens is not None:
            happens()
        if self.gone:
            raise MissingState("the checkpoint topic does not exist")
        return {task: record for task, record in self.records.items() if tasks is None or task in tasks}

    def adopted(self) -> None:
        """Return no job of other software."""

    def retired(self) -> Sequence[RetiredLayout]:
        """Return no retired layouts."""
        return ()

    def record_keys(self, generation: int) -> Sequence[bytes]:
        """Return no record keys."""
        return ()

    def job_records(self) -> Collection[int]:
        """Return no job records."""
        return ()

    def offers(self) -> Mapping[OfferKey, Offer]:
        """Return no offers."""
        return {}

    def was_truncated(self) -> bool:
        """Report that the topic was not truncated."""
        return False


class Job:
    """A job with one task and one store. The test plays the owner's part."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = ManualClock()
        self.clock.now = 1_700_000_000.0
        name = secrets.token_hex(8)
        self.config = JobConfig.from_mapping(
            {
                "job.name": IDENTITY.job_name,
                "blob.store.uri": f"memory://{name}",
                "task.backup.factories": ["blob-store"],
                "state.dir": str(tmp_path / "state"),
            }
        )
        self.services = open_services(self.config, self.clock)
        self.blobs = MemoryBlobStore(self.clock, name)
        self.topic = Topic()
        self._tmp_path = tmp_path
        self._stores: dict[StoreIdentity, Snapshots] = {}

    def store(self, task: str = IDENTITY.task, store: str = IDENTITY.store) -> Snapshots:
        """Return the backend of one store."""
        identity = StoreIdentity(IDENTITY.job_name, IDENTITY.job_id, task, store)
        if identity not in self._stores:
            path = self._tmp_path / f"store-{len(self._stores)}"
            self._stores[identity] = Snapshots(path, self.blobs, self.clock, identity=identity, part_size=50_000)
        return self._stores[identity]

    def checkpoint(self, markers: Mapping[str, Mapping[str, Marker]], **more: object) -> Checkpoint:
        """Return a checkpoint taken now."""
        values: dict[str, object] = {"sequence": 1, "epoch": 1, "input_offsets": {}, "stores": {}}
        values |= {"checkpoint_id": CheckpointId.at(self.clock.time_ns()), "state_checkpoint_markers": markers}
        return Checkpoint(**(values | more))  # type: ignore[arg-type]

    def publish(self, *checkpoints: Checkpoint, task: str = IDENTITY.task, tasks: int = 1) -> None:
        """Set the checkpoints that the task retains from now on, newest first."""
        layout = Layout(0, tasks, "kafka-partition")
        record = CheckpointRecord(IDENTITY.job_name, IDENTITY.job_id, task, layout, checkpoints)
        self.topic.records[task] = record

    def commit(self, number: int, base: Marker | None = None, **more: object) -> Checkpoint:
        """Return an unpublished commit of ``totals``."""
        return self.checkpoint({"blob-store": {"totals": self.store().commit(tree(number), base)}}, **more)

    def evict(self, old: Checkpoint, new: Checkpoint) -> None:
        """Delete what the owner deletes when it retains only ``new``."""
        markers = [c.marker("blob-store", "totals") for c in (old, new)]
        self.store().clean_up(markers[:1], markers[1:])  # type: ignore[arg-type]

    def later(self, seconds: float = 2 * DAY_S) -> None:
        """Let time pass."""
        self.clock.now += seconds

    def collect(self, grace_ms: int | None = None, **options: bool) -> GarbageReport:
        """Run one collection, which deletes unless options say otherwise."""
        options = options or {"delete": True}
        return collect_garbage(self.services, self.topic, no_progress, grace_ms=grace_ms, **options)

    def names(self) -> set[str]:
        """Return the name of every blob in the store."""
        return {info.blob_id for info in list_blobs(self.blobs, "")}

    def needed(self, *checkpoints: Checkpoint) -> set[str]:
        """Return the blobs of ``totals`` that the checkpoints need."""
        markers = [c.marker("blob-store", "totals") for c in checkpoints]
        return self.store().referenced(*markers)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop the threads."""
        self.services.close()
        for snapshots in self._stores.values():
            snapshots.transfer.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job without checkpoints."""
    made = Job(tmp_path)
    yield made
    made.close()


def blobs_of(found: GarbageReport) -> dict[str, int]:
    """Return the number of blobs for each status that occurs."""
    return {status.value: count.blobs for status, count in found.counts.items() if count.blobs}


# --- what is garbage ----------------------------------------------------------------------------------------


def test_garbage_is_what_nothing_needs_and_what_is_old(job: Job) -> None:
    """Protocol 8: a collection keeps retained and young blobs and deletes the rest. A second one finds nothing."""
    retained = job.commit(1)
    job.publish(retained)
    orphan = job.store().prepare(tree(2))
    job.later()
    young = job.store().prepare(tree(3))
    before = job.names()
    found = job.collect()
    assert blobs_of(found) == {"kept": 3, "young": 3, "orphans": 3}
    assert found.deleted.blobs == 3
    assert found.deleted.size == found.counts[BlobStatus.ORPHAN].size > 80_000
    assert job.names() == before - set(orphan.added_blobs) == job.needed(retained) | set(young.added_blobs)
    assert job.collect().deleted.blobs == 0
    job.later()
    job.collect()
    assert job.names() == job.needed(retained)


def test_a_dry_run_deletes_nothing(job: Job) -> None:
    """Without an option to delete, a collection only reports what it would delete."""
    job.publish(job.commit(1))
    orphan = job.store().prepare(tree(2))
    job.later()
    before = job.names()
    found = job.collect(delete=False)
    assert (found.counts[BlobStatus.ORPHAN].blobs, found.deleted.blobs) == (3, 0)
    assert set(found.examples) == set(orphan.added_blobs)
    assert job.names() == before


def test_everything_that_a_retained_checkpoint_names_is_kept(job: Job) -> None:
    """Invariant 3: older checkpoints, shared files, output rows and outstanding TTLs of every task are kept."""
    first = job.commit(1)
    base = first.marker("blob-store", "totals")
    job.blobs.put("orders/1/Partition_0/_commit/a/rows", b"rows", ttl_days=None)
    job.blobs.put("orders/1/Partition_0/totals/a/outstanding", b"x", ttl_days=None)
    rows = Attachment("rows", blob=BlobRef("orders/1/Partition_0/_commit/a/rows", 4, bytes(16)))
    outstanding = (OutstandingTtl("orders/1/Partition_0/totals/a/outstanding", 1),)
    second = job.commit(2, base, attachments=(rows,), outstanding_ttl=outstanding)
    job.publish(second, first, tasks=2)
    other = job.store("Partition 1").commit(tree(3))
    changelog = {"totals": ChangelogMarker("t", "id", 1, 5)}
    job.publish(
        job.checkpoint({"blob-store": {"totals": other}, "kafka-changelog": changelog}), task="Partition 1", tasks=2
    )
    before = job.names()
    job.later()
    found = job.collect()
    assert blobs_of(found) == {"kept": len(before)}
    assert job.names() == before
    assert not found.missing


def test_removed_stores_and_tasks_are_garbage(job: Job) -> None:
    """A12: no checkpoint names a removed store or task, so a collection deletes all its blobs, published or not."""
    retained = job.commit(1)
    job.publish(retained)
    job.store(store="removed").commit(tree(2))
    job.store("Partition 7").commit(tree(3))
    job.later()
    assert job.collect().deleted.blobs == 6
    assert job.names() == job.needed(retained)


def test_a_task_of_the_layout_without_a_checkpoint_is_left_alone(job: Job) -> None:
    """FAULT 17: the task's record may be lost, so its blobs are kept. A one-time permission allows their deletion."""
    retained = job.commit(1)
    job.publish(retained, tasks=2)
    job.store("Partition 1").commit(tree(2))
    job.later()
    found = job.collect()
    assert blobs_of(found) == {"kept": 3, "unknown": 3}
    assert len(job.names()) == 6
    job.collect(delete=True, allow_no_checkpoints=True)
    assert job.names() == job.needed(retained)


def test_a_partition_without_input_keeps_no_shared_garbage(job: Job) -> None:
    """A task that never had a message has no checkpoint and no blobs, so segments that no checkpoint needs and that
    several tasks could share are garbage."""
    retained = job.commit(1)
    job.publish(retained, tasks=2)
    job.blobs.put(SHARED, b"x", ttl_days=None)
    job.later()
    assert blobs_of(job.collect()) == {"kept": 3, "orphans": 1}
    assert job.names() == job.needed(retained)


def test_a_task_whose_record_was_lost_keeps_what_tasks_share(job: Job) -> None:
    """FAULT 17: if only the index of its snapshot is left, the task may need segments that it shared with others."""
    job.publish(job.commit(1), tasks=2)
    index = "orders/1/Partition_1/totals/1700000000000-0123456789abcdef/index"
    for name in (SHARED, index):
        job.blobs.put(name, b"x", ttl_days=None)
    job.later()
    assert blobs_of(job.collect()) == {"kept": 3, "unknown": 2}
    assert {SHARED, index} <= job.names()


def test_other_jobs_and_foreign_names_are_left_alone(job: Job) -> None:
    """A collection looks only below the job's own prefix."""
    job.publish(job.commit(1))
    for name in ("orders/10/Partition_0/totals/a/index", "orders2/1/Partition_0/x", "elsewhere"):
        job.blobs.put(name, b"x", ttl_days=None)
    job.later()
    assert blobs_of(job.collect()) == {"kept": 3}
    assert len(job.names()) == 6


def test_a_job_without_checkpoints_is_refused(job: Job) -> None:
    """FAULT 17: a missing or empty topic deletes no state. Giving up the job needs an explicit permission."""
    job.store().commit(tree(1))
    job.later()
    with pytest.raises(PermissionNeeded, match="no checkpoint") as caught:
        job.collect()
    assert "--allow-no-checkpoints" in str(caught.value.hint)
    job.topic.gone = True
    with pytest.raises(MissingState):
        job.collect()
    assert len(job.names()) == 3
    assert job.collect(delete=True, allow_no_checkpoints=True).deleted.blobs == 3
    assert job.names() == set()


# --- what stops it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", [False, True])
def test_an_unreadable_index_stops_everything(job: Job, spoilt: bool) -> None:
    """FAULTS 12, 13: without a readable index the collection cannot know what it needs, so it deletes nothing."""
    retained = job.commit(1)
    job.publish(retained)
    job.store().prepare(tree(2))
    index = index_of(retained.marker("blob-store", "totals")).blob_id
    job.blobs.delete(index)
    if spoilt:
        job.blobs.put(index, b"spoilt", ttl_days=None)
    job.later()
    before = job.names()
    with pytest.raises(CorruptBlob if spoilt else MissingBlob) as caught:
        job.collect()
    assert caught.value.where["blob"] == index
    assert caught.value.where["task"] == IDENTITY.task
    assert job.names() == before


def test_a_missing_part_is_named_and_nothing_is_deleted(job: Job) -> None:
    """FAULT 13: if retained state has lost a blob, the garbage may help to repair it, so nothing is deleted."""
    retained = job.commit(1)
    job.publish(retained)
    job.store().prepare(tree(2))
    part = sorted(job.needed(retained))[0]
    job.blobs.delete(part)
    job.later()
    before = job.names()
    found = job.collect()
    assert found.missing == [part]
    assert found.counts[BlobStatus.ORPHAN].blobs == 3
    assert found.deleted.blobs == 0
    assert job.names() == before


def test_a_backend_that_does_not_say_what_it_needs(job: Job) -> None:
    """An external backend may keep blobs below the job's prefix. If it cannot list them, the collection is refused."""

    class Outside(BackupManager):
        def prepare(self, snapshot: StoreSnapshot, base: Marker | None, *, portable: bool) -> PreparedBackup:
            raise NotImplementedError

    services = replace(job.services, backup_manager=lambda factory: Outside())
    job.publish(job.checkpoint({"some.where:Backend": {"totals": OpaqueMarker(b"x")}}))
    job.store().prepare(tree(1))
    job.later()
    with pytest.raises(InvalidError, match="does not say"):
        collect_garbage(services, job.topic, no_progress, delete=True)
    assert len(job.names()) == 3


def test_a_short_grace_period_is_refused(job: Job) -> None:
    """FAULT 38: a grace period may not be shorter than what a publish relies on. A longer one is used."""
    job.publish(job.commit(1))
    job.store().prepare(tree(2))
    for grace_ms in (0, SHORTEST_GRACE_MS - 1):
        with pytest.raises(InvalidError, match="too short"):
            job.collect(delete=True, grace_ms=grace_ms)
    job.later()
    assert blobs_of(job.collect(delete=True, grace_ms=3 * DAY_S * 1000)) == {"kept": 3, "young": 3}


def test_deletes_that_fail_are_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names blobs that could not be deleted, and the next collection deletes them."""
    job.publish(job.commit(1))
    orphan = job.store().prepare(tree(2))
    job.later()
    refused = sorted(orphan.added_blobs)[0]
    delete = MemoryBlobStore.delete

    def deny(self: MemoryBlobStore, blob_id: str) -> None:
        if blob_id == refused:
            raise AccessDenied("told to", blob=blob_id)
        delete(self, blob_id)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryBlobStore, "delete", deny)
        found = job.collect()
    assert (list(found.failed), found.deleted.blobs) == ([refused], 2)
    assert job.collect().deleted.blobs == 1


# --- a job that runs in the meantime ------------------------------------------------------------------------


def test_an_index_that_was_evicted_meanwhile_is_no_loss(job: Job) -> None:
    """The owner publishes and deletes its old index between the collection's reads of the topic and of the index."""
    first = job.commit(1)
    job.publish(first)
    second = job.commit(2)
    job.later()
    job.topic.meanwhile = [lambda: job.evict(first, second), lambda: job.publish(second)]
    assert job.collect().missing == []
    assert job.topic.meanwhile == []
    assert job.names() == job.needed(second)


def test_a_job_that_always_publishes_first_is_left_alone(job: Job) -> None:
    """FAULT 38: if every index vanishes before it is read, the collection ends with a note and deletes nothing."""
    checkpoint = first = job.commit(0)
    job.publish(first)
    job.store().commit({"killed.sst": b"garbage" * 10_000})
    job.blobs.put(SHARED, b"x", ttl_days=None)
    before: list[Checkpoint] = [first]

    def publish_and_evict() -> None:
        nonlocal checkpoint
        new = job.commit(len(before), checkpoint.marker("blob-store", "totals"))
        job.publish(new)
        before.append(new)
        checkpoint = new

    def published_meanwhile(tasks: Collection[str] | None = None) -> Mapping[str, CheckpointRecord]:
        records = Topic.read(job.topic, tasks)
        last = checkpoint
        publish_and_evict()
        job.evict(last, checkpoint)
        return records

    job.later()
    job.topic.read = published_meanwhile  # type: ignore[method-assign]
    found = job.collect()
    assert len(before) > 30
    assert found.missing == []
    assert found.deleted.blobs == 0
    assert found.counts[BlobStatus.UNKNOWN].blobs >= 1
    assert any("are kept this time" in note for note in found.notes)
    assert job.names() >= job.needed(checkpoint)
    # when the job is idle again, a collection deletes the garbage
    del job.topic.read
    job.later()
    assert job.collect().deleted.blobs >= 1
    assert job.names() == job.needed(checkpoint)


def test_an_evicted_index_does_not_make_its_old_blobs_garbage(job: Job) -> None:
    """FAULT 38: the owner evicts the newest index while it is read. Old blobs that its successor still needs stay."""
    first = job.commit(1)
    job.publish(first)
    job.later()
    second = job.commit(2, first.marker("blob-store", "totals"))
    job.topic.meanwhile = [lambda: job.evict(first, second), lambda: job.publish(second)]
    found = job.collect()
    assert (found.missing, found.notes) == ([], [])
    shared = [name for name in job.needed(second) if "shared" in name]
    assert shared
    assert job.names() == job.needed(second)


@pytest.mark.parametrize("seen_at", [2, 3])
def test_a_part_that_was_evicted_meanwhile_is_no_loss(job: Job, monkeypatch: pytest.MonkeyPatch, seen_at: int) -> None:
    """The owner deletes a blob between mark and listing. A later look at the topic shows that it is not lost."""
    first = job.commit(1)
    job.publish(first)
    job.later()
    second = job.commit(2)
    survey = collecting._survey

    def after_an_eviction(*arguments: object) -> set[str]:
        job.evict(first, second)
        unseen = survey(*arguments)  # type: ignore[arg-type]
        assert len(unseen) == 3
        return unseen

    monkeypatch.setattr(collecting, "_survey", after_an_eviction)
    job.topic.meanwhile = [*[None] * (seen_at - 1), lambda: job.publish(second)]
    assert job.collect().missing == []
    assert job.names() == job.needed(second)


def test_tasks_are_read_in_parallel_and_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexes of two tasks are read at the same time, also by a verification. The next search asks for nothing that
    it knows."""
    tasks = ("Partition 0", "Partition 1")
    made = [job.checkpoint({"blob-store": {"totals": job.store(task).commit(tree(1))}}) for task in tasks]
    for task, checkpoint in zip(tasks, made, strict=True):
        job.publish(checkpoint, task=task, tasks=2)
    both, get = threading.Barrier(2, timeout=30), MemoryBlobStore.get
    indexes: list[str] = []
    asked: list[StoreIdentity] = []

    def read(self: MemoryBlobStore, blob_id: str, *arguments: int) -> object:
        if blob_id.endswith("/index"):
            indexes.append(blob_id)
            both.wait()
        return get(self, blob_id, *arguments)

    monkeypatch.setattr(MemoryBlobStore, "get", read)
    referenced = BlobBackup.referenced_blobs

    def count(self: BlobBackup, identity: StoreIdentity, marker: Marker) -> Collection[str]:
        asked.append(identity)
        return referenced(self, identity, marker)

    monkeypatch.setattr(BlobBackup, "referenced_blobs", count)
    assert job.collect().missing == []
    assert sorted(identity.task for identity in asked) == list(tasks)
    found = verify_blobs(job.services, job.topic.read, (), 0.0, no_progress)
    assert (found.tasks, found.damaged) == (2, [])
    assert len(indexes) == 4


def test_what_is_published_between_the_two_looks_is_kept(job: Job) -> None:
    """FAULT 38, protocol 8: a commit published between the two looks keeps its blobs, even if they seem old enough."""
    first = job.commit(1)
    job.publish(first)
    second = job.commit(2, first.marker("blob-store", "totals"))
    job.later()
    job.topic.meanwhile = [None, lambda: job.publish(second)]
    found = job.collect()
    assert found.counts[BlobStatus.ORPHAN].blobs > 0
    assert found.deleted.blobs == 0
    assert job.names() >= job.needed(second) | job.needed(first)


def prepared(job: Job, age_s: float, *, added: bool = True) -> PreparedCommit:
    """Return a prepared commit whose attempt began that long ago."""
    attempt = f"{int((job.clock.now - age_s) * 1000)}-{'0' * 16}"
    blobs = ("orders/1/Partition_0/totals/a/index",) if added else ()
    return PreparedCommit("orders", "1", "Partition 0", Layout(0, 1, "x"), 1, attempt, None, {}, {}, blobs)


def test_a_commit_that_is_too_old_is_not_published(job: Job) -> None:
    """FAULTS 38 and 54, protocol 8: a commit whose new blobs are older than half the grace period is not published. A
    commit without new blobs may be of any age."""

    def check(commit: PreparedCommit, age_in_store_s: float) -> None:
        check_young(job.config, IdSource(job.clock.time_ns, str), commit, lambda _: int(age_in_store_s * 1000))

    check(prepared(job, DAY_S / 2 - 1), 10 * DAY_S)
    check(prepared(job, 10 * DAY_S, added=False), 10 * DAY_S)
    with pytest.raises(RetryableError, match="garbage"):
        check(prepared(job, DAY_S / 2 + 1), DAY_S / 2 + 1)
    # when clocks differ by days, the blob store's clock decides
    for skew_s in (-3 * DAY_S, 3 * DAY_S):
        check(prepared(job, skew_s), 60)
        with pytest.raises(RetryableError, match="garbage"):
            check(prepared(job, skew_s), DAY_S / 2 + 1)


def test_a_commit_whose_blob_is_gone_is_made_again(job: Job) -> None:
    """A clock that has jumped is no reason to end a loop for a blob that nothing published needs."""

    def gone(blob_ids: object) -> NoReturn:
        raise MissingBlob("the blob does not exist", blob="orders/1/Partition_0/totals/a/index")

    with pytest.raises(RetryableError, match="was deleted before"):
        check_young(job.config, IdSource(job.clock.time_ns, str), prepared(job, DAY_S), gone)


# --- TTLs, order, numbers -----------------------------------------------------------------------------------


def test_published_blobs_that_would_expire_are_named_and_repaired(job: Job) -> None:
    """FAULT 34: ``fix`` removes the TTL from blobs of an old checkpoint. Young blobs are left to their owner."""
    added = job.store().prepare(tree(1))
    job.publish(job.checkpoint({"blob-store": {"totals": added.marker}}))  # type: ignore[dict-item]
    assert job.collect(delete=False).expiring == []
    job.later()
    assert set(job.collect(delete=False).expiring) == set(added.added_blobs)
    assert all(info.expires_ms is not None for info in list_blobs(job.blobs, ""))
    found = job.collect(fix=True)
    assert set(found.fixed) == set(added.added_blobs)
    assert all(info.expires_ms is None for info in list_blobs(job.blobs, ""))
    assert job.collect(delete=False).expiring == []


def test_indexes_are_deleted_last(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes are deleted after all other blobs, so that a killed collection leaves no blobs without their index."""
    job.publish(job.commit(1))
    for number in (2, 3, 4):
        job.store().prepare(tree(number))
    job.later()
    deleted: list[str] = []
    delete = MemoryBlobStore.delete

    def note(self: MemoryBlobStore, blob_id: str) -> None:
        deleted.append(blob_id)
        delete(self, blob_id)

    monkeypatch.setattr(MemoryBlobStore, "delete", note)
    job.collect()
    assert [name.endswith("/index") for name in deleted] == [False] * 6 + [True] * 3


def test_many_blobs_are_deleted_in_small_numbers(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 13: the collection holds a bounded number of names at a time, however much garbage there is."""
    job.publish(job.commit(1))
    for number in range(2_500):
        job.blobs.put(f"orders/1/Partition_0/totals/a/{number}", b"x", ttl_days=30)
    job.later()
    sizes: list[int] = []
    delete_all = job.services.transfer().delete_all

    def note(names: Iterator[str]) -> object:
        held = list(names)
        sizes.append(len(held))
        return delete_all(held)

    monkeypatch.setattr(job.services.transfer(), "delete_all", note)
    assert job.collect().deleted.blobs == 2_500
    assert sizes == [1000, 1000, 500]


def test_temporaries_of_dead_writers_go(job: Job, tmp_path: Path) -> None:
    """FAULT 2: in a directory of blobs, a collection deletes the old temporary files of killed writers."""
    directory = tmp_path / "blobs"
    mapping = {**job.config.to_mapping(), "blob.store.uri": directory.as_uri()}
    services = open_services(JobConfig.from_mapping(mapping))
    job.publish(job.checkpoint({}))
    services.blobs().put("orders/1/Partition_0/totals/a/0", b"x", ttl_days=30)
    place = directory / "orders/1/Partition_0/totals/a"
    old, young = place / ".0123.tmp", place / ".4567.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1_000_000_000, 1_000_000_000))
    try:
        found = collect_garbage(services, job.topic, no_progress, delete=True)
        assert (found.unfinished, found.abandoned) == (1, 1)
        assert (old.exists(), young.exists()) == (False, True)
        assert blobs_of(found) == {"young": 1}
    finally:
        services.close()
