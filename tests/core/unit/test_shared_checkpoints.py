"""Checkpoints shared with workers: each worker gets its own, and the shared data does not grow with the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig
from statemgr.engine import share_checkpoints
from statemgr.engine.host import attempt_host
from statemgr.errors import CorruptBlob, MissingBlob
from statemgr.ids import CheckpointId, task_name
from statemgr.model.checkpoint import Attachment, BlobMarker, Checkpoint, MicroBatch
from tests.few_threads import no_new_threads


def config(directory: Path, tasks: int) -> JobConfig:
    """Return the configuration of a job with blobs in a directory."""
    return JobConfig.from_mapping(
        {
            "job.name": "shared",
            "job.tasks": tasks,
            "kafka.bootstrap.servers": "127.0.0.1:9",
            "task.backup.factories": ["blob-store"],
            "task.restore.factories": ["blob-store"],
            "blob.store.uri": (directory / "blobs").as_uri(),
            "state.dir": str(directory / "state"),
            "stores.totals.value.serde": "bytes",
        }
    )


def checkpoint(task: int, partitions: int = 3) -> Checkpoint:
    """Return a checkpoint that is different, and longer, for every task."""
    return Checkpoint(
        checkpoint_id=CheckpointId.parse("1700000000000-000001"),
        sequence=7,
        epoch=3,
        input_offsets={f"orders-{i}": i for i in range(partitions)},
        stores={"totals": f"attempt-{task}-totals"},
        state_checkpoint_markers={"blob-store": {"totals": BlobMarker(inline=b"x" * (100 + task))}},
        batch=MicroBatch("query", 1, "{}", "{}" * partitions),
        attachments=(Attachment("output-0", inline=b"rows" * 100),),
    )


def own(task: int) -> Checkpoint:
    """Return the part of the checkpoint that a worker needs."""
    return replace(checkpoint(task), input_offsets={}, batch=None, attachments=())


@pytest.mark.parametrize("tasks", [3, 500])
def test_each_worker_gets_its_own_checkpoint(tmp_path: Path, tasks: int) -> None:
    """A small job's checkpoints are inline; a large job's are in one blob. A task without a checkpoint gets none."""
    job = config(tmp_path, tasks)
    published = {task_name(task): checkpoint(task, 100) for task in range(tasks) if task != 1}
    with share_checkpoints(job, published) as found:
        assert (found.blob is None) == (tasks == 3)
        assert [found.of_task(job, task) for task in range(tasks)] == [
            None if task == 1 else own(task) for task in range(tasks)
        ]

    attempt_host(job).background.shutdown()
    if found.blob:
        with pytest.raises(MissingBlob):
            found.of_task(job, 0)


def test_a_blob_that_no_thread_deletes_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that can start no more threads does not fail the batch for it."""
    published = {task_name(task): checkpoint(task, 100) for task in range(500)}
    with no_new_threads(monkeypatch), share_checkpoints(config(tmp_path, 500), published) as found:
        assert found.blob
    assert "were not deleted; they expire" in caplog.text


def test_what_travels_with_the_function_is_bounded(tmp_path: Path) -> None:
    """Neither more tasks nor more input partitions increase the data sent with the function."""
    sizes = set()
    for tasks, partitions in ((300, 3), (300, 1000), (600, 3)):
        job = config(tmp_path, tasks)
        published = {task_name(task): checkpoint(task % 300, partitions) for task in range(tasks)}
        with share_checkpoints(job, published) as found:
            assert not found.inline
            sizes.add((len(str(found.blob)), found.cell_size))
    assert len(sizes) == 1


def test_a_damaged_cell(tmp_path: Path) -> None:
    """A flipped bit or a truncated blob raises CorruptBlob, and does not affect other workers' checkpoints."""
    job = config(tmp_path, 500)
    with share_checkpoints(job, {task_name(task): checkpoint(task) for task in range(500)}) as found:
        assert found.blob is not None
        (path,) = [p for p in (tmp_path / "blobs").rglob("*") if p.is_file() and p.stat().st_size > 100_000]
        data = bytearray(path.read_bytes())
        data[found.cell_size + 30] ^= 1
        path.write_bytes(data[: found.cell_size * 499 + 10])

        assert found.of_task(job, 0) == own(0)
        for task in (1, 499):
            with pytest.raises(CorruptBlob, match="passed to a worker"):
                found.of_task(job, task)
