"""librdkafka's admin client, with a guard against a crash in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import ListOffsetsResultInfo, OffsetSpec

#: Seconds for which a client certainly knows the leaders of a topic; librdkafka keeps them for 15 minutes.
_KNOWN_S = 60.0
#: Seconds that a request waits for another one, and for its own answer.
_WAIT_S = 5.0


class GuardedAdminClient(AdminClient):
    """Asks for the offsets of topics that it does not know one request after the other.

    While librdkafka 2.x looks for leaders that it does not know, any other answer that changes its list of topics lets
    it use memory that is free (``rd_kafka_topic_partition_list_query_leaders_async_worker``), and the process ends with
    SIGSEGV. Two requests at a time for a new topic do that now and then. Safe to use from many threads.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(dict(settings))
        self._looking = threading.Lock()
        #: topic → when the client has certainly known its leaders
        self._known_s: dict[str, float] = {}

    def list_offsets(  # type: ignore[override]
        self, topic_partition_offsets: dict[TopicPartition, OffsetSpec], **options: Any
    ) -> dict[TopicPartition, Future[ListOffsetsResultInfo]]:
        """As the client's. If a topic is not known, it returns when there is an answer, or after 5 seconds."""
        topics, now_s = {place.topic for place in topic_partition_offsets}, time.monotonic()
        if all(now_s - self._known_s.get(topic, -_KNOWN_S) < _KNOWN_S for topic in topics):
            return super().list_offsets(topic_partition_offsets, **options)
        is_held = self._looking.acquire(timeout=_WAIT_S)
        try:
            answers = super().list_offsets(topic_partition_offsets, **options)
            answered, _ = wait(answers.values(), timeout=_WAIT_S)
        finally:
            if is_held:
                self._looking.release()
        now_s = time.monotonic()
        for place, future in answers.items():
            if future in answered and future.exception() is None:
                self._known_s[place.topic] = now_s
        return answers
