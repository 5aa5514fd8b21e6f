"""Models as JSON-safe dicts, for the command line's ``--json``. Pure.

Names are those of the Avro records; hashes are hexadecimal; bytes are shown by their size, never whole.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from statemgr.errors import CorruptBlob
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import (
    Attachment,
    BlobMarker,
    BlobRef,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    Marker,
)
from statemgr.model.codecs import decode_chain
from statemgr.model.snapshot import FileIndex, SnapshotIndex

Json = dict[str, Any]


def to_json_array(record: CheckpointRecord) -> list[Json]:
    """One object for each retained checkpoint of a task, newest first."""
    return [to_json_dict(record, checkpoint) for checkpoint in record.checkpoints]


def to_json_dict(record: CheckpointRecord, checkpoint: Checkpoint | None = None) -> Json:
    """One checkpoint of a record (the current one by default) with the fields of the record around it.

    ``offset``: the Kafka offset that its record was read at; ``current``: whether the checkpoint is in force.
    """
    shown = record.current if checkpoint is None else checkpoint
    batch = shown.batch
    return {
        "job_name": record.job_name,
        "job_id": record.job_id,
        "task": record.task,
        "checkpoint_id": str(shown.checkpoint_id),
        "sequence": shown.sequence,
        "epoch": shown.epoch,
        "current": shown.checkpoint_id == record.current.checkpoint_id,
        "offset": shown.offset,
        "record_version": shown.record_version,
        "layout": {
            "generation": record.layout.generation,
            "tasks": record.layout.tasks,
            "partitioner": record.layout.partitioner,
        },
        "input_offsets": dict(sorted(shown.input_offsets.items())),
        "input_topic_ids": dict(sorted(shown.input_topic_ids.items())),
        "stores": dict(sorted(shown.stores.items())),
        "state_checkpoint_markers": {
            factory: {store: _marker(marker) for store, marker in sorted(stores.items())}
            for factory, stores in sorted(shown.state_checkpoint_markers.items())
        },
        "retired_changelogs": {
            store: [_marker(marker) for marker in markers]
            for store, markers in sorted(shown.retired_changelogs.items())
        },
        "backup_factories": {store: list(names) for store, names in sorted(shown.backup_factories.items())},
        "restore_factories": {store: list(names) for store, names in sorted(shown.restore_factories.items())},
        "serdes": {store: {"key": key, "value": value} for store, (key, value) in sorted(shown.serdes.items())},
        "batch": None
        if batch is None
        else {
            "query_id": batch.query_id,
            "batch_id": batch.batch_id,
            "start_offsets": batch.start_offsets,
            "end_offsets": batch.end_offsets,
            "watermark_ms": batch.watermark_ms,
        },
        "attachments": [_attachment(attachment) for attachment in shown.attachments],
        "outstanding_ttl": [{"blob_id": ttl.blob_id, "since_ms": ttl.since_ms} for ttl in shown.outstanding_ttl],
    }


def index_to_json_dict(index: SnapshotIndex) -> Json:
    """A snapshot index; ``files`` is flat, with paths relative to the store's directory."""
    return {
        "job_name": index.job_name,
        "job_id": index.job_id,
        "task": index.task,
        "store": index.store,
        "state_id": index.state_id,
        "attempt": index.attempt,
        "created_ms": index.created_ms,
        "previous": None if index.previous is None else _blob(index.previous),
        "size": index.root.size,
        "dirs": list(index.root.walk_dirs()),
        "files": [_file(path, file) for path, file in index.root.walk()],
    }


def _blob(blob: BlobRef) -> Json:
    found: Json = {"blob_id": blob.blob_id, "size": blob.size, "hash": blob.hash.hex()}
    return found if blob.offset is None else {**found, "offset": blob.offset}


def _marker(marker: Marker) -> Json:
    match marker:
        case ChangelogMarker(topic, topic_id, partition, offset):
            return {
                "type": "changelog",
                "topic": topic,
                "topic_id": topic_id,
                "partition": partition,
                "offset": offset,
            }
        case BlobMarker(blob, inline):
            size = len(inline or b"") if blob is None else blob.size
            found: Json = {"type": "blobs", "size": size, "blob": None if blob is None else _blob(blob)}
            chain = inline_chain(marker)
            if chain is not None:
                found |= {"index": _blob(chain.snapshot.index), "segments": len(chain.segments)}
            return found
        case _:
            return {"type": "opaque", "size": len(marker.data)}


def inline_chain(marker: BlobMarker) -> SegmentChain | None:
    """The chain that travels inside a marker; None where it lies in a blob, or is damaged."""
    with suppress(CorruptBlob):
        return decode_chain(marker.inline) if marker.inline is not None else None
    return None


def _attachment(attachment: Attachment) -> Json:
    blob = attachment.blob
    size = len(attachment.inline or b"") if blob is None else blob.size
    return {"name": attachment.name, "size": size, "blob": None if blob is None else _blob(blob)}


def _file(path: str, file: FileIndex) -> Json:
    return {
        "path": path,
        "size": file.size,
        "hash": file.hash.hex(),
        "inline": file.inline is not None,
        "parts": [_part(part, stored) for part, stored in file.stored()],
    }


def _part(part: BlobRef, stored: int) -> Json:
    """A part, and what it takes in its blob where that is a zstandard frame."""
    return _blob(part) if stored == part.size else {**_blob(part), "zstd_size": stored}
