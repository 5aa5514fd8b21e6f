"""Whether a topic is still the one that its owner has read: it may be deleted and created again under a running job.

The topic's ID tells. A publish asks for it while it sends its records, at most every few seconds; in between it asks
only when its records have an offset that is not beyond all earlier ones, as in a new topic.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from confluent_kafka import KafkaException
from confluent_kafka.admin._topic import TopicDescription

from statemgr.errors import MissingState
from statemgr.kafka.clients import is_missing
from statemgr.kafka.metadata import TopicMetadata
from statemgr.ports import Clock

_EVERY_S = 5.0
_ANSWER_S = 5.0


class TopicWatch:
    """Remembers the ID that the topic had when it was first read. Safe to use from many threads."""

    def __init__(self, topic: str, metadata: TopicMetadata, clock: Clock) -> None:
        self._topic = topic
        self._metadata = metadata
        self._clock = clock
        self._lock = threading.Lock()
        self._known: str | None = None
        self._seen_at = 0.0
        self._end = 0

    def compare(self, topic_id: str) -> None:
        """The topic has this ID now. Raises: MissingState when it had another one before."""
        with self._lock:
            if self._known is None:
                self._known = topic_id
            if self._known == topic_id:
                self._seen_at = self._clock.monotonic()
                return
        raise MissingState(
            "the checkpoint topic was deleted and created again while this owner was running, and its checkpoints are "
            f"gone: its ID was {self._known} and is {topic_id}",
            hint="stop the job and bring the records of the topic back; to start empty on purpose, open the job once "
            "with allow_empty_start=True",
            topic=self._topic,
        )

    def reached(self, end: int) -> None:
        """The topic has been read or written up to this offset."""
        with self._lock:
            self._end = max(self._end, end)

    def ask(self) -> Future[TopicDescription] | None:
        """Begin to ask for the ID, if it is time."""
        if self._clock.monotonic() - self._seen_at < _EVERY_S:
            return None
        return self._metadata.describe_later(self._topic)

    def check(self, end: int, asked: Future[TopicDescription] | None) -> None:
        """Records were written that end at this offset, and are not committed yet.

        Raises: MissingState when this is another topic than the one that was read, or there is none.
        """
        if asked is None and end > self._end:
            self.reached(end)
            return
        asked = asked or self._metadata.describe_later(self._topic)
        try:
            self.compare(str(asked.result(_ANSWER_S).topic_id))
        except TimeoutError:
            return  # the commit itself tells whether the brokers are there
        except KafkaException as error:
            if is_missing(error.args[0]):
                raise MissingState(
                    "the checkpoint topic was deleted while this owner was running",
                    hint="stop the job and bring the records of the topic back",
                    topic=self._topic,
                ) from error
            return
        self.reached(end)
