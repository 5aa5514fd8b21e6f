"""Reads a changelog as any other program would: with a plain consumer, without a checkpoint, and without its checks."""

from __future__ import annotations

from collections.abc import Iterator

from confluent_kafka import KafkaError, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord, UnavailableError
from statemgr.kafka.clients import consumer
from statemgr.kafka.errors import ClientErrors, translate
from statemgr.kafka.reader import offset_of
from statemgr.model.commit import Change
from statemgr.ports import Clock

_BATCH = 500
_WAIT_S = 0.05
#: Seconds without a record after which a read fails.
_STALL_S = 60.0


def read_plainly(
    config: JobConfig, clock: Clock, topic: str, partition: int, start: int, end: int
) -> Iterator[list[Change]]:
    """The committed records with ``start`` ≤ offset < ``end``, or fewer where the topic ends earlier.

    Raises: UnavailableError, AccessDenied, CorruptRecord (a record without a key).
    """
    client = consumer(config, ClientErrors(), isolation_level="read_committed", enable_partition_eof=True)
    try:
        client.assign([TopicPartition(topic, partition, start)])
        position, heard_s = start, clock.monotonic()
        while position < end:
            for_changes: list[Change] = []
            for message in client.consume(_BATCH, _WAIT_S):
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise translate(error, "reading a topic", topic=topic, partition=partition)
                position = offset_of(message) + (error is None)
                heard_s = clock.monotonic()
                if error is None and position <= end:
                    for_changes.append(_change(message.key(), message.value(), topic, partition, position - 1))
            if for_changes:
                yield for_changes
            if clock.monotonic() - heard_s > _STALL_S:
                where = {"topic": topic, "partition": partition, "offset": position}
                raise UnavailableError(
                    "the topic returned no more records before its end",
                    hint="check that the brokers are running",
                    **where,
                )
    finally:
        client.close()


def _change(key: object, value: object, topic: str, partition: int, offset: int) -> Change:
    if not isinstance(key, bytes) or not isinstance(value, bytes | None):
        hint = "find out what else writes to the changelog"
        raise CorruptRecord("a record has no key", hint=hint, topic=topic, partition=partition, offset=offset)
    return key, value
