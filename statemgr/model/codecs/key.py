"""Keys of the checkpoint topic ↔ bytes. Pure.

A version 2 key ends with the sequence number and a checksum, both of a fixed size: what is before them is the same for
all checkpoints of a task, so that a reader of millions of records decodes it once.
"""

from __future__ import annotations

from statemgr.errors import InvalidError
from statemgr.model.checkpoint import CheckpointKey
from statemgr.model.codecs.schemas import shipped_schemas
from statemgr.model.codecs.wire import HEADER_SIZE, MARK, decode, encode, refuser
from statemgr.model.hashing import checksum

#: Bytes of a checksum at the end of a version 2 key, and of a version 2 value.
CHECKSUM_SIZE = 8
#: Bytes at the end of a version 2 key that differ between the checkpoints of a task.
KEY_TAIL_SIZE = 8 + CHECKSUM_SIZE


def encode_key(key: CheckpointKey) -> bytes:
    """The bytes of a record's key; equal keys have equal bytes, which compaction relies on.

    Raises: InvalidError when it does not fit the schema.
    """
    fields = {
        "job_name": key.job_name,
        "job_id": key.job_id,
        "layout_generation": key.layout_generation,
        "task": key.task,
    }
    if key.sequence is None:
        return encode("checkpoint_key.v1", {**fields, "record_version": key.record_version})
    if key.sequence < 0:
        raise InvalidError(f"a checkpoint's sequence number is {key.sequence}", task=key.task)
    data = encode("checkpoint_key.v2", {**fields, "sequence": key.sequence.to_bytes(8, "big")})
    return data + checksum(data)


def decode_key(
    data: bytes, *, topic: str | None = None, partition: int | None = None, offset: int | None = None
) -> CheckpointKey:
    """Raises: CorruptRecord with the given place."""
    refuse = refuser("key", topic, partition, offset)
    if not data.startswith(MARK + shipped_schemas().fingerprint("checkpoint_key.v2")):
        return CheckpointKey(**decode("checkpoint_key.v1", data, refuse))
    if not is_whole(data):
        raise refuse("its checksum does not match")
    value = decode("checkpoint_key.v2", data[:-CHECKSUM_SIZE], refuse)
    sequence = int.from_bytes(value.pop("sequence"), "big")
    return CheckpointKey(**value, record_version=2, sequence=sequence)


def is_whole(key: bytes) -> bool:
    """Whether the checksum of a version 2 key matches."""
    return len(key) > HEADER_SIZE + CHECKSUM_SIZE and checksum(key[:-CHECKSUM_SIZE]) == key[-CHECKSUM_SIZE:]


def sequence_of(key: bytes) -> int:
    """The sequence number in a version 2 key."""
    return int.from_bytes(key[-KEY_TAIL_SIZE:-CHECKSUM_SIZE], "big")
