"""Tells the consumer group how far the published checkpoints are, for lag tools and autoscalers.

statemgr itself never reads these offsets: the checkpoint has the input offsets. So a failure is logged and changes
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from confluent_kafka import Consumer, KafkaException, TopicPartition

log = logging.getLogger(__name__)


class GroupOffsets:
    """Commits offsets to the group, without waiting for the answer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._warned = False

    def tell(self, places: Iterable[TopicPartition], published: Mapping[str, int]) -> None:
        """The next offsets of those ``places`` that a published checkpoint has (source partition → next offset)."""
        offsets = [
            TopicPartition(place.topic, place.partition, published[source])
            for place in places
            if (source := f"{place.topic}-{place.partition}") in published
        ]
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except (KafkaException, RuntimeError) as error:
            level, self._warned = logging.DEBUG if self._warned else logging.WARNING, True
            log.log(level, "offsets were not committed to the consumer group, so lag tools show old ones: %s", error)
