"""Models as JSON-safe dicts, for the command line's ``--json``. Pure.

Names are those of the Avro records. Hashes are hexadecimal, and other bytes are shown by their size, never whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from statemgr.errors import CorruptBlob
from statemgr.ids import CheckpointId
from statemgr.model.chain import SegmentChain
from statemgr.model.checkpoint import (
    Attachment,
    BlobMarker,
    BlobRef,
    ChangelogMarker,
    Checkpoint,
    CheckpointRecord,
    OpaqueMarker,
)
from statemgr.model.snapshot import DirIndex, FileIndex, SnapshotIndex

Json = dict[str, Any]


def to_json_dict(record: CheckpointRecord, checkpoint: Checkpoint | None = None) -> Json:
    """One checkpoint of a record (the current one by default) with the fields of the record around it.

    ``offset``: the Kafka offset at which its record was read. ``current``: whether it is the current checkpoint.
    """
    shown = record.current if checkpoint is None else checkpoint
    return {
        "job_name": record.job_name,
        "job_id": record.job_id,
        "task": record.task,
        "current": shown.checkpoint_id == record.current.checkpoint_id,
        "layout": _plain(record.layout),
        **_fields(shown),
        "serdes": {store: {"key": key, "value": value} for store, (key, value) in sorted(shown.serdes.items())},
    }


def index_to_json_dict(index: SnapshotIndex) -> Json:
    """A snapshot index. ``files`` is flat, with paths relative to the store's directory."""
    found = _fields(index)
    tree: Json = found.pop("root")
    return found | tree


def inline_chain(marker: BlobMarker) -> SegmentChain | None:
    """The chain inside a marker. None if it is in a blob, or damaged."""
    from statemgr.model.codecs import decode_chain

    with suppress(CorruptBlob):
        return decode_chain(marker.inline) if marker.inline is not None else None
    return None


def _fields(value: Any) -> Json:
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _plain(value: Any) -> Any:
    """A value as JSON has it: maps in the order of their keys, dataclasses with their fields unless listed here."""
    match value:
        case CheckpointId():
            return str(value)
        case Mapping():
            return {key: _plain(value[key]) for key in sorted(value)}
        case tuple():
            return [_plain(item) for item in value]
        case BlobRef():
            found = {"blob_id": value.blob_id, "size": value.size, "hash": value.hash.hex()}
            return found if value.offset is None else {**found, "offset": value.offset}
        case ChangelogMarker():
            return {"type": "changelog", **_fields(value)}
        case BlobMarker():
            found = {"type": "blobs", **_inline_or_blob(value)}
            chain = inline_chain(value)
            if chain is not None:
                found |= {"index": _plain(chain.snapshot.index), "segments": len(chain.segments)}
            return found
        case OpaqueMarker():
            return {"type": "opaque", "size": len(value.data)}
        case Attachment():
            return {"name": value.name, **_inline_or_blob(value)}
        case DirIndex():
            files = [_file(path, file) for path, file in value.walk()]
            return {"size": value.size, "dirs": list(value.walk_dirs()), "files": files}
    return _fields(value) if is_dataclass(value) else value


def _inline_or_blob(value: BlobMarker | Attachment) -> Json:
    size = len(value.inline or b"") if value.blob is None else value.blob.size
    return {"size": size, "blob": _plain(value.blob)}


def _file(path: str, file: FileIndex) -> Json:
    return {
        "path": path,
        "size": file.size,
        "hash": file.hash.hex(),
        "inline": file.inline is not None,
        "parts": [_part(part, stored) for part, stored in file.stored()],
    }


def _part(part: BlobRef, stored: int) -> Json:
    """A part, and the bytes of its zstandard frame, if it has one."""
    found: Json = _plain(part)
    return found if stored == part.size else {**found, "zstd_size": stored}
