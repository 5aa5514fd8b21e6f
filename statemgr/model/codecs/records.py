"""Codecs of the records of the checkpoint topic (keys, job records, task records, and version 1), and of what is in
blobs or sent between processes (snapshot indexes, segment chains, prepared commits). Pure.

A version 2 key ends with the sequence number and a checksum, both of a fixed size. The bytes before them are the same
for all checkpoints of a task, so a reader of millions of records decodes them once. A version 2 value ends with a
checksum over the key and all bytes of the value before it.

A decoded value is well formed, but not yet trusted: see ``snapshot.validate`` and ``chain.validate_chain``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.errors import ANOTHER_COPY, CorruptBlob, CorruptRecord, InvalidError
from statemgr.ids import CheckpointId
from statemgr.model.chain import MAX_CHAIN_SIZE, SegmentChain
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint, CheckpointKey, CheckpointRecord, Layout
from statemgr.model.checkpoint_records import JobCheckpoint, TaskCheckpoint, checkpoint_of, task_alone
from statemgr.model.codecs.generic import Codec, Refuse
from statemgr.model.codecs.special_types import SHAPES, changelog_marker
from statemgr.model.commit import PreparedCommit
from statemgr.model.hashing import checksum
from statemgr.model.snapshot import MAX_INDEX_SIZE, SnapshotIndex

#: Bytes of a checksum at the end of a version 2 key, and of a version 2 value.
_CHECKSUM_SIZE = 8
#: Bytes at the end of a version 2 key that differ between the checkpoints of a task.
KEY_TAIL_SIZE = 8 + _CHECKSUM_SIZE
#: The factory that version 1 markers belong to: changelogs are all that it knows.
VERSION_ONE_FACTORY = KAFKA_CHANGELOG
_HINT = "find out what else writes to the topic; this software and older versions of it did not write this record"


class Place(NamedTuple):
    """Where a record was read."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None

    def refuser(self, what: str) -> Refuse:
        """Makes the error of a record that is refused."""
        return lambda why: CorruptRecord(f"checkpoint record refused ({what}): {why}", hint=_HINT, **self._asdict())


NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class _VersionOne:
    """A version 1 value. ``stores``: store → topic, partition and offset of its changelog."""

    job_name: str
    job_id: str
    task: str
    checkpoint_id: CheckpointId
    input_offsets: Mapping[str, int]
    stores: Mapping[str, tuple[str, int, int]]


_KEY_V1 = Codec("checkpoint_key.v1", CheckpointKey, SHAPES)
_KEY = Codec("checkpoint_key.v2", dict, SHAPES)
_VALUE_V1 = Codec("checkpoint.v1", _VersionOne, SHAPES)
_JOB = Codec("checkpoint_job.v2", JobCheckpoint, SHAPES)
_TASK = Codec("checkpoint_task.v3", TaskCheckpoint, SHAPES)


def value_headers(version: int, task: str) -> Collection[bytes]:
    """What the values of a task's records may begin with, or of job records if ``task`` is empty."""
    return (_VALUE_V1 if version == 1 else _TASK if task else _JOB).headers


# --- keys -------------------------------------------------------------------------------------------------------


def encode_key(key: CheckpointKey) -> bytes:
    """The bytes of a record's key. Equal keys have equal bytes, which compaction relies on.

    Raises: InvalidError if it does not fit the schema.
    """
    if key.sequence is None:
        return _KEY_V1.encode(key, task=key.task)
    if key.sequence < 0:
        raise InvalidError(f"a checkpoint's sequence number is {key.sequence}", task=key.task)
    fields = {
        "job_name": key.job_name,
        "job_id": key.job_id,
        "layout_generation": key.layout_generation,
        "task": key.task,
        "sequence": key.sequence.to_bytes(8, "big"),
    }
    data = _KEY.encode(fields, task=key.task)
    return data + checksum(data)


def is_key(data: bytes) -> bool:
    """Whether a record of the checkpoint topic is a checkpoint, by its key."""
    return data.startswith((_KEY.header, _KEY_V1.header))


def decode_key(data: bytes, place: Place = NOWHERE) -> CheckpointKey:
    """Raises: CorruptRecord with the given place."""
    refuse = place.refuser("key")
    if not data.startswith(_KEY.header):
        return _KEY_V1.decode(data, refuse)
    if not is_whole(data):
        raise refuse("its checksum does not match")
    fields = _KEY.decode(data[:-_CHECKSUM_SIZE], refuse)
    sequence = int.from_bytes(fields.pop("sequence"), "big")
    return CheckpointKey(**fields, record_version=2, sequence=sequence)


def is_whole(key: bytes) -> bool:
    """Whether the checksum of a version 2 key matches."""
    return len(key) > KEY_TAIL_SIZE and checksum(key[:-_CHECKSUM_SIZE]) == key[-_CHECKSUM_SIZE:]


def sequence_of(key: bytes) -> int:
    """The sequence number in a version 2 key."""
    return int.from_bytes(key[-KEY_TAIL_SIZE:-_CHECKSUM_SIZE], "big")


def with_sequence(key: bytes, sequence: int) -> bytes:
    """The version 2 key of the same task, or of the same job's records, with another sequence number."""
    data = key[:-KEY_TAIL_SIZE] + sequence.to_bytes(8, "big")
    return data + checksum(data)


# --- version 2 --------------------------------------------------------------------------------------------------


def encode_job(key: CheckpointKey, job: JobCheckpoint) -> tuple[bytes, bytes]:
    """Key and value of a job record. Raises: InvalidError if it does not fit the schema."""
    return _sealed(key, _JOB.encode(job))


def encode_task(key: CheckpointKey, task: TaskCheckpoint) -> tuple[bytes, bytes]:
    """Key and value of a task record. Raises: InvalidError if it does not fit the schema."""
    return _sealed(key, _TASK.encode(task, task=key.task))


def encode_record(record: CheckpointRecord) -> list[tuple[bytes, bytes]]:
    """Keys and values of task records that need no job record, for all checkpoints of a record, oldest first.

    Raises: InvalidError if one does not fit the schema.
    """
    if not record.checkpoints:
        raise InvalidError("a checkpoint record needs at least one checkpoint")
    return [encode_task(record.key(c), task_alone(c, record.layout)) for c in reversed(record.checkpoints)]


def decode_job(key: bytes, at: CheckpointKey, value: bytes, place: Place = NOWHERE) -> JobCheckpoint:
    """The content of a job record. ``key`` are the bytes of ``at``. Raises: CorruptRecord with the given place."""
    refuse = place.refuser("job record")
    job = _JOB.decode(opened(key, value, refuse), refuse)
    _check_key(at, job.layout.generation, job.publish.sequence, refuse)
    return job


def decode_task(key: bytes, at: CheckpointKey, value: bytes, place: Place = NOWHERE) -> TaskCheckpoint:
    """The content of a task record. ``key`` are the bytes of ``at``. Raises: CorruptRecord with the given place."""
    refuse = place.refuser("task record")
    task = _TASK.decode(opened(key, value, refuse), refuse)
    if (task.publish is None) != (task.layout is None):
        raise refuse("it has one of the layout and the publish without the other")
    if task.publish is not None and task.layout is not None:
        _check_key(at, task.layout.generation, task.publish.sequence, refuse)
    return task


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """One checkpoint alone, for the machine that runs its task's attempt."""
    return _TASK.encode(task_alone(checkpoint))


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Raises: CorruptRecord."""
    refuse = NOWHERE.refuser("single checkpoint")
    task = _TASK.decode(data, refuse)
    if task.publish is None:
        raise refuse("it refers to a job record")
    return checkpoint_of(task, task.publish)


def _sealed(key: CheckpointKey, value: bytes) -> tuple[bytes, bytes]:
    data = encode_key(key)
    return data, sealed(data, value)


def sealed(key: bytes, value: bytes) -> bytes:
    """A value with a checksum over the key and all bytes of the value."""
    return value + checksum(key + value)


def opened(key: bytes, value: bytes, refuse: Refuse) -> bytes:
    """A value without its checksum. Raises: CorruptRecord unless that matches."""
    content = value[:-_CHECKSUM_SIZE]
    if len(value) <= _CHECKSUM_SIZE or checksum(key + content) != value[-_CHECKSUM_SIZE:]:
        raise refuse("its checksum does not match")
    return content


def _check_key(key: CheckpointKey, generation: int, sequence: int, refuse: Refuse) -> None:
    if (key.layout_generation, key.sequence) != (generation, sequence):
        raise refuse(
            f"the value is of layout {generation} and sequence {sequence}, "
            f"its key of layout {key.layout_generation} and sequence {key.sequence}"
        )


# --- version 1: what software without blob snapshots reads and writes -------------------------------------------


def encode_record_v1(record: CheckpointRecord) -> bytes:
    """The version 1 value of the current checkpoint: its changelog markers and input offsets alone."""
    current = record.current
    markers = current.state_checkpoint_markers.get(VERSION_ONE_FACTORY, {})
    stores = {
        store: (marker.topic, marker.partition, marker.offset)
        for store, marker in markers.items()
        if isinstance(marker, ChangelogMarker)
    }
    value = _VersionOne(
        record.job_name, record.job_id, record.task, current.checkpoint_id, current.input_offsets, stores
    )
    return _VALUE_V1.encode(value, task=record.task)


def decode_record_v1(key: CheckpointKey, data: bytes, place: Place = NOWHERE) -> CheckpointRecord:
    """A version 1 record has a layout of 0 tasks (unknown), sequence and epoch 0, and lists the stores that it has
    changelog offsets for.

    Raises: CorruptRecord with the given place: other bytes, or not the key's value.
    """
    refuse = place.refuser("value")
    value = _VALUE_V1.decode(data, refuse)
    try:
        markers = {
            store: changelog_marker(ChangelogMarker(topic, None, partition, offset))
            for store, (topic, partition, offset) in value.stores.items()
        }
    except ValueError as error:
        raise refuse(str(error)) from error
    checkpoint = Checkpoint(
        checkpoint_id=value.checkpoint_id,
        sequence=0,
        epoch=0,
        input_offsets=value.input_offsets,
        # version 1 has no state IDs, and no other content has this one
        stores=dict.fromkeys(markers, f"v1-{value.checkpoint_id}"),
        state_checkpoint_markers={VERSION_ONE_FACTORY: markers} if markers else {},
        record_version=1,
        offset=place.offset,
    )
    layout = Layout(key.layout_generation, 0, "")
    record = CheckpointRecord(value.job_name, value.job_id, value.task, layout, (checkpoint,), place.offset)
    if record.key_v1() != key:
        raise refuse(
            f"the value is of {record.job_name!r}/{record.job_id!r}, {record.task!r}; "
            f"its key is of {key.job_name!r}/{key.job_id!r}, {key.task!r}"
        )
    return record


_INDEX = Codec("snapshot_index.v1", SnapshotIndex, SHAPES, MAX_INDEX_SIZE)
_CHAIN = Codec("segment_chain.v1", SegmentChain, SHAPES, MAX_CHAIN_SIZE)
_PREPARED = Codec("prepared_commit.v2", PreparedCommit, SHAPES)


def encode_index(index: SnapshotIndex) -> bytes:
    """The content of an index blob. Raises: InvalidError if it does not fit the schema or the limit."""
    return _INDEX.encode(index, store=index.store)


def decode_index(data: bytes, blob_id: str | None = None) -> SnapshotIndex:
    """Raises: CorruptBlob naming the blob."""
    return _INDEX.decode(data, _refuser("index blob", blob_id))


def encode_chain(chain: SegmentChain) -> bytes:
    """The bytes of a chain. Raises: InvalidError if it does not fit the schema or the limit."""
    return _CHAIN.encode(chain, store=chain.store)


def decode_chain(data: bytes, blob_id: str | None = None) -> SegmentChain:
    """``blob_id``: the blob of the chain, None if it was inline. Raises: CorruptBlob."""
    chain = _CHAIN.decode(data, _refuser("segment chain", blob_id or "inline"))
    return chain if blob_id is None else chain.lying_in(blob_id)


def encode_prepared(prepared: PreparedCommit) -> bytes:
    """Raises: InvalidError if its changes are still local, because it was not prepared to leave its process."""
    for name, store in prepared.stores.items():
        for changes in store.changes.values():
            if changes.local is not None or (changes.inline is None) == (changes.blob is None):
                raise InvalidError("changes that leave their process must be either inline or in a blob", store=name)
    return _PREPARED.encode(prepared, task=prepared.task)


def decode_prepared(data: bytes) -> PreparedCommit:
    """Raises: CorruptRecord."""

    def refuse(why: str) -> CorruptRecord:
        hint = "prepare and publish commits with the same version of statemgr"
        return CorruptRecord(f"prepared commit refused: {why}", hint=hint)

    return _PREPARED.decode(data, refuse)


def _refuser(what: str, blob_id: str | None) -> Refuse:
    return lambda why: CorruptBlob(f"{what} refused: {why}", blob=blob_id, hint=ANOTHER_COPY)
