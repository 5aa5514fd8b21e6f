"""Prepared commits ↔ bytes. Pure."""

from __future__ import annotations

from statemgr.errors import CorruptRecord, InvalidError
from statemgr.model.codecs.parts import (
    Avro,
    attachment_from_avro,
    attachment_to_avro,
    each,
    layout_from_avro,
    layout_to_avro,
    marker_from_avro,
    marker_to_avro,
    optional_blob_from_avro,
    optional_blob_to_avro,
    state_id_from_avro,
)
from statemgr.model.codecs.wire import decode, encode
from statemgr.model.commit import PreparedChanges, PreparedCommit, PreparedStore, ProducedRecord


def encode_prepared(prepared: PreparedCommit) -> bytes:
    """The bytes of a prepared commit.

    Raises: InvalidError when its changes are still local (it was not prepared to leave its process).
    """
    return encode(
        "prepared_commit.v1",
        {
            "job_name": prepared.job_name,
            "job_id": prepared.job_id,
            "task": prepared.task,
            "layout": layout_to_avro(prepared.layout),
            "epoch": prepared.epoch,
            "attempt": prepared.attempt,
            "base_checkpoint_id": prepared.base_checkpoint_id,
            "input_offsets": None if prepared.input_offsets is None else each(prepared.input_offsets, int),
            "input_topic_ids": each(prepared.input_topic_ids, str),
            "stores": each(prepared.stores, _store_to_avro),
            "added_blobs": list(prepared.added_blobs),
            "attachments": [attachment_to_avro(attachment) for attachment in prepared.attachments],
            "produced": [_produced_to_avro(record) for record in prepared.produced],
        },
    )


def decode_prepared(data: bytes) -> PreparedCommit:
    """Raises: CorruptRecord."""

    def refuse(why: str) -> CorruptRecord:
        return CorruptRecord(
            f"prepared commit refused: {why}",
            hint="use the same version of statemgr where commits are prepared and where they are published",
        )

    value = decode("prepared_commit.v1", data, refuse)
    try:
        return PreparedCommit(
            job_name=value["job_name"],
            job_id=value["job_id"],
            task=value["task"],
            layout=layout_from_avro(value["layout"]),
            epoch=value["epoch"],
            attempt=value["attempt"],
            base_checkpoint_id=value["base_checkpoint_id"],
            input_offsets=value["input_offsets"],
            stores={name: _store_from_avro(store) for name, store in value["stores"].items()},
            added_blobs=tuple(value["added_blobs"]),
            attachments=tuple(attachment_from_avro(attachment) for attachment in value["attachments"]),
            produced=tuple(_produced_from_avro(record) for record in value["produced"]),
            input_topic_ids=value["input_topic_ids"],
        )
    except ValueError as error:
        raise refuse(str(error)) from error


def _store_to_avro(store: PreparedStore) -> Avro:
    return {
        "state_id": store.state_id,
        "markers": each(store.markers, marker_to_avro),
        "changes": each(store.changes, _changes_to_avro),
    }


def _store_from_avro(value: Avro) -> PreparedStore:
    return PreparedStore(
        state_id=state_id_from_avro(value["state_id"]),
        markers={factory: marker_from_avro(marker) for factory, marker in value["markers"].items()},
        changes={factory: _changes_from_avro(changes) for factory, changes in value["changes"].items()},
    )


def _changes_to_avro(changes: PreparedChanges) -> Avro:
    if changes.local is not None or (changes.inline is None) == (changes.blob is None):
        raise InvalidError("changes that leave their process must be either inline or in a blob")
    return {
        "fill": changes.fill,
        "inline": changes.inline,
        "blob": optional_blob_to_avro(changes.blob),
    }


def _changes_from_avro(value: Avro) -> PreparedChanges:
    if (value["inline"] is None) == (value["blob"] is None):
        raise ValueError("its changes need exactly one of inline and blob")
    return PreparedChanges(fill=value["fill"], inline=value["inline"], blob=optional_blob_from_avro(value["blob"]))


def _produced_to_avro(record: ProducedRecord) -> Avro:
    return {
        "topic": record.topic,
        "key": record.key,
        "value": record.value,
        "partition": record.partition,
        "headers": [{"name": name, "value": value} for name, value in record.headers],
    }


def _produced_from_avro(value: Avro) -> ProducedRecord:
    headers = tuple((header["name"], header["value"]) for header in value["headers"])
    return ProducedRecord(value["topic"], value["key"], value["value"], value["partition"], headers)
