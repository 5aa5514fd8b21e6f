"""Checkpoint records ↔ bytes: the key, both versions of the value, and one checkpoint alone. Pure."""

from __future__ import annotations

from statemgr.errors import CorruptRecord, InvalidError
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import (
    ChangelogMarker,
    Checkpoint,
    CheckpointKey,
    CheckpointRecord,
    Layout,
    MicroBatch,
    OutstandingTtl,
)
from statemgr.model.codec_parts import (
    Avro,
    attachment_from_avro,
    attachment_to_avro,
    changelog_marker,
    each,
    layout_from_avro,
    layout_to_avro,
    marker_from_avro,
    marker_to_avro,
    state_id_from_avro,
)
from statemgr.model.codec_wire import Refuse, decode, encode

#: The factory that version 1 markers belong to: changelogs are all that it knows.
VERSION_ONE_FACTORY = "kafka-changelog"


def encode_key(key: CheckpointKey) -> bytes:
    """The bytes of a record's key; equal keys have equal bytes, which compaction relies on."""
    return encode(
        "checkpoint_key.v1",
        {
            "job_name": key.job_name,
            "job_id": key.job_id,
            "layout_generation": key.layout_generation,
            "task": key.task,
            "record_version": key.record_version,
        },
    )


def decode_key(
    data: bytes, *, topic: str | None = None, partition: int | None = None, offset: int | None = None
) -> CheckpointKey:
    """Raises: CorruptRecord with the given place."""
    value = decode("checkpoint_key.v1", data, _refuser("key", topic, partition, offset))
    return CheckpointKey(**value)


def encode_record(record: CheckpointRecord) -> bytes:
    """The value of a version 2 record. Raises: InvalidError when it does not fit the schema."""
    if not record.checkpoints:
        raise InvalidError("a checkpoint record needs at least one checkpoint")
    return encode(
        "checkpoint.v2",
        {
            "job_name": record.job_name,
            "job_id": record.job_id,
            "task": record.task,
            "layout": layout_to_avro(record.layout),
            "checkpoints": [_checkpoint_to_avro(checkpoint) for checkpoint in record.checkpoints],
        },
    )


def encode_record_v1(record: CheckpointRecord) -> bytes:
    """The version 1 value of the current checkpoint: its changelog markers and input offsets alone."""
    current = record.current
    markers = current.state_checkpoint_markers.get(VERSION_ONE_FACTORY, {})
    stores = {store: marker for store, marker in markers.items() if isinstance(marker, ChangelogMarker)}
    return encode(
        "checkpoint.v1",
        {
            "job_name": record.job_name,
            "job_id": record.job_id,
            "task": record.task,
            "checkpoint_id": str(current.checkpoint_id),
            "input_offsets": each(current.input_offsets, int),
            "stores": each(stores, lambda m: {"topic": m.topic, "partition": m.partition, "offset": m.offset}),
        },
    )


def decode_record(
    key: CheckpointKey,
    value: bytes,
    offset: int | None = None,
    *,
    topic: str | None = None,
    partition: int | None = None,
) -> CheckpointRecord:
    """Decode the value of a record on the checkpoint topic; its key says which version it is.

    A version 1 record has a layout of 0 tasks (unknown), sequence and epoch 0, and lists the stores that it
    has changelog offsets for.

    Raises: CorruptRecord with the given place: other bytes, an unknown version, not the key's value.
    """
    refuse = _refuser("value", topic, partition, offset)
    if key.record_version == 1:
        record = _decode_v1(key, value, refuse)
    elif key.record_version == 2:
        record = _decode_v2(value, refuse)
    else:
        raise refuse(f"record version {key.record_version} is unknown (written by newer software?)")
    if record.key(key.record_version) != key:
        raise refuse(
            f"the value is of {record.job_name!r}/{record.job_id!r}, {record.task!r}, "
            f"layout {record.layout.generation}; its key is of {key.job_name!r}/{key.job_id!r}, "
            f"{key.task!r}, layout {key.layout_generation}"
        )
    return CheckpointRecord(record.job_name, record.job_id, record.task, record.layout, record.checkpoints, offset)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """One checkpoint alone, as it is sent to where its task's attempt runs."""
    return encode("checkpoint_state.v1", _checkpoint_to_avro(checkpoint))


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Raises: CorruptRecord."""
    refuse = _refuser("single checkpoint", None, None, None)
    return _checked(decode("checkpoint_state.v1", data, refuse), refuse)


def _decode_v2(data: bytes, refuse: Refuse) -> CheckpointRecord:
    value = decode("checkpoint.v2", data, refuse)
    checkpoints = tuple(_checked(checkpoint, refuse) for checkpoint in value["checkpoints"])
    if not checkpoints:
        raise refuse("it has no checkpoint")
    layout = layout_from_avro(value["layout"])
    return CheckpointRecord(value["job_name"], value["job_id"], value["task"], layout, checkpoints)


def _decode_v1(key: CheckpointKey, data: bytes, refuse: Refuse) -> CheckpointRecord:
    value = decode("checkpoint.v1", data, refuse)
    try:
        markers = {
            store: changelog_marker(at["topic"], None, at["partition"], at["offset"])
            for store, at in value["stores"].items()
        }
        checkpoint = Checkpoint(
            checkpoint_id=CheckpointId.parse(value["checkpoint_id"]),
            sequence=0,
            epoch=0,
            input_offsets=value["input_offsets"],
            # Version 1 has no state IDs; this one can name no other content.
            stores=dict.fromkeys(markers, f"v1-{value['checkpoint_id']}"),
            state_checkpoint_markers={VERSION_ONE_FACTORY: markers} if markers else {},
            record_version=1,
        )
    except (ValueError, InvalidError) as error:
        raise refuse(str(error)) from error
    layout = Layout(key.layout_generation, 0, "")
    return CheckpointRecord(value["job_name"], value["job_id"], value["task"], layout, (checkpoint,))


def _checked(value: Avro, refuse: Refuse) -> Checkpoint:
    try:
        return _checkpoint_from_avro(value)
    except (ValueError, InvalidError) as error:
        raise refuse(str(error)) from error


def _checkpoint_to_avro(checkpoint: Checkpoint) -> Avro:
    batch = checkpoint.batch
    return {
        "checkpoint_id": str(checkpoint.checkpoint_id),
        "sequence": checkpoint.sequence,
        "epoch": checkpoint.epoch,
        "input_offsets": each(checkpoint.input_offsets, int),
        "input_topic_ids": each(checkpoint.input_topic_ids, str),
        "stores": each(checkpoint.stores, str),
        "state_checkpoint_markers": each(
            checkpoint.state_checkpoint_markers, lambda stores: each(stores, marker_to_avro)
        ),
        "backup_factories": each(checkpoint.backup_factories, list),
        "restore_factories": each(checkpoint.restore_factories, list),
        "serdes": each(checkpoint.serdes, lambda names: {"key": names[0], "value": names[1]}),
        "batch": None
        if batch is None
        else {
            "query_id": batch.query_id,
            "batch_id": batch.batch_id,
            "start_offsets": batch.start_offsets,
            "end_offsets": batch.end_offsets,
            "watermark_ms": batch.watermark_ms,
        },
        "attachments": [attachment_to_avro(attachment) for attachment in checkpoint.attachments],
        "outstanding_ttl": [{"blob_id": ttl.blob_id, "since_ms": ttl.since_ms} for ttl in checkpoint.outstanding_ttl],
        "record_version": checkpoint.record_version,
    }


def _checkpoint_from_avro(value: Avro) -> Checkpoint:
    batch = value["batch"]
    return Checkpoint(
        checkpoint_id=CheckpointId.parse(value["checkpoint_id"]),
        sequence=value["sequence"],
        epoch=value["epoch"],
        input_offsets=value["input_offsets"],
        stores={store: state_id_from_avro(state_id) for store, state_id in value["stores"].items()},
        state_checkpoint_markers={
            factory: {store: marker_from_avro(marker) for store, marker in stores.items()}
            for factory, stores in value["state_checkpoint_markers"].items()
        },
        backup_factories={store: tuple(names) for store, names in value["backup_factories"].items()},
        restore_factories={store: tuple(names) for store, names in value["restore_factories"].items()},
        batch=None if batch is None else MicroBatch(**batch),
        attachments=tuple(attachment_from_avro(attachment) for attachment in value["attachments"]),
        outstanding_ttl=tuple(OutstandingTtl(**ttl) for ttl in value["outstanding_ttl"]),
        record_version=value["record_version"],
        input_topic_ids=value["input_topic_ids"],
        serdes={store: (names["key"], names["value"]) for store, names in value["serdes"].items()},
    )


def _refuser(what: str, topic: str | None, partition: int | None, offset: int | None) -> Refuse:
    def refuse(why: str) -> CorruptRecord:
        return CorruptRecord(
            f"checkpoint record refused ({what}): {why}",
            topic=topic,
            partition=partition,
            offset=offset,
            hint="it was not written by this software or by an older one: look who else writes to the topic",
        )

    return refuse
