"""Asks brokers about topics through an admin client: IDs, partitions, settings, first and last offsets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Self, TypeVar

from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigEntry, ConfigResource
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.admin._topic import TopicDescription

from statemgr.config import JobConfig
from statemgr.errors import MissingState, StatemgrError, UnavailableError
from statemgr.kafka.clients import ANSWER_S, DEADLINE_S, REQUEST_S, admin
from statemgr.kafka.errors import MISSING, ClientErrors, may_pass, translate
from statemgr.logs import Event, tell
from statemgr.ports import Clock

K = TypeVar("K")
V = TypeVar("V")
log = logging.getLogger(__name__)
_PAUSE_S = 0.1
#: Seconds of a wait until the log says so, and between two such lines.
_PATIENCE_S, _LOG_S = 2.0, 10.0


class TopicMetadata:
    """Asks each question again until it is answered or a deadline has passed. Safe to use from many threads.

    Use it in a ``with`` block, or :meth:`close` it.
    """

    def __init__(self, config: JobConfig, clock: Clock) -> None:
        self.errors = ClientErrors()
        self.client: AdminClient = admin(config, self.errors)
        self._clock = clock
        #: When requests began to fail, when the last one did, and when a line in the log may say so.
        self._waiting_since = self._paused = self._next_line = float("-inf")

    def describe(self, topics: Sequence[str]) -> dict[str, TopicDescription]:
        """The descriptions of those ``topics`` that exist. Raises: UnavailableError, AccessDenied."""
        if not topics:
            return {}
        return self.ask(
            "describing topics",
            lambda: self.client.describe_topics(TopicCollection(list(topics)), request_timeout=REQUEST_S),
            missing_is_none=True,
        )

    def missing_group_rights(self, group: str) -> list[str]:
        """The rights that a member of a consumer group needs and these credentials lack.

        Raises: UnavailableError, AccessDenied.
        """
        described = self.ask(
            "describing a consumer group",
            lambda: self.client.describe_consumer_groups(
                [group], include_authorized_operations=True, request_timeout=REQUEST_S
            ),
            group=group,
        )
        allowed = {operation.name for operation in described[group].authorized_operations or ()}
        return [] if "READ" in allowed else ["READ"]

    def describe_later(self, topic: str) -> Future[TopicDescription]:
        """Ask for a topic's description without waiting, and only once. The future raises KafkaException."""
        answers = self.client.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_S)
        future: Future[TopicDescription] = answers[topic]
        return future

    def wait_for(self, topics: Sequence[str]) -> None:
        """Wait until the broker that answers knows new topics. Raises: UnavailableError."""
        late = UnavailableError("the brokers did not make the new topics known in time", topics=", ".join(topics))
        deadline = self._deadline()
        while len(self.describe(topics)) < len(set(topics)):
            self._pause(deadline, late)

    def settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """All settings of existing topics, as text. Raises: UnavailableError, AccessDenied, MissingState.

        Waits for new topics, because another broker may answer than the one that said that they exist.
        """
        deadline = self._deadline()
        resources = {topic: ConfigResource(ResourceType.TOPIC, topic) for topic in topics}
        found: dict[ConfigResource, dict[str, ConfigEntry]] = {}
        while len(found) < len(resources):
            found = self.ask(
                "reading topics' settings",
                lambda: self.client.describe_configs(list(resources.values()), request_timeout=REQUEST_S),
                missing_is_none=True,
            )
            for topic, resource in resources.items():
                if resource not in found:
                    late = MissingState("reading the settings of topics: the topic does not exist", topic=topic)
                    self._pause(deadline, late)
                    break
        return {
            resource.name: {entry.name: str(entry.value) for entry in entries.values()}
            for resource, entries in found.items()
        }

    def bounds(self, topic: str, partition: int, *, only_settled: bool = False) -> tuple[int, int]:
        """First offset and high watermark; with ``only_settled`` the last stable offset in place of the watermark.

        Asks with read_uncommitted: under read_committed the answer would be the last stable offset, and another
        owner's open transaction would hide newer records.

        Raises: MissingState, UnavailableError, AccessDenied.
        """
        start = self._offset(topic, partition, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        return start, self._end(topic, partition, only_settled=only_settled)

    def ends(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The high watermarks of partitions, from one request. Leaves out partitions that the brokers do not know.

        Raises: UnavailableError, AccessDenied.
        """
        asked = {TopicPartition(*partition): OffsetSpec.latest() for partition in partitions}  # type: ignore[no-untyped-call]
        if not asked:
            return {}
        answers = self.ask(
            "asking for the ends of topics",
            lambda: self.client.list_offsets(
                asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=REQUEST_S
            ),
            missing_is_none=True,
        )
        return {(partition.topic, partition.partition): int(answer.offset) for partition, answer in answers.items()}

    def first_after(self, times: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """The offset of the first message with this timestamp (epoch milliseconds) or a later one, for each partition.

        Takes one request. Leaves out partitions that have no such message, and those that the brokers do not know.
        Raises: UnavailableError, AccessDenied.
        """
        asked = {TopicPartition(*place): OffsetSpec.for_timestamp(at_ms) for place, at_ms in times.items()}
        if not asked:
            return {}
        answers = self.ask(
            "asking for offsets by time",
            lambda: self.client.list_offsets(
                asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=REQUEST_S
            ),
            missing_is_none=True,
        )
        return {(at.topic, at.partition): int(one.offset) for at, one in answers.items() if one.offset >= 0}

    def await_stable(self, partitions: Iterable[tuple[str, int]], wait_s: float) -> None:
        """Wait until every transaction that is open in a partition now has ended there, or the partition is gone.

        Raises: UnavailableError if one is still open after ``wait_s`` seconds; AccessDenied.
        """
        deadline = self._clock.monotonic() + wait_s
        for topic, partition in partitions:
            with suppress(MissingState):
                end = self._end(topic, partition)
                while (stable := self._end(topic, partition, only_settled=True)) < end:
                    late = UnavailableError(
                        "an aborted transaction is still open: the next commit would also commit its records",
                        hint="a broker may leave a transaction open while a partition has no leader (KAFKA-20734): "
                        "find it with `kafka-transactions.sh find-hanging`, and end it with `abort`",
                        topic=topic,
                        partition=partition,
                        offset=stable,
                    )
                    self._pause(deadline, late)

    def _end(self, topic: str, partition: int, *, only_settled: bool = False) -> int:
        isolation = IsolationLevel.READ_COMMITTED if only_settled else IsolationLevel.READ_UNCOMMITTED
        return self._offset(topic, partition, OffsetSpec.latest(), isolation)  # type: ignore[no-untyped-call]

    def _offset(
        self,
        topic: str,
        partition: int,
        spec: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> int:
        asked = {TopicPartition(topic, partition): spec}
        doing = "asking for a topic's offsets"
        late = UnavailableError(
            f"{doing}: the partition has no leader",
            hint="check that the brokers with its replicas are running",
            topic=topic,
            partition=partition,
        )
        deadline = self._deadline()
        while True:
            try:
                answers = self.ask(
                    doing,
                    lambda: self.client.list_offsets(asked, isolation_level=isolation, request_timeout=REQUEST_S),
                    topic=topic,
                    partition=partition,
                )
                return int(next(iter(answers.values())).offset)
            except MissingState:
                # the client reports the same for a partition without a leader
                found = self.describe([topic]).get(topic)
                if found is None or all(there.id != partition for there in found.partitions):
                    raise
                self._pause(deadline, late)

    def ask(
        self,
        doing: str,
        request: Callable[[], Mapping[K, Future[V]]],
        *,
        missing_is_none: bool = False,
        **where: str | int,
    ) -> dict[K, V]:
        """Ask until there is an answer or the deadline has passed.

        ``missing_is_none``: leave out what the brokers do not know instead of raising MissingState.
        """
        deadline = self._deadline()
        about: str | None = None
        while True:
            try:
                answers: dict[K, V] = {}
                for name, future in request().items():
                    about = _topic_of(name)
                    try:
                        answers[name] = future.result(REQUEST_S + DEADLINE_S)
                    except KafkaException as error:
                        if not (missing_is_none and error.args[0].code() in MISSING):
                            raise
                self.errors.clear()
                return answers
            except TimeoutError as error:
                raise UnavailableError(f"{doing}: no answer").with_where(**where) from error
            except KafkaException as error:
                reason = error.args[0]
                if about is not None:
                    where.setdefault("topic", about)
                self.client.poll(0)
                failure = translate(reason, doing, reported=self.errors, **where)
                if not may_pass(reason) or self.errors.refused():
                    raise failure from error
                self._pause(deadline, failure)
                self._find_brokers()

    def close(self) -> None:
        """Close the client. It has nothing to wait for."""
        self.client.poll(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _find_brokers(self) -> None:
        """Ask any broker for the others. The client sends some requests to one broker (the "controller"), and does not
        look for another one by itself if that one is gone."""
        with suppress(KafkaException):
            self.client.list_topics(timeout=ANSWER_S)

    def _deadline(self) -> float:
        return self._clock.monotonic() + DEADLINE_S

    def _pause(self, deadline: float, late: StatemgrError) -> None:
        """Wait a moment before asking again. Raises: ``late`` if the deadline has passed."""
        now = self._clock.monotonic()
        if now >= deadline:
            raise late
        if now - self._paused > REQUEST_S + _PATIENCE_S:
            self._waiting_since = now  # a request has failed after others had succeeded
        self._paused = now
        waited = max(now - self._waiting_since, now - (deadline - DEADLINE_S))
        if waited >= _PATIENCE_S and now >= self._next_line:
            self._next_line = now + _LOG_S
            tell(log, Event.WAITING, "waiting for Kafka, for at most %.0f s more: %s", deadline - now, late.message)
        self._clock.sleep(_PAUSE_S)


def _topic_of(asked: object) -> str | None:
    """The topic of a question, for errors."""
    if isinstance(asked, str):
        return asked
    found = getattr(asked, "topic", None) or getattr(asked, "name", None)
    return found if isinstance(found, str) else None
