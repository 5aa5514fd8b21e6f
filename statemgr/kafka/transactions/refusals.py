"""Why a broker has refused records for good: which topic, which sizes or clocks, and which setting.

A broker that refuses a batch gives only a code. The topic's settings, and the largest record that was sent there, say
the rest. They are asked for after the transaction was aborted, and only then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from confluent_kafka import KafkaError

from statemgr.config import JobConfig
from statemgr.errors import InvalidError, RetryableError, StatemgrError
from statemgr.ids import task_name
from statemgr.kafka.errors import FENCED, FORGOTTEN, TOO_LARGE, may_pass
from statemgr.kafka.metadata import TopicMetadata
from statemgr.logs import utc
from statemgr.model.record_size import PRODUCER_LIMIT, too_large
from statemgr.ports import Clock

#: Bytes that a batch adds to its first record, at most.
_BATCH = 100
_MAX_BYTES = "max.message.bytes"
#: librdkafka's text about the batch that made a transaction fail.
_BATCH_OF = re.compile(r"ProduceRequest for (\S+) \[(\d+)\]")
_INVALID_TIME = "Invalid timestamp"
#: How the names of the settings about records' times begin.
_TIME = "message.timestamp."


class LargestRecord(NamedTuple):
    """A key, and the bytes of its key, value and headers."""

    key: bytes | None
    size: int


def refused_place(error: KafkaError, reported: tuple[str, int | None] | None) -> tuple[str, int | None] | None:
    """The topic and partition of the batch that a broker has refused; None if ``error`` is about something else.

    Args:
        reported: the place of a record whose delivery has failed, if one was reported.
    """
    if error.code() < 0 or may_pass(error) or error.code() in FENCED | FORGOTTEN:
        return None
    named = _BATCH_OF.search(error.str())
    return (named[1], int(named[2])) if named else reported


class Refusal(NamedTuple):
    """A refused batch, and what is needed to explain it. ``largest``: gives the largest record of the partition.
    ``times``: the oldest and the newest timestamp that records of the topic were given (epoch milliseconds)."""

    error: KafkaError
    topic: str
    partition: int | None
    largest: Callable[[], LargestRecord | None]
    times: tuple[int, int] | None = None

    def explained(self, config: JobConfig, clock: Clock, broker_ms: Callable[[], int] | None) -> StatemgrError | None:
        """The error to raise; None if the code says all that is known.

        Args:
            broker_ms: asks the brokers for their time (epoch milliseconds).
        """
        code, text = self.error.code(), self.error.str()
        if code not in {*TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP}:
            return None
        where: dict[str, object] = {"topic": self.topic, "partition": self.partition}
        store = next((name for name, of in config.stores.items() if of.changelog_topic == self.topic), None)
        if store is not None and self.partition is not None:
            where |= {"store": store, "task": task_name(self.partition)}
        settings = self._settings(config, clock)
        if code in TOO_LARGE:
            return self._too_large(settings, where)
        if code == KafkaError.INVALID_TIMESTAMP or _INVALID_TIME in text:
            if self.times is not None:
                return _refused_times(self.times, clock, settings, where)
            return _wrong_time(clock, broker_ms, settings, where)
        return InvalidError(
            f"the topic refuses a record: {text}",
            hint="a compacted topic takes no record without a key; see the log of the broker for the reason",
            **where,
        )

    def _settings(self, config: JobConfig, clock: Clock) -> Mapping[str, str]:
        """The topic's settings, if they can be read."""
        try:
            with TopicMetadata(config, clock) as metadata:
                return metadata.settings([self.topic])[self.topic]
        except StatemgrError:
            return {}

    def _too_large(self, settings: Mapping[str, str], where: Mapping[str, object]) -> InvalidError:
        found, limit = self.largest(), int(settings[_MAX_BYTES]) if _MAX_BYTES in settings else None
        if found is None or (limit is not None and found.size + _BATCH <= limit):
            return InvalidError(
                f"a batch of records is larger than the {limit} bytes that the topic allows",
                hint=f"raise {_MAX_BYTES} of the topic, or lower kafka.producer.batch.size below it",
                **where,
            )
        return too_large(found.key, found.size, limit, PRODUCER_LIMIT, **where)


def _wrong_time(
    clock: Clock, broker_ms: Callable[[], int] | None, settings: Mapping[str, str], where: Mapping[str, object]
) -> RetryableError:
    ours, theirs = utc(clock.time_ns() / 1e9), None
    with suppress(StatemgrError):  # the brokers show it only on a topic that is made for this
        theirs = utc(broker_ms() / 1000) if broker_ms else None
    return RetryableError(
        "the topic refuses the time of the records, which is too far from the brokers' clock",
        hint="set the clocks of this machine and of the brokers (NTP), or raise message.timestamp.before.max.ms or "
        "message.timestamp.after.max.ms of the topic; the next commit has the same changes",
        **where,
        clock=ours,
        broker_clock=theirs,
        **_limits(settings),
    )


def _refused_times(
    times: tuple[int, int], clock: Clock, settings: Mapping[str, str], where: Mapping[str, object]
) -> InvalidError:
    oldest, newest = (utc(at_ms / 1000) for at_ms in times)
    return InvalidError(
        "the topic refuses the timestamp of a record, which is too far from the brokers' clock",
        hint="give the record another timestamp_ms, or raise message.timestamp.before.max.ms or "
        "message.timestamp.after.max.ms of the topic; add the topic to task.outputs to get this error from produce",
        **where,
        oldest=oldest,
        newest=newest,
        clock=utc(clock.time_ns() / 1e9),
        **_limits(settings),
    )


def _limits(settings: Mapping[str, str]) -> Mapping[str, str]:
    return {name: settings[name] for name in sorted(settings) if name.startswith(_TIME) and name.endswith(".max.ms")}
