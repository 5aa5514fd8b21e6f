"""Version 2 records ↔ bytes: job records, task records, and one checkpoint alone. Pure.

A value ends with a checksum over the key and all bytes of the value before it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import Checkpoint, CheckpointKey, CheckpointRecord, MicroBatch, OutstandingTtl
from statemgr.model.checkpoint_parts import JobCheckpoint, Publish, TaskCheckpoint, checkpoint_of, task_alone
from statemgr.model.codecs.inputs import inputs_from_avro, inputs_to_avro
from statemgr.model.codecs.key import CHECKSUM_SIZE, encode_key
from statemgr.model.codecs.parts import (
    Avro,
    attachment_from_avro,
    attachment_to_avro,
    changelog_marker,
    changelog_to_avro,
    each,
    layout_from_avro,
    layout_to_avro,
    marker_from_avro,
    marker_to_avro,
    state_id_from_avro,
)
from statemgr.model.codecs.wire import Refuse, decode, encode, refuser
from statemgr.model.hashing import checksum

_JOB = "checkpoint_job.v2"
_TASK = "checkpoint_task.v2"


class Place(NamedTuple):
    """Where a record was read."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


NOWHERE = Place()


def encode_job(key: CheckpointKey, job: JobCheckpoint) -> tuple[bytes, bytes]:
    """Key and value of a job record. Raises: InvalidError when it does not fit the schema."""
    return _sealed(key, encode(_JOB, {"layout": layout_to_avro(job.layout), "publish": _publish_to_avro(job.publish)}))


def encode_task(key: CheckpointKey, task: TaskCheckpoint) -> tuple[bytes, bytes]:
    """Key and value of a task record. Raises: InvalidError when it does not fit the schema."""
    return _sealed(key, encode(_TASK, _task_to_avro(task)))


def encode_record(record: CheckpointRecord) -> list[tuple[bytes, bytes]]:
    """Keys and values of task records that need no job record, for all checkpoints of a record, oldest first.

    Raises: InvalidError when one does not fit the schema.
    """
    if not record.checkpoints:
        raise InvalidError("a checkpoint record needs at least one checkpoint")
    return [encode_task(record.key(c), task_alone(c, record.layout)) for c in reversed(record.checkpoints)]


def decode_job(key: bytes, at: CheckpointKey, value: bytes, place: Place = NOWHERE) -> JobCheckpoint:
    """The content of a job record. ``key`` are the bytes of ``at``. Raises: CorruptRecord with the given place."""
    refuse = refuser("job record", *place)
    found = decode(_JOB, _opened(key, value, refuse), refuse)
    try:
        job = JobCheckpoint(layout_from_avro(found["layout"]), _publish_from_avro(found["publish"]))
    except (ValueError, InvalidError) as error:
        raise refuse(str(error)) from error
    _check_key(at, job.layout.generation, job.publish.sequence, refuse)
    return job


def decode_task(key: bytes, at: CheckpointKey, value: bytes, place: Place = NOWHERE) -> TaskCheckpoint:
    """The content of a task record. ``key`` are the bytes of ``at``. Raises: CorruptRecord with the given place."""
    refuse = refuser("task record", *place)
    task = _task_from_avro(decode(_TASK, _opened(key, value, refuse), refuse), refuse)
    if (task.publish is None) != (task.layout is None):
        raise refuse("it has one of the layout and the publish without the other")
    if task.publish is not None and task.layout is not None:
        _check_key(at, task.layout.generation, task.publish.sequence, refuse)
    return task


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """One checkpoint alone, as it is sent to where its task's attempt runs."""
    return encode(_TASK, _task_to_avro(task_alone(checkpoint)))


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Raises: CorruptRecord."""
    refuse = refuser("single checkpoint")
    task = _task_from_avro(decode(_TASK, data, refuse), refuse)
    if task.publish is None:
        raise refuse("it refers to a job record")
    return checkpoint_of(replace(task, layout=None), task.publish)


def _sealed(key: CheckpointKey, value: bytes) -> tuple[bytes, bytes]:
    data = encode_key(key)
    return data, value + checksum(data + value)


def _opened(key: bytes, value: bytes, refuse: Refuse) -> bytes:
    """A value without its checksum. Raises: CorruptRecord unless that matches."""
    content = value[:-CHECKSUM_SIZE]
    if len(value) <= CHECKSUM_SIZE or checksum(key + content) != value[-CHECKSUM_SIZE:]:
        raise refuse("its checksum does not match")
    return content


def _check_key(key: CheckpointKey, generation: int, sequence: int, refuse: Refuse) -> None:
    if (key.layout_generation, key.sequence) != (generation, sequence):
        raise refuse(
            f"the value is of layout {generation} and sequence {sequence}, "
            f"its key of layout {key.layout_generation} and sequence {key.sequence}"
        )


def _publish_to_avro(publish: Publish) -> Avro:
    batch = publish.batch
    return {
        "checkpoint_id": str(publish.checkpoint_id),
        "sequence": publish.sequence,
        "epoch": publish.epoch,
        "inputs": inputs_to_avro(publish.inputs),
        "backup_factories": each(publish.backup_factories, list),
        "restore_factories": each(publish.restore_factories, list),
        "serdes": each(publish.serdes, lambda names: {"key": names[0], "value": names[1]}),
        "batch": None
        if batch is None
        else {
            "query_id": batch.query_id,
            "batch_id": batch.batch_id,
            "start_offsets": batch.start_offsets,
            "end_offsets": batch.end_offsets,
            "watermark_ms": batch.watermark_ms,
        },
    }


def _publish_from_avro(value: Avro) -> Publish:
    batch = value["batch"]
    return Publish(
        checkpoint_id=CheckpointId.parse(value["checkpoint_id"]),
        sequence=value["sequence"],
        epoch=value["epoch"],
        inputs=inputs_from_avro(value["inputs"]),
        backup_factories={store: tuple(names) for store, names in value["backup_factories"].items()},
        restore_factories={store: tuple(names) for store, names in value["restore_factories"].items()},
        serdes={store: (names["key"], names["value"]) for store, names in value["serdes"].items()},
        batch=None if batch is None else MicroBatch(**batch),
    )


def _task_to_avro(task: TaskCheckpoint) -> Avro:
    return {
        "layout": None if task.layout is None else layout_to_avro(task.layout),
        "publish": None if task.publish is None else _publish_to_avro(task.publish),
        "inputs": None if task.inputs is None else inputs_to_avro(task.inputs),
        "stores": each(task.stores, str),
        "state_checkpoint_markers": each(task.markers, lambda stores: each(stores, marker_to_avro)),
        "retired_changelogs": each(task.retired_changelogs, lambda markers: [changelog_to_avro(m) for m in markers]),
        "attachments": [attachment_to_avro(attachment) for attachment in task.attachments],
        "outstanding_ttl": [{"blob_id": ttl.blob_id, "since_ms": ttl.since_ms} for ttl in task.outstanding_ttl],
        "record_version": task.record_version,
    }


def _task_from_avro(value: Avro, refuse: Refuse) -> TaskCheckpoint:
    layout, publish, inputs = value["layout"], value["publish"], value["inputs"]
    try:
        return TaskCheckpoint(
            stores={store: state_id_from_avro(state_id) for store, state_id in value["stores"].items()},
            markers={
                factory: {store: marker_from_avro(marker) for store, marker in stores.items()}
                for factory, stores in value["state_checkpoint_markers"].items()
            },
            retired_changelogs={
                store: tuple(changelog_marker(**marker) for marker in markers)
                for store, markers in value["retired_changelogs"].items()
            },
            attachments=tuple(attachment_from_avro(attachment) for attachment in value["attachments"]),
            outstanding_ttl=tuple(OutstandingTtl(**ttl) for ttl in value["outstanding_ttl"]),
            record_version=value["record_version"],
            inputs=None if inputs is None else inputs_from_avro(inputs),
            layout=None if layout is None else layout_from_avro(layout),
            publish=None if publish is None else _publish_from_avro(publish),
        )
    except (ValueError, InvalidError) as error:
        raise refuse(str(error)) from error
