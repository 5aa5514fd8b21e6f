"""First starts: a job without a checkpoint may start empty only where nothing says that it had state.

Steps:

1. no checkpoint topic: create it, unless blobs or local directories of the job exist
2. a topic, but no record of the task: refuse when the topic was truncated, when this machine holds a published
   state of the task, or when a changelog holds committed records
3. with the one-shot permission, start empty knowingly
"""

from __future__ import annotations

import logging
from itertools import islice

from statemgr.errors import MissingState, PermissionNeeded
from statemgr.flows.parts import Parts
from statemgr.ids import task_index
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.ports import CheckpointLog

log = logging.getLogger(__name__)
_PERMISSION = "to start empty knowingly, open once with --allow-empty-start (allow_empty_start=True)"
_PUBLISHED = "PUBLISHED"


def state_evidence(parts: Parts) -> str | None:
    """Something outside the checkpoint topic that says the job had state, or None."""
    config = parts.config
    for task in range(config.tasks):
        if published_here(parts, f"Partition {task}"):
            return f"this machine holds a published state of Partition {task}"
    if config.blob_uri is not None:
        found = next(islice(parts.blobs().list(f"{config.job_name}/{config.job_id}/"), 1), None)
        if found is not None:
            return f"the blob store holds {found.blob_id}"
    return None


def refuse_lost_topic(parts: Parts, allow_empty_start: bool) -> None:
    """Before the checkpoint topic is created. Raises: PermissionNeeded when the job had state."""
    evidence = state_evidence(parts)
    if evidence is None or allow_empty_start:
        return
    raise PermissionNeeded(
        f"the checkpoint topic does not exist, but {evidence}",
        hint=f"check kafka.bootstrap.servers and task.checkpoint.topic; {_PERMISSION}",
        job=parts.config.job_name,
        topic=parts.config.checkpoint_topic,
    )


def refuse_lost_checkpoint(
    parts: Parts,
    checkpoint_log: CheckpointLog,
    task: str,
    record: CheckpointRecord | None,
    allow_empty_start: bool,
) -> None:
    """When the topic has no record of ``task``. Raises: PermissionNeeded when the task had state."""
    if record is not None or allow_empty_start:
        return
    problem = _lost(parts, checkpoint_log, task)
    if problem:
        raise PermissionNeeded(
            f"the checkpoint topic has no checkpoint of the task, but {problem}",
            hint=f"restore the topic's records, or {_PERMISSION}",
            job=parts.config.job_name,
            task=task,
            topic=parts.config.checkpoint_topic,
        )


def _lost(parts: Parts, checkpoint_log: CheckpointLog, task: str) -> str | None:
    if checkpoint_log.was_truncated():
        return "records were deleted from the topic"
    if published_here(parts, task):
        return "this machine holds a published state of it"
    partition = task_index(task)
    for store in parts.config.stores.values():
        if "kafka-changelog" not in (*store.backup_factories, *store.restore_factories):
            continue
        try:
            start, end = parts.changelog().bounds(store.changelog_topic, partition)
        except MissingState:
            continue  # the topic is new
        if end > start and any(parts.changelog().read(store.changelog_topic, partition, start, end)):
            return f"the changelog {store.changelog_topic} holds committed records"
    return None


def published_here(parts: Parts, task: str) -> bool:
    """Whether this machine has seen an acknowledged publish of the task."""
    return (parts.task_directory(task) / _PUBLISHED).exists()


def remember_published(parts: Parts, task: str) -> None:
    """Note on this machine that the task has published state. It only ever helps to refuse an empty start."""
    marker = parts.task_directory(task) / _PUBLISHED
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
