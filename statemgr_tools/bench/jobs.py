"""Jobs on a real broker that start from generated states. They are published without the flows, and opened normally."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from statemgr import StateManager
from statemgr.config import JobConfig
from statemgr.engine.task import Task
from statemgr.errors import MissingState
from statemgr.ids import task_path
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
from statemgr.kafka.transactions.publisher import TransactionalPublisher, task_transactional_id
from statemgr.local.directories import StoreDirectories
from statemgr.local.machine import SystemClock, system_ids
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord, Layout
from statemgr_tools.bench.seed import SEED, STORE, TASK
from statemgr_tools.bench.session import changed
from statemgr_tools.bench.states import State

#: How commits go to the blob store: as segments of changes (the default), or each as a snapshot.
SEGMENTS, SNAPSHOTS = "segments", "snapshots"


def to_blobs(kind: str) -> dict[str, object]:
    """Return the settings of a job for commits of this kind."""
    every_commit = {"task.commit.snapshot.interval": "1 commit"} if kind == SNAPSHOTS else {}
    return {"task.backup.factories": "blob-store", **every_commit}


def publish(config: JobConfig, checkpoint: Checkpoint) -> None:
    """Create the job's topics, and publish a checkpoint of task 0."""
    with TopicAdmin(config, SystemClock()) as admin:
        admin.create_missing([checkpoint_topic_spec(config), *changelog_topic_specs(config)])
    layout = Layout(1, config.tasks, "kafka-partition")
    record = CheckpointRecord(config.job_name, config.job_id, TASK, layout, (checkpoint,))
    publisher = TransactionalPublisher(config, task_transactional_id(config, TASK), SystemClock())
    try:
        publisher.fence()
        with publisher.transaction() as transaction:
            for key, value in codecs.encode_record(record):
                transaction.send(config.checkpoint_topic, key, value, partition=0)
    finally:
        publisher.close()


@contextmanager
def task_at(config: JobConfig, state: State) -> Iterator[Task]:
    """Return task 0 of a new job with this state as its store, after the first commit has backed it up."""
    seeded = changed(config, task__restore__factories=SEED)
    publish(seeded, state.checkpoint)
    with StateManager(seeded) as manager, manager.open_task(TASK) as task:
        task.commit({})
        yield task


def committed_files(config: JobConfig, task: Task, target: Path) -> Path:
    """Make a new directory with hard links to the local files of the task's last commit."""
    checkpoint = task.last_checkpoint
    assert checkpoint is not None
    root = config.state_dir / config.job_name / config.job_id / task_path(TASK) / STORE
    found = StoreDirectories(root, SystemClock(), system_ids()).find(checkpoint.stores[STORE])
    if found is None:
        raise MissingState("the directory of the last commit is gone", job=config.job_name, task=task.name)
    target.mkdir(parents=True)
    for name in found.files:
        os.link(found.path / name, target / name)
    return target
