"""What an output topic takes, as its settings say it. Pure.

A broker refuses a record only when a commit sends it. Then the whole commit fails, and each later one with the same
record. So a record is checked before it waits for a commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from statemgr.errors import InvalidError
from statemgr.model.commit import ProducedRecord
from statemgr.model.record_size import size_of_batch, too_large

_SMALLER = "make the value smaller, send it in parts, or raise max.message.bytes of the topic"


@dataclass(frozen=True, slots=True)
class OutputTopic:
    """A topic as a broker describes it.

    Attributes:
        settings: by name. A check whose setting is missing is left out.
        compressed: whether the producer compresses. Then only the broker knows how large a batch is.
    """

    partitions: int
    settings: Mapping[str, str]
    compressed: bool = False

    def check(self, record: ProducedRecord, now_ms: int) -> None:
        """Raises: InvalidError for a record that the broker would refuse now."""
        partition = record.partition
        if partition is not None and partition >= self.partitions:
            raise InvalidError(
                f"the output topic has no partition {partition}",
                hint=f"choose one from 0 to {self.partitions - 1}, or leave the argument out",
                topic=record.topic,
            )
        if record.key is None and "compact" in self.settings.get("cleanup.policy", ""):
            raise InvalidError(
                "the output topic is compacted, and takes no record without a key",
                hint="give the record a key, or send it to a topic with cleanup.policy=delete",
                topic=record.topic,
            )
        limit = self.settings.get("max.message.bytes")
        if limit is not None and not self.compressed:
            size = size_of_batch(record.key, record.value, record.headers)
            if size > int(limit):
                raise too_large(record.key, size, int(limit), _SMALLER, topic=record.topic)
        if record.timestamp_ms is not None and self.settings.get("message.timestamp.type") == "CreateTime":
            self._check_time(record.topic, record.timestamp_ms, now_ms)

    def _check_time(self, topic: str, at_ms: int, now_ms: int) -> None:
        for side, distance_ms in (("after", at_ms - now_ms), ("before", now_ms - at_ms)):
            name = f"message.timestamp.{side}.max.ms"
            limit = self.settings.get(name)
            if limit is not None and distance_ms > int(limit):
                raise InvalidError(
                    f"the timestamp {at_ms} of a record is {distance_ms} ms {side} the present time, and the output "
                    f"topic takes {limit} ms",
                    hint=f"give another timestamp_ms, raise {name} of the topic, or set the clock of this machine",
                    topic=topic,
                )
