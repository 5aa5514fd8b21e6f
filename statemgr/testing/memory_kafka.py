"""A Kafka broker in this process's memory: topics, transactions with fencing, and consumer groups.

It answers as a real broker does, which ``tests/core/integration/test_memory_kafka_differential.py`` checks: an aborted
or open transaction is not visible to a reader of committed records, the markers that end a transaction take an offset,
and a transactional ID that is initialised again fences its older producer.

What a broker does on its own after a while happens here only when it is called: :meth:`MemoryBroker.compact`,
:meth:`MemoryBroker.expire_transactions` and :meth:`MemoryBroker.forget_ids`. Retention never deletes a record.
:mod:`statemgr.testing.memory_clients` has its clients.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import KafkaError, TopicPartition, Uuid

from statemgr.local.machine import SystemClock
from statemgr.model.record_size import size_of_batch
from statemgr.ports import Clock
from statemgr.testing.memory_log import Entry, Header, Log, Txn, failure
from statemgr.testing.memory_topics import DEFAULTS, check_name, check_record, check_settings

if TYPE_CHECKING:
    from statemgr.testing.memory_clients import MemoryGroupConsumer

#: librdkafka's default of ``transaction.timeout.ms``.
TRANSACTION_TIMEOUT_MS = 60_000


@dataclass
class Topic:
    """A topic: its ID, the partitions, the settings that somebody gave it, as text, and its number of replicas."""

    topic_id: Uuid
    logs: list[Log]
    config: dict[str, str]
    replicas: int

    @property
    def settings(self) -> dict[str, str]:
        """All settings."""
        return DEFAULTS | self.config


class ProducerId(NamedTuple):
    """What a broker gives to a producer that initialises a transactional ID. A newer epoch fences an older one."""

    number: int
    epoch: int


@dataclass
class _Owner:
    """The newest producer of a transactional ID, and its open transaction."""

    producer: ProducerId
    timeout_ms: int
    txn: Txn | None = None


@dataclass
class Group:
    """A consumer group: each change of its members starts a new generation, which all of them join."""

    members: list[MemoryGroupConsumer] = field(default_factory=list)
    generation: int = 0
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)


class MemoryBroker:
    """The state of the broker. ``changed`` guards all of it, and is notified of each change.

    Args:
        clock: the broker's clock, and that of its clients' waits.
        partitions: of a topic that a producer writes to before anybody created it.
    """

    def __init__(self, clock: Clock | None = None, partitions: int = 1) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.clock: Clock = clock or SystemClock()
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        #: Whether it creates a topic that a producer writes to (``auto.create.topics.enable``).
        self.creates_topics = True
        self._partitions = partitions
        self._topic_ids = 0
        self._producers = 0
        #: By transactional ID.
        self._owners: dict[str, _Owner] = {}

    @property
    def now_ms(self) -> int:
        """The broker's time, in epoch milliseconds."""
        return self.clock.time_ns() // 1_000_000

    # --- topics --------------------------------------------------------------------------------------------------

    def create(
        self, name: str, partitions: int | None = None, config: Mapping[str, str] | None = None, replicas: int = 1
    ) -> None:
        """Without ``partitions``, or with -1, the topic gets the broker's default.

        Raises: KafkaException if the topic exists, or its name or a setting is not valid.
        """
        with self.changed:
            check_name(name)
            if name in self.topics:
                raise failure(KafkaError.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
            check_settings(config or {})
            count = self._partitions if partitions is None or partitions == -1 else partitions
            if count < 1:
                raise failure(KafkaError.INVALID_PARTITIONS, "Number of partitions was set to an invalid value.")
            self._topic_ids += 1
            logs = [Log() for _ in range(count)]
            self.topics[name] = Topic(Uuid(1, self._topic_ids), logs, dict(config or {}), replicas)
            self.changed.notify_all()

    def delete(self, name: str) -> None:
        """Also deletes the offsets of groups. Raises: KafkaException if the topic does not exist."""
        with self.changed:
            if self.topics.pop(name, None) is None:
                raise _unknown(name)
            for group in self.groups.values():
                group.offsets = {at: offset for at, offset in group.offsets.items() if at[0] != name}
            self.changed.notify_all()

    def topic(self, name: str) -> Topic:
        """Raises: KafkaException if the topic does not exist, or none can have this name."""
        with self.changed:
            if name not in self.topics:
                check_name(name)
                raise _unknown(name)
            return self.topics[name]

    def configure(self, name: str, changes: Mapping[str, str | None]) -> None:
        """Change settings of a topic; None means the default again. Raises: KafkaException."""
        with self.changed:
            check_settings({key: DEFAULTS.get(key, "") if value is None else value for key, value in changes.items()})
            topic = self.topic(name)
            merged = {**topic.config, **changes}
            topic.config = {key: value for key, value in merged.items() if value is not None}

    def log(self, name: str, partition: int) -> Log:
        """Raises: KafkaException if there is no such partition."""
        logs = self.topic(name).logs
        if not 0 <= partition < len(logs):
            raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART, f"topic {name} has no partition {partition}")
        return logs[partition]

    def end(self, name: str, partition: int, *, only_settled: bool) -> int:
        """The offset after the last record, or the first one of an open transaction. Raises: KafkaException."""
        with self.changed:
            return self.log(name, partition).end(only_settled=only_settled)

    def delete_records(self, name: str, partition: int, offset: int) -> int:
        """Delete the records below ``offset``, or all with -1. Returns: the first offset. Raises: KafkaException."""
        with self.changed:
            log = self.log(name, partition)
            if "delete" not in self.topics[name].settings["cleanup.policy"]:
                raise failure(KafkaError.POLICY_VIOLATION, "Broker: Policy violation")
            self.changed.notify_all()
            return log.delete_before(offset)

    def compact(self, name: str, partition: int) -> None:
        """Compact a partition now, if the topic is compacted: see :meth:`statemgr.testing.memory_log.Log.compact`.

        Raises: KafkaException.
        """
        with self.changed:
            log, settings = self.log(name, partition), self.topics[name].settings
            if "compact" in settings["cleanup.policy"]:
                log.compact(self.now_ms, settings)
                self.changed.notify_all()

    def committed(self, name: str) -> list[tuple[int, int, Entry]]:
        """Partition, offset and record of everything that a reader of committed records gets. Empty without a topic."""
        with self.changed:
            logs = self.topics[name].logs if name in self.topics else []
            return [
                (partition, offset, entry)
                for partition, log in enumerate(logs)
                for offset, entry in log.records(log.end(only_settled=True))
                if entry.is_visible
            ]

    def append(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[Header] = (),
        *,
        timestamp_ms: int | None = None,
        owner: tuple[str, ProducerId] | None = None,
        checked: bool = False,
    ) -> tuple[int, int, tuple[int, int]]:
        """Write a record. Without a ``partition``, the CRC-32 of the key chooses it, as librdkafka does by default.

        Args:
            owner: the transactional ID and the producer, if the record belongs to its transaction.
            checked: refuse what the settings of the topic do not allow. Otherwise a test may write anything.

        Returns: partition, offset, and timestamp with its type. Raises: KafkaException.
        """
        with self.changed:
            if topic not in self.topics and (self.creates_topics or not checked):
                self.create(topic)
            found, now_ms, headers = self.topic(topic), self.now_ms, tuple(headers)
            if partition is None or partition < 0:
                partition = zlib.crc32(key or b"") % len(found.logs)
            log = self.log(topic, partition)
            txn = None if owner is None else self._joined(*owner, (topic, partition))
            if checked:
                check_record(found.config, key, size_of_batch(key, value, headers), timestamp_ms, now_ms)
            by_broker = found.settings["message.timestamp.type"] == "LogAppendTime"
            stamp = (2, now_ms) if by_broker else (1, now_ms if timestamp_ms is None else timestamp_ms)
            offset = log.append(Entry(key, value, headers, stamp, txn))
            self.changed.notify_all()
            return partition, offset, stamp

    # --- transactions --------------------------------------------------------------------------------------------

    def fence(
        self, transactional_id: str, timeout_ms: int = TRANSACTION_TIMEOUT_MS, mine: ProducerId | None = None
    ) -> ProducerId:
        """Abort the ID's open transaction and fence its producer.

        Args:
            timeout_ms: how long a transaction of the next producer may be open.
            mine: what a producer had that continues with the ID. Only the newest producer may.

        Returns: what the next producer gets. Raises: KafkaException if ``mine`` is fenced.
        """
        with self.changed:
            owner = self._owners.get(transactional_id)
            if owner is None:
                self._producers += 1
                owner = self._owners[transactional_id] = _Owner(ProducerId(self._producers, 0), timeout_ms)
            else:
                if mine not in (None, owner.producer):
                    raise _fenced()
                self._end(owner, committed=False)
                owner.producer = owner.producer._replace(epoch=owner.producer.epoch + 1)
                owner.timeout_ms = timeout_ms
            return owner.producer

    def finish(self, transactional_id: str, producer: ProducerId, *, committed: bool) -> None:
        """End the open transaction. Raises: KafkaException if the producer is fenced, or its ID is forgotten."""
        with self.changed:
            self._end(self._checked(transactional_id, producer), committed=committed)

    def expire_transactions(self) -> list[str]:
        """Abort transactions that have been open for longer than their producers' ``transaction.timeout.ms``, and
        fence these producers. A broker does this every 10 s.

        Returns: their transactional IDs.
        """
        with self.changed:
            now_ms = self.now_ms
            late = [
                name
                for name, owner in self._owners.items()
                if owner.txn is not None and now_ms - owner.txn.began_ms > owner.timeout_ms
            ]
            for name in late:
                self.fence(name, self._owners[name].timeout_ms)
            return late

    def forget_ids(self) -> list[str]:
        """Forget all transactional IDs without an open transaction, as if ``transactional.id.expiration.ms`` had
        passed.

        Returns: the IDs.
        """
        with self.changed:
            idle = [name for name, owner in self._owners.items() if owner.txn is None]
            for name in idle:
                del self._owners[name]
            return idle

    def _checked(self, transactional_id: str, producer: ProducerId) -> _Owner:
        owner = self._owners.get(transactional_id)
        if owner is None or owner.producer.number != producer.number:
            raise failure(
                KafkaError.INVALID_PRODUCER_ID_MAPPING,
                "Broker: Producer attempted to use a producer id which is not currently assigned to its transactional "
                "id",
                requires_abort=True,
            )
        if owner.producer != producer:
            raise _fenced()
        return owner

    def _joined(self, transactional_id: str, producer: ProducerId, place: tuple[str, int]) -> Txn:
        """The open transaction, which has a partition more now. The first one opens it."""
        owner = self._checked(transactional_id, producer)
        if owner.txn is None:
            owner.txn = Txn(self.now_ms)
        owner.txn.places.add(place)
        return owner.txn

    def _end(self, owner: _Owner, *, committed: bool) -> None:
        txn, owner.txn = owner.txn, None
        if txn is None:
            return
        txn.committed = committed
        for topic, partition in sorted(txn.places):
            # a topic that was deleted and created again meanwhile gets a marker, too
            if topic in self.topics and partition < len(self.topics[topic].logs):
                self.log(topic, partition).append(Entry(None, None, (), (1, self.now_ms), txn, is_marker=True))
        self.changed.notify_all()

    # --- consumer groups -----------------------------------------------------------------------------------------

    def join(self, group: str, member: MemoryGroupConsumer) -> None:
        """Add a member, which starts a rebalance."""
        with self.changed:
            found = self.groups.setdefault(group, Group())
            found.members.append(member)
            found.generation += 1
            self.changed.notify_all()

    def leave(self, group: str, member: MemoryGroupConsumer) -> None:
        """Remove a member, which starts a rebalance. Idempotent."""
        with self.changed:
            found = self.groups.setdefault(group, Group())
            if member in found.members:
                found.members.remove(member)
                found.generation += 1
                self.changed.notify_all()

    def share(self, group: str, member: MemoryGroupConsumer, topics: Sequence[str]) -> list[TopicPartition]:
        """The partitions of a member by the strategy ``range``."""
        with self.changed:
            shared = []
            for topic in topics:
                members = [other for other in self.groups[group].members if other is member or other.reads(topic)]
                index, partitions = members.index(member), len(self.topic(topic).logs)
                each, more = divmod(partitions, len(members))
                first = index * each + min(index, more)
                shared += [TopicPartition(topic, first + i) for i in range(each + (index < more))]
            return shared


def _unknown(name: str) -> Exception:
    return failure(KafkaError.UNKNOWN_TOPIC_OR_PART, f"Broker: Unknown topic or partition ({name})")


def _fenced() -> Exception:
    return failure(KafkaError._FENCED, "Local: This instance has been fenced by a newer instance", fatal=True)
