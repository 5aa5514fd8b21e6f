"""The metrics of jobs that share a process, and of an owner of all tasks of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.engine.task import Task
from tests.commits import attempt, write
from tests.jobs import job_mapping
from tests.kafka_jobs import wait_until
from tests.loop_members import make_topic, produce
from tests.servers import KafkaServer

pytestmark = pytest.mark.integration


def published(manager: StateManager) -> float | None:
    """Return how many publishes the metrics of a manager have counted."""
    return manager.metrics.registry.get_sample_value("statemgr_publish_seconds_count", {"job": manager.config.job_name})


def commit_on(task: Task, offset: int) -> None:
    """Make one change and commit it."""
    write(task, {b"a": b"%d" % offset})
    task.commit({"orders-0": offset})


def test_two_jobs_in_a_process_count_their_own_steps(kafka: KafkaServer, tmp_path: Path) -> None:
    """Two IDs of a job run in one process, and the metrics of each count only its own steps, by task."""
    one = JobConfig.from_mapping(job_mapping(kafka, tmp_path / "one", tasks=2, metrics__port=0))
    named = {"name": one.job_name, "tasks": 2, "job__id": "2"}
    other = JobConfig.from_mapping(job_mapping(kafka, tmp_path / "other", **named))  # type: ignore[arg-type]
    with StateManager(one) as first, StateManager(other) as second:
        with first.open_task("Partition 0") as task, second.open_task("Partition 1") as others:
            commit_on(others, 1)
            for number in range(3):
                commit_on(others, number + 2)
            assert published(first) == 0
            commit_on(task, 1)
            assert [{*manager.metrics.last_phase} for manager in (first, second)] == [{"Partition 0"}, {"Partition 1"}]
        assert [published(manager) for manager in (first, second)] == [1, 4]
        assert not first.metrics.last_phase, "nothing of a closed task is left"


def test_an_owner_of_the_whole_job_has_the_same_series(kafka: KafkaServer, tmp_path: Path) -> None:
    """As on Spark: lag, age and tasks have the same names as in a consumer loop, and disappear with the owner."""
    topic = kafka.fresh_name("input")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(5))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2))
    with StateManager(config) as manager:
        epoch = manager.acquire()
        names = ["Partition 0", "Partition 1"]
        commits = [replace(attempt(config, epoch, task, {b"a": b"1"}, 0), input_offsets=None) for task in names]
        manager.publish(commits, input_offsets={f"{topic}-0": 2})
        registry, job = manager.metrics.registry, {"job": config.job_name}
        lag = {**job, "task": "", "topic": topic, "partition": "0"}
        wait_until(lambda: registry.get_sample_value("statemgr_input_lag", lag) == 3)
        assert registry.get_sample_value("statemgr_tasks", job) == 2
        assert registry.get_sample_value("statemgr_job_tasks", job) == 2
        for task in names:
            taken = registry.get_sample_value("statemgr_checkpoint_timestamp_seconds", {**job, "task": task})
            last = registry.get_sample_value("statemgr_last_commit_timestamp_seconds", {**job, "task": task})
            assert taken is not None
            assert last is not None
            assert 0 <= last - taken < 60
            assert registry.get_sample_value("statemgr_blobs_with_ttl", {**job, "task": task}) == 0
    left = {sample.name for metric in registry.collect() for sample in metric.samples}
    assert not left & {"statemgr_input_lag", "statemgr_checkpoint_timestamp_seconds", "statemgr_blobs_with_ttl"}
