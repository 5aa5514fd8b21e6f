"""Experiments on a temporary topic: whether a transaction can be published, and what time the brokers have.

They do not touch the job's own topics: an experiment that dies halfway must not make the job's readers wait. The next
one deletes the topic that it leaves. A broker shows its time only in the timestamp of a record that it receives.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from confluent_kafka import KafkaException

from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, CorruptRecord, StatemgrError, UnavailableError
from statemgr.ids import IdSource, attempt_millis, transactional_id
from statemgr.kafka.clients import ANSWER_S
from statemgr.kafka.plain_writes import write_plainly
from statemgr.kafka.reader import PartitionReader
from statemgr.kafka.topics import TopicAdmin, TopicSpec
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.ports import Clock

log = logging.getLogger(__name__)
_KEY, _VALUE = b"key", b"value"
#: Seconds by which the times that two clocks measure may differ.
_DISAGREE_S = 1.0
_PREFIX = "__statemgr_doctor_"
#: Milliseconds after which a topic belongs to nobody any more: an experiment takes seconds.
_LEFT_MS = 3_600_000


@contextmanager
def _temporary_topic(config: JobConfig, clock: Clock, ids: IdSource) -> Iterator[tuple[TopicAdmin, str]]:
    """A topic of one partition, whose timestamps the broker sets. It is deleted after the block. What experiments that
    have died left is deleted before. Raises: AccessDenied if a topic stays because this user may not delete it."""
    topic = f"{_PREFIX}{ids.attempt_id()}"
    with TopicAdmin(config, clock) as topics:
        left = _delete_left(topics, clock)
        try:
            topics.create_missing([TopicSpec(topic, 1, -1, {"message.timestamp.type": "LogAppendTime"})])
        except UnavailableError:  # it may exist all the same
            with suppress(KafkaException, TimeoutError):
                topics.client.delete_topics([topic], request_timeout=ANSWER_S)[topic].result(ANSWER_S)
            raise
        try:
            yield topics, topic
        except BaseException:
            with suppress(StatemgrError):
                topics.delete(topic)
            raise
        try:
            topics.delete(topic)
        except UnavailableError as error:
            log.info("the temporary topic %s stays until the next run: %s", topic, error)
        except AccessDenied:
            left.append(topic)
        if left:
            raise AccessDenied(
                f"without Delete on topic {_PREFIX}*, temporary topics stay: {', '.join(left)}",
                hint="grant this user the right. Then the next run deletes them when they are an hour old",
                missing_right=f"Delete on topic {_PREFIX}*",
            )


def _delete_left(topics: TopicAdmin, clock: Clock) -> list[str]:
    """Delete the topics of experiments that have died. Returns: the first one that this user may not delete. After
    other errors, the next experiment tries again."""
    try:
        for topic in topics.names(_PREFIX):
            made_ms = attempt_millis(topic.removeprefix(_PREFIX))
            if made_ms is not None and clock.time_ns() // 1_000_000 - made_ms > _LEFT_MS:
                try:
                    topics.delete(topic)
                except AccessDenied:
                    return [topic]
    except StatemgrError as error:
        log.info("temporary topics of earlier experiments may stay: %s", error)
    return []


def probe_transaction(config: JobConfig, clock: Clock, ids: IdSource) -> int:
    """Publish one record in a transaction and read it back, for ``statemgr doctor``.

    Returns: how far the broker's clock is ahead of this machine's, in milliseconds (exact to the length of a request).
    Raises: UnavailableError, AccessDenied, ConfigError and the other errors of publishing.
    """
    with _temporary_topic(config, clock, ids) as (topics, topic):
        publisher = TransactionalPublisher(config, transactional_id(config.job_name, config.job_id, "doctor"), clock)
        try:
            publisher.fence()
            with publisher.transaction() as transaction:
                transaction.send(topic, _KEY, _VALUE, partition=0)
                before = clock.time_ns()
                transaction.flush()
                after = clock.time_ns()
        finally:
            publisher.close()
        for batch in PartitionReader(config, clock).read(topic, 0, *topics.bounds(topic, 0)):
            for message in batch:
                if (message.key(), message.value()) == (_KEY, _VALUE):
                    return message.timestamp()[1] - (before + after) // 2_000_000
        raise CorruptRecord("the broker did not return a record that was committed", topic=topic, partition=0)


class BrokerTime:
    """The brokers' clock. It asks them once, and then adds the time that has passed on this machine. It asks again if
    the machine's clocks disagree about that: one stands still while the machine is suspended, and people set the other.

    Safe to use from many threads.
    """

    def __init__(self, config: JobConfig, clock: Clock, ids: IdSource) -> None:
        self._config = config
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        #: The broker's time, and the seconds of this machine's two clocks before it was asked for.
        self._asked: tuple[int, float, float] | None = None

    def now_ms(self) -> int:
        """The broker's time in epoch milliseconds. It may be too high by the length of a request, but never too low.

        Raises: UnavailableError, AccessDenied, InvalidError (the brokers refuse to create the topic).
        """
        with self._lock:
            now_s, wall_s = self._now_s()
            if self._asked is None or abs((now_s - self._asked[1]) - (wall_s - self._asked[2])) > _DISAGREE_S:
                self._asked = self._ask()
            broker_ms, before_s, _ = self._asked
        return broker_ms + int((self._clock.elapsed() - before_s) * 1000) + 1

    def _now_s(self) -> tuple[float, float]:
        return self._clock.elapsed(), self._clock.time_ns() / 1e9

    def _ask(self) -> tuple[int, float, float]:
        asked = None
        try:
            with _temporary_topic(self._config, self._clock, self._ids) as (_, topic):
                asked = self._write_to(topic)
        except StatemgrError as error:
            if asked is None:
                raise
            log.warning("a temporary topic could not be deleted: %s", error)
        return asked

    def _write_to(self, topic: str) -> tuple[int, float, float]:
        before = self._now_s()
        broker_ms = write_plainly(self._config, topic, 0, [(_KEY, _VALUE)], "asking for the broker's time")
        if broker_ms is None:
            raise UnavailableError("the broker did not report its time", topic=topic)
        return broker_ms, *before
