"""A librdkafka producer with a transactional ID, and its open transaction.

Each call is repeated until it succeeds or its deadline has passed. librdkafka continues an operation that timed out
when it is called again. Between two calls, a process that was suspended or is closing notices that its deadline has
passed.

A transaction puts records into librdkafka's queue, with back-pressure, and learns their offsets. A record that the
client does not take ends it with an error that names its key. If a broker refuses a batch,
:meth:`KafkaTransaction.largest` finds the record that is too large in the changes, which can be read again. Of many
records, only the first and the last one have a delivery callback. That is enough, because one failed delivery makes the
commit of a transaction fail, and an idempotent producer keeps the order of a partition.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from statemgr.config import JobConfig
from statemgr.errors import ClosedError, RetryableError
from statemgr.kafka.clients import SLICE_S, producer, serve_after
from statemgr.kafka.errors import AFTER_EFFECTS, TOO_LARGE, ClientErrors, is_unreachable, translate, unmasked
from statemgr.kafka.transactions.refusals import LargestRecord
from statemgr.logs import Event, tell
from statemgr.model.commit import Change
from statemgr.model.record_size import PRODUCER_LIMIT, size_of_record, too_large
from statemgr.ports import Clock, Delivered

log = logging.getLogger(__name__)
#: Seconds between two lines about topics that have taken no record yet.
_PATIENCE_S = 5.0
#: Seconds to wait for room in a full queue.
_BACK_PRESSURE_S = 0.02


class TransactionalProducer:
    """``client`` is the ``confluent_kafka.Producer``. Methods raise KafkaException. Deadlines are monotonic seconds.

    Args:
        timeout_ms: the brokers abort a transaction that is open for longer.
        errors: receives what the client reports by callback.
    """

    def __init__(
        self, config: JobConfig, transactional_id: str, clock: Clock, timeout_ms: int, errors: ClientErrors
    ) -> None:
        self._clock = clock
        self._errors = errors
        self._topic = config.checkpoint_topic
        self._used_s = clock.elapsed()
        self.client = producer(
            config,
            errors,
            transactional_id=transactional_id,
            enable_idempotence=True,
            acks="all",
            transaction_timeout_ms=timeout_ms,
        )

    def init(self, deadline: float) -> None:
        """Take over the transactional ID."""
        with contextlib.suppress(KafkaException):
            # A client without a connection asks for its coordinator again only after 500 ms. The first answer comes
            # over the bootstrap connection, which librdkafka closes then; the second over one that stays.
            for _ in range(2):
                left_s = max(deadline - self._clock.monotonic(), 0.01)
                self.client.list_topics(self._topic, timeout=min(SLICE_S, left_s))
        self._until(self.client.init_transactions, deadline)

    def begin(self) -> None:
        """Begin a transaction. First hands over what the client has logged since it was used last."""
        fatal = serve_after(self._clock.elapsed() - self._used_s, self._served)
        if fatal is not None:
            raise KafkaException(fatal)
        self.client.begin_transaction()

    def commit(self, deadline: float) -> None:
        """Commit the open transaction, or ask again how its commit ended."""
        self._until(self.client.commit_transaction, deadline)

    def abort(self, deadline: float) -> None:
        """Abort the open transaction."""
        self._until(self.client.abort_transaction, deadline)

    def reason(self, error: KafkaError) -> KafkaError:
        """Why a transaction failed. Asks the client if ``error`` only says that it has failed."""
        if error.code() in AFTER_EFFECTS:
            try:
                self.client.begin_transaction()  # refused while one is open; the error says why that one failed
            except KafkaException as refusal:
                found: KafkaError = refusal.args[0]
                return found
        return error

    def close(self) -> None:
        """Drop the records that are not sent yet."""
        with contextlib.suppress(KafkaException):
            self.client.purge()

    def _until(self, call: Callable[[float], None], deadline: float) -> None:
        while True:
            left = deadline - self._clock.monotonic()
            try:
                with unmasked():
                    call(max(min(SLICE_S, left), 0.01))
                self._used_s = self._clock.elapsed()
                return
            except KafkaException as error:
                reason = self._served() or error.args[0]
                refused = self._errors.refused() is not None
                again = is_unreachable(reason) or reason.code() == KafkaError._FATAL  # the next call says which error
                if not again or reason.fatal() or refused or left <= 0:
                    raise KafkaException(reason) from error
                if reason.code() != KafkaError._TIMED_OUT:
                    self._clock.sleep(min(0.1, max(left, 0.0)))

    def _served(self) -> KafkaError | None:
        """Run the client's callbacks. Returns: a fatal error, which the client raises as an exception."""
        try:
            with unmasked():
                self.client.poll(0)
        except KafkaException as error:
            found: KafkaError = error.args[0]
            return found
        return None


class KafkaTransaction:
    """Implements :class:`statemgr.ports.Transaction`. The publisher makes it; it cannot be used after its block.

    Attributes:
        written: the topics and partitions that have, or may have, records of this transaction → the offset of the first
            one; None if it is not known.
        refused: the topic and partition of the first record that a broker has refused.
        times: topic → the oldest and the newest timestamp that records were given (epoch milliseconds).

    Args:
        most_bytes: what the producer takes as key, value and headers of one record.
    """

    def __init__(
        self, producer: Producer, clock: Clock, deadline: float, errors: ClientErrors, most_bytes: int
    ) -> None:
        self._producer = producer
        self._clock = clock
        self._deadline = deadline
        self._errors = errors
        self._most_bytes = most_bytes
        self.written: dict[tuple[str, int], int | None] = {}
        self.refused: tuple[str, int | None] | None = None
        self.times: dict[str, tuple[int, int]] = {}
        #: The changes of each topic and partition, and the largest other record of each topic.
        self._changes: list[tuple[str, int, Iterable[Change]]] = []
        self._largest: dict[str, LargestRecord] = {}
        self._topics: set[str] = set()
        self._delivered: dict[tuple[str, int], Delivered] = {}
        #: Where the fate of the first record is known.
        self._reported: set[tuple[str, int]] = set()
        #: Records that were sent without a callback.
        self._uncounted: Counter[tuple[str, int]] = Counter()
        self._failed: KafkaError | None = None
        self._closed = False

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        self._check()
        self._topics.add(topic)
        options: dict[str, Any] = {"on_delivery": self._on_delivery}
        if partition is not None:
            options["partition"] = partition
            self.written.setdefault((topic, partition))
        if headers:
            options["headers"] = list(headers)
        if timestamp_ms is not None:
            options["timestamp"] = timestamp_ms
            oldest, newest = self.times.get(topic, (timestamp_ms, timestamp_ms))
            self.times[topic] = min(oldest, timestamp_ms), max(newest, timestamp_ms)
        self._produce(topic, key, value, options)
        size = size_of_record(key, value, headers)
        if topic not in self._largest or size > self._largest[topic].size:
            self._largest[topic] = LargestRecord(key, size)

    def send_changes(self, topic: str, partition: int, changes: Iterable[Change]) -> None:
        self._changes.append((topic, partition, changes))
        produce, rest = self._producer.produce, iter(changes)
        for key, value in islice(rest, 1):
            self.send(topic, key, value, partition=partition)
        # the last record gets a callback, so each record is held back until the next one is known
        last: Change | None = None
        number = -1
        for number, change in enumerate(rest):  # noqa: B007
            if last is not None:
                key, value = last
                try:
                    produce(topic, value, key, partition)
                except (BufferError, KafkaException):
                    self._produce(topic, key, value, {"partition": partition})
            last = change
        if last is not None:
            self._uncounted[topic, partition] += number
            key, value = last
            self.send(topic, key, value, partition=partition)

    def flush(self) -> Mapping[tuple[str, int], Delivered]:
        self._check()
        begun = self._clock.elapsed()
        while True:
            with unmasked():
                waiting = self._producer.flush(max(min(SLICE_S, self._left()), 0.01))
            self._check()
            if not waiting:
                break
            silent = sorted(self._topics - {topic for topic, _ in self._delivered})
            if silent and self._clock.elapsed() - begun > _PATIENCE_S:
                begun = self._clock.elapsed()
                tell(
                    log, Event.WAITING, "waiting for Kafka to take records for %s: check that the topic exists",
                    ", ".join(silent), topics=silent,
                )  # fmt: skip
            if self._left() <= 0:
                last = self._errors.last()
                raise RetryableError(
                    "the broker has not accepted all records within the timeout of the commit"
                    + (f" ({last})" if last else ""),
                    hint="check the brokers, or raise task.commit.timeout.ms"
                    + (f"; check that these topics exist: {', '.join(silent)}" if silent else ""),
                )
        return {
            place: found._replace(records=found.records + self._uncounted[place])
            for place, found in self._delivered.items()
        }

    def largest(self, topic: str, partition: int | None) -> LargestRecord | None:
        """The largest record that was sent to a partition, or without one to the whole topic. Reads the changes again.

        Raises: what reading them raises.
        """
        found = self._largest.get(topic)
        for to, number, changes in self._changes:
            if to == topic and partition in (None, number):
                for key, value in changes:
                    size = size_of_record(key, value)
                    if found is None or size > found.size:
                        found = LargestRecord(key, size)
        return found

    def close(self) -> None:
        """Refuse further records."""
        self._closed = True

    def _produce(self, topic: str, key: bytes | None, value: bytes | None, options: Mapping[str, Any]) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key, **options)
                return
            except KafkaException as error:
                if error.args[0].code() not in TOO_LARGE:
                    raise
                size = size_of_record(key, value, options.get("headers", ()))
                raise too_large(key, size, self._most_bytes, PRODUCER_LIMIT, topic=topic) from error
            except BufferError:
                with unmasked():
                    self._producer.poll(_BACK_PRESSURE_S)
                self._check()
                if self._left() <= 0:
                    raise RetryableError(
                        "the broker accepts records too slowly for the timeout of the commit",
                        hint="check the brokers, or raise task.commit.timeout.ms",
                    ) from None

    def _left(self) -> float:
        return self._deadline - self._clock.monotonic()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the transaction has ended")
        if self._failed is not None:
            refused = self.refused
            topics = refused[0] if refused else " or ".join(sorted({topic for topic, _ in self.written}))
            raise translate(self._failed, "sending to Kafka", reported=self._errors, topic=topics) from KafkaException(
                self._failed
            )

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        if partition is not None and partition >= 0:
            place = topic, partition
            if error is not None and error.code() != KafkaError._PURGE_QUEUE:
                self.written[place] = None  # the record may have arrived, and may do so after the abort
            elif place not in self._reported:
                self.written[place] = offset if error is None and offset is not None and offset >= 0 else None
            self._reported.add(place)
        if error is not None:
            if error.code() not in AFTER_EFFECTS and self.refused is None:
                self._failed, self.refused = error, (topic, partition)
            self._failed = self._failed or error
            return
        assert partition is not None
        assert offset is not None
        known = self._delivered.get((topic, partition))
        newest = Delivered(offset, offset + 1, 1, message.timestamp()[1], message.value() is None)
        if known is not None:
            later = newest if offset >= known.end else known
            newest = later._replace(start=min(known.start, offset), records=known.records + 1)
        self._delivered[topic, partition] = newest
