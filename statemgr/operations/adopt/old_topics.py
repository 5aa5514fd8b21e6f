"""Reads the topics and the consumer group of a job that other software ran. Writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, Message, TopicPartition
from confluent_kafka.admin._config import ConfigResource, ConfigSource
from confluent_kafka.admin._resource import ResourceType

from statemgr.config import JobConfig
from statemgr.config.job import CHECKPOINTS
from statemgr.errors import CorruptRecord
from statemgr.ids import topic_name
from statemgr.kafka.clients import REQUEST_S
from statemgr.kafka.errors import may_pass, translate
from statemgr.kafka.metadata import TopicMetadata
from statemgr.kafka.reader import PartitionReader, offset_of
from statemgr.operations.adopt.origins import OldRecord
from statemgr.ports import Clock, TopicInfo

#: Longer than a broker accepts next to an offset (``offset.metadata.max.bytes``); a request has room for 32,767 bytes.
_TOO_LONG = "x" * 32_000
#: Why a broker refuses an offset of somebody who is no member of a group that has members.
_HAS_MEMBERS = {
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
}

#: ``OldRecord._make`` without its call of a function in Python, which takes as long as the rest of a record.
_record = partial(tuple.__new__, OldRecord)


@dataclass(frozen=True, slots=True)
class Bounds:
    """First offset of a partition, the end of what is committed, and the end with open transactions."""

    start: int = field(compare=False)  # Kafka may delete the oldest records
    stable: int
    end: int

    def until(self, end: int) -> Bounds:
        """The same partition up to an offset in it."""
        return replace(self, stable=end, end=end)


@dataclass(frozen=True, slots=True)
class OldGroup:
    """A consumer group: Kafka's name of its state.

    ``EMPTY``: it has no member. ``DEAD``: there is no such group, or its protocol is one that the client does not know,
    such as Kafka Streams' own (KIP-1071).
    """

    name: str
    state: str
    members: int


class OldTopics:
    """Use it in a ``with`` block, or :meth:`close` it."""

    def __init__(self, config: JobConfig, clock: Clock) -> None:
        self._config = config
        self.metadata = TopicMetadata(config, clock)
        self._reader = PartitionReader(config, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.metadata.close()

    def names(self) -> list[str]:
        """All topics that these credentials may describe, without those of statemgr's own jobs by their usual names.

        Raises: UnavailableError, AccessDenied.
        """
        found = self.metadata.names("")
        job, mine = self._config, set[str]()
        if job.checkpoint_topic in found:
            # its stores are known, and a changelog of the old job may begin like theirs
            mine = {topic_name(job.job_name, job.job_id, store, "changelog") for store in job.stores}
        others = [name for name in found if name.startswith(CHECKPOINTS) and name != job.checkpoint_topic]
        theirs = tuple(f"{name.removeprefix(CHECKPOINTS)}-" for name in others)
        return [name for name in found if name not in mine and not name.startswith(theirs)]

    def describe(self, topics: Collection[str], *, with_settings: bool = False) -> dict[str, TopicInfo]:
        """The topics that exist. Their settings need a right of their own. Raises: UnavailableError, AccessDenied."""
        found = self.metadata.describe(sorted(set(topics)))
        settings = self.metadata.settings(list(found)) if found and with_settings else {}
        return {
            name: TopicInfo(name, str(topic.topic_id), len(topic.partitions), settings.get(name, {}))
            for name, topic in found.items()
        }

    def own_settings(self, topic: str) -> dict[str, str]:
        """The settings that somebody gave a topic that exists; the others are the brokers' defaults. Raises:
        UnavailableError, AccessDenied, MissingState.
        """
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = self.metadata.ask(
            "reading topics' settings",
            lambda: self.metadata.client.describe_configs([resource], request_timeout=REQUEST_S),
        )[resource]
        set_here = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        return {entry.name: str(entry.value) for entry in entries.values() if entry.source == set_here}

    def bounds(self, topic: str, partition: int) -> Bounds:
        """Raises: MissingState, UnavailableError, AccessDenied."""
        start, end = self.metadata.bounds(topic, partition)
        # asked last: a transaction that ends in between counts as ended
        return Bounds(start, self.metadata.bounds(topic, partition, only_settled=True)[1], end)

    def first(self, topic: TopicInfo, partition: int, start: int) -> int:
        """Where a read of a changelog begins that began at ``start`` a while ago: there, or later if Kafka has deleted
        records by the topic's ``cleanup.policy`` since.

        Args:
            topic: with its settings.

        Raises: MissingState, UnavailableError, AccessDenied.
        """
        if "delete" not in topic.config.get("cleanup.policy", ""):
            return start
        return max(start, self.metadata.bounds(topic.name, partition)[0])

    def group(self, name: str) -> OldGroup:
        """Raises: UnavailableError, AccessDenied."""
        client = self.metadata.client
        described = self.metadata.ask(
            "describing a consumer group",
            lambda: client.describe_consumer_groups([name], request_timeout=REQUEST_S),
            group=name,
        )[name]
        return OldGroup(name, described.state.name, len(described.members))

    def has_members(self, group: str, topic: str) -> bool:
        """Whether somebody runs in a group, whatever its protocol is. Needs the right to read the group and the topic.

        librdkafka describes groups of the classic and of the consumer protocol. Of others it says that there is no such
        group. A broker looks for members of any kind before it takes an offset from somebody who is none. So this sends
        an offset of partition 0 of ``topic`` with a note that is too long, which the broker never stores.

        Raises: UnavailableError, AccessDenied.
        """
        client = self.metadata.client
        offset = max(self.committed(group).get(f"{topic}-0", 0), 0)
        asked = [ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, offset, metadata=_TOO_LONG)])]
        (answer,) = self.metadata.ask(
            "asking whether a consumer group has members",
            lambda: client.alter_consumer_group_offsets(asked, request_timeout=REQUEST_S),
            failed=_not_yet,
            group=group,
        )[group].topic_partitions
        error = answer.error
        if error is None or error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            return False
        if error.code() in _HAS_MEMBERS:
            return True
        raise translate(error, "asking whether a consumer group has members", group=group, topic=topic)

    def committed(self, group: str) -> dict[str, int]:
        """Source partition (``orders-0``) → the next offset, as the group has committed it. Raises: UnavailableError,
        AccessDenied.
        """
        return self.metadata.committed(group)

    def records(self, topic: str, partition: int, start: int, end: int) -> Iterator[Sequence[OldRecord]]:
        """Committed records with ``start`` ≤ offset < ``end``, in batches.

        Raises: CorruptRecord (a record has no key), UnavailableError, MissingState, AccessDenied.
        """
        for batch in self._reader.read(topic, partition, start, end):
            keys, values = _keys(batch, topic, partition), map(Message.value, batch)
            headers = [found or () for found in map(Message.headers, batch)]
            times_ms = [time_ms for _, time_ms in map(Message.timestamp, batch)]
            yield [*map(_record, zip(keys, values, headers, map(Message.offset, batch), times_ms, strict=True))]

    def pairs(
        self, topic: str, partition: int, start: int, end: int
    ) -> Iterator[Sequence[tuple[bytes | None, bytes | None]]]:
        """Keys and values of any topic, where a record may have no key. Otherwise as :meth:`records`."""
        for batch in self._reader.read(topic, partition, start, end):
            yield [(message.key(), message.value()) for message in batch]

    def changes(
        self, topic: str, partition: int, start: int, end: int
    ) -> Iterator[tuple[Sequence[bytes], Sequence[bytes | None], int]]:
        """Like :meth:`records`, without what a changelog of plain keys and values does not need, and faster: each step
        is one loop in C over the whole batch.

        Yields: keys, values, and the offset after the last of them.
        """
        for batch in self._reader.read(topic, partition, start, end):
            yield _keys(batch, topic, partition), [*map(Message.value, batch)], offset_of(batch[-1]) + 1


def _not_yet(found: ConsumerGroupTopicPartitions) -> KafkaError | None:
    """The error in an answer about one partition of a group, if the question should be put again."""
    errors = (answer.error for answer in found.topic_partitions or ())
    return next((error for error in errors if error is not None and may_pass(error)), None)


def _keys(batch: Sequence[Message], topic: str, partition: int) -> list[bytes]:
    """Raises: CorruptRecord if a record has no key."""
    keys = [*map(Message.key, batch)]
    if not all(keys) and None in keys:
        raise CorruptRecord(
            "a changelog record has no key",
            hint="this is no changelog: name the changelogs with `statemgr adopt --changelog STORE=TOPIC`",
            topic=topic,
            partition=partition,
            offset=offset_of(batch[keys.index(None)]),
        )
    return keys  # type: ignore[return-value]
