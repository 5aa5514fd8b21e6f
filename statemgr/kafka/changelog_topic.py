"""Reads changelog topics.

Keys and values are raw bytes, so statemgr can take over the changelog of an existing job.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import cache, partial

from confluent_kafka import Message

from statemgr.config import JobConfig
from statemgr.errors import ANOTHER_COPY, CorruptRecord, MissingState, StatemgrError
from statemgr.ids import IdSource
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader, offset_of
from statemgr.kafka.temporary_topic import BrokerTime
from statemgr.ports import ChangelogBatch, ChangelogRecord, Clock, TopicBounds, TopicInfo


class ChangelogTopics:
    """Implements :class:`statemgr.ports.Changelog`. Safe to use from many threads.

    Args:
        stall_s: seconds without progress after which reading fails (see :class:`PartitionReader`).
    """

    def __init__(self, config: JobConfig, clock: Clock, ids: IdSource, *, stall_s: float | None = None) -> None:
        self._metadata = TopicMetadata(config, clock)
        self._reader = PartitionReader(config, clock, stall_s)
        #: The brokers' clock, once somebody has asked for it.
        self._time = cache(partial(BrokerTime, config, clock, ids))
        self._lock = threading.Lock()
        self._asking: dict[str, threading.Lock] = {}
        #: Topic → the answer that the next question will have.
        self._next: dict[str, Future[TopicInfo]] = {}

    def describe(self, topic: str) -> TopicInfo:
        """Calls at the same time share an answer, because that for a topic with 1,000 partitions is large. Its question
        is sent after all of them have begun. Also raises: UnavailableError, AccessDenied.
        """
        with self._lock:
            answer = self._next.get(topic)
            asks = answer is None
            if answer is None:
                answer = self._next[topic] = Future()
            one_at_a_time = self._asking.setdefault(topic, threading.Lock())
        if asks:
            try:
                with one_at_a_time:  # the question in progress may be older than this call
                    with self._lock:
                        del self._next[topic]
                    answer.set_result(self._described(topic))
            except BaseException as error:
                with self._lock:
                    if self._next.get(topic) is answer:
                        del self._next[topic]
                answer.set_exception(error)
        try:
            return answer.result()
        except StatemgrError as error:
            raise copy(error) from error.__cause__  # each caller adds its own task

    def _described(self, topic: str) -> TopicInfo:
        found = self._metadata.describe([topic]).get(topic)
        if found is None:
            raise MissingState("the changelog topic does not exist", hint=ANOTHER_COPY, topic=topic)
        config = self._metadata.settings([topic])[topic]
        return TopicInfo(topic, str(found.topic_id), len(found.partitions), config)

    def survey(self, topics: Collection[str], only: Collection[int] | None = None) -> Mapping[str, TopicBounds]:
        """Raises: UnavailableError, AccessDenied."""
        described = self._metadata.describe(sorted(topics))
        partitions = [(topic, one.id) for topic, found in described.items() for one in found.partitions]
        partitions = [(topic, number) for topic, number in partitions if only is None or number in only]
        starts, ends = self._metadata.starts(partitions), self._metadata.ends(partitions)
        bounds: dict[str, dict[int, tuple[int, int]]] = {topic: {} for topic in described}
        for topic, number in starts.keys() & ends.keys():
            bounds[topic][number] = starts[topic, number], ends[topic, number]
        return {
            topic: TopicBounds(str(found.topic_id), len(found.partitions), bounds[topic])
            for topic, found in described.items()
        }

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Raises: MissingState, UnavailableError."""
        return self._metadata.bounds(topic, partition)

    def settled_end(self, topic: str, partition: int) -> int:
        """Raises: MissingState, UnavailableError."""
        return self._metadata.bounds(topic, partition, only_settled=True)[1]

    def read(
        self, topic: str, partition: int, start: int, end: int, *, checked: bool = False
    ) -> Iterator[Sequence[ChangelogRecord]]:
        """Checks the bounds at the first step, unless the caller has."""
        for batch in self._messages(topic, partition, start, end, checked):
            records = [
                ChangelogRecord(m.key(), m.value(), m.offset(), m.timestamp()[1])  # type: ignore[arg-type]
                for m in batch
            ]
            for record in records:
                if record.key is None:
                    raise self._keyless(topic, partition, record.offset)
            yield records

    def changes(
        self, topic: str, partition: int, start: int, end: int, *, checked: bool = False
    ) -> Iterator[ChangelogBatch]:
        """Checks the bounds at the first step, unless the caller has. Works column by column, because each step is then
        one loop in C over the whole batch.
        """
        for batch in self._messages(topic, partition, start, end, checked):
            keys = [message.key() for message in batch]
            values = [message.value() for message in batch]
            if not all(keys) and None in keys:
                raise self._keyless(topic, partition, offset_of(batch[keys.index(None)]))
            size = sum(map(len, keys)) + sum(map(len, filter(None, values)))  # type: ignore[arg-type]
            yield ChangelogBatch(list(zip(keys, values, strict=True)), size, offset_of(batch[-1]) + 1)  # type: ignore[arg-type]

    def time_ms(self) -> int:
        """Raises: UnavailableError, AccessDenied, InvalidError."""
        return self._time().now_ms()

    def _messages(self, topic: str, partition: int, start: int, end: int, checked: bool) -> Iterator[list[Message]]:
        low, high = (start, end) if checked else self.bounds(topic, partition)
        if start < low or end > high:
            raise MissingState(
                f"the changelog has offsets {low} to {high}, but the checkpoint needs {start} to {end}",
                hint=ANOTHER_COPY,
                topic=topic,
                partition=partition,
            )
        yield from self._reader.read(topic, partition, start, end)

    def _keyless(self, topic: str, partition: int, offset: int) -> CorruptRecord:
        return CorruptRecord(
            "a changelog record has no key",
            hint=f"find out what else writes to the changelog, because only the job may; {ANOTHER_COPY}",
            topic=topic,
            partition=partition,
            offset=offset,
        )

    def close(self) -> None:
        self._metadata.close()
