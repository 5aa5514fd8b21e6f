"""An admin client of a broker in memory, with those methods of ``AdminClient`` that the engine and its tests call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from confluent_kafka import (
    OFFSET_INVALID,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.admin._config import AlterConfigOpType, ConfigSource
from confluent_kafka.admin._listoffsets import EarliestSpec, LatestSpec

from statemgr.testing.memory_kafka import Group, MemoryBroker
from statemgr.testing.memory_log import failure

#: Bytes that a broker stores with the offset of a group (``offset.metadata.max.bytes``).
_NOTE_MAX_BYTES = 4096
#: Where the setting of a topic comes from.
_OWN, _DEFAULT = ConfigSource.DYNAMIC_TOPIC_CONFIG.value, ConfigSource.DEFAULT_CONFIG.value


class MemoryAdmin:
    """An admin client. Its futures are done when they are returned."""

    def __init__(self, broker: MemoryBroker, settings: Mapping[str, Any]) -> None:
        self._broker = broker

    def poll(self, timeout: float = 0) -> int:
        return 0

    # --- topics --------------------------------------------------------------------------------------------------

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> SimpleNamespace:
        return listed(self._broker, topic)

    def describe_topics(self, topics: Any, **options: Any) -> dict[str, Future[Any]]:
        return {name: _done(self._described, name) for name in topics.topic_names}

    def create_topics(self, topics: Sequence[Any], **options: Any) -> dict[str, Future[Any]]:
        return {
            new.topic: _done(
                self._broker.create, new.topic, new.num_partitions, new.config, max(new.replication_factor, 1)
            )
            for new in topics
        }

    def delete_topics(self, topics: Sequence[str], **options: Any) -> dict[str, Future[Any]]:
        return {name: _done(self._broker.delete, name) for name in topics}

    def describe_configs(self, resources: Sequence[Any], **options: Any) -> dict[Any, Future[Any]]:
        def settings(name: str) -> dict[str, SimpleNamespace]:
            own = self._broker.topic(name).config
            return {
                key: SimpleNamespace(
                    name=key, value=value, source=_OWN if key in own else _DEFAULT, is_default=key not in own
                )
                for key, value in self._broker.topic(name).settings.items()
            }

        return {resource: _done(settings, resource.name) for resource in resources}

    def incremental_alter_configs(self, resources: Sequence[Any], **options: Any) -> dict[Any, Future[Any]]:
        def alter(resource: Any) -> None:
            changes: dict[str, str | None] = {}
            for entry in resource.incremental_configs:
                operation = entry.incremental_operation
                if operation not in (AlterConfigOpType.SET, AlterConfigOpType.DELETE):
                    raise NotImplementedError(f"the broker in memory has no operation {operation}")
                changes[entry.name] = entry.value if operation is AlterConfigOpType.SET else None
            self._broker.configure(resource.name, changes)

        return {resource: _done(alter, resource) for resource in resources}

    # --- records -------------------------------------------------------------------------------------------------

    def list_offsets(
        self, asked: Mapping[TopicPartition, Any], isolation_level: Any = None, **options: Any
    ) -> dict[TopicPartition, Future[Any]]:
        settled = isolation_level == IsolationLevel.READ_COMMITTED

        def offset(at: TopicPartition, spec: Any) -> SimpleNamespace:
            self._check_led(at, asked)
            log = self._broker.log(at.topic, at.partition)
            end, timestamp_ms = log.end(only_settled=settled), -1
            if isinstance(spec, EarliestSpec | LatestSpec):
                found = log.start if isinstance(spec, EarliestSpec) else end
            else:
                found, timestamp_ms = log.first_since(spec._value, end)
            return SimpleNamespace(offset=found, timestamp=timestamp_ms, leader_epoch=log.leader_epoch)

        with self._broker.changed:
            return {at: _done(offset, at, spec) for at, spec in asked.items()}

    def delete_records(self, asked: Sequence[TopicPartition], **options: Any) -> dict[TopicPartition, Future[Any]]:
        def delete(at: TopicPartition) -> SimpleNamespace:
            self._check_led(at, asked)
            return SimpleNamespace(low_watermark=self._broker.delete_records(at.topic, at.partition, at.offset))

        with self._broker.changed:
            return {at: _done(delete, at) for at in asked}

    # --- consumer groups -----------------------------------------------------------------------------------------

    def describe_consumer_groups(
        self, groups: Sequence[str], include_authorized_operations: bool = False, **options: Any
    ) -> dict[str, Future[Any]]:
        def described(name: str) -> SimpleNamespace:
            group = self._broker.groups.get(name)
            if group is None:
                state = ConsumerGroupState.DEAD
            else:
                state = ConsumerGroupState.STABLE if group.members else ConsumerGroupState.EMPTY
            return SimpleNamespace(
                group_id=name,
                state=state,
                members=list(group.members) if group is not None else [],
                authorized_operations=[AclOperation.READ, AclOperation.DELETE, AclOperation.DESCRIBE]
                if include_authorized_operations
                else None,
            )

        return {name: _done(described, name) for name in groups}

    def list_consumer_group_offsets(
        self, asked: Sequence[ConsumerGroupTopicPartitions], **options: Any
    ) -> dict[str, Future[Any]]:
        def offsets(of: ConsumerGroupTopicPartitions) -> ConsumerGroupTopicPartitions:
            with self._broker.changed:
                known = self._broker.groups.get(of.group_id, Group()).offsets
                places = sorted(known) if of.topic_partitions is None else [place(at) for at in of.topic_partitions]
                found = [TopicPartition(*at, known.get(at, OFFSET_INVALID)) for at in places]
                return ConsumerGroupTopicPartitions(of.group_id, found)

        return {of.group_id: _done(offsets, of) for of in asked}

    def alter_consumer_group_offsets(
        self, asked: Sequence[ConsumerGroupTopicPartitions], **options: Any
    ) -> dict[str, Future[Any]]:
        def alter(of: ConsumerGroupTopicPartitions) -> SimpleNamespace:
            with self._broker.changed:
                answers = [self._altered(of.group_id, at) for at in of.topic_partitions or ()]
                return SimpleNamespace(group_id=of.group_id, topic_partitions=answers)

        return {of.group_id: _done(alter, of) for of in asked}

    # --- inside --------------------------------------------------------------------------------------------------

    def _described(self, name: str) -> SimpleNamespace:
        found = self._broker.topic(name)
        partitions = [
            SimpleNamespace(id=number, replicas=list(range(found.replicas))) for number in range(len(found.logs))
        ]
        return SimpleNamespace(name=name, topic_id=found.topic_id, partitions=partitions)

    def _check_led(self, at: TopicPartition, asked: Iterable[TopicPartition]) -> None:
        """The client first looks for the leaders of all partitions. Raises: KafkaException if there is no such one."""
        if self._has(at):
            return
        if not any(self._has(other) for other in asked):
            raise failure(KafkaError._NOENT, "Failed to query partition leaders: No leaders found")
        is_known = at.topic in self._broker.topics
        raise failure(
            KafkaError._UNKNOWN_PARTITION if is_known else KafkaError.UNKNOWN_TOPIC_OR_PART,
            "Local: Unknown partition" if is_known else "Broker: Unknown topic or partition",
        )

    def _has(self, at: TopicPartition) -> bool:
        topic = self._broker.topics.get(at.topic)
        return topic is not None and at.partition < len(topic.logs)

    def _altered(self, group: str, at: TopicPartition) -> SimpleNamespace:
        known, code = self._broker.groups.get(group), None
        if known is not None and known.members:
            code = KafkaError.UNKNOWN_MEMBER_ID
        elif not self._has(at):
            code = KafkaError.UNKNOWN_TOPIC_OR_PART
        elif len(at.metadata or "") > _NOTE_MAX_BYTES:
            code = KafkaError.OFFSET_METADATA_TOO_LARGE
        else:
            self._broker.groups.setdefault(group, Group()).offsets[place(at)] = at.offset
        error = None if code is None else KafkaError(code)
        return SimpleNamespace(topic=at.topic, partition=at.partition, offset=at.offset, error=error)


def listed(broker: MemoryBroker, topic: str | None) -> SimpleNamespace:
    """What ``list_topics`` of any client returns."""

    def one(name: str) -> SimpleNamespace:
        try:
            logs, error = broker.topic(name).logs, None
        except KafkaException as missing:
            logs, error = [], missing.args[0]
        return SimpleNamespace(topic=name, partitions=dict.fromkeys(range(len(logs))), error=error)

    with broker.changed:
        names = list(broker.topics) if topic is None else [topic]
        return SimpleNamespace(topics={name: one(name) for name in names}, brokers={})


def place(partition: TopicPartition) -> tuple[str, int]:
    """Its topic and its number."""
    return partition.topic, partition.partition


def _done(work: Callable[..., Any], *arguments: object) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work(*arguments))
    except KafkaException as error:
        future.set_exception(error)
    return future
