"""Reads the topics and the consumer group of a job that other software ran. Writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, Message

from statemgr.config import JobConfig
from statemgr.errors import CorruptRecord
from statemgr.kafka.clients import REQUEST_S
from statemgr.kafka.errors import translate
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader, offset_of
from statemgr.model.origins import OldRecord
from statemgr.ports import Clock, TopicInfo


@dataclass(frozen=True, slots=True)
class Bounds:
    """First offset of a partition, the end of what is committed, and the end with open transactions."""

    start: int
    stable: int
    end: int

    def until(self, end: int) -> Bounds:
        """The same partition up to an offset in it."""
        return replace(self, stable=end, end=end)


@dataclass(frozen=True, slots=True)
class OldGroup:
    """A consumer group: Kafka's name of its state (``EMPTY``: it has no member, ``DEAD``: there is no such group)."""

    name: str
    state: str
    members: int


class OldTopics:
    """Use it in a ``with`` block, or :meth:`close` it."""

    def __init__(self, config: JobConfig, clock: Clock) -> None:
        self._metadata = TopicMetadata(config, clock)
        self._reader = PartitionReader(config, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._metadata.close()

    def names(self) -> list[str]:
        """All topics that these credentials may describe. Raises: UnavailableError, AccessDenied."""
        try:
            return sorted(self._metadata.client.list_topics(timeout=REQUEST_S).topics)
        except KafkaException as error:
            raise translate(error.args[0], "listing topics", reported=self._metadata.errors) from error

    def describe(self, topics: Collection[str], *, with_settings: bool = False) -> dict[str, TopicInfo]:
        """The topics that exist. Their settings need a right of their own. Raises: UnavailableError, AccessDenied."""
        found = self._metadata.describe(sorted(topics))
        settings = self._metadata.settings(list(found)) if found and with_settings else {}
        return {
            name: TopicInfo(name, str(topic.topic_id), len(topic.partitions), settings.get(name, {}))
            for name, topic in found.items()
        }

    def bounds(self, topic: str, partition: int) -> Bounds:
        """Raises: MissingState, UnavailableError, AccessDenied."""
        start, end = self._metadata.bounds(topic, partition)
        # asked last: a transaction that ends in between counts as ended
        return Bounds(start, self._metadata.bounds(topic, partition, only_settled=True)[1], end)

    def group(self, name: str) -> OldGroup:
        """Raises: UnavailableError, AccessDenied."""
        client = self._metadata.client
        described = self._metadata.ask(
            "describing a consumer group",
            lambda: client.describe_consumer_groups([name], request_timeout=REQUEST_S),
            group=name,
        )[name]
        return OldGroup(name, described.state.name, len(described.members))

    def committed(self, group: str) -> dict[str, int]:
        """Source partition (``orders-0``) → the next offset, as the group has committed it. Raises: UnavailableError,
        AccessDenied.
        """
        client = self._metadata.client
        asked = [ConsumerGroupTopicPartitions(group)]
        answer = self._metadata.ask(
            "reading the offsets of a consumer group",
            lambda: client.list_consumer_group_offsets(asked, require_stable=True, request_timeout=REQUEST_S),
            group=group,
        )[group]
        return {f"{p.topic}-{p.partition}": p.offset for p in answer.topic_partitions or () if p.offset >= 0}

    def records(self, topic: str, partition: int, start: int, end: int) -> Iterator[Sequence[OldRecord]]:
        """Committed records with ``start`` ≤ offset < ``end``, in batches.

        Raises: CorruptRecord (a record has no key), UnavailableError, MissingState, AccessDenied.
        """
        for batch in self._reader.read(topic, partition, start, end):
            keys = _keys(batch, topic, partition)
            yield [
                OldRecord(key, m.value(), m.headers() or (), offset_of(m))  # type: ignore[arg-type]
                for key, m in zip(keys, batch, strict=True)
            ]

    def changes(
        self, topic: str, partition: int, start: int, end: int
    ) -> Iterator[tuple[Sequence[bytes], Sequence[bytes | None], int]]:
        """Like :meth:`records`, without what a changelog of plain keys and values does not need, and faster.

        Yields: keys, values, and the offset after the last of them.
        """
        for batch in self._reader.read(topic, partition, start, end):
            yield _keys(batch, topic, partition), [m.value() for m in batch], offset_of(batch[-1]) + 1


def _keys(batch: Sequence[Message], topic: str, partition: int) -> list[bytes]:
    """Raises: CorruptRecord if a record has no key."""
    keys = [message.key() for message in batch]
    if None in keys:
        raise CorruptRecord(
            "a changelog record has no key",
            hint="this is no changelog: name the changelogs with `statemgr adopt --changelog STORE=TOPIC`",
            topic=topic,
            partition=partition,
            offset=offset_of(batch[keys.index(None)]),
        )
    return keys  # type: ignore[return-value]
