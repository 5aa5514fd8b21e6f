"""Reads the committed records of one partition from one offset up to exactly another.

The reader compares positions and does not count records, because control records, aborted transactions and compaction
leave gaps. Offsets that decrease, or lie beyond the end of the log, come from a damaged log. With read_committed,
librdkafka reports the position by an end-of-partition event at the last stable offset. As long as that is below the
wanted end, a transaction is still open there, and the reader waits until it has ended or the deadline has passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import UnavailableError
from statemgr.kafka.clients import ANSWER_S, ClientErrors, consumer, damaged, is_damaged, may_pass, translate
from statemgr.ports import Clock

#: Records that are taken together. They should fit into the processor's caches and not trigger the garbage collector:
#: measured, 10,000 together take more than twice the processor time of 500.
_BATCH = 500
#: ``consume`` waits this long for a full batch. Every read pays it once, at the end of the topic.
_WAIT_S = 0.02
#: Seconds that a read may make no progress, in addition to the longest life of a transaction.
_GRACE_S = 30.0


class PartitionReader:
    """Reads partitions, each time with a new consumer.

    Args:
        stall_s: seconds without progress after which a read fails; by default a little more than another owner's
            transaction may be open (``task.commit.timeout.ms``).
    """

    def __init__(self, config: JobConfig, clock: Clock, stall_s: float | None = None) -> None:
        self._config = config
        self._clock = clock
        self._stall_s = config.commit_timeout_ms / 1000 + _GRACE_S if stall_s is None else stall_s

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[list[Message]]:
        """Committed records with ``start`` ≤ offset < ``end``, in batches.

        Raises: MissingState (the topic or the offset is gone), UnavailableError (deadline), AccessDenied, CorruptRecord
            (the log on the broker's disk is damaged).
        """
        if start >= end:
            return
        errors = ClientErrors()
        client = consumer(self._config, errors, isolation_level="read_committed", enable_partition_eof=True)
        try:
            client.assign([TopicPartition(topic, partition, start)])
            position, last_progress = start, self._clock.monotonic()
            while position < end:
                messages = client.consume(_BATCH, _WAIT_S)
                batch = [message for message in messages if message.error() is None]
                reached = _after(batch, position, topic, partition) if batch else position
                if len(batch) < len(messages):
                    events = [message for message in messages if message.error() is not None]
                    reached = max(reached, *(_after_event(e, topic, partition, errors) for e in events))
                if reached > end:
                    _check_beyond(client, batch, position, topic, partition)
                    batch = [message for message in batch if offset_of(message) < end]
                if batch:
                    yield batch
                if reached > position:
                    position, last_progress = reached, self._clock.monotonic()
                elif self._clock.monotonic() - last_progress > self._stall_s or errors.refused():
                    _refuse_unreadable(client, topic, partition, position, end, errors)
                    _stalled(topic, partition, position, end, errors)
        finally:
            client.close()


def offset_of(message: Message) -> int:
    """The offset of a record that was read."""
    offset = message.offset()
    assert offset is not None
    return offset


def _after(batch: list[Message], position: int, topic: str, partition: int) -> int:
    """The position after a batch. Raises: CorruptRecord if the batch does not follow what was read before."""
    first, last = offset_of(batch[0]), offset_of(batch[-1])
    if first < position or last - first < len(batch) - 1:
        raise damaged("its records are out of order", topic=topic, partition=partition, offset=position)
    return last + 1


def _check_beyond(client: Consumer, batch: list[Message], position: int, topic: str, partition: int) -> None:
    """Records beyond the wanted end must be newer than it. Raises: CorruptRecord if the log does not have them."""
    if not batch:
        return
    _, high = client.get_watermark_offsets(TopicPartition(topic, partition), cached=True)
    offsets = [offset_of(message) for message in batch]
    if offsets[-1] >= high >= 0:
        last = max((offset for offset in offsets if offset < high), default=position - 1)
        why = f"it has a record at offset {offsets[-1]}, and ends at {high}"
        raise damaged(why, topic=topic, partition=partition, offset=last + 1)


def _refuse_unreadable(
    client: Consumer, topic: str, partition: int, position: int, end: int, errors: ClientErrors
) -> None:
    """After reading has stalled. Raises: CorruptRecord if the broker answers and no transaction is open."""
    if errors.refused() or errors.last():
        return
    try:
        _, stable = client.get_watermark_offsets(TopicPartition(topic, partition), timeout=ANSWER_S)
    except KafkaException as error:
        errors(error.args[0])
        return
    if stable >= end:
        why = f"the broker gives no records after offset {position}, though the topic ends at {end}"
        raise damaged(why, topic=topic, partition=partition, offset=position)


def _after_event(event: Message, topic: str, partition: int, errors: ClientErrors) -> int:
    """The position that an event reports; 0 if it reports none. Raises: an error that waiting cannot fix."""
    error = event.error()
    assert error is not None
    if error.code() == KafkaError._PARTITION_EOF:
        return event.offset() or 0
    if is_damaged(error):
        offset = event.offset()
        raise damaged(f"a record cannot be read: {error.str()}", topic=topic, partition=partition, offset=offset or 0)
    if may_pass(error):
        errors(error)
        return 0
    raise translate(error, "reading a topic", reported=errors, topic=topic, partition=partition)


def _stalled(topic: str, partition: int, position: int, end: int, errors: ClientErrors) -> NoReturn:
    refused, last = errors.refused(), errors.last()
    if refused is not None:
        raise translate(refused, "reading a topic", topic=topic, partition=partition)
    if last is not None:
        raise UnavailableError(
            f"the topic could not be read to its end at offset {end}: {last}",
            hint="check that the brokers are running",
            topic=topic,
            partition=partition,
            offset=position,
        )
    raise UnavailableError(
        f"the topic could not be read to its end at {end}: an open transaction of another owner stops it at {position}",
        hint="wait until that owner commits or its transaction.timeout.ms is over; find a transaction that never ends "
        "with `kafka-transactions.sh find-hanging`",
        topic=topic,
        partition=partition,
        offset=position,
    )
