"""A query repairs damaged backups between its batches, and its output stays the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame

from spark_integration.driver import Driver
from statemgr.errors import CorruptError, MissingError, OutcomeUnknownError
from tests.commits import lose_acknowledgements, published, referenced
from tests.jobs import DUAL, SEGMENTS, SNAPSHOTS
from tests.spark.conftest import Pipeline

MakePipeline = Callable[..., Pipeline]


def is_whole(job: Pipeline) -> bool:
    """Return whether the blobs alone restore the state. A failed try fences nobody."""
    try:
        published(job.config, "blob-store")
    except (MissingError, CorruptError):
        return False
    return True


def with_rows(job: Pipeline) -> dict[int, list[tuple[object, ...]]]:
    """Return sequence → rows of the output, without empty sequences."""
    return {sequence: rows for sequence, rows in job.outputs.calls if rows}


def test_damage_that_is_found_while_a_batch_runs(pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT 45: the batch was prepared without it, so the next one makes the backup again."""
    job = pipeline(backup=("blob-store",))
    job.produce(60)
    publish, task = Driver._publish, "Partition 0"
    left: list[bool] = []

    def found_before(self: Driver, *arguments: Any) -> float:
        if len(left) == 1:
            coordinator = self._manager._acquired()
            coordinator.when_damaged(lambda: False)  # no repair comes between the batches
            coordinator.damage_of(task).found("blob-store", "totals", "told to")
        seconds = publish(self, *arguments)
        left.append(bool(self._manager.damaged()[task]))
        return seconds

    monkeypatch.setattr(Driver, "_publish", found_before)
    job.run(job.query(per_batch=20))
    assert left[:3] == [False, True, False]
    assert job.state("blob-store") == job.produced == job.outputs.counts()


def test_a_batch_continues_a_repair_that_was_not_answered(
    pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protocol 1: the driver settles it first, also before it gives output again."""
    job = pipeline(backup=("blob-store",))
    job.produce(60)
    run = Driver.run
    sequences: list[int] = []

    def repaired_before(self: Driver, rows: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            coordinator = self._manager._acquired()
            coordinator.when_damaged(lambda: True)
            coordinator.damage_of("Partition 0").found("blob-store", "totals", "told to")
            with monkeypatch.context() as patch:
                lose_acknowledgements(patch)
                with pytest.raises(OutcomeUnknownError):
                    self.repair()
            self.give_output_again(rows.sparkSession)
        run(self, rows, batch_id)
        sequences.append(max(checkpoint.sequence for checkpoint in self.published().values()))

    monkeypatch.setattr(Driver, "run", repaired_before)
    job.run(job.query(per_batch=20))
    assert sequences[:3] == [1, 3, 4]
    assert job.state("blob-store") == job.produced == job.outputs.counts()


@pytest.mark.parametrize("kind", [pytest.param(SNAPSHOTS, marks=pytest.mark.long), SEGMENTS])
def test_a_query_without_input_repairs_what_is_damaged(pipeline: MakePipeline, kind: str) -> None:
    """FAULT 45, invariant 12: without input, the driver repairs, and no row gets a second sequence number."""
    job = pipeline(backup=DUAL, restore=("kafka-changelog",), kind=kind)
    job.produce(60)
    job.run()
    given = with_rows(job)
    for task in range(job.config.tasks):
        for name in referenced(job.config, f"Partition {task}"):
            if name.endswith("/index"):
                (job.directory / "blobs" / name).unlink()
    assert not is_whole(job)
    running = job.query().trigger(processingTime="1 hour").start()
    try:
        deadline = time.monotonic() + 60
        while not is_whole(job):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        running.stop()
    assert with_rows(job) == given
    # A new location delivers the published rows again under their old sequence number.
    moved = job.query().option("checkpointLocation", (job.directory / "moved").as_uri())
    job.run(moved)
    assert with_rows(job) == given
    job.produce(30)
    job.run(moved)
    assert job.state("blob-store") == job.produced == job.outputs.counts()
