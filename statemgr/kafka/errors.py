"""Translates librdkafka's errors into statemgr's, with the missing right in the words of Kafka's ACLs.

Only this module decides what librdkafka's error codes mean.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from confluent_kafka import KafkaError, KafkaException

from statemgr.errors import (
    ANOTHER_COPY,
    NEW_OWNER,
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
from statemgr.os_errors import LIMIT_HINT, Fault, fault_in

#: Another owner of the transactional ID has taken over.
FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
#: Waiting does not help: the credentials are refused, or lack a right.
DENIED = {
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
#: The brokers do not know the topic or partition.
MISSING = {
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._NOENT,
}
#: The topic does not have the offset of a fetch.
OUT_OF_RANGE = {KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET}
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
    # the client has given a connection up while a request was on it, and uses another one
    KafkaError._DESTROY_BROKER,
}
#: Answers of a broker that no longer leads the partition or the cluster, or does not lead it yet. A new leader tells no
#: offsets before it knows how far its followers are (KIP-207), and one whose disk fails gives the partition up.
_LEADERLESS = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LISTENER_NOT_FOUND,
    KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
    KafkaError.NOT_CONTROLLER,
}
#: Answers about a consumer group: its coordinator moves or reads its offsets, or a transaction with them is open.
_NOT_YET = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
}
#: The brokers have forgotten the producer, because nobody used its transactional ID for a long time.
FORGOTTEN = {KafkaError.INVALID_PRODUCER_ID_MAPPING, KafkaError.UNKNOWN_PRODUCER_ID}
#: The client reports these for records whose transaction has already failed.
AFTER_EFFECTS = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._STATE}
TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE}
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


#: Why a consumer group turns a member away for good → the kind of error, what happened, and the hint. Other reasons,
#: such as a missing right, mean the same as elsewhere.
_TURNED_AWAY: dict[int, tuple[type[StatemgrError], str, str]] = {
    KafkaError.FENCED_INSTANCE_ID: (
        FencedError,
        "another process has joined the consumer group with the same group.instance.id, and replaces this one",
        "give each process a group.instance.id of its own (docs/running.md), or remove the key",
    ),
    KafkaError.UNRELEASED_INSTANCE_ID: (
        RetryableError,
        "the consumer group has another member with the same group.instance.id",
        "give each process a group.instance.id of its own; after a crash, the group releases it when "
        "group.consumer.session.timeout.ms of the brokers has passed: start again then",
    ),
    KafkaError.GROUP_MAX_SIZE_REACHED: (
        RetryableError,
        "the consumer group is full",
        "start fewer processes, or raise group.max.size and group.consumer.max.size of the brokers",
    ),
    KafkaError.UNSUPPORTED_ASSIGNOR: (
        ConfigError,
        "the brokers do not have the assignor",
        "set group.remote.assignor of the consumer to one of the brokers' group.consumer.assignors",
    ),
    **dict.fromkeys(
        (KafkaError.UNSUPPORTED_VERSION, KafkaError._UNSUPPORTED_FEATURE),
        (
            ConfigError,
            "the brokers do not support group.protocol = consumer",
            "set group.protocol of the consumer to classic; consumer needs Kafka 4.0",
        ),
    ),
}

#: How ``doing`` begins (see :func:`translate`) → the ACL operation that it needs on a topic.
_ON_TOPIC = {
    "creating": "Create",
    "deleting": "Delete",
    "reading topics' settings": "DescribeConfigs",
    "reading": "Read",
    "consuming": "Read",
    "publishing": "Write",
    "sending": "Write",
    "beginning": "Write",
    "settling": "Write",
}
#: Operations that Read and Write include.
_DESCRIBE = "Describe (or Read or Write)"


class ClientErrors:
    """Keeps the last few errors that librdkafka reports by callback. They explain why a deadline passed."""

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
        return next((e for e in reversed(self._recent) if e.code() in DENIED), None)

    def fatal(self) -> KafkaError | None:
        """The last report of a fatal error, after which the client cannot be used; None if there is none."""
        return next((e for e in reversed(self._recent) if e.fatal()), None)

    def last(self) -> str | None:
        """The most useful report, as text for an error message: one about a limit of this process, else the newest."""
        texts = [error.str() for error in reversed(self._recent)]
        found = next((text for text in texts if fault_in(text) is Fault.LIMIT), next(iter(texts), None))
        return None if found is None else self.hide(found)

    def clear(self) -> None:
        """Forget all reports, because a broker has answered since."""
        self._recent.clear()


_CREATE = (
    "for a new job, create the checkpoint topic and the changelogs with `statemgr topics create`, and create other "
    "topics with Kafka's tools. If the topic had state, restore it"
)


def translate(
    error: KafkaError, doing: str, *, reported: ClientErrors | None = None, **where: str | int
) -> StatemgrError:
    """Translate a librdkafka error into one of statemgr's.

    Args:
        error: the error of a call or of a message.
        doing: what the caller was doing, as in ``"reading the checkpoint topic"``.
        reported: the client's reports by callback; they often show that a time-out is really a refusal.
    """
    code = error.code()
    hide = reported.hide if reported else str
    text = f"{doing}: {hide(error.str())}"
    refused = reported.refused() if reported else None
    if code in FENCED:
        return FencedError(f"{text}: another owner has taken over", hint=NEW_OWNER, **where)
    if code in DENIED or (refused is not None and code in _UNREACHABLE):
        denied = refused if refused is not None and code not in DENIED else error
        right = _missing_right(denied, doing, where, reported.group if reported else None)
        return AccessDenied(
            f"{doing}: {hide(denied.str())}",
            hint="grant this user the right; docs/security.md lists all rights that it needs"
            if right
            else "check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
            missing_right=right,
            **where,
        )
    if code in MISSING:
        return MissingState(f"{doing}: the topic or partition does not exist", hint=_CREATE, **where)
    if code in OUT_OF_RANGE:
        return MissingState(f"{doing}: the topic no longer has these records", hint=ANOTHER_COPY, **where)
    if code in TOO_LARGE:
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


def fatal_cause(error: KafkaError) -> KafkaError:
    """The cause of an error whose code says only that the client cannot be used any more; any other error as it is.

    A member of a consumer group receives its fatal error in place of a message, and only its text names the cause:
    "Fatal error: <cause>: <details>" (``rd_kafka_set_fatal_error0`` in ``rdkafka.c`` of librdkafka).
    """
    text = error.str()
    if error.code() != KafkaError._FATAL or not text.startswith("Fatal error: "):
        return error
    for code in vars(KafkaError).values():
        if isinstance(code, int) and text.startswith(f"Fatal error: {KafkaError(code).str()}: "):
            return KafkaError(code, text, True)
    return error


def turned_away(error: KafkaError, reported: ClientErrors | None, **where: str | int) -> StatemgrError:
    """The error to raise for a consumer group's fatal error, after which the consumer receives nothing any more."""
    cause = fatal_cause(error)
    if cause.code() in _TURNED_AWAY:
        kind, what, hint = _TURNED_AWAY[cause.code()]
        return kind(what, hint=hint).with_where(**where)
    return translate(cause, "consuming", reported=reported, **where)


def damaged(what: str, **where: str | int) -> CorruptRecord:
    """The error for records whose bytes are not the ones that were written."""
    return CorruptRecord(
        what, hint="the log on the disk of the broker is damaged: check that disk and the replicas", **where
    )


@contextlib.contextmanager
def translated(doing: str, reported: ClientErrors | None = None, **where: str | int) -> Iterator[None]:
    """A context manager that raises librdkafka's exceptions as statemgr's errors."""
    try:
        with unmasked():
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


def _missing_right(error: KafkaError, doing: str, where: Mapping[str, object], group: str | None) -> str | None:
    """``Read on topic orders-1-totals-changelog``, or None if the credentials themselves are refused.

    Args:
        doing: as in :func:`translate`.
        where: names of things; the topic, the group and the transactional ID count.
        group: the client's own consumer group, if it is a consumer.
    """
    match error.code():
        case KafkaError.TOPIC_AUTHORIZATION_FAILED:
            operation = next((needed for begin, needed in _ON_TOPIC.items() if doing.startswith(begin)), _DESCRIBE)
            return f"{operation} on topic {where.get('topic', 'unknown')}"
        case KafkaError.CLUSTER_AUTHORIZATION_FAILED if doing.startswith("creating"):
            return f"Create on topic {where.get('topic', 'unknown')}"
        case KafkaError.GROUP_AUTHORIZATION_FAILED:
            operation = "Read" if doing.startswith("consuming") else "Describe (or Read)"
            return f"{operation} on group {group or where.get('group', 'unknown')}"
        case KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return f"Write on transactional ID {where.get('transactional_id', 'unknown')}"
        case KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            return "ClusterAction or IdempotentWrite on the cluster"
    return None


def is_unreachable(error: KafkaError) -> bool:
    """Whether waiting may help: no broker was reached, or none has answered yet."""
    return error.code() in _UNREACHABLE or bool(error.retriable())


def may_pass(error: KafkaError) -> bool:
    """Whether the caller may ask again: no broker was reached, or a leader or a group's coordinator is moving."""
    return is_unreachable(error) or error.code() in _LEADERLESS | _NOT_YET


def is_damaged(error: KafkaError) -> bool:
    """Whether the bytes of a fetch cannot be records: a checksum does not match, or the format is unknown."""
    return error.code() in _DAMAGED or error.code() == KafkaError._NOT_IMPLEMENTED
