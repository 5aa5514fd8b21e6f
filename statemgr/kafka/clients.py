"""Configures librdkafka's clients, and translates their errors into statemgr's. Opens connections.

Only this module decides what librdkafka's error codes mean. Secrets leave the configuration here and are not logged.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from statemgr.config import JobConfig
from statemgr.errors import (
    ANOTHER_COPY,
    AccessDenied,
    ConfigError,
    CorruptRecord,
    FencedError,
    InvalidError,
    MissingState,
    RetryableError,
    StatemgrError,
    UnavailableError,
)
from statemgr.ids import topic_name
from statemgr.kafka.rights import missing_right
from statemgr.os_errors import LIMIT_HINT, Fault, fault_in

log = logging.getLogger("statemgr.kafka.librdkafka")
T = TypeVar("T")

#: Seconds of one blocking call of librdkafka; in between the caller checks signals and deadlines.
SLICE_S = 1.0
#: Seconds that a question to the brokers may stay unanswered in all, each time that it is asked, and while a running
#: task waits for the answer.
DEADLINE_S = 30.0
REQUEST_S = 10.0
ANSWER_S = 5.0
#: Defaults of every consumer that must read fast: librdkafka's wait of 1000 ms starves it (measured: 210 k/s instead of
#: over 900 k/s).
FAST_READS = {"fetch.queue.backoff.ms": 2, "queued.max.messages.kbytes": 64 * 1024}

_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
_DENIED = {
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_MISSING = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,
}
_OUT_OF_RANGE = {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET}
_UNREACHABLE = {
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
}
#: Answers of a broker that no longer leads the partition, or does not lead it yet.
_LEADERLESS = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
#: The brokers have forgotten the producer, because nobody used its transactional ID for a long time.
_FORGOTTEN = {KafkaError.INVALID_PRODUCER_ID_MAPPING, KafkaError.UNKNOWN_PRODUCER_ID}
#: The client reports these for records whose transaction has already failed.
_AFTER_EFFECTS = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._STATE}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE}
#: The bytes that a broker sent are not the ones that it received.
_DAMAGED = {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION}
_INVALID = {
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_REPLICATION_FACTOR,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError._INVALID_ARG,
}


class ClientErrors:
    """Keeps the last few errors that librdkafka reports by callback: they explain a missed deadline."""

    def __init__(self) -> None:
        #: The client's consumer group, set when it is made.
        self.group: str | None = None
        #: Masks secrets in the client's reports; set when it is made.
        self.hide: Callable[[str], str] = str
        self._recent: deque[KafkaError] = deque(maxlen=20)

    def __call__(self, error: KafkaError) -> None:
        """The ``error_cb`` of a client."""
        self._recent.append(error)

    def refused(self) -> KafkaError | None:
        """The last report that says that the credentials were refused, if any."""
        return next((e for e in reversed(self._recent) if e.code() in _DENIED), None)

    def fatal(self) -> KafkaError | None:
        """The last report of a fatal error, after which the client cannot be used; None if there is none."""
        return next((e for e in reversed(self._recent) if e.fatal()), None)

    def last(self) -> str | None:
        """The newest report as text for an error message."""
        return self.hide(self._recent[-1].str()) if self._recent else None

    def clear(self) -> None:
        """Forget all reports, because a broker has answered since."""
        self._recent.clear()


def producer(config: JobConfig, errors: ClientErrors, **own: Any) -> Producer:
    """A producer. ``own`` settings (with ``_`` for ``.``) override the configuration. Raises: ConfigError."""
    return _make(Producer, _settings(config, "producer", errors, {}, own))


def consumer(config: JobConfig, errors: ClientErrors, **own: Any) -> Consumer:
    """A consumer that joins no group: the caller assigns partitions, and nothing is committed.

    Raises: ConfigError.
    """
    defaults = {
        "group.id": topic_name("statemgr", config.job_name, config.job_id),
        **FAST_READS,
        # every read to the end of a topic would otherwise wait 500 ms there
        "fetch.wait.max.ms": 10,
    }
    fixed = {
        "enable_auto_commit": False,
        "enable_auto_offset_store": False,
        "auto_offset_reset": "error",
        # by default librdkafka ignores checksums, and would accept a bit that changed on a broker's disk
        "check_crcs": True,
    }
    return _make(Consumer, _settings(config, "consumer", errors, defaults, fixed | own))


def admin(config: JobConfig, errors: ClientErrors) -> AdminClient:
    """An admin client. Raises: ConfigError."""
    return _make(AdminClient, _settings(config, "admin", errors, {}, {}))


def _settings(
    config: JobConfig, kind: Any, errors: ClientErrors, defaults: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    fixed = {name.replace("_", "."): value for name, value in own.items()}
    errors.hide = config.hider()
    settings = {**defaults, **config.kafka_client(kind), **fixed}
    errors.group = settings.get("group.id")
    return {**settings, "error_cb": errors, "logger": ClientLog(errors.hide)}


class ClientLog:
    """librdkafka's log, with secrets masked: with ``kafka.debug`` librdkafka logs its configuration."""

    def __init__(self, hide: Callable[[str], str]) -> None:
        self._hide = hide

    def log(self, level: int, message: str, *args: object) -> None:
        """Called by confluent_kafka, which takes this object for a ``logging.Logger``."""
        if log.isEnabledFor(level):
            log.log(level, "%s", self._hide(message % args if args else message))


def _make(kind: Callable[..., T], settings: dict[str, Any]) -> T:
    try:
        return kind(settings)
    except KafkaException as error:
        reason, hide = error.args[0], settings["error_cb"].hide
        if reason.code() in (KafkaError._CRIT_SYS_RESOURCE, KafkaError._FS) or fault_in(reason.str()) is Fault.LIMIT:
            raise UnavailableError(f"a Kafka client cannot be started: {hide(reason.str())}", hint=LIMIT_HINT) from None
        raise ConfigError(
            f"a setting under kafka.* is refused: {hide(reason.str())}",
            hint="correct it: librdkafka's CONFIGURATION.md lists its settings",
        ) from None


def translate(
    error: KafkaError, doing: str, *, reported: ClientErrors | None = None, **where: str | int
) -> StatemgrError:
    """Translate a librdkafka error into one of statemgr's.

    Args:
        error: the error of a call or of a message.
        doing: what the caller was doing, as in ``"reading the checkpoint topic"``.
        reported: the client's reports by callback: what looks like a time-out is often a refusal there.
    """
    code = error.code()
    hide = reported.hide if reported else str
    text = f"{doing}: {hide(error.str())}"
    refused = reported.refused() if reported else None
    if code in _FENCED:
        return FencedError(f"{text}: another owner has taken over", hint="stop this process; nothing is lost", **where)
    if code in _DENIED or (refused is not None and code in _UNREACHABLE):
        denied = refused if refused is not None and code not in _DENIED else error
        right = missing_right(denied, doing, where, reported.group if reported else None)
        return AccessDenied(
            f"{doing}: {hide(denied.str())}",
            hint="grant this user the right; docs/security.md lists all rights that it needs"
            if right
            else "check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
            missing_right=right,
            **where,
        )
    if code in _MISSING:
        return MissingState(f"{doing}: the topic or partition does not exist", hint=_CREATE, **where)
    if code in _OUT_OF_RANGE:
        return MissingState(f"{doing}: the topic no longer has these records", hint=ANOTHER_COPY, **where)
    if code in _TOO_LARGE:
        return InvalidError(
            f"{doing}: a record is larger than the broker allows",
            hint="raise max.message.bytes of the topic, and kafka.producer.message.max.bytes",
            **where,
        )
    if code in _DAMAGED:
        return damaged(f"{doing}: {error.str()}", **where)
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return ConfigError(
            f"{doing}: the timeout of the transaction is longer than the broker allows",
            hint="lower task.commit.timeout.ms, or raise transaction.max.timeout.ms of the broker",
            **where,
        )
    if code in _INVALID:
        return InvalidError(text).with_where(**where)
    if code in _UNREACHABLE:
        last = reported.last() if reported else None
        return UnavailableError(
            text + (f" ({last})" if last and last not in text else ""),
            hint=LIMIT_HINT
            if fault_in(f"{text} {last}") is Fault.LIMIT
            else "check kafka.bootstrap.servers, and that the brokers are running",
            **where,
        )
    return RetryableError(text).with_where(**where)


def damaged(what: str, **where: str | int) -> CorruptRecord:
    """The error for records whose bytes are not the ones that were written."""
    return CorruptRecord(
        what, hint="the log on the disk of the broker is damaged: check that disk and the replicas", **where
    )


_CREATE = (
    "for a new job, create the checkpoint topic and the changelogs with `statemgr topics create`, and create other "
    "topics with Kafka's tools. If the topic had state, restore it"
)


@contextlib.contextmanager
def translated(doing: str, reported: ClientErrors | None = None, **where: str | int) -> Iterator[None]:
    """A context manager that raises librdkafka's exceptions as statemgr's errors."""
    try:
        yield
    except KafkaException as error:
        raise translate(error.args[0], doing, reported=reported, **where) from error


@contextlib.contextmanager
def unmasked() -> Iterator[None]:
    """A context manager for calls that run callbacks: only KafkaExceptions leave it.

    The client raises a fatal error inside such a call. If it then calls another callback (for a delivery, or the
    logger), the interpreter replaces the error by a SystemError or loses it. In this case the code is ``_FATAL``, and
    the next call to the client says which error it was.
    """
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from None
        if "without setting an exception" not in str(error):
            raise
        raise KafkaException(KafkaError(KafkaError._FATAL, "the client reported a fatal error")) from error


def is_unreachable(error: KafkaError) -> bool:
    """Whether waiting may help: no broker was reached, or none has answered yet."""
    return error.code() in _UNREACHABLE or bool(error.retriable())


def may_pass(error: KafkaError) -> bool:
    """Whether the caller may ask again: no broker was reached, or the partition's leader is moving."""
    return is_unreachable(error) or error.code() in _LEADERLESS


def is_damaged(error: KafkaError) -> bool:
    """Whether the bytes of a fetch cannot be records: a checksum does not match, or the format is unknown."""
    return error.code() in _DAMAGED or error.code() == KafkaError._NOT_IMPLEMENTED


def is_fenced(error: KafkaError) -> bool:
    """Whether another owner of the transactional ID has taken over."""
    return error.code() in _FENCED


def is_forgotten(error: KafkaError) -> bool:
    """Whether the brokers no longer know the transactional ID or its producer."""
    return error.code() in _FORGOTTEN


def is_after_effect(error: KafkaError) -> bool:
    """Whether the error only says that the transaction had already failed."""
    return error.code() in _AFTER_EFFECTS


def is_missing(error: KafkaError) -> bool:
    """Whether the brokers do not know the topic or partition."""
    return error.code() in _MISSING
