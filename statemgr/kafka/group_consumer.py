"""The consumer for a consumer loop: a member of a group that reads committed records and never jumps to another offset.

It starts at the offset that the loop seeks to. Nobody reads the positions that the group stores. Opens connections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from statemgr.config import JobConfig
from statemgr.errors import ConfigError, InvalidError
from statemgr.kafka.clients import FAST_READS, ClientErrors, ClientLog

log = logging.getLogger("statemgr.kafka.librdkafka")
#: Settings that the loop depends on.
_OWN = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
}


class GroupConsumer(Consumer):
    """A ``confluent_kafka.Consumer``. ``errors`` has what the client reported by callback.

    It never jumps: an offset that the topic does not have is an error, and never the way to another offset.
    """

    def __init__(self, settings: dict[str, Any], hide: Callable[[str], str] = str) -> None:
        self.errors = ClientErrors()
        self.errors.group, self.errors.hide = settings.get("group.id"), hide
        self._warned = False
        own = {"error_cb": self.errors, "on_commit": self._committed, "logger": ClientLog(hide)}
        super().__init__({**settings, **own})

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        if error is not None:
            level, self._warned = logging.DEBUG if self._warned else logging.WARNING, True
            log.log(
                level, "offsets were not committed to the consumer group, so lag tools show old ones: %s", error.str()
            )


def group_consumer(config: JobConfig, group: str) -> GroupConsumer:
    """A consumer for :meth:`statemgr.StateManager.run`. Raises: ConfigError, InvalidError."""
    if not isinstance(group, str) or not group:
        raise InvalidError(f"the name of a consumer group must be a text, not {group!r}", hint='for example "orders"')
    defaults = {
        # the client detects bits that changed on a broker's disk only with this setting
        "check.crcs": True,
        # partition i of every input topic goes to the same member
        "partition.assignment.strategy": "range",
        **FAST_READS,
    }
    given = config.kafka_client("consumer")
    if given.get("auto.offset.reset", "error") != "error":
        raise ConfigError(
            "auto.offset.reset cannot be set here: a client that jumps to another offset skips input silently",
            hint="remove it; a partition that is in no checkpoint is read from its first offset",
            key="kafka.consumer.auto.offset.reset",
        )
    hide = config.hider()
    try:
        return GroupConsumer({**defaults, **given, **_OWN, "group.id": group}, hide)
    except KafkaException as error:
        raise ConfigError(
            f"a setting under kafka.* is refused: {hide(error.args[0].str())}",
            hint="correct it: librdkafka's CONFIGURATION.md lists its settings",
        ) from None
