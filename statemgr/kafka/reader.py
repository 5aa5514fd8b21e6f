"""Reads the committed records of one partition from one offset up to exactly another.

The reader compares positions and does not count records, because control records, aborted transactions and compaction
leave gaps. Offsets that decrease, or lie beyond the end of the log, come from a damaged log. With read_committed,
librdkafka reports the position by an end-of-partition event at the last stable offset. As long as that is below the
wanted end, a transaction is still open there, and the reader waits until it has ended or the deadline has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import StatemgrError, UnavailableError
from statemgr.kafka.clients import ANSWER_S, consumer
from statemgr.kafka.errors import ClientErrors, damaged, is_damaged, may_pass, translate
from statemgr.logs import Event, tell
from statemgr.ports import Clock

log = logging.getLogger(__name__)
#: Records that are taken together. They should fit into the processor's caches and not trigger the garbage collector:
#: measured, 10,000 together take more than twice the processor time of 500.
_BATCH = 500
#: ``consume`` waits this long for a full batch. Every read waits so once, at the end of the topic.
_WAIT_S = 0.02
#: Seconds after which ``consume`` has returned, unless the process was suspended meanwhile.
_RETURNED_S = 5.0
#: Seconds that a read may make no progress, in addition to the longest life of a transaction.
_GRACE_S = 30.0
#: Seconds without progress after which the log says so, and between two such lines.
_PATIENCE_S, _LOG_S = 5.0, 10.0


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

    def read(self, topic: str, partition: int, start: int, end: int) -> Generator[list[Message]]:
        """Committed records with ``start`` ≤ offset < ``end``, in batches.

        Raises: MissingState (the topic or the offset is gone), UnavailableError (deadline), AccessDenied, CorruptRecord
            (the log on the broker's disk is damaged).
        """
        if start >= end:
            return
        errors = ClientErrors()
        client = consumer(self._config, errors, isolation_level="read_committed", enable_partition_eof=True)
        try:
            reading = _Reading(client, errors, topic, partition, start, end)
            client.assign([TopicPartition(topic, partition, start)])
            last_progress = self._clock.monotonic()
            next_line = _PATIENCE_S
            while reading.position < end:
                before, asked_s = reading.position, self._clock.elapsed()
                # to the end there are at most this many messages, where one of them may be the news that it is the end
                batch = reading.take(client.consume(min(_BATCH, end - reading.position), _WAIT_S))
                # a process that was suspended in the call has not waited: the brokers could not answer
                last_progress += max(self._clock.elapsed() - asked_s - _RETURNED_S, 0.0)
                if batch:
                    yield batch
                waited = self._clock.monotonic() - last_progress
                if reading.position > before:
                    last_progress, next_line = self._clock.monotonic(), _PATIENCE_S
                elif waited > self._stall_s or errors.refused():
                    raise reading.stalled()
                elif waited > next_line:
                    next_line = waited + _LOG_S
                    reading.tell_waiting(self._stall_s - waited)
        finally:
            client.close()


def offset_of(message: Message) -> int:
    """The offset of a record that was read."""
    offset = message.offset()
    assert offset is not None
    return offset


@dataclass
class _Reading:
    """One read of a partition. ``position``: everything below this offset has been read."""

    client: Consumer
    errors: ClientErrors
    topic: str
    partition: int
    position: int
    end: int

    def take(self, messages: list[Message]) -> list[Message]:
        """Move the position, and return the records below the wanted end.

        Raises: CorruptRecord for records that the log cannot have; errors that waiting cannot fix.
        """
        batch = messages
        if any(map(Message.error, messages)):  # nearly never, so it is one loop in C
            batch = [message for message in messages if message.error() is None]
        reached = self.position
        if batch:
            first, last = offset_of(batch[0]), offset_of(batch[-1])
            if first < self.position or last - first < len(batch) - 1:
                raise self._damaged("its records are out of order", self.position)
            reached = last + 1
        if len(batch) < len(messages):
            reached = max(reached, *(self._after(event) for event in messages if event.error() is not None))
        if reached > self.end and batch:
            self._check_beyond(batch)
            batch = [message for message in batch if offset_of(message) < self.end]
        self.position = max(self.position, reached)
        return batch

    def _after(self, event: Message) -> int:
        """The position that an event reports; 0 if it reports none."""
        error = event.error()
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            return event.offset() or 0
        if is_damaged(error):
            raise self._damaged(f"a record cannot be read: {error.str()}", event.offset() or 0)
        if may_pass(error):
            self.errors(error)
            return 0
        raise self._translated(error)

    def _check_beyond(self, batch: list[Message]) -> None:
        """Records beyond the wanted end must be newer than it. Raises: CorruptRecord if the log does not have them."""
        _, high = self.client.get_watermark_offsets(TopicPartition(self.topic, self.partition), cached=True)
        offsets = [offset_of(message) for message in batch]
        if offsets[-1] >= high >= 0:
            last = max((offset for offset in offsets if offset < high), default=self.position - 1)
            raise self._damaged(f"it has a record at offset {offsets[-1]}, and ends at {high}", last + 1)

    def tell_waiting(self, left_s: float) -> None:
        """Tell the log why there is no progress, and how long the read will wait at most."""
        why = self.stalled()
        if isinstance(why, UnavailableError):  # a transaction that has just ended looks like damage
            where = f"{self.topic}-{self.partition}"
            tell(log, Event.WAITING, "waiting for Kafka, for at most %.0f s more: %s: %s", left_s, where, why.message)

    def stalled(self) -> StatemgrError:
        """The error for a read without progress: credentials, unreachable brokers, damage, or an open transaction."""
        where: dict[str, str | int] = {"topic": self.topic, "partition": self.partition, "offset": self.position}
        if self.errors.refused() is None and self.errors.last() is None:
            place = TopicPartition(self.topic, self.partition)
            try:
                _, stable = self.client.get_watermark_offsets(place, timeout=ANSWER_S)
            except KafkaException as error:
                self.errors(error.args[0])
            else:
                if stable >= self.end:
                    why = f"the broker gives no records after offset {self.position}, but the topic ends at {self.end}"
                    return self._damaged(why, self.position)
        if (refused := self.errors.refused()) is not None:
            return self._translated(refused)
        if (last := self.errors.last()) is not None:
            return UnavailableError(
                f"the topic has not been read to its end at offset {self.end}: {last}",
                hint="check that the brokers are running",
                **where,
            )
        return UnavailableError(
            f"the topic has not been read to its end at {self.end}: an open transaction of another owner stops it at "
            f"{self.position}",
            hint="wait until that owner commits or its transaction.timeout.ms is over; find a transaction that never "
            "ends with `kafka-transactions.sh find-hanging`",
            **where,
        )

    def _damaged(self, what: str, offset: int) -> StatemgrError:
        return damaged(what, topic=self.topic, partition=self.partition, offset=offset)

    def _translated(self, error: KafkaError) -> StatemgrError:
        return translate(error, "reading a topic", reported=self.errors, topic=self.topic, partition=self.partition)
