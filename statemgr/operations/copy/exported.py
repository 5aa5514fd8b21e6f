"""The checkpoints of a job in a file, from which a copy can be made when the checkpoint topic is lost.

One JSON object per line. The first one is a header: the version of the form, the name and the ID of the job, the time
in epoch milliseconds, and the number of records. Each other one is a record of the checkpoint topic, key and value in
Base64 (:func:`statemgr.flows.published.send_records`). docs/format.md describes it.
"""

from __future__ import annotations

import json
import os
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import CorruptFile, CorruptRecord, InvalidError, MissingState
from statemgr.flows.published import send_records
from statemgr.flows.upkeep import find_damage
from statemgr.local import durable
from statemgr.model import codecs
from statemgr.model.checkpoint import Checkpoint, CheckpointKey, CheckpointRecord
from statemgr.model.checkpoint_records import JobCheckpoint, TaskCheckpoint, checkpoint_of
from statemgr.model.keys.partitioners import is_by_input
from statemgr.os_errors import MISTYPED, Fault, translated
from statemgr.services import Services
from statemgr.terminal.files import check_replaceable

_VERSION = 1


def export(config: JobConfig, records: Mapping[str, CheckpointRecord], now_ms: int) -> Iterator[bytes]:
    """The lines of a file with all retained checkpoints of these tasks. Raises: MissingState if there is none."""
    if not records:
        hint = "check job.name, job.id and task.checkpoint.topic"
        raise MissingState("the job has no checkpoint to export", hint=hint, job=config.job_name)
    publishes: dict[tuple[int, str], dict[str, CheckpointRecord]] = {}
    for task, record in records.items():
        for one in record.checkpoints:
            of_publish = publishes.setdefault((one.sequence, str(one.checkpoint_id)), {})
            of_publish[task] = replace(record, checkpoints=(one,), from_version_one=False)
    layout = next(iter(records.values())).layout
    pairs: list[tuple[bytes, bytes]] = []

    def send(key: bytes, value: bytes | None) -> None:
        if value is not None and codecs.decode_key(key).record_version == 2:
            pairs.append((key, value))

    for at in sorted(publishes):
        send_records(config, send, layout, dict.fromkeys(publishes[at]), publishes[at], ())
    yield json.dumps({**_of_job(config), "ms": now_ms, "records": len(pairs)}).encode() + b"\n"
    for key, value in pairs:
        yield json.dumps({"key": b64encode(key).decode(), "value": b64encode(value).decode()}).encode() + b"\n"


def _of_job(config: JobConfig) -> dict[str, object]:
    """The beginning of the header."""
    return {"statemgr_export": _VERSION, "job": config.job_name, "id": config.job_id}


def write(path: Path, config: JobConfig, lines: Iterator[bytes]) -> None:
    """Write a file for this user alone, whole or not at all. It replaces an older export of the job.

    Raises: InvalidError if no file can be there, or if there is another one; DiskFull, AccessDenied, RetryableError.
    """
    check_replaceable(path, "an export of this job", json.dumps(_of_job(config)).encode()[:-1])
    hints = {Fault.GONE: "name a file in a directory that exists"}
    with translated("the export cannot be written", path, kinds=MISTYPED, hints=hints), ExitStack() as undo:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            undo.callback(os.unlink, file.name)
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
        undo.pop_all()
        durable.sync(path.parent)


def read(path: Path, config: JobConfig) -> dict[str, CheckpointRecord]:
    """Task → its record, without what only the lost topics could supply.

    Raises: CorruptFile; InvalidError if there is no such file, or if it has another job; AccessDenied, RetryableError.
    """
    hints = {Fault.GONE: "name a file that `statemgr export` wrote"}
    with translated("the export cannot be read", path, kinds=MISTYPED, hints=hints):
        data = path.read_bytes()
    return decode_export(data, config.job_name, config.job_id)


def decode_export(data: bytes, job_name: str, job_id: str) -> dict[str, CheckpointRecord]:
    """:func:`read` for the bytes of a file."""
    try:
        header, *lines = [json.loads(line) for line in data.splitlines()]
        version, job, count = header["statemgr_export"], (header["job"], header["id"]), header["records"]
        pairs = [(b64decode(line["key"], validate=True), b64decode(line["value"], validate=True)) for line in lines]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt("it is no export of checkpoints") from error
    if version != _VERSION:
        raise InvalidError(f"the export has the version {version!r}", hint="use the release that wrote it")
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


def _records(pairs: Sequence[tuple[bytes, bytes]]) -> dict[str, CheckpointRecord]:
    """Raises: CorruptRecord, CorruptFile."""
    jobs: dict[int | None, JobCheckpoint] = {}
    tasks: list[tuple[CheckpointKey, TaskCheckpoint]] = []
    for key, value in pairs:
        at = codecs.decode_key(key)
        if at.task:
            tasks.append((at, codecs.decode_task(key, at, value)))
        else:
            jobs[at.sequence] = codecs.decode_job(key, at, value)
    records: dict[str, CheckpointRecord] = {}
    for at, task in sorted(tasks, key=lambda found: found[0].sequence or 0):
        of = task if task.publish is not None else jobs.get(at.sequence)
        if of is None or of.publish is None or of.layout is None:
            raise _corrupt(f"it has no job record for a checkpoint of {at.task}")
        older = records[at.task].checkpoints if at.task in records else ()
        checkpoint = _without_changelogs(checkpoint_of(task, of.publish))
        records[at.task] = CheckpointRecord(at.job_name, at.job_id, at.task, of.layout, (checkpoint, *older))
    return records


def only_in_kafka(records: Mapping[str, CheckpointRecord]) -> list[str]:
    """The stores of current checkpoints that only a changelog has."""
    current = [_without_changelogs(record.current) for record in records.values()]
    return sorted({store for one in current for store in _without_marker(one)})


def whole(
    services: Services, records: Mapping[str, CheckpointRecord], ids: Sequence[str]
) -> dict[str, CheckpointRecord]:
    """The records of an export without the newest checkpoints that have lost blobs since: the job went on for a while.

    Tasks that are published together, and share their input, get the checkpoint of one publish. All tasks of a Spark
    job get that of one micro-batch. Costs a HEAD for each blob of a checkpoint that is looked at.

    Args:
        ids: the checkpoints that may be taken; empty: any.

    Raises: MissingState if a task has none left; RetryableError, AccessDenied.
    """
    share = not all(is_by_input(record.layout.partitioner) for record in records.values())
    together = share and len({record.current.checkpoint_id for record in records.values()}) == 1
    while True:
        found = services.in_parallel("copy", lambda record: _newest_whole(services, record, ids), [*records.values()])
        oldest = min((record.current.sequence for record in found), default=0)
        if len({one.current.sequence if together else one.current.batch for one in found}) <= 1:
            return dict(zip(records, found, strict=True))
        records = {record.task: _up_to(record, oldest) for record in found}


def _newest_whole(services: Services, record: CheckpointRecord, ids: Sequence[str]) -> CheckpointRecord:
    why = ""
    for number, one in enumerate(record.checkpoints):
        if ids and str(one.checkpoint_id) not in ids:
            continue
        lost = sorted({*_without_marker(one), *(store for _, store in find_damage(services, record.task, one))})
        if not lost:
            return replace(record, checkpoints=record.checkpoints[number:])
        if not why:
            why = f"checkpoint {one.checkpoint_id} lacks the state of {', '.join(lost)}"
    raise MissingState(
        f"no checkpoint of the export has all of its blobs: {why or 'it has none of these'}",
        hint="use another export; only blobs count, because a changelog is lost with Kafka",
        task=record.task,
    )


def _up_to(record: CheckpointRecord, sequence: int) -> CheckpointRecord:
    """Raises: MissingState."""
    older = tuple(one for one in record.checkpoints if one.sequence <= sequence)
    if not older:
        raise MissingState("no checkpoint of the export is whole for all tasks", hint="use another export")
    return replace(record, checkpoints=older)


def _without_marker(checkpoint: Checkpoint) -> set[str]:
    """The stores that no backend has."""
    return set(checkpoint.stores).difference(*checkpoint.state_checkpoint_markers.values())


def _without_changelogs(checkpoint: Checkpoint) -> Checkpoint:
    markers = {f: m for f, m in checkpoint.state_checkpoint_markers.items() if f != KAFKA_CHANGELOG}
    return replace(checkpoint, state_checkpoint_markers=markers)


def _corrupt(why: str) -> CorruptFile:
    return CorruptFile(f"the export cannot be used: {why}", hint="use another export of the job")
