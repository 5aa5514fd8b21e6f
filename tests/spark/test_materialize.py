"""`spark_integration.materialize`: executors build the first snapshots of a job that keeps running."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_integration import materialize
from statemgr import JobConfig, StateManager
from statemgr.errors import MissingState
from tests.commits import attempt, totals, write
from tests.docs.blocks import blocks
from tests.kafka_jobs import recreate
from tests.offers import BLOBS, CHANGELOG, offers, stage_one, stage_two
from tests.servers import KafkaServer

TASKS = [f"Partition {number}" for number in range(3)]
ROWS: dict[bytes, bytes | None] = {b"key-%03d" % number: b"value" for number in range(200)}


def commit_all(config: JobConfig, items: dict[bytes, bytes | None], number: int) -> None:
    """Commit the whole job once."""
    with StateManager(config) as manager:
        epoch = manager.acquire()
        manager.publish([attempt(config, epoch, task, items, number) for task in TASKS])


@pytest.mark.long
def test_executors_build_the_first_snapshots(spark: SparkSession, kafka: KafkaServer, tmp_path: Path) -> None:
    """Executors build one snapshot per task and store while an open task commits, and the job adopts all offers.

    A second call, the one in docs/migrating.md, builds nothing.
    """
    (program,) = blocks("docs/migrating.md", "## A large state")
    config = stage_one(kafka, tmp_path, tasks=3, stores=("totals", "seen"))
    commit_all(config, ROWS, 1)
    with StateManager(config) as manager, manager.open_task(TASKS[1]) as task:
        found = materialize(spark, config)
        write(task, {b"key-000": None, b"later": b"1"})
        task.commit({"orders-0": 2})
    assert {(one.task, one.store) for one in found} == {(task, store) for task in TASKS for store in ("totals", "seen")}
    assert all(one.offered and one.records == len(ROWS) for one in found)
    assert len(offers(config)) == 6
    exec(program, {"spark": spark, "config": config})
    assert len(offers(config)) == 6
    assert materialize(spark, config) == []
    dual = stage_two(config)
    with StateManager(dual) as manager:
        epoch = manager.acquire()
        for checkpoint in epoch.checkpoints.values():
            assert checkpoint is not None
            assert set(checkpoint.state_checkpoint_markers[BLOBS]) == {"totals", "seen"}
    assert offers(config) == {}
    assert totals(config, BLOBS) == totals(config, CHANGELOG)


def test_errors_keep_their_type(spark: SparkSession, kafka: KafkaServer, tmp_path: Path) -> None:
    """If an executor cannot build a snapshot, the caller gets the command's typed error with task and store."""
    config = stage_one(kafka, tmp_path, tasks=1)
    with StateManager(config) as manager:
        epoch = manager.acquire()
        manager.publish([attempt(config, epoch, TASKS[0], ROWS, 1)])
    recreate(config, config.stores["totals"].changelog_topic)
    with pytest.raises(MissingState, match="created again") as found:
        materialize(spark, config)
    assert (found.value.where["task"], found.value.where["store"]) == (TASKS[0], "totals")
