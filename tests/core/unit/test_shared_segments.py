"""The clean-up of blobs that several tasks share, and what a clean-up asks for and keeps in memory."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from statemgr.backends.blobs import catalogue, clean_up
from statemgr.backends.blobs.clean_up import Cleaner, Needs, SharedSegments
from statemgr.blobs import open_raw_blob_store
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.errors import AccessDenied, UnavailableError
from statemgr.kafka.checkpoint_topic import CheckpointTopic
from statemgr.local.machine import SystemClock
from statemgr.model.chain import ChainSegment, ChainSnapshot, SegmentChain
from statemgr.model.checkpoint import BlobMarker, BlobRef
from statemgr.model.codecs import decode_chain, encode_chain
from statemgr.ports import StoreIdentity, list_blobs
from statemgr.testing import JobTester
from tests import model_samples as sample

_ONE, _OTHER = (StoreIdentity("orders", "1", f"Partition {number}", "totals") for number in range(2))
_INDEX = BlobRef("index", 1, b"")
_TASKS = 4
_JOB: dict[str, object] = {
    "job.name": "orders", "task.inputs": ["orders"], "task.backup.factories": ["blob-store"],
    "blob.store.uri": "s3://bucket/prefix", "stores.totals.type": "rocksdb",
}  # fmt: skip
#: Every third commit is a snapshot, and the blobs of the checkpoint before the current one can be deleted.
_SHORT = {**_JOB, "task.checkpoint.retained": 1, "task.commit.snapshot.interval": "3 commits"}


def _process(task: Any, message: Any) -> None:
    task.store("totals").put(message.key(), os.urandom(3000))


class Transfer:
    """Deletes nothing, and fails with the errors that it is given, call by call."""

    def __init__(self, *failing: dict[str, UnavailableError]) -> None:
        self.failing = list(failing)
        self.asked: list[list[str]] = []

    def delete_all(self, blobs: Any) -> dict[str, UnavailableError]:
        self.asked.append([*blobs])
        return self.failing.pop(0) if self.failing else {}

    def for_each(self, items: Any, action: Callable[[Any], None]) -> dict[Any, UnavailableError]:
        for item in items:
            action(item)
        return {}


def _delete(shared: SharedSegments, transfer: Any) -> None:
    shared.delete(lambda: transfer)


def test_a_blob_that_could_not_be_deleted_is_tried_again() -> None:
    """A failure leaves nothing that a later clean-up would miss."""
    now = 0.0
    shared = SharedSegments(lambda: now)
    transfer = Transfer({"blob": UnavailableError("away")})
    shared.stored("blob", _ONE, 1, {_ONE.task})
    shared.retained({_ONE: [Needs((), _INDEX, 1)]})
    for _ in range(3):
        now += 3600
        _delete(shared, transfer)
    assert transfer.asked == [["blob"], ["blob"]]


def test_only_some_blobs_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 13: where no blob can be deleted, what the process remembers and asks for does not grow."""
    now, names = 0.0, {f"blob {number}": UnavailableError("away") for number in range(5)}
    monkeypatch.setattr(clean_up, "_MOST_UNDELETED", 2)
    shared, transfer = SharedSegments(lambda: now), Transfer(names)
    for name in names:
        shared.stored(name, _ONE, 1, {_ONE.task})
    shared.retained({_ONE: [Needs((), _INDEX, 1)]})
    for _ in range(2):
        now += 3600
        _delete(shared, transfer)
    assert transfer.asked == [[*names], ["blob 3", "blob 4"]]


def test_a_blob_is_deleted_when_no_task_may_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may need a blob that a retained checkpoint refers to, or that has changes which its newest snapshot lacks:
    a commit may be under way."""
    monkeypatch.setattr(clean_up, "_MANY", 1)
    shared, transfer = SharedSegments(lambda: 0.0), Transfer()
    shared.stored("blob", _OTHER, 5, {_ONE.task, _OTHER.task})
    shared.retained({_OTHER: [Needs((), _INDEX, 5)]})
    shared.stored("blob", _ONE, 5, {_ONE.task, _OTHER.task})
    still_needed: list[dict[StoreIdentity, list[Needs]]] = [
        {_ONE: []},
        {_ONE: [Needs((), _INDEX, 4)]},
        {_ONE: [Needs((), _INDEX, 9), Needs(("blob",), _INDEX, 2)]},
    ]
    for needs in still_needed:
        shared.retained(needs)
        _delete(shared, transfer)
        assert transfer.asked == []
    shared.retained({_ONE: [Needs((), _INDEX, 9)]})
    _delete(shared, transfer)
    assert transfer.asked == [["blob"]]


def test_a_clean_up_asks_for_nothing_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains of retained checkpoints are read once, however many there are, and a commit does not read the topic,
    where it would wait for the transactions of other owners."""
    read, chains = catalogue.Catalogue._read_chain, 0

    def counted(self: Any, identity: Any, marker: Any) -> Any:
        nonlocal chains
        chains += marker.blob is not None
        return read(self, identity, marker)

    config = {**_JOB, "job.tasks": _TASKS, "task.checkpoint.retained": 8}
    with monkeypatch.context() as patched, JobTester(config, _process) as job:
        patched.setattr(catalogue, "_CHAINS", 2 * _TASKS)
        patched.setattr(catalogue.Catalogue, "_read_chain", counted)
        patched.setattr(CheckpointTopic, "read", None)
        for number in range(40):
            for partition in range(_TASKS):
                job.send("orders", key=f"{number % 7}", value="", partition=partition)
            job.commit()
    assert chains == 0


class Chains:
    """Reads each chain from its marker, whose snapshot is empty."""

    def chain(self, identity: StoreIdentity, marker: BlobMarker) -> SegmentChain:
        return decode_chain(marker.inline or b"")

    def index(self, identity: StoreIdentity, ref: BlobRef) -> SimpleNamespace:
        return SimpleNamespace(blobs=lambda: (), previous=None)


def _marker(segments: int) -> BlobMarker:
    refs = [BlobRef(f"orders/1/Partition_0/_segments/{number}", 1, sample.HASH) for number in range(segments)]
    snapshot = ChainSnapshot(sample.INDEX_BLOB, "state", 0)
    chain = SegmentChain("orders", "1", _ONE.task, _ONE.store, "state", "attempt", "attempt", 0, snapshot)
    chained = tuple(ChainSegment(number, number + 1, ref) for number, ref in enumerate(refs))
    return BlobMarker(inline=encode_chain(replace(chain, segments=chained)))


def test_a_name_in_many_chains_is_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver has the names of all its tasks. They are not interned: Python 3.12.0 to 3.12.6 never forgets those."""
    cleaner = Cleaner(lambda: Transfer(), Chains(), lambda: 0.0)  # type: ignore[arg-type,return-value]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "intern", None)
        for newest in (3, 4):
            retained = [_marker(newest - older) for older in range(3)]
            needs = cleaner.clean_up(replace(_ONE, store=""), {}, {_ONE.store: retained}, set())
    names = [name for one in needs[_ONE] for name in one.blobs]
    assert (len(names), len(set(names)), len(set(map(id, names)))) == (9, 4, 4)


def test_a_segment_that_cannot_be_deleted_keeps_no_other_blob(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob with a legal hold stays. All other blobs that no checkpoint needs are deleted."""
    delete, held = MemoryBlobStore.delete, list[str]()

    def refuse_one(self: MemoryBlobStore, blob_id: str) -> None:
        if not held and "/_segments/" in blob_id:
            held.append(blob_id)
        if blob_id in held:
            raise AccessDenied("on hold", blob=blob_id)
        delete(self, blob_id)

    monkeypatch.setattr(MemoryBlobStore, "delete", refuse_one)
    with JobTester(_SHORT, _process) as job:
        for number in range(30):
            job.send("orders", key=f"{number}", value="")
            job.commit()
        blobs = [info.blob_id for info in list_blobs(open_raw_blob_store(job.config, SystemClock()), "")]
    assert held[0] in blobs
    assert sum(blob.endswith("/index") for blob in blobs) <= 4, "that of the checkpoint, and the next ones"


def test_a_commit_asks_for_few_blobs_where_none_may_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 13: it asks for those that it has evicted, and once a minute for some of the older ones."""
    asked = list[str]()

    def refuse(self: MemoryBlobStore, blob_id: str) -> None:
        asked.append(blob_id)
        raise AccessDenied("no right to delete", blob=blob_id)

    monkeypatch.setattr(MemoryBlobStore, "delete", refuse)
    monkeypatch.setattr(clean_up, "_MOST_UNDELETED", 10)
    with JobTester(_SHORT, _process) as job:
        for number in range(60):
            job.send("orders", key=f"{number % 7}", value="")
            job.advance(seconds=20)
            job.commit()
    assert len(set(asked)) > 60
    assert len(asked) < len(set(asked)) + 20 * 11


def test_an_opening_reads_the_indexes_of_retained_snapshots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number grows with the retention, and a request to S3 takes tens of milliseconds. The newest one is read
    alone, because the restore needs it."""
    get, reading, changed, most = MemoryBlobStore.get, set[str](), threading.Condition(), list[int]()

    def slow(self: MemoryBlobStore, blob_id: str, *where: Any) -> Any:
        if blob_id.endswith("/index"):
            with changed:
                reading.add(blob_id)
                most.append(len(reading))
                changed.notify_all()
                changed.wait_for(lambda: max(most) >= 4, timeout=1)
                reading.discard(blob_id)
        return get(self, blob_id, *where)

    config = {**_SHORT, "task.checkpoint.retained": 6, "task.commit.snapshot.interval": "1 commits"}
    with JobTester(config, _process) as job:
        for number in range(8):
            job.send("orders", key=f"{number}", value="")
            job.commit()
        job.crash(lose_disk=True)
        monkeypatch.setattr(MemoryBlobStore, "get", slow)
        job.restore("blob-store")
    assert max(most) >= 4, "six are retained"
