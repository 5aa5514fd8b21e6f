"""Limits of the records on the checkpoint topic and of what they hold inline, and the error for any other record that
is too large. Pure.

A record that outgrew the broker's limit at some commit would stop the job, so its parts have limits: what is inline in
a task record, how many TTLs may be outstanding, and how many input partitions and stores a job may have.
"""

from __future__ import annotations

from collections.abc import Sequence

from statemgr.errors import InvalidError

#: Bytes of any record's key and value.
MOST_RECORD = 256 * 1024
#: Most inline bytes of all chains, and of all attachments, in one record; and in all records of one publish together.
_CHAINS, _ATTACHMENTS = 64 * 1024, 16 * 1024
_CHAINS_OF_PUBLISH, _ATTACHMENTS_OF_PUBLISH = 768 * 1024, 512 * 1024
_CHAIN = 8 * 1024
#: The most published blobs of a task that may still have a TTL.
MOST_OUTSTANDING = 400
#: The most bytes of an input partition in a record: its offset, and its number and offset in the JSON of both ends of
#: a micro-batch (see the format), with offsets up to 10^15.
_OF_PARTITION = 8 + 2 * (7 + 1 + 16 + 1)
#: Bytes of a job record without its input partitions and stores.
_JOB = 8 * 1024
#: Bytes of a batch of records before its first record.
_BATCH_HEADER = 61
#: Bytes of a long key that an error shows.
_SHOWN = 40


def inline_chain_limit(stores: int, tasks: int) -> int:
    """The most bytes of a store's chain that is stored inline, if ``tasks`` are published together."""
    stores = max(stores, 1)
    return min(_CHAIN, _CHAINS // stores, _CHAINS_OF_PUBLISH // (tasks * stores))


def inline_attachments_limit(tasks: int) -> int:
    """The most bytes of a task's attachments that are stored inline, if ``tasks`` are published together."""
    return min(_ATTACHMENTS, _ATTACHMENTS_OF_PUBLISH // tasks)


def most_partitions(settings: int) -> int:
    """How many input partitions fit into a record in which the stores' settings take this many bytes."""
    return (MOST_RECORD - _JOB - settings) // _OF_PARTITION


#: What to do about a record that the producer does not take.
PRODUCER_LIMIT = (
    "make the value smaller, or raise kafka.producer.message.max.bytes and max.message.bytes of the topic; blob-store "
    "has no such limit"
)


def size_of_record(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]] = ()) -> int:
    """Bytes of a record's key, value and headers."""
    size = len(key or b"") + len(value or b"")
    return size + sum(len(name.encode()) + len(of or b"") for name, of in headers) if headers else size


def size_of_batch(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]] = ()) -> int:
    """Bytes of a batch with this record alone, without compression: what a broker compares with ``max.message.bytes``
    (record batches of version 2, ``DefaultRecordBatch`` and ``DefaultRecord`` of Kafka)."""
    parts = [key, value, *(part for name, of in headers for part in (name.encode(), of))]
    # attributes, and the distances to the batch's timestamp and offset, which are 0
    size = 3 + _varint(len(headers)) + sum(1 if part is None else _varint(len(part)) + len(part) for part in parts)
    return _BATCH_HEADER + _varint(size) + size


def _varint(number: int) -> int:
    """Bytes of a whole number that is not negative, as Kafka writes it: zigzag, 7 bits in a byte."""
    return max(1, ((2 * number).bit_length() + 6) // 7)


def too_large(key: bytes | None, size: int, limit: int | None, hint: str, **where: object) -> InvalidError:
    """The error for a record, or a store's key and value, that a backend does not take. It names the key; of a long one
    only the beginning.

    Args:
        size: bytes of key, value and headers.
        limit: the bytes that are allowed, if they are known.
        where: the topic, the store…
    """
    allowed = "Kafka allows" if limit is None else f"the {limit} bytes that are allowed"
    shortened = repr(key) if key is None or len(key) <= _SHOWN else f"{key[:_SHOWN]!r}… ({len(key)} bytes)"
    return InvalidError(f"a record of {size} bytes is larger than {allowed}", hint=hint, key=shortened, **where)
