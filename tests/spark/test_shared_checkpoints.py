"""The data that a batch ships to its workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.serializers import CloudPickleSerializer

from spark_integration import stage
from spark_integration.attempt import Work
from tests.kafka_jobs import wait_until
from tests.spark.conftest import Pipeline

MakePipeline = Callable[..., Pipeline]


@pytest.mark.long
def test_checkpoints_in_a_blob(pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers fetch their own checkpoints from a blob, as in a job of many tasks. The driver then deletes the blob."""
    monkeypatch.setattr("statemgr.engine.shared_checkpoints.INLINE_LIMIT", 0)
    shipped: list[int] = []
    worker = stage.worker

    def measured(work: Work) -> object:
        shipped.append(len(CloudPickleSerializer().dumps(work)))
        return worker(work)

    monkeypatch.setattr(stage, "worker", measured)
    job = pipeline(tasks=4)
    for rows in (100, 60, 40):
        job.produce(rows)
        job.run()

    assert job.state("blob-store") == job.state("kafka-changelog") == job.outputs.counts() == job.produced
    with_checkpoints = shipped[1:]  # the job's first batch has no checkpoints
    assert max(with_checkpoints) - min(with_checkpoints) < 100
    # a background thread deletes the blob
    wait_until(lambda: not [path for path in (job.directory / "blobs").rglob("*") if path.name == "checkpoints"])
