"""A librdkafka producer with a transactional ID. Each call is repeated until it succeeds or its deadline has passed.

librdkafka continues an operation that timed out when it is called again. Between two calls, a process that was
suspended or is closing notices that its deadline has passed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException

from statemgr.config import JobConfig
from statemgr.kafka.clients import SLICE_S, idle_for, producer
from statemgr.kafka.errors import AFTER_EFFECTS, ClientErrors, is_unreachable, unmasked
from statemgr.ports import Clock


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
        with idle_for(self._clock.elapsed() - self._used_s):
            fatal = self._served()
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
