"""Executors in their own processes, as on a cluster. They share only what Spark ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from statemgr.ids import task_name
from tests.servers import KafkaServer
from tests.spark.cluster import Cluster, order_for
from tests.spark.conftest import make_pipeline


@pytest.mark.long
def test_two_executors_commit_one_checkpoint(kafka: KafkaServer, tmp_path: Path) -> None:
    """Two executors without a common disk commit batches. State from both backends and output equal the input.

    After the first batch, each task runs on the executor that has its state.
    """
    job = make_pipeline(None, kafka, tmp_path, tasks=4)
    job.produce(120)
    cluster = Cluster(tmp_path / "cluster", settings={"spark.locality.wait": "60s"})
    try:
        assert cluster.ask({"kind": "executors", "wanted": 2, "timeout": 300}) == {"executors": 2}
        _, *later = cluster.run(job, ["tests.spark.conftest:count"], per_batch=20)["reports"]
    finally:
        cluster.close()

    assert [sequence for sequence, _ in job.outputs.calls] == list(range(1, len(job.outputs.calls) + 1))
    assert len(later) > 3
    assert {one["factory"] for batch in later for task in batch["tasks"] for one in task["restored"]} == {"local"}
    assert job.outputs.counts() == job.state("blob-store") == job.state("kafka-changelog") == job.produced


@pytest.mark.long
def test_a_task_leaves_an_executor_on_which_it_fails(kafka: KafkaServer, tmp_path: Path) -> None:
    """If all attempts of a batch failed on one executor, a restarted query runs the task on another."""
    job = make_pipeline(None, kafka, tmp_path, tasks=4)
    job.produce(40)
    notes = tmp_path / "notes"
    notes.mkdir()
    cluster = Cluster(tmp_path / "cluster", settings={"spark.locality.wait": "60s"})
    try:
        assert cluster.ask({"kind": "executors", "wanted": 2, "timeout": 300}) == {"executors": 2}
        process = ["tests.spark.faults:Broken", str(notes), task_name(1)]
        assert "no such file" in cluster.ask(order_for(job, process))["message"]
        cluster.run(job, process)
    finally:
        cluster.close()

    assert job.outputs.counts() == job.state("blob-store") == job.produced
