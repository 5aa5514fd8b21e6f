"""A producer of a broker in memory, with those methods of ``confluent_kafka.Producer`` that the engine calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message

from statemgr.testing.memory_admin import listed
from statemgr.testing.memory_kafka import TRANSACTION_TIMEOUT_MS, MemoryBroker, ProducerId
from statemgr.testing.memory_log import failure

#: librdkafka's default of ``message.max.bytes``.
MESSAGE_MAX_BYTES = 1_000_000
OnDelivery = Callable[[KafkaError | None, Message], None]


class _State(Enum):
    """The names are librdkafka's."""

    INIT = "Init"
    READY = "Ready"
    OPEN = "InTransaction"


class MemoryProducer:
    """A producer whose records reach the broker at once. Delivery reports wait for ``poll`` or ``flush``.

    An error of a transaction shows as with librdkafka: ``produce`` takes the record, the delivery report has an error,
    and the next call of the transaction raises. A fatal error is also raised once by ``poll`` or ``flush``.
    """

    def __init__(self, broker: MemoryBroker, settings: Mapping[str, Any]) -> None:
        self._broker = broker
        self._id = settings.get("transactional.id")
        self._timeout_ms = int(settings.get("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS))
        self._most_bytes = int(settings.get("message.max.bytes", MESSAGE_MAX_BYTES))
        self._state = _State.INIT
        self._mine: ProducerId | None = None
        #: Whether the open transaction has a partition, so that the broker knows of it.
        self._is_known = False
        #: Why the transaction or the producer has failed; and the same, until the client notices it.
        self._error: KafkaError | None = None
        self._unnoticed: KafkaError | None = None
        #: A fatal error that ``poll`` has not raised yet.
        self._unraised: KafkaError | None = None
        #: Whether the transaction has lost a record to a name that no topic can have.
        self._has_lost = False
        self._reports: list[tuple[OnDelivery, KafkaError | None, Message]] = []

    # --- transactions --------------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float = -1) -> None:
        self._check()
        self._expect(_State.INIT)
        self._mine = self._broker.fence(str(self._id), self._timeout_ms)
        self._state = _State.READY

    def begin_transaction(self) -> None:
        self._check()
        self._expect(_State.READY)
        self._state, self._is_known, self._has_lost = _State.OPEN, False, False

    def commit_transaction(self, timeout: float = -1) -> None:
        self._check()
        self._expect(_State.OPEN)
        if self._has_lost:
            with self._failing():
                raise failure(KafkaError._INCONSISTENT, "1 message(s) failed delivery", requires_abort=True)
        self._finish(committed=True)

    def abort_transaction(self, timeout: float = -1) -> None:
        self._notice()
        if self._error is not None and self._error.fatal():
            raise KafkaException(self._error)
        self._expect(_State.OPEN)
        if self._error is not None and self._error.code() == KafkaError.INVALID_PRODUCER_ID_MAPPING:
            with self._failing():  # librdkafka initialises the ID again, and the transaction is not open anywhere
                self._mine = self._broker.fence(str(self._id), self._timeout_ms, self._mine)
            self._is_known = False
        self._finish(committed=False)

    def _finish(self, *, committed: bool) -> None:
        assert self._mine is not None
        self.poll(0)
        if self._is_known:
            with self._failing():
                self._broker.finish(str(self._id), self._mine, committed=committed)
        self._state, self._error = _State.READY, None

    # --- records -------------------------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
        timestamp: int | None = None,
        headers: Iterable[tuple[str, str | bytes | None]] = (),
    ) -> None:
        key, value, headers = _encoded(key), _encoded(value), _encoded_headers(headers)
        if self._error is not None and self._error.fatal():
            raise failure(KafkaError._FATAL, "Unable to produce message: Local: Fatal error")
        if len(key or b"") + len(value or b"") > self._most_bytes:
            raise failure(KafkaError.MSG_SIZE_TOO_LARGE, "Unable to produce message: Broker: Message size too large")
        if self._id is not None and (self._state is not _State.OPEN or self._error is not None):
            raise failure(KafkaError._STATE, "Unable to produce message: Local: Erroneous state")
        error, offset, stamp = None, -1, (0, -1)
        try:
            with self._broker.changed:
                found = self._broker.topics.get(topic)
                if found is not None and partition is not None and partition >= len(found.logs):
                    raise failure(KafkaError._UNKNOWN_PARTITION, "Unable to produce message: Local: Unknown partition")
                if self._unnoticed is None:
                    partition, offset, stamp = self._append(topic, partition, key, value, headers, timestamp)
                else:
                    error = KafkaError(KafkaError._PURGE_QUEUE)
        except KafkaException as refused:
            error = refused.args[0]
            if error.code() == KafkaError._UNKNOWN_PARTITION:
                raise
            error = self._failed(error)
        if on_delivery is not None:
            message = Message(
                topic=topic, partition=-1 if partition is None else partition, offset=offset, key=key, value=value,
                error=error, timestamp=stamp,
            )  # fmt: skip
            self._reports.append((on_delivery, error, message))

    def flush(self, timeout: float = -1) -> int:
        self.poll(0)
        return 0

    def poll(self, timeout: float = 0) -> int:
        self._notice()
        reports, self._reports = self._reports, []
        for report, error, message in reports:
            report(error, message)
        if (fatal := self._unraised) is not None:
            self._unraised = None
            raise KafkaException(fatal)
        return len(reports)

    def purge(self) -> None:
        self._reports.clear()

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        return listed(self._broker, topic)

    def __len__(self) -> int:
        return len(self._reports)

    def _append(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]],
        timestamp: int | None,
    ) -> tuple[int, int, tuple[int, int]]:
        owner = None
        if self._id is not None:
            assert self._mine is not None
            owner = str(self._id), self._mine
        taken = self._broker.append(
            topic, partition, key, value, headers, timestamp_ms=timestamp or None, owner=owner, checked=True
        )
        self._is_known = True
        return taken

    # --- errors --------------------------------------------------------------------------------------------------

    def _failed(self, error: KafkaError) -> KafkaError:
        """Note why a record was not written. Returns: the error of its delivery report."""
        if self._id is None:
            return error
        if error.code() == KafkaError.TOPIC_EXCEPTION:
            self._has_lost = True  # the commit says so
            return error
        if error.fatal() or error.code() == KafkaError.INVALID_PRODUCER_ID_MAPPING:
            self._unnoticed = error
            return KafkaError(KafkaError._PURGE_QUEUE)
        # the partition is in the transaction before its leader refuses the record
        self._is_known = True
        self._unnoticed = KafkaError(error.code(), error.str(), False, False, True)
        return error

    def _notice(self) -> None:
        if self._unnoticed is not None:
            self._note(self._unnoticed)
            self._unnoticed = None

    def _note(self, error: KafkaError) -> None:
        self._error = error
        if error.fatal():
            self._unraised = error

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A block in which an error of the broker is noted."""
        try:
            yield
        except KafkaException as error:
            self._note(error.args[0])
            raise

    def _check(self) -> None:
        """Raises: KafkaException if the transaction or the producer has failed."""
        self._notice()
        if self._error is not None:
            raise KafkaException(self._error)

    def _expect(self, state: _State) -> None:
        if self._error is not None and self._error.fatal():
            raise KafkaException(self._error)
        if self._state is not state:
            raise failure(KafkaError._STATE, f"Operation not valid in state {self._state.value}")


def _encoded(given: str | bytes | None) -> bytes | None:
    """Text as UTF-8, as confluent_kafka sends it. Raises: TypeError."""
    if given is None or isinstance(given, bytes):
        return given
    return given.encode() if isinstance(given, str) else bytes(memoryview(given))


def _encoded_headers(given: Iterable[tuple[str, str | bytes | None]]) -> list[tuple[str, bytes | None]]:
    """Raises: TypeError."""
    headers = list(given)
    if not all(isinstance(one, tuple) and len(one) == 2 for one in headers):
        raise TypeError("Headers are expected to be a list of (key, value) tuples")
    return [(name, _encoded(value)) for name, value in headers]
