"""The checkpoints of a job in a file, from which a copy can be made when the checkpoint topic is lost.

One JSON object per line. The first one is a header: the version of the form, the name and the ID of the job, the time
in epoch milliseconds, and the number of records. Each other one is a record as the checkpoint topic would have it
(:func:`statemgr.model.codecs.encode_record`), key and value in Base64, next to its task and its checkpoint's ID for
people who look into the file. docs/format.md describes it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import CorruptFile, CorruptRecord, InvalidError, MissingState
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointRecord
from statemgr.model.checkpoint_records import checkpoint_of

_VERSION = 1


def encode_export(records: Mapping[str, CheckpointRecord], now_ms: int) -> bytes:
    """The file with all retained checkpoints of these tasks. Raises: MissingState if there is none."""
    lines: list[dict[str, Any]] = []
    for record in records.values():
        for checkpoint, (key, value) in zip(reversed(record.checkpoints), codecs.encode_record(record), strict=True):
            names = {"task": record.task, "checkpoint_id": str(checkpoint.checkpoint_id)}
            lines.append({**names, "key": b64encode(key).decode(), "value": b64encode(value).decode()})
    if not lines:
        raise MissingState(
            "the job has no checkpoint to export", hint="check job.name, job.id and task.checkpoint.topic"
        )
    job = next(iter(records.values()))
    header = {"statemgr_export": _VERSION, "job": job.job_name, "id": job.job_id, "ms": now_ms, "records": len(lines)}
    return b"".join(json.dumps(line).encode() + b"\n" for line in (header, *lines))


def decode_export(data: bytes, job_name: str, job_id: str) -> dict[str, CheckpointRecord]:
    """Task → its record, without what only the lost topics could supply.

    Raises: CorruptFile; InvalidError if the file has another job.
    """
    try:
        header, *lines = [json.loads(line) for line in data.splitlines()]
        version, job, count = header["statemgr_export"], (header["job"], header["id"]), header["records"]
        pairs = [(b64decode(line["key"], validate=True), b64decode(line["value"], validate=True)) for line in lines]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt("it is no export of checkpoints") from error
    if version != _VERSION:
        raise InvalidError(f"the export has the version {version!r}", hint="use the version of statemgr that wrote it")
    if job != (job_name, job_id):
        raise InvalidError(
            f"the export has the checkpoints of the job {'/'.join(map(str, job))}, not of {job_name}/{job_id}",
            hint="give the configuration of that job with -c",
            job=job_name,
        )
    if count != len(pairs):
        raise _corrupt(f"it has {len(pairs)} of {count} records")
    try:
        return _records(pairs)
    except CorruptRecord as error:
        raise _corrupt(error.message) from error


def lost_with_kafka(records: Mapping[str, CheckpointRecord]) -> list[str]:
    """The stores of current checkpoints that only a changelog has."""
    current = [_without_changelogs(record.current) for record in records.values()]
    return sorted({name for one in current for name in one.stores if not _is_outside(one, name)})


def _is_outside(checkpoint: Checkpoint, store: str) -> bool:
    return any(store in of_store for of_store in checkpoint.state_checkpoint_markers.values())


def _records(pairs: list[tuple[bytes, bytes]]) -> dict[str, CheckpointRecord]:
    """Raises: CorruptRecord, CorruptFile."""
    records: dict[str, CheckpointRecord] = {}
    for key, value in pairs:
        at = codecs.decode_key(key)
        found = codecs.decode_task(key, at, value)
        if found.publish is None or found.layout is None:
            raise _corrupt("a record refers to another one")
        checkpoint = _without_changelogs(checkpoint_of(found, found.publish))
        before = records.get(at.task)
        older = before.checkpoints if before is not None else ()
        newest_first = sorted((checkpoint, *older), key=lambda one: one.sequence, reverse=True)
        records[at.task] = CheckpointRecord(at.job_name, at.job_id, at.task, found.layout, tuple(newest_first))
    return records


def _without_changelogs(checkpoint: Checkpoint) -> Checkpoint:
    markers = {f: m for f, m in checkpoint.state_checkpoint_markers.items() if f != KAFKA_CHANGELOG}
    return replace(checkpoint, state_checkpoint_markers=markers)


def _corrupt(why: str) -> CorruptFile:
    return CorruptFile(f"the export cannot be used: {why}", hint="use another export of the job")
