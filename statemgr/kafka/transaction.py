"""One open transaction: puts records into librdkafka's queue, with back-pressure, and learns their offsets.

Of many records, only the first and the last one have a delivery callback. That is enough, because one failed delivery
makes the commit of a transaction fail, and an idempotent producer keeps the order of a partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from statemgr.errors import ClosedError, RetryableError
from statemgr.kafka.clients import SLICE_S
from statemgr.kafka.errors import ClientErrors, translate, unmasked
from statemgr.model.commit import Change
from statemgr.ports import Clock, Delivered

#: Seconds to wait for room in a full queue.
_BACK_PRESSURE_S = 0.02


class KafkaTransaction:
    """Implements :class:`statemgr.ports.Transaction`. The publisher makes it; it cannot be used after its block.

    Attributes:
        written: topics and partitions that have, or may have, records of this transaction.
    """

    def __init__(self, producer: Producer, clock: Clock, deadline: float, errors: ClientErrors) -> None:
        self._producer = producer
        self._clock = clock
        self._deadline = deadline
        self._errors = errors
        self.written: set[tuple[str, int]] = set()
        self._topics: set[str] = set()
        self._delivered: dict[tuple[str, int], Delivered] = {}
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
    ) -> None:
        self._check()
        self._topics.add(topic)
        options: dict[str, Any] = {"on_delivery": self._on_delivery}
        if partition is not None:
            options["partition"] = partition
            self.written.add((topic, partition))
        if headers:
            options["headers"] = list(headers)
        self._produce(topic, key, value, options)

    def send_changes(self, topic: str, partition: int, changes: Iterable[Change]) -> None:
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
                except BufferError:
                    self._produce(topic, key, value, {"partition": partition})
            last = change
        if last is not None:
            self._uncounted[topic, partition] += number
            key, value = last
            self.send(topic, key, value, partition=partition)

    def flush(self) -> Mapping[tuple[str, int], Delivered]:
        self._check()
        while True:
            with unmasked():
                waiting = self._producer.flush(max(min(SLICE_S, self._left()), 0.01))
            self._check()
            if not waiting:
                break
            if self._left() <= 0:
                last, silent = self._errors.last(), self._topics - {topic for topic, _ in self._delivered}
                raise RetryableError(
                    "the broker has not accepted all records within the timeout of the commit"
                    + (f" ({last})" if last else ""),
                    hint="check the brokers, or raise task.commit.timeout.ms"
                    + (f"; check that these topics exist: {', '.join(sorted(silent))}" if silent else ""),
                )
        return {
            place: found._replace(records=found.records + self._uncounted[place])
            for place, found in self._delivered.items()
        }

    def close(self) -> None:
        """Refuse further records."""
        self._closed = True

    def _produce(self, topic: str, key: bytes | None, value: bytes | None, options: Mapping[str, Any]) -> None:
        while True:
            try:
                self._producer.produce(topic, value, key, **options)
                return
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
            topics = " or ".join(sorted({topic for topic, _ in self.written}))
            raise translate(self._failed, "sending to Kafka", reported=self._errors, topic=topics) from KafkaException(
                self._failed
            )

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        if partition is not None and partition >= 0:
            self.written.add((topic, partition))  # also after an error: the record may have arrived
        if error is not None:
            self._failed = self._failed or error
            return
        assert partition is not None
        assert offset is not None
        start, end, records = self._delivered.get((topic, partition), (offset, 0, 0))
        self._delivered[topic, partition] = Delivered(min(start, offset), max(end, offset + 1), records + 1)
