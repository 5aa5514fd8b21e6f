"""Clients of a broker in memory, with those methods of confluent_kafka's clients that the engine calls: the consumers,
and how the engine gets all of them.

:mod:`statemgr.testing.memory_producer` and :mod:`statemgr.testing.memory_admin` have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from statemgr.kafka.admin_client import GuardedAdminClient
from statemgr.kafka.clients import INSTEAD
from statemgr.kafka.errors import ClientErrors
from statemgr.kafka.group_consumer import GroupConsumer
from statemgr.testing.memory_admin import MemoryAdmin, listed, place
from statemgr.testing.memory_kafka import MemoryBroker
from statemgr.testing.memory_log import Log, failure
from statemgr.testing.memory_producer import MemoryProducer

Callback = Callable[[Any, list[TopicPartition]], None]


@contextmanager
def served(broker: MemoryBroker, servers: str) -> Iterator[None]:
    """In this block, clients whose ``kafka.bootstrap.servers`` is ``servers`` are clients of this broker."""
    kinds: dict[object, Callable[[MemoryBroker, Mapping[str, Any]], Any]] = {
        Producer: MemoryProducer,
        Consumer: MemoryConsumer,
        GroupConsumer: MemoryGroupConsumer,
        GuardedAdminClient: MemoryAdmin,
    }
    INSTEAD[servers] = lambda kind, settings: kinds[kind](broker, settings)
    try:
        yield
    finally:
        del INSTEAD[servers]


class MemoryConsumer(Consumer):
    """A consumer of assigned partitions, from given offsets on.

    As librdkafka does with ``auto.offset.reset = error``, it reports an offset that a partition does not have once, and
    then reads nothing from it until the next ``assign`` or ``seek``. A partition that does not exist is reported to
    ``error_cb``; a topic that is created again is read from the same offset on.
    """

    def __init__(self, broker: MemoryBroker, settings: Mapping[str, Any]) -> None:
        # Consumer.__init__ would start a client of librdkafka
        self._broker = broker
        self._settled = settings.get("isolation.level", "read_committed") == "read_committed"
        self._reports_ends = bool(settings.get("enable.partition.eof", False))
        self._report: Callable[[KafkaError], None] = settings.get("error_cb", lambda error: None)
        #: The next offsets; those of :data:`OFFSET_BEGINNING` and the like until the first fetch.
        self._positions: dict[tuple[str, int], int] = {}
        #: Partitions of which something was consumed, and the watermarks of those that were fetched from.
        self._moved: set[tuple[str, int]] = set()
        self._watermarks: dict[tuple[str, int], tuple[int, int]] = {}
        self._paused: set[tuple[str, int]] = set()
        self._ended: dict[tuple[str, int], int] = {}
        #: Partitions that are not read, because an error was reported.
        self._failed: set[tuple[str, int]] = set()

    def assign(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            self._forget_all()
            self._begin(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            if any(place(at) in self._positions for at in partitions):
                raise failure(KafkaError._CONFLICT, "a partition is already part of the current assignment")
            self._begin(partitions)

    def unassign(self) -> None:
        with self._broker.changed:
            self._forget_all()

    def seek(self, partition: TopicPartition) -> None:
        with self._broker.changed:
            if place(partition) not in self._positions:
                raise failure(KafkaError._STATE, "Failed to seek: Local: Erroneous state")
            self._begin([partition])

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        with self._broker.changed:
            return [
                TopicPartition(*place(at), self._positions[place(at)] if place(at) in self._moved else OFFSET_INVALID)
                for at in partitions
            ]

    def pause(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            self._paused |= {place(at) for at in partitions}

    def resume(self, partitions: list[TopicPartition]) -> None:
        with self._broker.changed:
            self._paused -= {place(at) for at in partitions}
            for at in partitions:
                self._ended.pop(place(at), None)
            self._broker.changed.notify_all()

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        clock = self._broker.clock
        deadline = clock.monotonic() + timeout
        taken: list[Message] = []
        with self._broker.changed:
            while len(taken) < num_messages:
                message = self._next()
                if message is not None:
                    taken.append(message)
                elif taken or (left := deadline - clock.monotonic()) <= 0:
                    break
                else:
                    clock.wait(self._broker.changed, left)
        return taken

    def poll(self, timeout: float = -1) -> Message | None:
        return next(iter(self.consume(1, timeout)), None)

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        with self._broker.changed:
            if cached:
                return self._watermarks.get(place(partition), (-1, -1))
            log = self._log(place(partition))
            if log is None:
                raise failure(
                    KafkaError._UNKNOWN_PARTITION, "Failed to get watermark offsets: Local: Unknown partition"
                )
            return log.start, log.end(only_settled=self._settled)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        return listed(self._broker, topic)

    def commit(self, message: object = None, offsets: Any = None, asynchronous: bool = True) -> Any:
        raise failure(KafkaError._STATE, "this consumer is in no group")

    def close(self) -> None:
        self.unassign()

    # --- inside; the caller has the lock -------------------------------------------------------------------------

    def _begin(self, partitions: list[TopicPartition]) -> None:
        for at in partitions:
            self._positions[place(at)] = at.offset
            self._moved.discard(place(at))
            self._failed.discard(place(at))
            self._ended.pop(place(at), None)

    def _forget_all(self) -> None:
        for known in (self._positions, self._moved, self._watermarks, self._paused, self._ended, self._failed):
            known.clear()

    def _log(self, at: tuple[str, int]) -> Log | None:
        try:
            return self._broker.log(*at)
        except KafkaException:
            return None

    def _next(self) -> Message | None:
        """The next message or end of a partition."""
        for at in self._positions:
            if at in self._paused or at in self._failed:
                continue
            message = self._next_of(at)
            if message is not None:
                return message
        return None

    def _next_of(self, at: tuple[str, int]) -> Message | None:
        log = self._log(at)
        if log is None:
            if self._ended.get(at) != OFFSET_INVALID:  # once
                self._ended[at] = OFFSET_INVALID
                self._report(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"{at[0]} [{at[1]}]: topic does not exist"))
            return None
        end = log.end(only_settled=self._settled)
        begin = {OFFSET_BEGINNING: log.start, OFFSET_END: end}.get(self._positions[at], self._positions[at])
        if not log.start <= begin <= len(log.entries):
            self._failed.add(at)
            error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "fetch failed: Broker: Offset out of range")
            return Message(topic=at[0], partition=at[1], offset=begin, error=error)
        self._watermarks[at] = log.start, len(log.entries)
        position = begin
        while position < end:
            entry = log.entries[position]
            position += 1
            if entry is not None and (entry.is_visible or not (self._settled or entry.is_marker)):
                self._reach(at, begin, position)
                return Message(
                    topic=at[0], partition=at[1], offset=position - 1, key=entry.key, value=entry.value,
                    headers=list(entry.headers) or None, timestamp=entry.timestamp,
                )  # fmt: skip
        self._reach(at, begin, position)
        if self._reports_ends and position == end and self._ended.get(at) != end:
            self._ended[at] = end
            return Message(topic=at[0], partition=at[1], offset=end, error=KafkaError(KafkaError._PARTITION_EOF))
        return None

    def _reach(self, at: tuple[str, int], begin: int, position: int) -> None:
        self._positions[at] = position
        if position > begin:
            self._moved.add(at)


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
                    (log := self._log(at)) is None or position >= log.end(only_settled=True)
                    for at, position in self._positions.items()
                )
            )

    def positions(self) -> dict[str, int]:
        """Source partition → next offset to process."""
        with self._broker.changed:
            return {f"{topic}-{partition}": position for (topic, partition), position in self._positions.items()}

    def reads(self, topic: str) -> bool:
        """Whether it has subscribed to the topic."""
        return topic in self._topics

    # --- for the loop --------------------------------------------------------------------------------------------

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        self._topics, self._on_assign, self._on_revoke = list(topics), on_assign, on_revoke
        self._broker.join(self._group, self)

    def unsubscribe(self) -> None:
        self._broker.leave(self._group, self)

    def assignment(self) -> list[TopicPartition]:
        with self._broker.changed:
            group = self._broker.groups.get(self._group)
            is_member = group is not None and self in group.members
            return [TopicPartition(*at) for at in self._positions] if is_member else []

    def poll(self, timeout: float = -1) -> Message | None:
        clock = self._broker.clock
        deadline = clock.monotonic() + timeout
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
                    if (left := deadline - clock.monotonic()) <= 0:
                        return None
                    clock.wait(self._broker.changed, left)
            finally:
                self._waiting = False
        self._rebalance()
        return None

    def commit(self, message: object = None, offsets: Any = None, asynchronous: bool = True) -> Any:
        with self._broker.changed:
            group = self._broker.groups[self._group]
            group.offsets |= {place(at): at.offset for at in offsets or () if self._log(place(at)) is not None}

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
                self._forget_all()
                self._released = generation
                changed.notify_all()
        with changed:
            if group.generation != generation:
                return
            if any(member._released != generation for member in group.members):
                self._broker.clock.wait(changed, 0.05)
                return
            shared = self._broker.share(self._group, self, self._topics)
            self._generation = generation
        if shared and self._on_assign is not None:
            self._on_assign(self, shared)
