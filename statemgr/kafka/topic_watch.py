"""Notices that a topic was deleted and created again under a running job, or that it has lost its newest records.

The topic's ID shows that it was created again. A publish asks for the ID while it sends its records, at most every few
seconds. In between it asks only if its records get an offset that is not higher than all earlier ones, as happens in a
new topic. In the old topic, this shows that records were lost: a broker that did not have them has become the leader
(an unclean election).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from confluent_kafka import KafkaException
from confluent_kafka.admin._topic import TopicDescription

from statemgr.errors import MissingState
from statemgr.kafka.clients import ANSWER_S
from statemgr.kafka.errors import MISSING
from statemgr.kafka.metadata import TopicMetadata
from statemgr.ports import Clock

_EVERY_S = 5.0


def newest_lost(topic: str, what: str) -> MissingState:
    """The error of an owner that finds less on the topic than it has seen there."""
    return MissingState(
        f"the checkpoint topic has lost its newest records while this owner was running: {what}. A broker without "
        "these records has become the leader",
        hint="bring a broker back that has the records. If none has them, start the job again: it continues from an "
        "older checkpoint, and sends output again that it has sent since",
        topic=topic,
    )


class TopicWatch:
    """Remembers the topic's ID at the first read. Safe to use from many threads."""

    def __init__(self, topic: str, metadata: TopicMetadata, clock: Clock) -> None:
        self._topic = topic
        self._metadata = metadata
        self._clock = clock
        self._lock = threading.Lock()
        self._known: str | None = None
        self._seen_at = 0.0
        self._end = 0

    def compare(self, topic_id: str) -> None:
        """Compare the ID that the topic has now. Raises: MissingState if it had another ID before."""
        with self._lock:
            if self._known is None:
                self._known = topic_id
            if self._known == topic_id:
                self._seen_at = self._clock.monotonic()
                return
        raise MissingState(
            "the checkpoint topic was deleted and created again while this owner was running, without its checkpoints: "
            f"its ID was {self._known} and is now {topic_id}",
            hint="stop the job and restore the records of the topic; to start empty instead, open the job once "
            "with allow_empty_start=True",
            topic=self._topic,
        )

    def reached(self, end: int) -> None:
        """Note that the topic was read or written up to this offset."""
        with self._lock:
            self._end = max(self._end, end)

    def begin_check(self) -> Callable[[int], None]:
        """Ask for the topic's ID without waiting, if it is time to.

        Call this before records are written, and the result after that, with the offset after them, and before they
        are committed. It raises: MissingState if this is not the topic that was read, if it has lost records, or if
        there is no topic.
        """
        is_due = self._clock.monotonic() - self._seen_at >= _EVERY_S
        return partial(self._check, self._metadata.describe_later(self._topic) if is_due else None, self._end)

    def _check(self, asked: Future[TopicDescription] | None, known: int, end: int) -> None:
        if asked is not None or end <= self._end:
            asked = asked or self._metadata.describe_later(self._topic)
            try:
                self.compare(str(asked.result(ANSWER_S).topic_id))
            except TimeoutError:
                return  # the commit itself shows whether the brokers can be reached
            except KafkaException as error:
                if error.args[0].code() not in MISSING:
                    return
                raise MissingState(
                    "the checkpoint topic was deleted while this owner was running",
                    hint="stop the job and restore the records of the topic",
                    topic=self._topic,
                ) from error
        if end <= known:  # other tasks may have written since, but nobody takes offsets back
            raise newest_lost(self._topic, f"it had {known} offsets, and the newest one is now {end - 1}")
        self.reached(end)
