"""Version 1 records ↔ bytes: what software without blob snapshots reads and writes. Pure."""

from __future__ import annotations

from statemgr.errors import InvalidError
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, CheckpointKey, CheckpointRecord, Layout
from statemgr.model.codecs.parts import changelog_marker, each
from statemgr.model.codecs.wire import decode, encode, refuser

#: The factory that version 1 markers belong to: changelogs are all that it knows.
VERSION_ONE_FACTORY = "kafka-changelog"


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


def decode_record_v1(
    key: CheckpointKey,
    data: bytes,
    offset: int | None = None,
    *,
    topic: str | None = None,
    partition: int | None = None,
) -> CheckpointRecord:
    """A version 1 record has a layout of 0 tasks (unknown), sequence and epoch 0, and lists the stores that it has
    changelog offsets for.

    Raises: CorruptRecord with the given place: other bytes, or not the key's value.
    """
    refuse = refuser("value", topic, partition, offset)
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
            offset=offset,
        )
    except (ValueError, InvalidError) as error:
        raise refuse(str(error)) from error
    layout = Layout(key.layout_generation, 0, "")
    record = CheckpointRecord(value["job_name"], value["job_id"], value["task"], layout, (checkpoint,), offset)
    if record.key_v1() != key:
        raise refuse(
            f"the value is of {record.job_name!r}/{record.job_id!r}, {record.task!r}; "
            f"its key is of {key.job_name!r}/{key.job_id!r}, {key.task!r}"
        )
    return record
