"""A query repairs damaged backups between its batches, and its output stays the same."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from statemgr.errors import CorruptError, MissingError
from tests.commits import published, referenced
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
