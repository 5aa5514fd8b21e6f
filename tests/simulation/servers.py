"""Servers of a hostile world: Kafka and a blob store in memory, whose answers are late, lost or never come.

Each call of a client is a moment at which the seed may end or pause the caller's process, let the request or the answer
get lost, or let time pass. What a call does on the server happens at once, or not at all, as on a real one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from statemgr.blobs import memory
from statemgr.blobs.body import BytesReader
from statemgr.blobs.memory import MemoryBlobStore
from statemgr.errors import AccessDenied, StatemgrError, UnavailableError
from statemgr.kafka.admin_client import GuardedAdminClient
from statemgr.kafka.clients import INSTEAD
from statemgr.kafka.group_consumer import GroupConsumer
from statemgr.ports import BlobInfo, BlobPage, BlobReader, Body, Clock
from statemgr.testing.memory_admin import MemoryAdmin
from statemgr.testing.memory_clients import Callback, MemoryConsumer, MemoryGroupConsumer
from statemgr.testing.memory_kafka import MemoryBroker, ProducerId
from statemgr.testing.memory_log import Log
from statemgr.testing.memory_producer import MemoryProducer
from tests.simulation.model import Wrong
from tests.simulation.scheduler import Scheduler

T = TypeVar("T")
#: What a client is told when nobody answers.
_TIMED_OUT = KafkaError(KafkaError._TIMED_OUT, "nobody answers", False, True, False)


@dataclass
class Faults:
    """How often what happens, as probabilities of one call."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    refused_record: float = 0.0
    kill: float = 0.0
    pause: float = 0.0
    blob_fails: float = 0.0
    refused_tag: float = 0.0
    slow: float = 0.0
    outage: float = 0.0
    flipped_bit: float = 0.0
    disk: float = 0.0
    late_list: float = 0.0


@dataclass
class Network:
    """Between the processes and the servers.

    Attributes:
        seen: what has happened how often.
        tags_refused_until: until then nobody may remove tags of blobs.
    """

    scheduler: Scheduler
    faults: Faults
    seen: dict[str, int] = field(default_factory=dict)
    tags_refused_until: float = 0.0
    #: server → when its outage ends
    _out: dict[str, float] = field(default_factory=dict)

    def step(self, what: str, kill: float | None = None) -> str:
        """A moment of a process at which it may be ended or paused. Returns: a name of the moment, for decisions."""
        scheduler = self.scheduler
        assert scheduler.current is not None
        process = scheduler.current.process
        number = process.calls[what] = process.calls.get(what, 0) + 1
        moment = f"{process.name}/{what}/{number}"
        scheduler.trace(f"{scheduler.current.name} {moment}")
        if process is scheduler.world:
            return moment
        if process.danger is None:
            process.danger = _DANGERS[scheduler.decide(f"danger of {process.name}", len(_DANGERS))]
        if scheduler.chance(f"kill {moment}", process.danger * (self.faults.kill if kill is None else kill)):
            self.happened("kill", f"dies at {what}")
            scheduler.kill(process)
        is_fence = what == "init-transactions" and process.name.startswith(("keep-", "rescale-"))
        if scheduler.chance(f"pause {moment}", self.faults.pause * (_BEFORE_A_FENCE if is_fence else 1)):
            seconds = (3, 20, 90, 700)[scheduler.decide(f"pause for {moment}", 4)]
            self.happened("pause", f"is suspended at {what} for {seconds} s")
            scheduler.pause(process, seconds)
        return moment

    def call(
        self,
        what: str,
        effect: Callable[[], T],
        fail: Callable[[str], Exception],
        timeout_s: float,
        *,
        may_be_late: bool = False,
    ) -> T:
        """A request to a server and its answer. Raises: what ``fail`` makes, if one of them got lost.

        ``may_be_late``: a request that counts as lost may still arrive, when nobody waits for its answer.
        """
        moment, scheduler = self.step(what), self.scheduler
        slow = scheduler.chance(f"slow {moment}", self.faults.slow)
        scheduler.sleep(timeout_s * 0.8 if slow else 0.0005 * (1 + scheduler.decide(f"latency {moment}", 8)))
        if self.is_out(what) or scheduler.chance(f"request {moment}", self.faults.lost_request):
            self.happened("lost request", f"{what}: the request is lost")
            if may_be_late and scheduler.decide(f"late {moment}", 2):
                self._deliver_late(moment, effect)
            scheduler.sleep(timeout_s)
            if what in _MATTERS:
                self.step(f"{what}, unanswered", self.faults.kill * 10)
            raise fail(what)
        result = effect()
        if scheduler.chance(f"outage {moment}", self.faults.outage * _MATTERS.get(what, 1)):
            seconds = (3, 30, 120)[scheduler.decide(f"length of outage {moment}", 3)]
            self.happened("outage", f"{_server(what)} cannot be reached for {seconds} s")
            self._out[_server(what)] = scheduler.now + seconds
        if self.is_out(what) or scheduler.chance(f"answer {moment}", self.faults.lost_answer):
            self.happened("lost answer", f"{what}: the answer is lost")
            scheduler.sleep(timeout_s)
            raise fail(what)
        self.step(f"{what}, answered")
        return result

    def before_file(self, name: str) -> None:
        """An operation on files, which may fail. Raises: OSError."""
        moment = self.step(f"file {name}")
        if name != "unlink" and self.scheduler.chance(f"disk {moment}", self.faults.disk * self._worse()):
            number = (errno.ENOSPC, errno.EIO)[self.scheduler.decide(f"error {moment}", 2)]
            self.happened("disk error", f"{name} fails: {os.strerror(number)}")
            raise OSError(number, os.strerror(number))
        self.scheduler.may_point()

    def _worse(self) -> int:
        """How much more often the disk fails for this process: some commands find one that is almost full."""
        assert self.scheduler.current is not None
        process = self.scheduler.current.process.name
        return 20 if not process.startswith("owner") and self.scheduler.decide(f"disk of {process}", 4) == 0 else 1

    def is_out(self, what: str) -> bool:
        """Whether the server of a request cannot be reached."""
        return self.scheduler.now < self._out.get(_server(what), 0.0) and self.faults.outage > 0

    def _deliver_late(self, moment: str, effect: Callable[[], object]) -> None:
        scheduler = self.scheduler

        def deliver() -> None:
            scheduler.sleep(0.5 + scheduler.decide(f"how late {moment}", 30))
            with suppress(KafkaException, StatemgrError):
                effect()
            self.happened("late request", f"{moment}: the request arrives")

        scheduler.start(f"late {moment}", scheduler.world, deliver)

    def happened(self, kind: str, text: str) -> None:
        self.seen[kind] = self.seen.get(kind, 0) + 1
        self.scheduler.note(text)


def _server(what: str) -> str:
    return "the blob store" if what.startswith("blob") else "Kafka"


def _no_answer(what: str) -> KafkaException:
    return KafkaException(_TIMED_OUT)


#: Requests whose outcome matters most → how much more often an outage begins after one. Who does not know the outcome
#: dies more often, too.
_MATTERS = {"commit-transaction": 20, "blob-remove-ttl": 10}
#: How much more often `checkpoints tag` is suspended between its look at the topic and its fence: owners commit then.
_BEFORE_A_FENCE = 40
#: How much more often a process dies than others. Without those that live, a third of all histories has no commit.
_DANGERS = (0.0, 0.2, 1.0, 1.0)
#: How much older than now a list may be.
_LIST_LAG_MS = 60_000
#: Seconds after which the broker forgets a transactional ID that nobody uses (transactional.id.expiration.ms).
_REMEMBERED_S = 600.0
#: Seconds for which the records of a topic stay in its active segment, which is not compacted.
ACTIVE_S = 120.0
#: Seconds of silence after which a consumer group gives up a member.
_SESSION_S = 10.0


class Broker(MemoryBroker):
    """A broker that aborts transactions after their time and fences their producers, forgets IDs, compacts topics, and
    gives up silent members of groups. Another job writes to the checkpoint topic, too."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        #: Members of consumer groups.
        self.members: list[SimulatedGroupConsumer] = []
        #: transactional ID → when it was used last
        self._used: dict[str, float] = {}
        self._looks = 0
        #: topic → its end at the last compaction
        self._compacted: dict[str, int] = {}

    def fence(self, transactional_id: str, *args: Any, **more: Any) -> ProducerId:
        self._used[transactional_id] = self.network.scheduler.now
        return super().fence(transactional_id, *args, **more)

    def _checked(self, transactional_id: str, producer: ProducerId) -> Any:
        owner = super()._checked(transactional_id, producer)
        self._used[transactional_id] = self.network.scheduler.now
        return owner

    def check(self, transactional_id: str, producer: ProducerId) -> None:
        """Raises: KafkaException if the producer is fenced, or its ID is forgotten."""
        with self.changed:
            self._checked(transactional_id, producer)

    def look(self) -> None:
        """What a broker does from time to time."""
        now = self.network.scheduler.now
        with self.changed:
            for name in self.expire_transactions():
                self.network.happened("transaction timed out", f"the broker aborts a transaction of {name}")
            for name, used in list(self._used.items()):
                if used + _REMEMBERED_S < now and name in self._owners and self._owners[name].txn is None:
                    del self._owners[name], self._used[name]
                    self.network.happened("forgotten ID", f"the broker forgets {name}")
            for member in [member for member in self.members if member.is_silent(now)]:
                self.leave(member.group, member)
                if not member.process.alive:
                    self.members.remove(member)

    def compact_all(self) -> None:
        """Remove what compaction may remove. It leaves the newest records alone, which are in the active segment."""
        for name, topic in self.topics.items():
            lag_ms = max(int(topic.settings["min.compaction.lag.ms"]), int(ACTIVE_S * 1000))
            for log in topic.logs if "compact" in topic.settings["cleanup.policy"] else ():
                log.compact(self.now_ms, {**topic.settings, "min.compaction.lag.ms": str(lag_ms)})
            self._compacted[name] = len(topic.logs[0].entries)

    def lose_tail(self, topic: str, transactions: int) -> bool:
        """Lose the newest records of a topic, as an unclean election does. Transactions are lost as a whole.

        Returns: whether it has lost some. Nothing is lost that a compaction has seen.
        """
        with self.changed:
            log = self.log(topic, 0)
            first: dict[object, int] = {}
            for offset, entry in log.records(len(log.entries)):
                first.setdefault(entry.owner, offset)
            cut = sorted(first.values())[-transactions:][0] if first else 0
            if not first or log.open or cut < self._compacted.get(topic, 0):
                return False
            log.lose_from(cut)
            self.network.happened("lost tail", f"{topic} loses its records from {cut} on")
            self.changed.notify_all()
            return True

    def partitions(self, topic: str) -> int:
        """The number of partitions of a topic."""
        return len(self.topic(topic).logs)

    def add_partitions(self, topic: str, partitions: int) -> None:
        """Let a topic have so many partitions. Members that read it get them."""
        with self.changed:
            found = self.topic(topic)
            found.logs += [Log() for _ in range(len(found.logs), partitions)]
            for group in self.groups.values():
                group.generation += any(member.reads(topic) for member in group.members)
            self.changed.notify_all()

    def has_record(self, topic: str, text: str) -> bool:
        """Whether a record with this text is there."""
        log = self.log(topic, 0)
        return any(text.encode() in (entry.value or b"") for _, entry in log.records(len(log.entries)))

    def lose_hidden_tail(self, topic: str, transactions: int, *, longer: bool) -> bool:
        """Lose the newest records of a topic. An aborted transaction takes their offsets, so that it ends as before,
        or ``longer`` by one. Returns: whether it has lost some.
        """
        with self.changed:
            end = len(self.log(topic, 0).entries) + longer
            if not self.lose_tail(topic, transactions):
                return False
            producer = self.fence("aborted", 900_000)
            while len(self.log(topic, 0).entries) < end - 1:
                self.append(topic, 0, b"aborted", b"", owner=("aborted", producer))
            self.finish("aborted", producer, committed=False)
            return True

    def let_neighbour_write(self, topic: str, key: bytes, *, goes_on: bool) -> None:
        """Let another job end its open transaction on a topic, or begin one."""
        scheduler, name = self.network.scheduler, "neighbour"
        self._looks += 1
        with self.changed:
            owner = self._owners.get(name)
            if owner is not None and owner.txn is not None:
                if not goes_on or scheduler.chance(f"neighbour ends {self._looks}", 0.3):
                    self.finish(name, owner.producer, committed=bool(scheduler.decide(f"end {self._looks}", 2)))
            elif goes_on and topic in self.topics and scheduler.chance(f"neighbour begins {self._looks}", 0.05):
                self.append(topic, 0, key, None, owner=(name, self.fence(name, 900_000)))


class SimulatedProducer(MemoryProducer):
    """A client of librdkafka that waits for answers that may not come. An operation that timed out is continued by the
    next call of it."""

    def __init__(self, broker: Broker, settings: Mapping[str, Any]) -> None:
        super().__init__(broker, settings)
        self._network = broker.network
        self._there = broker
        #: The number of the transaction, and whether the broker has committed or aborted it.
        self._number = 0
        self._ended: bool | None = None

    def init_transactions(self, timeout: float = -1) -> None:
        scheduler = self._network.scheduler
        assert scheduler.current is not None
        process = scheduler.current.process

        def effect() -> None:
            if self._mine is None:
                if process.gave_back:
                    scheduler.fail(Wrong(f"{process.name} fences {self._id} after it has given the task back"))
                super(SimulatedProducer, self).init_transactions()

        self._network.call("init-transactions", effect, _no_answer, max(timeout, 0.01))

    def begin_transaction(self) -> None:
        super().begin_transaction()
        self._number, self._ended = self._number + 1, None

    def produce(
        self, topic: str, value: Any = None, key: Any = None, partition: Any = None, *args: Any, **more: Any
    ) -> None:
        moment, network = self._network.step("produce"), self._network
        failed = self._error or self._unnoticed
        if self._id and not failed and network.scheduler.chance(f"refused {moment}", network.faults.refused_record):
            network.happened("refused record", f"a record for {topic} is lost")
            # the records after it are lost, too
            lost = self._unnoticed = KafkaError(KafkaError._MSG_TIMED_OUT, "not delivered", False, False, True)
            if (report := more.get("on_delivery")) is not None:
                message = Message(topic=topic, partition=-1 if partition is None else partition, error=lost)
                self._reports.append((report, lost, message))
            return
        super().produce(topic, value, key, partition, *args, **more)

    def flush(self, timeout: float = -1) -> int:
        self._network.step("flush")
        return super().flush(timeout)

    def commit_transaction(self, timeout: float = -1) -> None:
        number = self._number

        def effect() -> None:
            if self._number != number:
                return  # it arrives late, and another transaction is open by now
            if self._ended is None:
                super(SimulatedProducer, self).commit_transaction()
                self._ended = True
            elif self._mine is not None:
                with self._failing():
                    self._there.check(str(self._id), self._mine)

        self._network.call("commit-transaction", effect, _no_answer, max(timeout, 0.01), may_be_late=True)

    def abort_transaction(self, timeout: float = -1) -> None:
        def effect() -> None:
            if self._ended is None:
                super(SimulatedProducer, self).abort_transaction()
                self._ended = False

        self._network.call("abort-transaction", effect, _no_answer, max(timeout, 0.01))


class SimulatedConsumer(MemoryConsumer):
    """A consumer for which a poll may find nothing although there is something."""

    def __init__(self, broker: Broker, settings: Mapping[str, Any]) -> None:
        super().__init__(broker, settings)
        self._network = broker.network

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        moment = self._network.step("consume")
        if self._network.is_out("consume") or self._network.scheduler.chance(
            f"nothing {moment}", self._network.faults.slow
        ):
            self._network.scheduler.sleep(max(timeout, 0.01))
            return []
        return super().consume(num_messages, timeout)

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float = -1, cached: bool = False) -> Any:
        if cached:  # asks nobody
            return super().get_watermark_offsets(partition)
        return self._network.call(
            "watermarks", lambda: super(SimulatedConsumer, self).get_watermark_offsets(partition), _no_answer, 1.0
        )


class SimulatedGroupConsumer(MemoryGroupConsumer):
    """A member that the group gives up when it was silent for too long. It learns that at its next poll."""

    def __init__(self, broker: Broker, settings: Mapping[str, Any]) -> None:
        super().__init__(broker, settings)
        self._network, self._there = broker.network, broker
        assert broker.network.scheduler.current is not None
        self.process = broker.network.scheduler.current.process
        self.group = self._group
        self._on_lost: Callback | None = None
        broker.members.append(self)

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        def assigned(consumer: object, places: list[TopicPartition]) -> None:
            self.process.gave_back = False
            on_assign(consumer, places)

        def given_back(call: Callback, consumer: object, places: list[TopicPartition]) -> None:
            call(consumer, places)
            self.process.gave_back = True

        self._on_lost = partial(given_back, on_lost)
        super().subscribe(topics, assigned, partial(given_back, on_revoke))

    def poll(self, timeout: float = -1) -> Message | None:
        self._network.step("poll")
        if self not in self._there.groups[self.group].members:
            lost = [TopicPartition(*at) for at in self._positions]
            self.unassign()
            if lost and self._on_lost is not None:
                self._on_lost(self, lost)
            self._released = 0
            self._there.join(self.group, self)
        return super().poll(timeout)

    def _rebalance(self) -> None:
        try:
            super()._rebalance()
        except ValueError:  # given up in the middle of it
            if self in self._there.groups[self.group].members:
                raise

    def is_silent(self, now: float) -> bool:
        """Whether the group gives it up."""
        if not self.process.alive:
            return now - self.process.ended_at > _SESSION_S
        return self.process.paused_until - now > _SESSION_S


class SimulatedAdmin(MemoryAdmin):
    """An admin client whose requests may get no answer."""

    def __init__(self, broker: Broker, settings: Mapping[str, Any]) -> None:
        super().__init__(broker, settings)
        self._network = broker.network

    def _asked(self, what: str, keys: Iterable[Any], ask: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        try:
            return self._network.call(what, ask, _no_answer, 2.0)
        except KafkaException as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return dict.fromkeys(keys, failed)

    def describe_topics(self, topics: Any, **options: Any) -> dict[Any, Any]:
        return self._asked(
            "describe-topics", topics.topic_names, lambda: super(SimulatedAdmin, self).describe_topics(topics)
        )

    def describe_configs(self, resources: Sequence[Any], **options: Any) -> dict[Any, Any]:
        return self._asked(
            "describe-configs", resources, lambda: super(SimulatedAdmin, self).describe_configs(resources)
        )

    def list_offsets(self, asked: Mapping[TopicPartition, Any], isolation_level: Any = None, **options: Any) -> Any:
        return self._asked(
            "list-offsets", asked, lambda: super(SimulatedAdmin, self).list_offsets(asked, isolation_level, **options)
        )

    def create_topics(self, topics: Sequence[Any], **options: Any) -> dict[Any, Any]:
        names = [new.topic for new in topics]
        return self._asked("create-topics", names, lambda: super(SimulatedAdmin, self).create_topics(topics))

    def delete_topics(self, topics: Sequence[str], **options: Any) -> dict[Any, Any]:
        return self._asked("delete-topics", topics, lambda: super(SimulatedAdmin, self).delete_topics(topics))


class SimulatedBlobStore(MemoryBlobStore):
    """A bucket whose requests fail, and which deletes blobs whose TTL has passed."""

    network: Network

    def __init__(self, clock: Clock, name: str) -> None:
        super().__init__(clock, name)
        #: blobs that somebody has deleted
        self.lost: set[str] = set()

    def _call(self, what: str, effect: Callable[[], T]) -> T:
        def failed(what: str) -> Exception:
            return UnavailableError(f"{what}: no answer from the blob store")

        self.network.step(f"blob-{what}")
        if self.network.scheduler.chance(self.network.step(f"blob-{what} fails"), self.network.faults.blob_fails):
            self.network.happened("blob request fails", f"blob {what} fails")
            raise failed(what)
        return self.network.call(f"blob-{what}", effect, failed, 5.0, may_be_late=what in ("put", "delete"))

    def expire(self) -> None:
        """Delete what has expired."""
        now = self.time_ms()
        with self._space.lock:
            for blob_id, (_, info) in list(self._space.blobs.items()):
                if info.expires_ms is not None and info.expires_ms <= now:
                    del self._space.blobs[blob_id]
                    self.network.happened("blob expired", f"the blob {blob_id} expires")

    def names(self) -> set[str]:
        """All blobs that exist."""
        return set(self._space.blobs)

    def published(self) -> set[str]:
        """Those that have no TTL."""
        return {name for name, (_, info) in self._space.blobs.items() if info.expires_ms is None}

    def lose(self, blob_id: str) -> None:
        """Somebody deletes a blob."""
        with self._space.lock:
            del self._space.blobs[blob_id]
        self.lost.add(blob_id)
        self.network.happened("lost blob", f"somebody deletes the blob {blob_id}")

    def spoil(self, blob_id: str, moment: str) -> None:
        """A bit of a blob is wrong from now on."""
        with self._space.lock:
            found, info = self._space.blobs[blob_id]
            body = bytearray(found)
            body[self.network.scheduler.decide(f"byte {moment}", len(body))] ^= 1
            self._space.blobs[blob_id] = bytes(body), info
        self.network.happened("damaged blob", f"the blob {blob_id} is damaged")

    def put(self, blob_id: str, body: Body, *, ttl_days: int | None) -> None:
        self._call("put", lambda: super(SimulatedBlobStore, self).put(blob_id, body, ttl_days=ttl_days))

    @contextmanager
    def get(self, blob_id: str, offset: int = 0, length: int | None = None) -> Iterator[BlobReader]:
        found = self._call("get", lambda: super(SimulatedBlobStore, self).stat(blob_id))
        with super().get(blob_id, offset, length) as reader:
            moment, scheduler = self.network.step("blob-body"), self.network.scheduler
            if scheduler.chance(f"flipped {moment}", self.network.faults.flipped_bit):
                body = bytearray(min(found.size - offset, found.size if length is None else length))
                if reader.readinto(memoryview(body)):
                    self.network.happened("flipped bit", f"a bit of {blob_id} is wrong")
                    body[scheduler.decide(f"byte {moment}", len(body))] ^= 1 << scheduler.decide(f"bit {moment}", 8)
                reader = BytesReader(memoryview(body))
            yield reader

    def delete(self, blob_id: str) -> None:
        self._call("delete", lambda: super(SimulatedBlobStore, self).delete(blob_id))

    def remove_ttl(self, blob_id: str) -> None:
        moment, scheduler = self.network.step("blob-tag"), self.network.scheduler
        if scheduler.chance(f"refused {moment}", self.network.faults.refused_tag):
            self.network.happened("refused tags", "the blob store refuses to remove tags for 60 s")
            self.network.tags_refused_until = scheduler.now + 60
        if scheduler.now < self.network.tags_refused_until:
            raise AccessDenied("remove-ttl: no right to delete tags")
        self._call("remove-ttl", lambda: super(SimulatedBlobStore, self).remove_ttl(blob_id))

    def stat(self, blob_id: str) -> BlobInfo:
        return self._call("stat", lambda: super(SimulatedBlobStore, self).stat(blob_id))

    def list(self, prefix: str, token: str | None = None) -> BlobPage:
        page = self._call("list", lambda: super(SimulatedBlobStore, self).list(prefix, token))
        if not self.network.scheduler.chance(self.network.step("blob-list, page"), self.network.faults.late_list):
            return page
        before_ms = self.time_ms() - _LIST_LAG_MS
        return replace(page, blobs=[blob for blob in page.blobs if blob.modified_ms < before_ms])


@contextmanager
def served(broker: Broker, servers: str) -> Iterator[None]:
    """In this block, clients of ``servers`` are clients of the broker, and stores of ``memory://`` are simulated."""
    kinds: dict[object, Callable[[Broker, Mapping[str, Any]], Any]] = {
        Producer: SimulatedProducer, Consumer: SimulatedConsumer, GuardedAdminClient: SimulatedAdmin,
        GroupConsumer: SimulatedGroupConsumer,
    }  # fmt: skip

    def make(kind: object, settings: Mapping[str, Any]) -> Any:
        return kinds[kind](broker, settings)

    def bucket(clock: Clock, name: str = "") -> MemoryBlobStore:
        made = SimulatedBlobStore(clock, name)
        made.network = broker.network
        return made

    INSTEAD[servers] = make
    memory.MemoryBlobStore = bucket  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        memory.MemoryBlobStore = MemoryBlobStore  # type: ignore[misc]
        del INSTEAD[servers]
        memory.forget(servers.partition(":")[2])
