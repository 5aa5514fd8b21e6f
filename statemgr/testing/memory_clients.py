"""Clients of a broker in memory, with those methods of confluent_kafka's clients that the engine calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import EarliestSpec

from statemgr.kafka.clients import INSTEAD
from statemgr.kafka.errors import ClientErrors
from statemgr.kafka.group_consumer import GroupConsumer
from statemgr.testing.memory_kafka import MemoryBroker, Txn, failure

#: librdkafka's default of ``message.max.bytes``.
MESSAGE_MAX_BYTES = 1_000_000
Callback = Callable[[Any, list[TopicPartition]], None]


@contextmanager
def served(broker: MemoryBroker, servers: str) -> Iterator[None]:
    """In this block, clients whose ``kafka.bootstrap.servers`` is ``servers`` are clients of this broker."""
    kinds: dict[object, Callable[[MemoryBroker, Mapping[str, Any]], Any]] = {
        Producer: MemoryProducer,
        Consumer: MemoryConsumer,
        GroupConsumer: MemoryGroupConsumer,
        AdminClient: MemoryAdmin,
    }
    INSTEAD[servers] = lambda kind, settings: kinds[kind](broker, settings)
    try:
        yield
    finally:
        del INSTEAD[servers]


class MemoryProducer:
    """A producer whose records reach the broker at once. Delivery reports wait for ``poll`` or ``flush``."""

    def __init__(self, broker: MemoryBroker, settings: Mapping[str, Any]) -> None:
        self._broker = broker
        self._id = settings.get("transactional.id")
        self._most_bytes = int(settings.get("message.max.bytes", MESSAGE_MAX_BYTES))
        self._epoch = -1
        self._txn: Txn | None = None
        self._reports: list[tuple[Callable[[KafkaError | None, Message], None], KafkaError | None, Message]] = []

    def init_transactions(self, timeout: float = -1) -> None:
        self._epoch, self._txn = self._broker.fence(str(self._id)), None

    def begin_transaction(self) -> None:
        if self._txn is not None:
            raise failure(KafkaError._STATE, "a transaction is open")
        self._txn = self._broker.begin(str(self._id), self._epoch)

    def commit_transaction(self, timeout: float = -1) -> None:
        self._broker.finish(str(self._id), self._epoch, committed=True)
        self._txn = None

    def abort_transaction(self, timeout: float = -1) -> None:
        self._broker.finish(str(self._id), self._epoch, committed=False)
        self._txn = None

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int | None = None,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
        timestamp: int | None = None,
        headers: Iterable[tuple[str, str | bytes | None]] = (),
    ) -> None:
        key, value, headers = _encoded(key), _encoded(value), _encoded_headers(headers)
        if len(key or b"") + len(value or b"") > self._most_bytes:
            raise failure(KafkaError.MSG_SIZE_TOO_LARGE, "Broker: Message size too large")
        if self._id is not None and self._txn is None:
            raise failure(KafkaError._STATE, "no transaction is open")
        error, offset, stamp = None, -1, (0, -1)
        try:
            with self._broker.changed:
                if self._id is not None:
                    self._broker.check(str(self._id), self._epoch)
                partition, offset, stamp = self._broker.append(
                    topic, partition, key, value, headers, timestamp_ms=timestamp, owner=self._txn
                )
        except KafkaException as refused:
            error = refused.args[0]
        if on_delivery is not None:
            message = Message(
                topic=topic, partition=-1 if partition is None else partition, offset=offset, key=key, value=value,
                error=error, timestamp=stamp,
            )  # fmt: skip
            self._reports.append((on_delivery, error, message))

    def flush(self, timeout: float = -1) -> int:
        self.poll(0)
        return 0

    def poll(self, timeout: float = 0) -> int:
        reports, self._reports = self._reports, []
        for report, error, message in reports:
            report(error, message)
        return len(reports)

    def purge(self) -> None:
        self._reports.clear()

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> SimpleNamespace:
        return _listed(self._broker, topic)

    def __len__(self) -> int:
        return len(self._reports)


class MemoryConsumer(Consumer):
    """A consumer of assigned partitions, from given offsets on."""

    def __init__(self, broker: MemoryBroker, settings: Mapping[str, Any]) -> None:
        # Consumer.__init__ would start a client of librdkafka
        self._broker = broker
        self._settled = settings.get("isolation.level", "read_committed") == "read_committed"
        self._reports_ends = bool(settings.get("enable.partition.eof", False))
        self._positions: dict[tuple[str, int], int] = {}
        self._paused: set[tuple[str, int]] = set()
        self._ended: dict[tuple[str, int], int] = {}

    def assign(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            self._positions = {place(at): max(at.offset, 0) for at in partitions}
            self._paused.clear()
            self._ended.clear()

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            self._positions |= {place(at): max(at.offset, 0) for at in partitions}

    def seek(self, partition: TopicPartition) -> None:
        with self._broker.changed:
            self._positions[place(partition)] = max(partition.offset, 0)

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        with self._broker.changed:
            return [TopicPartition(*place(at), self._positions.get(place(at), OFFSET_INVALID)) for at in partitions]

    def pause(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            self._paused |= {place(at) for at in partitions}

    def resume(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            self._paused -= {place(at) for at in partitions}
            self._broker.changed.notify_all()

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        deadline = time.monotonic() + timeout
        taken: list[Message] = []
        with self._broker.changed:
            while len(taken) < num_messages:
                message = self._next()
                if message is not None:
                    taken.append(message)
                elif taken or (left := deadline - time.monotonic()) <= 0:
                    break
                else:
                    self._broker.changed.wait(left)
        return taken

    def poll(self, timeout: float = -1) -> Message | None:
        return next(iter(self.consume(1, timeout)), None)

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        return 0, self._broker.end(partition.topic, partition.partition, only_settled=self._settled)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        return _listed(self._broker, topic)

    def commit(self, message: object = None, offsets: Any = None, asynchronous: bool = True) -> Any:
        raise failure(KafkaError._STATE, "this consumer is in no group")

    def close(self) -> None:
        with self._broker.changed:
            self._positions.clear()

    def _next(self) -> Message | None:
        """The next message or end of a partition. The caller has the lock."""
        for at, position in self._positions.items():
            if at in self._paused:
                continue
            log, end = self._broker.log(*at), self._broker.end(*at, only_settled=self._settled)
            if position > len(log):
                error = KafkaError(KafkaError.OFFSET_OUT_OF_RANGE, "the partition ends before this offset")
                return Message(topic=at[0], partition=at[1], offset=position, error=error)
            while position < end and not (log[position].is_visible or not (self._settled or log[position].is_marker)):
                position += 1
            self._positions[at] = position
            if position < end:
                entry = log[position]
                self._positions[at] += 1
                return Message(
                    topic=at[0], partition=at[1], offset=position, key=entry.key, value=entry.value,
                    headers=list(entry.headers) or None, timestamp=entry.timestamp,
                )  # fmt: skip
            if self._reports_ends and self._ended.get(at) != position:
                self._ended[at] = position
                return Message(
                    topic=at[0], partition=at[1], offset=position, error=KafkaError(KafkaError._PARTITION_EOF)
                )
        return None


class MemoryGroupConsumer(MemoryConsumer, GroupConsumer):
    """A member of a consumer group, which a test can watch and kill."""

    def __init__(self, broker: MemoryBroker, settings: Mapping[str, Any]) -> None:
        super().__init__(broker, settings)
        self.errors: ClientErrors = settings["error_cb"]
        self._group = str(settings["group.id"])
        self._topics: list[str] = []
        self._on_assign: Callback | None = None
        self._on_revoke: Callback | None = None
        self._generation = 0
        self._released = 0
        self._killed: BaseException | None = None
        #: How many polls are to return at once, and whether the owner waits in a poll.
        self._nudges = 0
        self._waiting = False

    # --- for a test ----------------------------------------------------------------------------------------------

    def kill(self, error: BaseException) -> None:
        """Leave the group without a commit; the next poll raises ``error``."""
        with self._broker.changed:
            self._killed = error
            self._broker.leave(self._group, self)
            self._broker.changed.notify_all()

    def nudge(self) -> None:
        """Let two polls return, so that the owner takes at least one turn from its beginning to its end."""
        with self._broker.changed:
            self._nudges = 2
            self._broker.changed.notify_all()

    def rests(self) -> bool:
        """Whether the owner has processed all there is, and waits for more."""
        with self._broker.changed:
            return (
                self._waiting
                and not self._nudges
                and self._generation == self._broker.groups[self._group].generation
                and not self._paused
                and all(
                    position >= self._broker.end(*at, only_settled=True) for at, position in self._positions.items()
                )
            )

    def positions(self) -> dict[str, int]:
        """Source partition → next offset to process."""
        with self._broker.changed:
            return {f"{topic}-{partition}": position for (topic, partition), position in self._positions.items()}

    # --- for the loop --------------------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        self._topics, self._on_assign, self._on_revoke = list(topics), on_assign, on_revoke
        self._broker.join(self._group, self)

    def unsubscribe(self) -> None:
        self._broker.leave(self._group, self)

    def poll(self, timeout: float = -1) -> Message | None:
        deadline = time.monotonic() + timeout
        with self._broker.changed:
            self._waiting = True
            try:
                while True:
                    if self._killed is not None:
                        raise self._killed
                    if self._nudges:
                        self._nudges -= 1
                        return None
                    if self._generation != self._broker.groups[self._group].generation:
                        break
                    if (message := self._next()) is not None:
                        return message
                    if (left := deadline - time.monotonic()) <= 0:
                        return None
                    self._broker.changed.wait(left)
            finally:
                self._waiting = False
        self._rebalance()
        return None

    def commit(self, message: object = None, offsets: Any = None, asynchronous: bool = True) -> Any:
        with self._broker.changed:
            group = self._broker.groups[self._group]
            group.offsets |= {place(at): at.offset for at in offsets or ()}

    def close(self) -> None:
        self.unsubscribe()
        super().close()

    def _rebalance(self) -> None:
        """Give up all partitions; once every member has, take the new ones. Callbacks run without the lock."""
        changed, group = self._broker.changed, self._broker.groups[self._group]
        generation = group.generation
        if self._released != generation:
            if self._positions and self._on_revoke is not None:
                self._on_revoke(self, [TopicPartition(*at) for at in self._positions])
            with changed:
                self._positions.clear()
                self._paused.clear()
                self._released = generation
                changed.notify_all()
        with changed:
            if group.generation != generation:
                return
            if any(member._released != generation for member in group.members):
                changed.wait(0.05)
                return
            shared = self._broker.share(self._group, self, self._topics)
            self._generation = generation
        if shared and self._on_assign is not None:
            self._on_assign(self, shared)


class MemoryAdmin:
    """An admin client. Its futures are done when they are returned."""

    def __init__(self, broker: MemoryBroker, settings: Mapping[str, Any]) -> None:
        self._broker = broker

    def poll(self, timeout: float = 0) -> int:
        return 0

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> SimpleNamespace:
        return _listed(self._broker, topic)

    def describe_topics(self, topics: Any, **options: Any) -> dict[str, Future[Any]]:
        return {name: _done(self._described, name) for name in topics.topic_names}

    def describe_configs(self, resources: Sequence[Any], **options: Any) -> dict[Any, Future[Any]]:
        def settings(name: str) -> dict[str, SimpleNamespace]:
            config = {"cleanup.policy": "delete", "max.message.bytes": "1048588"} | self._broker.topic(name).config
            return {key: SimpleNamespace(name=key, value=value) for key, value in config.items()}

        return {resource: _done(settings, resource.name) for resource in resources}

    def list_offsets(
        self, asked: Mapping[TopicPartition, Any], isolation_level: Any = None, **options: Any
    ) -> dict[TopicPartition, Future[Any]]:
        settled = isolation_level == IsolationLevel.READ_COMMITTED

        def offset(at: TopicPartition, spec: Any) -> SimpleNamespace:
            end = self._broker.end(at.topic, at.partition, only_settled=settled)
            return SimpleNamespace(offset=0 if isinstance(spec, EarliestSpec) else end)

        return {at: _done(offset, at, spec) for at, spec in asked.items()}

    def create_topics(self, topics: Sequence[Any], **options: Any) -> dict[str, Future[Any]]:
        return {
            new.topic: _done(
                self._broker.create, new.topic, new.num_partitions, new.config, max(new.replication_factor, 1)
            )
            for new in topics
        }

    def delete_topics(self, topics: Sequence[str], **options: Any) -> dict[str, Future[Any]]:
        return {name: _done(self._broker.delete, name) for name in topics}

    def _described(self, name: str) -> SimpleNamespace:
        found = self._broker.topic(name)
        partitions = [
            SimpleNamespace(id=number, replicas=list(range(found.replicas))) for number in range(len(found.logs))
        ]
        return SimpleNamespace(name=name, topic_id=found.topic_id, partitions=partitions)


def _encoded(given: str | bytes | None) -> bytes | None:
    """Text as UTF-8, as confluent_kafka sends it. Raises: TypeError."""
    if given is None or isinstance(given, bytes):
        return given
    return given.encode() if isinstance(given, str) else bytes(memoryview(given))


def _encoded_headers(given: Iterable[tuple[str, str | bytes | None]]) -> list[tuple[str, bytes | None]]:
    """Raises: TypeError."""
    headers = list(given)
    if not all(isinstance(one, tuple) and len(one) == 2 for one in headers):
        raise TypeError("Headers are expected to be a list of (key, value) tuples")
    return [(name, _encoded(value)) for name, value in headers]


def place(partition: TopicPartition) -> tuple[str, int]:
    """Its topic and its number."""
    return partition.topic, partition.partition


def _listed(broker: MemoryBroker, topic: str | None) -> SimpleNamespace:
    with broker.changed:
        names = list(broker.topics) if topic is None else [topic]
        missing = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        listed = {
            name: SimpleNamespace(
                topic=name,
                partitions=dict.fromkeys(range(len(broker.topics[name].logs))) if name in broker.topics else {},
                error=None if name in broker.topics else missing,
            )
            for name in names
        }
        return SimpleNamespace(topics=listed, brokers={})


def _done(work: Callable[..., Any], *arguments: object) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work(*arguments))
    except KafkaException as error:
        future.set_exception(error)
    return future
