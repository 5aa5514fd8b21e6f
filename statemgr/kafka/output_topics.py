"""The topics of ``task.outputs``: what they take is known before a commit sends it."""

from __future__ import annotations

import logging

from statemgr.config import JobConfig
from statemgr.errors import InvalidError, StatemgrError, UnavailableError
from statemgr.kafka.input_topics import LOOK_EVERY_S, InputTopics
from statemgr.model.commit import ProducedRecord
from statemgr.model.output_topic import OutputTopic

log = logging.getLogger(__name__)
#: librdkafka's two names for how a producer compresses.
_COMPRESSIONS = ("compression.type", "compression.codec")


class OutputTopics:
    """Only the loop's thread uses it.

    Args:
        topics: asks the brokers.
    """

    def __init__(self, config: JobConfig, topics: InputTopics) -> None:
        self._config = config
        self._topics = topics
        self._known: dict[str, OutputTopic] = {}
        self._asked_s = float("-inf")

    def check(self, record: ProducedRecord) -> None:
        """Check a record. Before one is refused, the brokers are asked again, as somebody may have changed the topic.

        Raises: InvalidError for a record that its topic does not take. Of other topics than ``task.outputs``, and of
            those that the credentials may not describe, nothing is known.
        """
        if record.topic not in self._known:
            return
        clock = self._topics.clock
        try:
            self._known[record.topic].check(record, clock.time_ns() // 1_000_000)
        except InvalidError:
            if clock.monotonic() - self._asked_s < LOOK_EVERY_S:
                raise
            self.ask()
            if record.topic in self._known:
                self._known[record.topic].check(record, clock.time_ns() // 1_000_000)

    def ask(self) -> None:
        """Ask the brokers what the topics take. A question that fails leaves it unknown."""
        producer = self._config.kafka_client("producer")
        compressed = any(str(producer.get(name, "none")) != "none" for name in _COMPRESSIONS)
        for topic in self._config.outputs:
            try:
                metadata = self._topics.metadata()
                partitions = len(metadata.describe([topic])[topic].partitions)
                self._known[topic] = OutputTopic(partitions, metadata.settings([topic])[topic], compressed)
            except (StatemgrError, KeyError) as error:
                log.debug("what the output topic %s takes is not known: %s", topic, error)
                if isinstance(error, UnavailableError):
                    break  # each further question could take as long
        self._asked_s = self._topics.clock.monotonic()
