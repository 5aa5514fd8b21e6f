"""The same calls of confluent_kafka's clients on a real broker and on the broker in memory, with comparable answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
)

from statemgr.config import JobConfig
from statemgr.kafka.clients import admin, consumer, producer
from statemgr.kafka.errors import ClientErrors, unmasked
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
from tests.kafka_jobs import wait_until

#: Settings of topics that are compared. Brokers of other versions have others as well.
SETTINGS = (
    "cleanup.policy", "delete.retention.ms", "max.message.bytes", "message.timestamp.type", "min.compaction.lag.ms",
    "retention.ms", "segment.ms",
)  # fmt: skip
#: What a call raises after a fatal error; which of them depends on which callback runs then.
_FATAL = {KafkaError._FENCED, KafkaError._FATAL}
_DEADLINE_S = 20.0
#: A real consumer that is to receive nothing is given this long.
_SILENCE_S = 0.3
Answer = Any
Flags = tuple[str, bool, bool, bool]


def flags(error: KafkaError | None) -> Flags | None:
    """What a caller sees of an error: its code, and whether it is fatal, can be retried, or needs an abort."""
    return None if error is None else (error.name(), error.fatal(), error.retriable(), error.txn_requires_abort())


def answer(call: Callable[..., Answer], *arguments: Any, **options: Any) -> Answer:
    """What a call returns, or the flags of the error that it raises."""
    try:
        return call(*arguments, **options)
    except KafkaException as error:
        return flags(error.args[0])


class Side:
    """The clients of one broker. Topics and IDs are given without the prefix of the test.

    Every method returns what can be compared with the other side.

    Args:
        prefix: of all names.
        patient: whether an answer that is not there yet may come later.
    """

    def __init__(self, servers: str, prefix: str, *, patient: bool) -> None:
        self._config = JobConfig.from_mapping({"job.name": "sides", "kafka.bootstrap.servers": servers})
        self._patient = patient
        #: ``transaction.timeout.ms`` of producers.
        self.timeout_ms = 60_000
        self.admin = admin(self._config, ClientErrors())
        self._consumers = {name: self._consumer(name) for name in ("read_committed", "read_uncommitted")}
        self.renew(prefix)

    def renew(self, prefix: str) -> None:
        """Begin again with other names."""
        self._prefix = prefix
        self._producers: dict[str, Any] = {}
        #: Consumers that stay, and what each has received.
        self._followers: dict[str, tuple[Any, list[Answer]]] = {}
        #: Topic → its IDs so far.
        self._topic_ids: dict[str, list[str]] = {}
        #: Producers that had a record refused: librdkafka's sequence numbers are in doubt then (librdkafka 3575).
        self._in_doubt: set[str] = set()

    def close(self) -> None:
        """Close the consumers."""
        for client in [*self._consumers.values(), *(client for client, _ in self._followers.values())]:
            client.close()

    def name(self, topic: str) -> str:
        """A topic, an ID or a group with the prefix."""
        return f"{self._prefix}-{topic}"

    def _consumer(self, isolation: str) -> Any:
        return consumer(self._config, ClientErrors(), isolation_level=isolation, enable_partition_eof=True)

    # --- producers -----------------------------------------------------------------------------------------------

    def producer(self, name: str) -> Any:
        """The producer of a name: ``plain``, or a transactional ID and a number, as in ``a1``."""
        if name not in self._producers:
            own: dict[str, Any] = {"acks": "all"}
            if name != "plain":
                own |= {
                    "transactional_id": self.name(name[0]), "enable_idempotence": True,
                    "transaction_timeout_ms": self.timeout_ms,
                }  # fmt: skip
            made = self._producers[name] = producer(self._config, ClientErrors(), **own)
            for _ in range(2):  # otherwise the first request to the coordinator takes 500 ms
                made.list_topics(self.name("any"), timeout=_DEADLINE_S)
        return self._producers[name]

    def drop(self, name: str) -> None:
        """The next call makes a new producer of this name."""
        self._producers.pop(name, None)
        self._in_doubt.discard(name)

    def init(self, name: str) -> Answer:
        """``init_transactions``."""
        return answer(self.producer(name).init_transactions, _DEADLINE_S)

    def begin(self, name: str) -> Answer:
        """``begin_transaction``. A producer that had a record refused is not used again."""
        return "in doubt" if name in self._in_doubt else answer(self.producer(name).begin_transaction)

    def commit(self, name: str) -> Answer:
        """``commit_transaction``."""
        return self._ended(name, self.producer(name).commit_transaction)

    def abort(self, name: str) -> Answer:
        """``abort_transaction``."""
        return self._ended(name, self.producer(name).abort_transaction)

    def _ended(self, name: str, call: Any) -> Answer:
        def end() -> Answer:
            with unmasked():
                return call(_DEADLINE_S)

        return answer(end)

    def produce(
        self, name: str, topic: str, partition: int, timestamp: int | None, record: Mapping[str, Any]
    ) -> Answer:
        """Produce one record and flush. Returns: the delivery report, or the error."""
        client, reports = self.producer(name), list[tuple[KafkaError | None, Message]]()
        client.list_topics(self.name(topic), timeout=_DEADLINE_S)  # it may know an older topic of this name
        more = {} if timestamp is None else {"timestamp": timestamp}

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            reports.append((error, message))

        def send() -> Answer:
            client.produce(self.name(topic), partition=partition, on_delivery=on_delivery, **record, **more)
            return self._flushed(client, reports)

        found = answer(send)
        if isinstance(found, list) and any(error and error[0] != "_PURGE_QUEUE" for error, *_ in found):
            self._in_doubt.add(name)
        return found

    def _flushed(self, client: Any, reports: list[tuple[KafkaError | None, Message]]) -> Answer:
        try:
            with unmasked():
                assert client.flush(_DEADLINE_S) == 0
        except KafkaException as error:
            return "fatal" if error.args[0].code() in _FATAL else flags(error.args[0])
        return [(flags(error), *_content(message)) for error, message in reports]

    def poll(self, name: str) -> Answer:
        """Whether a poll raises a fatal error, which it does once."""
        try:
            with unmasked():
                self.producer(name).poll(0)
        except KafkaException as error:
            return "fatal" if error.args[0].code() in _FATAL else flags(error.args[0])
        return None

    # --- consumers -----------------------------------------------------------------------------------------------

    def read(self, isolation: str, topic: str, partition: int, offset: int, like: Answer = None) -> Answer:
        """Read from an offset to the end of the partition, or to an error.

        Args:
            like: what the other side has answered. Without an end or an error there, nothing is waited for.
        """
        client = self._consumers[isolation]
        client.assign([TopicPartition(self.name(topic), partition, offset)])
        is_silent = like is not None and not (like[0] and like[0][-1][0])
        found = self._received(client, _SILENCE_S if is_silent else _DEADLINE_S)
        where = [at.offset for at in client.position([TopicPartition(self.name(topic), partition)])]
        cached = client.get_watermark_offsets(TopicPartition(self.name(topic), partition), cached=True)
        client.unassign()
        return found, where, cached if found and found[-1][0] != ("_AUTO_OFFSET_RESET", False, False, False) else None

    def _received(self, client: Any, patience_s: float) -> list[Answer]:
        found: list[Answer] = []
        deadline = time.monotonic() + (patience_s if self._patient else 0.0)
        while True:
            message = client.poll(0.05 if self._patient else 0.0)
            if message is not None:
                found.append((flags(message.error()), *_content(message)))
                if message.error() is not None:
                    return found
            elif time.monotonic() >= deadline:
                return found

    def follow(self, name: str, topic: str, partition: int, offset: int) -> None:
        """Assign a partition to a consumer of committed records that stays."""
        client = self._consumer("read_committed")
        client.assign([TopicPartition(self.name(topic), partition, offset)])
        self._followers[name] = client, []

    def received(self, name: str) -> Answer:
        """All that a consumer that stays has received."""
        client, found = self._followers[name]
        while (message := client.poll(0.3 if self._patient else 0.0)) is not None:
            found.append((flags(message.error()), *_content(message)))
        return list(found)

    def watermarks(self, isolation: str, topic: str, partition: int) -> Answer:
        """``get_watermark_offsets``."""
        place = TopicPartition(self.name(topic), partition)
        return answer(self._consumers[isolation].get_watermark_offsets, place, timeout=_DEADLINE_S)

    # --- the admin client ----------------------------------------------------------------------------------------

    def create(self, topic: str, partitions: int, config: Mapping[str, str]) -> Answer:
        """``create_topics``. Waits until the topic is known."""
        name = self.name(topic)
        found = answer(self.admin.create_topics([NewTopic(name, partitions, 1, config=dict(config))])[name].result, 30)
        if found is None:
            wait_until(lambda: not isinstance(self.describe(topic), tuple))
        return found

    def delete(self, topic: str) -> Answer:
        """``delete_topics``. Waits until the topic is unknown."""
        found = answer(self.admin.delete_topics([self.name(topic)])[self.name(topic)].result, 30)
        wait_until(lambda: isinstance(self.describe(topic), tuple))
        return found

    def describe(self, topic: str) -> Answer:
        """The partitions, replicas, and how many topics of this name there were."""
        return answer(self._described, topic)

    def _described(self, topic: str) -> Answer:
        found = self.admin.describe_topics(TopicCollection([self.name(topic)]))[self.name(topic)].result(30)
        known = self._topic_ids.setdefault(topic, [])
        if str(found.topic_id) not in known:
            known.append(str(found.topic_id))
        return [len(known), [(at.id, len(at.replicas)) for at in found.partitions]]

    def listed(self, topic: str) -> Answer:
        """``list_topics`` of one topic: the numbers of its partitions, and its error."""
        found = self.admin.list_topics(self.name(topic), timeout=_DEADLINE_S).topics[self.name(topic)]
        return sorted(found.partitions), flags(found.error)

    def configs(self, topic: str) -> Answer:
        """``describe_configs``: the value and the source of some settings."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.name(topic))
        found = answer(self.admin.describe_configs([resource])[resource].result, 30)
        return {n: (found[n].value, found[n].source) for n in SETTINGS} if isinstance(found, dict) else found

    def alter(self, topic: str, setting: str, value: str | None) -> Answer:
        """``incremental_alter_configs``; None is the default."""
        operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        entry = ConfigEntry(setting, value or "", incremental_operation=operation)
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.name(topic), incremental_configs=[entry])
        return answer(self.admin.incremental_alter_configs([resource])[resource].result, 30)

    def offsets(self, isolation: IsolationLevel, spec: OffsetSpec | int, places: Iterable[tuple[str, int]]) -> Answer:
        """``list_offsets`` of several partitions."""
        if isinstance(spec, int):
            spec = OffsetSpec.for_timestamp(spec)
        asked = {TopicPartition(self.name(topic), partition): spec for topic, partition in places}
        futures = self.admin.list_offsets(asked, isolation_level=isolation, request_timeout=_DEADLINE_S)
        found = {at.partition: answer(future.result, 30) for at, future in futures.items()}
        return {n: one if isinstance(one, tuple) else (one.offset, one.timestamp) for n, one in found.items()}

    def bounds(self, places: Iterable[tuple[str, int]]) -> Answer:
        """The start, the last stable offset and the end of each partition that exists."""
        latest, earliest = OffsetSpec.latest(), OffsetSpec.earliest()
        found = []
        for topic, partition in places:
            found += [
                self.offsets(isolation, spec, [(topic, partition)])
                for spec, isolation in (
                    (earliest, IsolationLevel.READ_UNCOMMITTED),
                    (latest, IsolationLevel.READ_COMMITTED),
                    (latest, IsolationLevel.READ_UNCOMMITTED),
                )
            ]
        return found

    def delete_records(self, topic: str, partition: int, offset: int) -> Answer:
        """``delete_records``: the first offset then."""
        place = TopicPartition(self.name(topic), partition, offset)
        found = answer(self.admin.delete_records([place])[place].result, 30)
        return found if isinstance(found, tuple) else found.low_watermark

    def alter_group(self, group: str, topic: str, partition: int, offset: int, note: str | None) -> Answer:
        """``alter_consumer_group_offsets`` of one partition."""
        place = TopicPartition(self.name(topic), partition, offset, **({} if note is None else {"metadata": note}))
        asked = ConsumerGroupTopicPartitions(self.name(group), [place])
        (found,) = self.admin.alter_consumer_group_offsets([asked])[self.name(group)].result(30).topic_partitions
        return found.partition, found.offset, flags(found.error)

    def group(self, group: str, places: Iterable[tuple[str, int]] | None) -> Answer:
        """Offsets and state of a consumer group; ``places`` None: all offsets."""
        name = self.name(group)
        at = None if places is None else [TopicPartition(self.name(topic), number) for topic, number in places]
        asked = [ConsumerGroupTopicPartitions(name, at)]
        found = self.admin.list_consumer_group_offsets(asked, require_stable=True)[name].result(30).topic_partitions
        described = self.admin.describe_consumer_groups([name], include_authorized_operations=True)[name].result(30)
        may_read = "READ" in {operation.name for operation in described.authorized_operations}
        offsets = sorted((p.topic, p.partition, p.offset, flags(p.error)) for p in found)
        return offsets, described.state.name, len(described.members), may_read


def _content(message: Message) -> tuple[Any, ...]:
    """What a message has, without a time that the clients or brokers gave."""
    kind, at_ms = message.timestamp()
    given = at_ms if kind == 1 and message.headers() and ("given", b"") in message.headers() else None  # type: ignore[operator]
    if message.error() is not None and message.offset() is not None:
        return message.partition(), message.offset()
    return message.partition(), message.offset(), message.key(), message.value(), message.headers(), kind, given


class Sides:
    """A real broker and the broker in memory. ``both`` makes a call on each, and requires the same answer."""

    def __init__(self, real: Side, memory: Side, broker: MemoryBroker) -> None:
        self.real = real
        self.memory = memory
        self.broker = broker
        self.log: list[str] = []

    def renew(self, prefix: str) -> None:
        """Begin again with other names."""
        self.log.clear()
        for side in (self.real, self.memory):
            side.renew(prefix)

    def both(self, call: str, *arguments: Any) -> Answer:
        """Make a call that changes something. Returns: the answer."""
        found = getattr(self.memory, call)(*arguments)
        real = getattr(self.real, call)(*arguments)
        self.log.append(f"{call}{arguments}: {found}")
        assert real == found, self._story(real)
        return found

    def same(self, call: str, *arguments: Any) -> Answer:
        """Make a call that only asks, until the real broker gives the answer of the broker in memory: brokers answer a
        commit before its markers are written, for example."""
        found = getattr(self.memory, call)(*arguments)
        more = {"like": found} if call == "read" else {}
        self.log.append(f"{call}{arguments}: {found}")
        deadline = time.monotonic() + _DEADLINE_S
        while (real := getattr(self.real, call)(*arguments, **more)) != found:
            assert time.monotonic() < deadline, self._story(real)
            time.sleep(0.01)
        return found

    @property
    def timeout_ms(self) -> int:
        """``transaction.timeout.ms`` of the producers."""
        return self.memory.timeout_ms

    @timeout_ms.setter
    def timeout_ms(self, timeout_ms: int) -> None:
        self.memory.timeout_ms = self.real.timeout_ms = timeout_ms

    def drop(self, name: str) -> None:
        """The next call makes new producers of this name."""
        for side in (self.real, self.memory):
            side.drop(name)

    def _story(self, real: Answer) -> str:
        return "\n".join([*self.log, f"but the real broker: {real}"])


@contextmanager
def sides(servers: str, prefix: str, broker: MemoryBroker | None = None) -> Iterator[Sides]:
    """A block with clients of the real broker at ``servers`` and of a broker in memory."""
    broker, name = broker or MemoryBroker(), f"memory:{prefix}"
    with served(broker, name):
        pair = Sides(Side(servers, prefix, patient=True), Side(name, prefix, patient=False), broker)
        try:
            yield pair
        finally:
            pair.real.close()
            pair.memory.close()
