"""Damaged blobs and local directories: altered, replaced and lost blobs, TTLs that stay, and clean-ups during
commits."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.blobs.file import FileBlobStore
from statemgr.errors import AccessDenied, CorruptBlob, MissingBlob, RetryableError
from statemgr.local.machine import SystemClock
from statemgr.model.snapshot import FileIndex
from statemgr.phases import Phase, observed
from statemgr.reader import JobReader
from tests.commits import TASK, blob_files, commit, current, referenced, totals, write
from tests.jobs import elsewhere, job_mapping
from tests.servers import KafkaServer


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A dual-commit job on a directory of blobs."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **more))  # type: ignore[arg-type]


def files_of(config: JobConfig) -> dict[str, FileIndex]:
    """Maps each path of the published snapshot to its file."""
    with JobReader(config) as reader:
        return dict(reader.index(TASK, "totals").root.walk())


def test_same_name_same_size_other_content_is_uploaded(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 14, invariant 5: a file that differs only in its content counts as another file."""
    config = job(kafka, tmp_path, backup=("blob-store",), stores__totals__type="memory")
    first, second = random.Random(1).randbytes(60_000), random.Random(2).randbytes(60_000)
    commit(config, {b"key": first}, 1)
    before = files_of(config)
    commit(config, {b"key": second}, 2)
    after = files_of(config)
    assert {p: f.size for p, f in after.items()} == {p: f.size for p, f in before.items()}, "names and sizes are equal"
    assert after != before
    assert totals(config, "blob-store")[TASK] == {b"key": second}


def test_a_missing_or_altered_blob_is_named(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULTS 12, 13: a lost or altered index or file causes a typed error with the blob's name, and leaves no state
    that an opening takes."""
    config = job(kafka, tmp_path, backup=("blob-store",))
    commit(config, {b"key": random.Random(1).randbytes(200_000)}, 1)
    index = next(name for name in blob_files(tmp_path) if name.endswith("/index"))
    part = next(name for name in blob_files(tmp_path) if ".sst" in name)
    for number, name in enumerate((index, part)):
        path = tmp_path / "blobs" / name
        data = path.read_bytes()
        for spoil, error in ((path.unlink, MissingBlob), (lambda p=path, d=data: p.write_bytes(d[:-1]), CorruptBlob)):
            path.write_bytes(data)
            spoil()
            machine = tmp_path / f"{number}-{error.__name__}"
            with (
                StateManager(elsewhere(config, machine, "blob-store")) as manager,
                pytest.raises(error) as caught,
            ):
                manager.open_task(TASK)
            assert caught.value.where["blob"] == name
            left = [path for path in machine.rglob("*.sst") if ".left" not in "".join(path.parts)]
            assert not left, "there is no state, only what the next try verifies"
        path.write_bytes(data)
    assert len(totals(config, "blob-store")[TASK]) == 1


def test_a_ttl_that_cannot_be_removed_stays_outstanding(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT 34, protocol 8: the checkpoint records the TTL, the next owner's commits retry to remove it, and a commit
    fails after a third of it."""
    config = job(kafka, tmp_path, backup=("blob-store",))
    remove_ttl, time_ns = FileBlobStore.remove_ttl, SystemClock.time_ns

    def denied(self: FileBlobStore, blob_id: str) -> None:
        raise AccessDenied("told to", blob=blob_id)

    monkeypatch.setattr(FileBlobStore, "remove_ttl", denied)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        task.commit({"orders-0": 1})
        first = blob_files(tmp_path, expiring=True)
        assert first
        write(task, {b"b": b"2"})
        checkpoint = task.commit({"orders-0": 2})
        assert {o.blob_id for o in checkpoint.outstanding_ttl} == first
    # another owner inherits it; after ten of thirty days a commit fails, and succeeds once the TTL can be removed
    monkeypatch.setattr(SystemClock, "time_ns", lambda self: time_ns(self) + 11 * 24 * 3600 * 10**9)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"c": b"3"})
        with pytest.raises(RetryableError, match="TTL") as caught:
            task.commit({"orders-0": 3})
        assert caught.value.where["blob"] in first
        assert "s3:DeleteObjectTagging" in str(caught.value.hint)
        monkeypatch.setattr(FileBlobStore, "remove_ttl", remove_ttl)
        checkpoint = task.commit({"orders-0": 4})
        assert checkpoint.outstanding_ttl == ()
    assert blob_files(tmp_path, expiring=True) == set()
    assert totals(config, "blob-store")[TASK] == {b"a": b"1", b"b": b"2", b"c": b"3"}


def test_clean_up_deletes_exactly_what_nothing_retained_needs(kafka: KafkaServer, tmp_path: Path) -> None:
    """A5, A9, A10, A11, A14, invariant 3: after every commit of every owner, exactly the blobs of retained checkpoints
    are there, without a TTL."""
    config = job(kafka, tmp_path, backup=("blob-store",), task__checkpoint__retained=2)
    for number in range(4):
        with StateManager(config) as manager, manager.open_task(TASK) as task:
            for turn in range(2):
                write(task, {b"%d" % turn: random.Random(number * 2 + turn).randbytes(30_000)})
                task.commit({"orders-0": number * 2 + turn})
                assert blob_files(tmp_path) == blob_files(tmp_path, expiring=False) == referenced(config)
    record = current(config)
    assert record is not None
    assert [c.input_offsets["orders-0"] for c in record.checkpoints] == [7, 6]


def test_a_clean_up_beside_a_long_commit_leaves_it_alone(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 38: while a task's uploads wait for their publish, clean-ups of the job's other task leave them alone."""
    config = job(kafka, tmp_path, backup=("blob-store",), tasks=2, task__checkpoint__retained=1)
    waits, go_on = threading.Event(), threading.Event()
    large = random.Random(1).randbytes(200_000)

    def hold(phase: Phase, subject: str) -> None:
        if phase is Phase.BEGIN and not waits.is_set():
            waits.set()
            assert go_on.wait(60)

    with StateManager(config) as manager, manager.open_task("Partition 1") as slow:
        write(slow, {b"slow": large})
        with observed(hold):
            future = slow.commit_async({"orders-1": 1})
            assert waits.wait(30)
            unpublished = blob_files(tmp_path)
            assert unpublished == blob_files(tmp_path, expiring=True)
            for number in range(3):
                commit(config, {b"fast": large[number:]}, number)
            assert unpublished < blob_files(tmp_path)
            go_on.set()
            future.result(30)
    assert totals(config, "blob-store") == {TASK: {b"fast": large[2:]}, "Partition 1": {b"slow": large}}
    assert blob_files(tmp_path) == blob_files(tmp_path, expiring=False)
    assert blob_files(tmp_path) == referenced(config) | referenced(config, "Partition 1")
