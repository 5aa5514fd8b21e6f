"""What a publish writes: a job record with what its tasks share, and a task record for each task. Pure.

When several tasks are published together, there is one job record, and each task record refers to it by the sequence
number. The record of a task that is published alone has both parts. Both parts together are a :class:`Checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import (
    Attachment,
    ChangelogMarker,
    Checkpoint,
    Layout,
    Markers,
    MicroBatch,
    OutstandingTtl,
    Owner,
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The position in the input: source partition → next offset, and topic → its ID in Kafka."""

    offsets: Mapping[str, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Publish:
    """What all tasks of one publish share."""

    checkpoint_id: CheckpointId
    sequence: int
    epoch: int
    inputs: Inputs
    backup_factories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    restore_factories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    serdes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    batch: MicroBatch | None = None
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class JobCheckpoint:
    """The content of a job record."""

    layout: Layout
    publish: Publish


@dataclass(frozen=True, slots=True)
class TaskCheckpoint:
    """The content of a task record. ``layout`` and ``publish`` are None if the job record has them.

    ``inputs`` are None if they are those of the publish. ``published_ms`` is set if another layout published it first.
    """

    stores: Mapping[str, str]
    state_checkpoint_markers: Markers
    attachments: tuple[Attachment, ...] = ()
    outstanding_ttl: tuple[OutstandingTtl, ...] = ()
    record_version: int = 2
    inputs: Inputs | None = None
    layout: Layout | None = None
    publish: Publish | None = None
    retired_changelogs: Mapping[str, tuple[ChangelogMarker, ...]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    published_ms: int | None = None


def publish_of(checkpoint: Checkpoint, inputs: Inputs | None = None) -> Publish:
    """What a checkpoint shares with those of other tasks. ``inputs``: the checkpoint's own if None."""
    return Publish(inputs=inputs_of(checkpoint) if inputs is None else inputs, **_taken(_COMMON, checkpoint))


def inputs_of(checkpoint: Checkpoint) -> Inputs:
    """The position of a checkpoint's task in the input."""
    return Inputs(checkpoint.input_offsets, checkpoint.input_topic_ids)


def common_inputs(checkpoints: Mapping[str, Checkpoint]) -> Inputs:
    """The input offsets of all tasks if they are the same, otherwise empty ones."""
    found = [inputs_of(checkpoint) for checkpoint in checkpoints.values()]
    return found[0] if found and all(inputs == found[0] for inputs in found) else Inputs()


def task_part(checkpoint: Checkpoint, publish: Publish) -> TaskCheckpoint:
    """The content of a task record that refers to a job record."""
    own = inputs_of(checkpoint)
    return TaskCheckpoint(inputs=None if own == publish.inputs else own, **_taken(_OWN, checkpoint))


def task_alone(checkpoint: Checkpoint, layout: Layout | None = None) -> TaskCheckpoint:
    """The content of a task record that needs no job record."""
    return TaskCheckpoint(layout=layout, publish=publish_of(checkpoint), **_taken(_OWN, checkpoint))


def checkpoint_of(
    task: TaskCheckpoint, publish: Publish, offset: int | None = None, published_ms: int | None = None
) -> Checkpoint:
    """Puts both parts together.

    Args:
        offset: where the task record was read.
        published_ms: when this record was published, by the broker's clock (epoch milliseconds).
    """
    inputs = publish.inputs if task.inputs is None else task.inputs
    own = _taken(_OWN, task)
    if task.published_ms is None:
        own["published_ms"] = published_ms
    return Checkpoint(
        input_offsets=inputs.offsets,
        input_topic_ids=inputs.topic_ids,
        offset=offset,
        **_taken(_COMMON, publish),
        **own,
    )


def _shared(part: type) -> tuple[str, ...]:
    """The fields that a checkpoint takes from a part."""
    known = {field.name for field in fields(Checkpoint)}
    return tuple(field.name for field in fields(part) if field.name in known)


_COMMON, _OWN = _shared(Publish), _shared(TaskCheckpoint)


def _taken(names: tuple[str, ...], source: object) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
