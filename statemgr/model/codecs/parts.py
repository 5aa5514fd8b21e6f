"""Avro forms of what several records share: blob references, markers, layouts, attachments. Pure.

``*_to_avro`` make what fastavro writes; ``*_from_avro`` take what it read and raise ValueError where a rule
that the schema cannot express is broken. Maps are written sorted: equal records have equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from statemgr.model.checkpoint import (
    Attachment,
    BlobRef,
    ChainMarker,
    ChangelogMarker,
    IndexMarker,
    Layout,
    Marker,
    OpaqueMarker,
)
from statemgr.model.snapshot import name_problem

Avro = dict[str, Any]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def each(mapping: Mapping[str, _In], convert: Callable[[_In], _Out]) -> dict[str, _Out]:
    """Convert the values of a map, in the order of its keys."""
    return {key: convert(mapping[key]) for key in sorted(mapping)}


def blob_to_avro(blob: BlobRef) -> Avro:
    """The record ``BlobRef``."""
    return {"blob_id": blob.blob_id, "size": blob.size, "hash": blob.hash, "offset": blob.offset}


def blob_from_avro(value: Avro) -> BlobRef:
    """Raises: ValueError for a negative size or offset."""
    if value["size"] < 0 or (value["offset"] or 0) < 0:
        raise ValueError(f"blob {value['blob_id']!r} has a negative size or offset")
    return BlobRef(value["blob_id"], value["size"], value["hash"], value["offset"])


def optional_blob_from_avro(value: Avro | None) -> BlobRef | None:
    """A ``BlobRef`` or null. Raises: ValueError for a negative size or offset."""
    return None if value is None else blob_from_avro(value)


def optional_blob_to_avro(blob: BlobRef | None) -> Avro | None:
    """A ``BlobRef`` or null."""
    return None if blob is None else blob_to_avro(blob)


def marker_to_avro(marker: Marker) -> tuple[str, Avro]:
    """The member of the union of markers, with its full name."""
    match marker:
        case IndexMarker(index):
            return "statemgr.IndexMarker", {"index": blob_to_avro(index)}
        case ChangelogMarker(topic, topic_id, partition, offset):
            fields = {"topic": topic, "topic_id": topic_id, "partition": partition, "offset": offset}
            return "statemgr.ChangelogMarker", fields
        case ChainMarker(blob, inline):
            return "statemgr.ChainMarker", {"blob": optional_blob_to_avro(blob), "inline": inline}
        case OpaqueMarker(data):
            return "statemgr.OpaqueMarker", {"data": data}


def marker_from_avro(value: tuple[str, Avro]) -> Marker:
    """Raises: ValueError for a negative size, partition or offset, and for what is both inline and in a blob."""
    name, fields = value
    if name == "statemgr.IndexMarker":
        return IndexMarker(blob_from_avro(fields["index"]))
    if name == "statemgr.ChangelogMarker":
        return changelog_marker(fields["topic"], fields["topic_id"], fields["partition"], fields["offset"])
    if name == "statemgr.ChainMarker":
        if (fields["blob"] is None) == (fields["inline"] is None):
            raise ValueError("a chain marker needs exactly one of inline and blob")
        return ChainMarker(optional_blob_from_avro(fields["blob"]), fields["inline"])
    return OpaqueMarker(fields["data"])


def changelog_marker(topic: str, topic_id: str | None, partition: int, offset: int) -> ChangelogMarker:
    """A changelog marker that was read. Raises: ValueError for a negative partition or offset."""
    if partition < 0 or offset < 0:
        raise ValueError(f"changelog marker of {topic!r} has partition {partition} and offset {offset}")
    return ChangelogMarker(topic, topic_id, partition, offset)


def changelog_to_avro(marker: ChangelogMarker) -> Avro:
    """The fields of a changelog marker, outside of a union."""
    return {
        "topic": marker.topic,
        "topic_id": marker.topic_id,
        "partition": marker.partition,
        "offset": marker.offset,
    }


def state_id_from_avro(value: str) -> str:
    """A state ID, which becomes a local directory's name. Raises: ValueError when it may not be one."""
    if problem := name_problem(value):
        raise ValueError(f"state ID {value!r} {problem}")
    return value


def layout_to_avro(layout: Layout) -> Avro:
    """The record ``Layout``."""
    return {"generation": layout.generation, "tasks": layout.tasks, "partitioner": layout.partitioner}


def layout_from_avro(value: Avro) -> Layout:
    """The model of the record ``Layout``."""
    return Layout(value["generation"], value["tasks"], value["partitioner"])


def attachment_to_avro(attachment: Attachment) -> Avro:
    """The record ``Attachment``."""
    return {
        "name": attachment.name,
        "inline": attachment.inline,
        "blob": optional_blob_to_avro(attachment.blob),
    }


def attachment_from_avro(value: Avro) -> Attachment:
    """Raises: ValueError unless exactly one of inline and blob is set."""
    if (value["inline"] is None) == (value["blob"] is None):
        raise ValueError(f"attachment {value['name']!r} needs exactly one of inline and blob")
    return Attachment(value["name"], value["inline"], optional_blob_from_avro(value["blob"]))
