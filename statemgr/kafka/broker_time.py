"""The broker's clock.

A broker shows its time only in the timestamp of a record that it receives. So this module writes one record to a
temporary topic and deletes the topic again. It does not touch the job's own topics.
"""

from __future__ import annotations

import logging
import threading
import uuid

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, Message

from statemgr.config import JobConfig
from statemgr.errors import StatemgrError, UnavailableError
from statemgr.kafka.clients import DEADLINE_S, REQUEST_S, ClientErrors, producer, translate
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.topics import TopicAdmin, TopicSpec
from statemgr.ports import Clock

log = logging.getLogger(__name__)


class BrokerTime:
    """Asks once, then adds the time that has passed on the monotonic clock. Safe to use from many threads."""

    def __init__(self, config: JobConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        #: The broker's time, and the monotonic time before it was asked for.
        self._asked: tuple[int, float] | None = None

    def now_ms(self) -> int:
        """The broker's time in epoch milliseconds: at most the length of a request late, and never early.

        Raises: UnavailableError, AccessDenied, InvalidError (the brokers refuse to create the topic).
        """
        with self._lock:
            if self._asked is None:
                self._asked = self._ask()
            broker_ms, before_s = self._asked
        return broker_ms + int((self._clock.monotonic() - before_s) * 1000) + 1

    def _ask(self) -> tuple[int, float]:
        topic = f"__statemgr_doctor_{uuid.uuid4().hex}"
        with TopicAdmin(self._config) as topics:
            topics.create_missing([TopicSpec(topic, 1, -1, {"message.timestamp.type": "LogAppendTime"})])
        try:
            return self._written(topic)
        finally:
            self._delete(topic)

    def _written(self, topic: str) -> tuple[int, float]:
        found: list[int] = []
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Message) -> None:
            kind, timestamp_ms = message.timestamp()
            if error is not None:
                failed.append(error)
            elif kind == TIMESTAMP_LOG_APPEND_TIME:
                found.append(timestamp_ms)

        errors = ClientErrors()
        client = producer(self._config, errors, acks="all")
        before_s = self._clock.monotonic()
        try:
            client.produce(topic, b"time", partition=0, on_delivery=delivered)
            client.flush(DEADLINE_S)
        except KafkaException as error:
            raise translate(error.args[0], "asking for the broker's time", reported=errors, topic=topic) from error
        if failed:
            raise translate(failed[0], "asking for the broker's time", reported=errors, topic=topic)
        if not found:
            raise UnavailableError("the broker did not report its time", topic=topic)
        return found[0], before_s

    def _delete(self, topic: str) -> None:
        metadata = TopicMetadata(self._config)
        try:
            metadata.ask(
                "deleting a topic",
                lambda: metadata.client.delete_topics([topic], request_timeout=REQUEST_S),
                missing_is_none=True,
                topic=topic,
            )
        except StatemgrError as error:
            log.warning("the temporary topic %s could not be deleted: %s", topic, error)
        finally:
            metadata.close()
