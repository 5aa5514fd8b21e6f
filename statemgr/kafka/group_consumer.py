"""The consumer of a consumer loop: a member of a group that reads committed records and never jumps to another offset.

It starts at the offset that the loop seeks to. The positions that the group stores are for lag tools and autoscalers:
statemgr never reads them, so a failure to store one is only logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import InvalidError
from statemgr.kafka.clients import FAST_READS, make, settings_of
from statemgr.kafka.errors import ClientErrors

log = logging.getLogger(__name__)
#: Settings that the loop depends on.
_OWN = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
}


class GroupConsumer(Consumer):
    """Reports an offset that the topic does not have as an error, and never moves to another offset instead.

    Attributes:
        errors: what the client reported by callback.
        by_brokers: whether the brokers assign partitions (``group.protocol=consumer``, KIP-848), and not a member.
        in_steps: whether an assignment has only the partitions that are added.
    """

    by_brokers = in_steps = False

    def __init__(self, settings: dict[str, Any]) -> None:
        self.errors: ClientErrors = settings["error_cb"]
        self.by_brokers = _assigned_by_brokers(settings)
        self.in_steps = self.by_brokers or "cooperative" in str(settings.get("partition.assignment.strategy"))
        self._warnings = _Warnings()
        super().__init__({**settings, "on_commit": self._committed})

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        if error is not None:
            self._warnings.warn(error.str())


class GroupOffsets:
    """Stores the offsets of published checkpoints in the group, without waiting for the answer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._warnings = _Warnings()

    def store(self, places: Iterable[TopicPartition], published: Mapping[str, int]) -> None:
        """Store the next offsets of those ``places`` that a checkpoint has (source partition → next offset)."""
        offsets = [
            TopicPartition(place.topic, place.partition, published[source])
            for place in places
            if (source := f"{place.topic}-{place.partition}") in published
        ]
        if offsets:
            try:
                self._consumer.commit(offsets=offsets, asynchronous=True)
            except (KafkaException, RuntimeError) as error:
                self._warnings.warn(error)


class _Warnings:
    """Logs the first failure as a warning, and later ones at the level DEBUG."""

    def __init__(self) -> None:
        self._level = logging.WARNING

    def warn(self, error: object) -> None:
        log.log(self._level, "offsets were not committed to the consumer group, so lag tools show old ones: %s", error)
        self._level = logging.DEBUG


def _assigned_by_brokers(settings: Mapping[str, Any]) -> bool:
    return settings.get("group.protocol") == "consumer"


def group_consumer(config: JobConfig, group: str) -> GroupConsumer:
    """A consumer for :meth:`statemgr.StateManager.run`. Raises: ConfigError, InvalidError."""
    if not isinstance(group, str) or not group:
        raise InvalidError(f"the name of a consumer group must be a text, not {group!r}", hint='for example "orders"')
    by_brokers = _assigned_by_brokers(config.kafka_client("consumer"))
    defaults = {
        # the client detects bits that changed on a broker's disk only with this setting
        "check.crcs": True,
        # partition i of every input topic goes to the same member
        "group.remote.assignor" if by_brokers else "partition.assignment.strategy": "range",
        **FAST_READS,
    }
    own = {**_OWN, "group.id": group}
    return make(GroupConsumer, settings_of(config, "consumer", ClientErrors(), defaults, own))
