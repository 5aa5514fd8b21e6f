"""Makes librdkafka's clients from the configuration. Secrets leave the configuration here and are not logged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from statemgr.config import JobConfig
from statemgr.errors import ConfigError, UnavailableError
from statemgr.ids import topic_name
from statemgr.kafka.admin_client import GuardedAdminClient
from statemgr.kafka.errors import ClientErrors
from statemgr.logs import Event, RateLimit
from statemgr.os_errors import LIMIT_HINT, Fault, fault_in

log = logging.getLogger("statemgr.kafka.librdkafka")
T = TypeVar("T")

#: Seconds for which the client that is being served was idle, and from how many on its lines say so.
_IDLE_S: ContextVar[float] = ContextVar("idle", default=0.0)
_NOTED_S = 2.0
#: Seconds of one blocking call of librdkafka; in between the caller checks signals and deadlines.
SLICE_S = 1.0
#: Seconds for which a request to the brokers is repeated before it fails.
DEADLINE_S = 30.0
#: Seconds that one request may take.
REQUEST_S = 10.0
#: Seconds that one request may take while a running task waits for the answer.
ANSWER_S = 5.0
#: Every consumer has these defaults. With librdkafka's own wait of 1000 ms it would read 210,000 records a second
#: instead of over 900,000 (measured).
FAST_READS = {"fetch.queue.backoff.ms": 2, "queued.max.messages.kbytes": 64 * 1024}
#: Bytes of values that a producer holds by default until they are sent. librdkafka's own limit is 1 GiB, and a process
#: has a producer for each of its tasks.
QUEUE_BYTES = 32 * 1024 * 1024

#: ``bootstrap.servers`` → what makes clients of a kind instead of librdkafka. Brokers in memory register here.
INSTEAD: dict[str, Callable[[object, dict[str, Any]], Any]] = {}


def producer(config: JobConfig, errors: ClientErrors, **own: Any) -> Producer:
    """A producer. ``own`` settings (with ``_`` instead of ``.``) override the configuration. Raises: ConfigError."""
    # a value that is larger than the whole queue would wait for room for ever
    queue_bytes = max(QUEUE_BYTES, config.most_record_bytes)
    defaults = {"queue.buffering.max.kbytes": -(-queue_bytes // 1024)}
    return make(Producer, settings_of(config, "producer", errors, defaults, _dotted(own)))


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
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        # by default librdkafka ignores checksums, and would accept a bit that changed on a broker's disk
        "check.crcs": True,
    }
    return make(Consumer, settings_of(config, "consumer", errors, defaults, fixed | _dotted(own)))


def admin(config: JobConfig, errors: ClientErrors) -> AdminClient:
    """An admin client. Raises: ConfigError."""
    return make(GuardedAdminClient, settings_of(config, "admin", errors, {}, {}))


def settings_of(
    config: JobConfig, kind: Any, errors: ClientErrors, defaults: dict[str, Any], own: dict[str, Any]
) -> dict[str, Any]:
    """A client's settings: the configuration's override ``defaults``, and ``own`` ones override both."""
    errors.hide = config.hider()
    settings = {**defaults, **config.kafka_client(kind), **own}
    errors.group = settings.get("group.id")
    return {**settings, "error_cb": errors, "logger": ClientLog(errors.hide)}


def _dotted(settings: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "."): value for name, value in settings.items()}


def _kind(record: logging.LogRecord) -> str:
    """The level, and the first word of librdkafka's lines, which is in capitals and says what kind of line it is."""
    return f"{record.levelname} {record.getMessage().partition(' ')[0]}"


log.addFilter(RateLimit("librdkafka", _kind))


def serve_after(idle_s: float, serve: Callable[[], T]) -> T:
    """Serve a client for the first time after ``idle_s`` seconds. The client hands its lines over only then, so each
    may be as old, and is logged as a past event: at the level INFO, with that age."""
    token = _IDLE_S.set(idle_s)
    try:
        return serve()
    finally:
        _IDLE_S.reset(token)


class ClientLog:
    """librdkafka's log, with secrets masked: with ``kafka.debug`` librdkafka logs its configuration.

    A broker that has just started answers for some seconds that it is still loading its transaction coordinator.
    librdkafka asks again, and warns each time that it could not get a producer ID (``GETPID``). That is a wait and no
    fault, so it is logged at the level INFO and explained.
    """

    def __init__(self, hide: Callable[[str], str]) -> None:
        self._hide = hide

    def error(self, error: KafkaError) -> None:
        """Log an error that a call has returned and that the client recovers from, as the client logs its own."""
        self.log(logging.WARNING, f"{error.name()} {error.str()}")

    def log(self, level: int, message: str, *args: object) -> None:
        """Called by confluent_kafka, which takes this object for a ``logging.Logger``."""
        text = message % args if args else message
        extra: dict[str, str] | None = None
        if text.startswith("GETPID") and level <= logging.WARNING:
            level, extra = logging.INFO, {"event": Event.WAITING.value}
            text += " (the brokers are not ready for transactions yet; the client asks again)"
        if (idle_s := _IDLE_S.get()) >= _NOTED_S:
            level = min(level, logging.INFO)
            text += f" (an old line: up to {idle_s:.0f} s ago, while this client was idle)"
        if log.isEnabledFor(level):
            log.log(level, "%s", self._hide(text), extra=extra)


def make(kind: Callable[..., T], settings: dict[str, Any]) -> T:
    """A client of this kind. Raises: ConfigError if librdkafka refuses a setting; UnavailableError."""
    instead = INSTEAD.get(str(settings.get("bootstrap.servers")))
    if instead is not None:
        made: T = instead(kind, settings)
        return made
    try:
        return kind(settings)
    except KafkaException as error:
        reason, hide = error.args[0], settings["error_cb"].hide
        if reason.code() in (KafkaError._CRIT_SYS_RESOURCE, KafkaError._FS) or fault_in(reason.str()) is Fault.LIMIT:
            raise UnavailableError(f"a Kafka client cannot be started: {hide(reason.str())}", hint=LIMIT_HINT) from None
        files = {name: str(value) for name, value in settings.items() if name.endswith(".location")}
        missing = [name for name, path in files.items() if name in reason.str() and not os.path.exists(path)]
        hint = "correct it: librdkafka's CONFIGURATION.md lists its settings"
        if missing:
            hint = f"this machine does not have the file that {missing[0]} names: run this on a machine of the job"
        raise ConfigError(f"a setting under kafka.* is refused: {hide(reason.str())}", hint=hint) from None
