"""A Kafka broker in this process's memory: topics, transactions with fencing, and consumer groups.

It keeps what the engine relies on: an aborted or open transaction is not visible to a reader of committed records, the
markers that end a transaction take an offset, and a transactional ID that is initialised again fences its older
producer. It compacts and deletes nothing. :mod:`statemgr.testing.memory_clients` has its clients.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition, Uuid

if TYPE_CHECKING:
    from statemgr.testing.memory_clients import MemoryGroupConsumer

#: What a broker accepts as the name of a topic (``Topic.validate`` of Kafka).
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
Header = tuple[str, bytes | None]


@dataclass(slots=True)
class Entry:
    """A record, or the marker that ends a transaction.

    Attributes:
        timestamp: its type and epoch milliseconds, as ``Message.timestamp()`` returns them.
        owner: the transaction that wrote it; None if none did.
    """

    key: bytes | None
    value: bytes | None
    headers: Sequence[Header]
    timestamp: tuple[int, int]
    owner: Txn | None = None
    is_marker: bool = False

    @property
    def is_visible(self) -> bool:
        """Whether a reader of committed records gets it."""
        return not self.is_marker and (self.owner is None or self.owner.committed)


@dataclass(slots=True, eq=False)
class Txn:
    """A transaction. ``begins``: partition → the offset of its first record there."""

    begins: dict[tuple[str, int], int] = field(default_factory=dict)
    committed: bool = False


@dataclass
class Topic:
    """A topic: its ID, its settings as text, its number of replicas, and the records of each partition."""

    topic_id: Uuid
    logs: list[list[Entry]]
    config: dict[str, str]
    replicas: int


@dataclass
class Group:
    """A consumer group: each change of its members starts a new generation, which all of them join."""

    members: list[MemoryGroupConsumer] = field(default_factory=list)
    generation: int = 0
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)


class MemoryBroker:
    """The state of the broker. ``changed`` guards all of it, and is notified of each change.

    Args:
        time_ms: the broker's clock, in epoch milliseconds.
        partitions: of a topic that a producer writes to before anybody created it.
    """

    def __init__(self, time_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000, partitions: int = 1) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self._time_ms = time_ms
        self._partitions = partitions
        self._ids = 0
        #: transactional ID → its epoch, and its open transaction
        self._epochs: dict[str, int] = {}
        self._open: dict[str, Txn] = {}

    # --- topics --------------------------------------------------------------------------------------------------

    def create(
        self, name: str, partitions: int | None = None, config: Mapping[str, str] | None = None, replicas: int = 1
    ) -> None:
        """Without ``partitions``, the topic gets the broker's default. Raises: KafkaException if the topic exists."""
        with self.changed:
            if name in self.topics:
                raise failure(KafkaError.TOPIC_ALREADY_EXISTS, f"topic {name} exists")
            self._ids += 1
            logs: list[list[Entry]] = [[] for _ in range(partitions or self._partitions)]
            self.topics[name] = Topic(Uuid(1, self._ids), logs, dict(config or {}), replicas)

    def delete(self, name: str) -> None:
        """Raises: KafkaException if the topic does not exist."""
        with self.changed:
            self.topic(name)
            del self.topics[name]

    def topic(self, name: str) -> Topic:
        """Raises: KafkaException if the topic does not exist."""
        with self.changed:
            if name not in self.topics:
                raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART, f"topic {name} does not exist")
            return self.topics[name]

    def log(self, name: str, partition: int) -> list[Entry]:
        """The records of a partition, where the index is the offset. Raises: KafkaException."""
        logs = self.topic(name).logs
        if not 0 <= partition < len(logs):
            raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART, f"topic {name} has no partition {partition}")
        return logs[partition]

    def end(self, name: str, partition: int, *, only_settled: bool) -> int:
        """The offset after the last record, or the first one of an open transaction. Raises: KafkaException."""
        with self.changed:
            end = len(self.log(name, partition))
            if only_settled:
                begins = (txn.begins.get((name, partition), end) for txn in self._open.values())
                end = min([end, *begins])
            return end

    def committed(self, name: str) -> list[tuple[int, int, Entry]]:
        """Partition, offset and record of everything that a reader of committed records gets. Empty without a topic."""
        with self.changed:
            logs = self.topics[name].logs if name in self.topics else []
            return [
                (partition, offset, entry)
                for partition, log in enumerate(logs)
                for offset, entry in enumerate(log[: self.end(name, partition, only_settled=True)])
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
        owner: Txn | None = None,
    ) -> tuple[int, int, tuple[int, int]]:
        """Write a record. Without a ``partition``, the CRC-32 of the key chooses it, as librdkafka does by default.

        Returns: partition, offset, and timestamp with its type. Raises: KafkaException.
        """
        with self.changed:
            if not _NAME.fullmatch(topic) or topic in (".", ".."):
                raise failure(KafkaError.TOPIC_EXCEPTION, "Broker: Invalid topic")
            if topic not in self.topics:
                self.create(topic)
            found = self.topics[topic]
            if partition is None or partition < 0:
                partition = zlib.crc32(key or b"") % len(found.logs)
            log = self.log(topic, partition)
            by_broker = found.config.get("message.timestamp.type") == "LogAppendTime"
            now_ms = self._time_ms() if timestamp_ms is None or by_broker else timestamp_ms
            if owner is not None:
                owner.begins.setdefault((topic, partition), len(log))
            log.append(Entry(key, value, tuple(headers), (2 if by_broker else 1, now_ms), owner))
            self.changed.notify_all()
            return partition, len(log) - 1, log[-1].timestamp

    # --- transactions --------------------------------------------------------------------------------------------

    def fence(self, transactional_id: str) -> int:
        """Abort the ID's open transaction and fence its producer. Returns: the epoch of the next producer."""
        with self.changed:
            self._end(transactional_id, committed=False)
            self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
            return self._epochs[transactional_id]

    def check(self, transactional_id: str, epoch: int) -> None:
        """Raises: KafkaException if another producer has initialised the ID since."""
        with self.changed:
            if self._epochs.get(transactional_id) != epoch:
                raise failure(KafkaError._FENCED, "a newer producer has this transactional ID", fatal=True)

    def begin(self, transactional_id: str, epoch: int) -> Txn:
        """Raises: KafkaException if the producer is fenced."""
        with self.changed:
            self.check(transactional_id, epoch)
            return self._open.setdefault(transactional_id, Txn())

    def finish(self, transactional_id: str, epoch: int, *, committed: bool) -> None:
        """End the open transaction. Raises: KafkaException if the producer is fenced."""
        with self.changed:
            self.check(transactional_id, epoch)
            self._end(transactional_id, committed=committed)

    def _end(self, transactional_id: str, *, committed: bool) -> None:
        txn = self._open.pop(transactional_id, None)
        if txn is None:
            return
        txn.committed = committed
        for topic, partition in txn.begins:
            if topic in self.topics:
                marker = Entry(None, None, (), (1, self._time_ms()), txn, is_marker=True)
                self.topics[topic].logs[partition].append(marker)
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
            members = self.groups[group].members
            index, shared = members.index(member), []
            for topic in topics:
                partitions = len(self.topic(topic).logs)
                each, more = divmod(partitions, len(members))
                first = index * each + min(index, more)
                shared += [TopicPartition(topic, first + i) for i in range(each + (index < more))]
            return shared


def failure(code: int, reason: str, *, fatal: bool = False) -> KafkaException:
    """What the clients raise."""
    error: Any = KafkaError
    return KafkaException(error(code, reason, fatal))
