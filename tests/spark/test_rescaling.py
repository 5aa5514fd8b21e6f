"""`spark_integration.rescale`: executors build the new stores of a job, and some of them die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_integration import rescale, rescaling
from statemgr import JobConfig
from statemgr.errors import ConfigError, InvalidError
from statemgr.operations.rescale.spread import rescale_unit
from statemgr.phases import Phase, observed
from tests.jobs import SEGMENTS, job_mapping
from tests.operations.rescale.test_rescale import check, fill, some_state
from tests.servers import KafkaServer, S3Server
from tests.spark.cluster import spark_environment

BLOBS = ("blob-store",)


def die_once(died: str, phase: Phase, order: str) -> str:
    """Carry out an order in an executor's worker. The first worker to reach the phase kills itself."""

    def observe(announced: Phase, _: str) -> None:
        if announced is phase:
            try:
                Path(died).touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    with observed(observe):
        return rescale_unit(order)


@pytest.mark.long
@pytest.mark.parametrize("phase", [Phase.UPLOAD, Phase.STORED])
def test_more_tasks_while_an_executor_dies(
    spark: SparkSession, kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    """4 → 6 in dual commits: although a worker dies while it uploads or after, every key is in its task."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=4, kind=SEGMENTS))
    state, died = some_state(), tmp_path / "died"
    fill(config, state)
    monkeypatch.setattr(rescaling, "rescale_unit", partial(die_once, str(died), phase))
    done = rescale(spark, config, 6)
    assert died.exists()
    assert (done.config.tasks, done.partitioner, done.keys) == (6, "murmur2", len(state))
    check(done.config, state, tmp_path / "other")


@pytest.mark.long
def test_fewer_tasks(spark: SparkSession, kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """6 → 3 on S3. A second rescale changes nothing, and errors keep their type."""
    blobs = job_mapping(kafka, tmp_path, tasks=6, s3=s3, kind=SEGMENTS, backup=BLOBS)
    config, state = JobConfig.from_mapping(blobs), some_state()
    fill(config, state)
    with pytest.raises(ConfigError):
        rescale(spark, config, 3, partitioner="no such")
    with pytest.raises(InvalidError, match="and crc32 puts it into"):
        rescale(spark, config, 3, partitioner="crc32")
    done = rescale(spark, config, 3, partitioner="murmur2")
    check(done.config, state, tmp_path / "other")
    again = rescale(spark, config, 3)
    assert (again.config, again.checkpoints, again.keys) == (done.config, done.checkpoints, None)


@pytest.mark.long
def test_a_driver_and_an_executor_die(kafka: KafkaServer, tmp_path: Path) -> None:
    """An executor is killed during an upload, and the driver after its first answer.

    The job commits, and the next driver orders only the missing parts.
    """
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=4, kind=SEGMENTS, backup=BLOBS))
    state = some_state()
    fill(config, state)
    on_cluster(config, tmp_path, phase=Phase.STORED)
    assert (tmp_path / "died").exists()
    late = some_state(60, "late-")
    fill(config, late, 20)
    told = on_cluster(config, tmp_path)
    assert told["orders"] <= 1, "of two groups of tasks"
    check(JobConfig.from_mapping(told["config"]), {**state, **late}, tmp_path / "other")


def on_cluster(config: JobConfig, directory: Path, phase: Phase | None = None) -> dict[str, Any]:
    """Rescale to six tasks with a separate driver and two executors.

    Return what the driver prints, or nothing if it kills itself at ``phase``.
    """
    (directory / "config.json").write_text(json.dumps(config.to_mapping()))
    order = {"config": str(directory / "config.json"), "tasks": 6, "scratch": str(directory)}
    with (directory / "out").open("wb") as out, (directory / "log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.rescale_job", json.dumps(order | ({"phase": phase} if phase else {}))],
            env=spark_environment(SPARK_WORKER_DIR=directory / "work"),
            cwd=directory,
            stdout=out,
            stderr=log,
            start_new_session=True,
        )
    try:
        ended = driver.wait(200)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)  # the JVMs that the driver has left behind
    assert ended == (-signal.SIGKILL if phase else 0), (directory / "log").read_text()[-3000:]
    return {} if phase else json.loads((directory / "out").read_text().splitlines()[-1])
