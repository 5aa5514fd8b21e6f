"""Asks brokers about topics through an admin client: IDs, partitions, settings, first and last offsets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigEntry, ConfigResource
from confluent_kafka.admin._listoffsets import ListOffsetsResultInfo, OffsetSpec
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.admin._topic import TopicDescription

from statemgr.config import JobConfig
from statemgr.errors import MissingState, StatemgrError, UnavailableError
from statemgr.kafka.clients import ANSWER_S, DEADLINE_S, REQUEST_S, admin, serve_after
from statemgr.kafka.errors import MISSING, ClientErrors, may_pass, translate
from statemgr.logs import Event, tell
from statemgr.ports import Clock, TransactionOpen

K = TypeVar("K")
V = TypeVar("V")
log = logging.getLogger(__name__)
#: What to ask for, as an offset and whether transactions that are open count.
_START = (OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)  # type: ignore[no-untyped-call]
_END = (OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED)  # type: ignore[no-untyped-call]
_STABLE = (OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)  # type: ignore[no-untyped-call]
_PAUSE_S = 0.1
#: Seconds of a wait until the log says so, and between two such lines.
_PATIENCE_S, _LOG_S = 2.0, 10.0


class TopicMetadata:
    """Asks each question again until it is answered or a deadline has passed. Safe to use from many threads.

    Use it in a ``with`` block, or :meth:`close` it.

    Args:
        quiet: whether the log says nothing while the brokers do not answer.
    """

    def __init__(self, config: JobConfig, clock: Clock, *, quiet: bool = False) -> None:
        self.errors = ClientErrors()
        self.client: AdminClient = admin(config, self.errors)
        self._clock = clock
        #: When the client was used last, on the clock of durations.
        self._used_s = clock.elapsed()
        #: When requests began to fail, when the last one did, and when a line in the log may say so.
        self._waiting_since = self._paused = float("-inf")
        self._next_line = float("inf") if quiet else float("-inf")

    def describe(self, topics: Sequence[str]) -> dict[str, TopicDescription]:
        """The descriptions of those ``topics`` that exist. Raises: UnavailableError, AccessDenied."""
        if not topics:
            return {}
        return self.ask(
            "describing topics",
            lambda: self.client.describe_topics(TopicCollection(list(topics)), request_timeout=REQUEST_S),
            missing_is_none=True,
        )

    def names(self, prefix: str) -> list[str]:
        """The topics whose names start with ``prefix``, in order, as far as these credentials may see them.

        Raises: UnavailableError, AccessDenied.
        """
        try:
            found = self.client.list_topics(timeout=REQUEST_S).topics
        except KafkaException as error:
            raise translate(error.args[0], "listing topics", reported=self.errors) from error
        return sorted(name for name in found if name.startswith(prefix))

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

    def committed(self, group: str) -> dict[str, int]:
        """Source partition (``orders-0``) → the next offset, as a consumer group has committed it.

        Raises: UnavailableError, RetryableError, AccessDenied.
        """
        # the next request crashes the client if the group's coordinator is moving; this one waits (librdkafka #5040)
        self.ask(
            "describing a consumer group",
            lambda: self.client.describe_consumer_groups([group], request_timeout=REQUEST_S),
            group=group,
        )
        asked = [ConsumerGroupTopicPartitions(group)]
        answer = self.ask(
            "reading the offsets of a consumer group",
            lambda: self.client.list_consumer_group_offsets(asked, require_stable=True, request_timeout=REQUEST_S),
            failed=lambda found: next((p.error for p in found.topic_partitions or () if p.error is not None), None),
            group=group,
        )[group]
        return {f"{p.topic}-{p.partition}": p.offset for p in answer.topic_partitions or () if p.offset >= 0}

    def bounds(self, topic: str, partition: int, *, only_settled: bool = False) -> tuple[int, int]:
        """First offset and high watermark; with ``only_settled`` the last stable offset in place of the watermark.

        Asks with read_uncommitted: under read_committed the answer would be the last stable offset, and another
        owner's open transaction would hide newer records.

        Raises: MissingState, UnavailableError, AccessDenied.
        """
        return self.led_bounds(topic, partition, only_settled=only_settled)[1:]

    def led_bounds(self, topic: str, partition: int, *, only_settled: bool = False) -> tuple[int | None, int, int]:
        """As :meth:`bounds`, after the epoch of the partition's leader: a leader that lacks records has a higher one
        than the leader that had them. None if the broker does not say."""
        start, end = self._offsets_of(topic, partition, _START, _STABLE if only_settled else _END)
        return end.leader_epoch, int(start.offset), int(end.offset)

    def ends(self, partitions: Iterable[tuple[str, int]], *, only_settled: bool = False) -> dict[tuple[str, int], int]:
        """The high watermarks of partitions, from one request; with ``only_settled`` the last stable offsets, up to
        which a consumer of committed records receives messages. Leaves out partitions that the brokers do not know, and
        those without a leader.

        Raises: UnavailableError, AccessDenied.
        """
        isolation = IsolationLevel.READ_COMMITTED if only_settled else IsolationLevel.READ_UNCOMMITTED
        return self._offsets(partitions, OffsetSpec.latest(), isolation)  # type: ignore[no-untyped-call]

    def starts(self, partitions: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The first offsets of partitions, as :meth:`ends`."""
        return self._offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]

    def _offsets(
        self,
        partitions: Iterable[tuple[str, int]],
        spec: OffsetSpec,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[tuple[str, int], int]:
        asked = {TopicPartition(*partition): spec for partition in partitions}
        if not asked:
            return {}
        answers = self.ask(
            "asking for the offsets of topics",
            lambda: self.client.list_offsets(asked, isolation_level=isolation, request_timeout=REQUEST_S),
            missing_is_none=True,
        )
        return {(partition.topic, partition.partition): int(answer.offset) for partition, answer in answers.items()}

    def spans(
        self, partitions: Iterable[tuple[str, int]]
    ) -> tuple[dict[tuple[str, int], tuple[int, int]], StatemgrError | None]:
        """First offset and last stable offset of partitions, from two requests that are sent together, and only once.

        Returns: the partitions that have answered; and the error of one that has not, or None.
        """
        places = [TopicPartition(*partition) for partition in partitions]
        asked = [
            self.client.list_offsets(dict.fromkeys(places, spec), isolation_level=isolation, request_timeout=REQUEST_S)
            for spec, isolation in (_START, _STABLE)
        ]
        found: dict[tuple[str, int], tuple[int, int]] = {}
        failure: StatemgrError | None = None
        for place in places:
            where: dict[str, str | int] = {"topic": place.topic, "partition": place.partition}
            try:
                start, end = (int(answers[place].result(REQUEST_S + DEADLINE_S).offset) for answers in asked)
                found[place.topic, place.partition] = start, end
            except KafkaException as error:
                self.client.poll(0)
                failure = translate(error.args[0], "asking for the offsets of the input", reported=self.errors, **where)
            except TimeoutError:
                failure = UnavailableError("asking for the offsets of the input: no answer").with_where(**where)
        return found, failure

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

    def await_ended(self, written: Mapping[tuple[str, int], int | None], wait_s: float) -> None:
        """Wait until a transaction that was aborted has ended in every partition, or the partition is gone.

        The last stable offset is the first offset of an open transaction. So an aborted one has ended if it is beyond
        the first of its records. If it is before that record, another transaction hides whether the aborted one has
        ended.

        Args:
            written: partition → the offset of the first record there. None if it is not known: then all transactions
                that are open there now have to end.

        Raises: TransactionOpen if that is not clear after ``wait_s`` seconds; UnavailableError, AccessDenied.
        """
        deadline = self._clock.monotonic() + wait_s
        for (topic, partition), first in written.items():
            with suppress(MissingState):
                end = self._end(topic, partition)
                while (stable := self._end(topic, partition, only_settled=True)) < end:
                    if first is not None and stable > first:
                        break
                    where: dict[str, str | int] = {"topic": topic, "partition": partition, "offset": stable}
                    self._pause(deadline, _still_open(where, is_own=stable == first, is_others=first is not None))

    def _end(self, topic: str, partition: int, *, only_settled: bool = False) -> int:
        return int(self._offsets_of(topic, partition, _STABLE if only_settled else _END)[0].offset)

    def _offsets_of(
        self, topic: str, partition: int, *specs: tuple[OffsetSpec, IsolationLevel]
    ) -> list[ListOffsetsResultInfo]:
        """One offset for each of ``specs``; all requests are sent together."""
        place = TopicPartition(topic, partition)
        doing = "asking for a topic's offsets"
        deadline: float | None = None

        def request() -> dict[int, Future[ListOffsetsResultInfo]]:
            return {
                number: self.client.list_offsets({place: spec}, isolation_level=isolation, request_timeout=REQUEST_S)[
                    place
                ]
                for number, (spec, isolation) in enumerate(specs)
            }

        while True:
            try:
                answers = self.ask(doing, request, topic=topic, partition=partition)
                return list(answers.values())
            except MissingState:
                # the client reports the same for a partition without a leader
                found = self.describe([topic]).get(topic)
                if found is None or all(there.id != partition for there in found.partitions):
                    raise
                deadline = deadline or self._deadline()
                late = UnavailableError(
                    f"{doing}: the partition has no leader",
                    hint="check that the brokers with its replicas are running",
                    topic=topic,
                    partition=partition,
                )
                self._pause(deadline, late)

    def ask(
        self,
        doing: str,
        request: Callable[[], Mapping[K, Future[V]]],
        *,
        missing_is_none: bool = False,
        failed: Callable[[V], KafkaError | None] = lambda answer: None,
        **where: str | int,
    ) -> dict[K, V]:
        """Ask until there is an answer or the deadline has passed.

        Args:
            missing_is_none: leave out what the brokers do not know instead of raising MissingState.
            failed: the error in an answer that is none.
        """
        deadline = self._deadline()
        asked: object = None
        serve_after(self._clock.elapsed() - self._used_s, partial(self.client.poll, 0))
        while True:
            try:
                answers: dict[K, V] = {}
                for name, future in request().items():
                    asked = name
                    try:
                        answer = self._result(future, deadline, doing)
                        if (refusal := failed(answer)) is not None:
                            raise KafkaException(refusal)
                        answers[name] = answer
                    except KafkaException as error:
                        if not (missing_is_none and error.args[0].code() in MISSING):
                            raise
                self._serve()
                self.errors.clear()
                return answers
            except TimeoutError as error:
                raise self._unanswered(doing).with_where(**where) from error
            except KafkaException as error:
                reason = error.args[0]
                if (about := _topic_of(asked)) is not None:
                    where.setdefault("topic", about)
                self._serve()
                failure = translate(reason, doing, reported=self.errors, **where)
                if not may_pass(reason) or self.errors.refused():
                    raise failure from error
                self._pause(deadline, failure)
                self._find_brokers(deadline)

    def close(self) -> None:
        """Close the client. It has nothing to wait for."""
        self.client.poll(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _result(self, future: Future[V], deadline: float, doing: str) -> V:
        """Wait for an answer, and tell the log if it is late. Raises: KafkaException; TimeoutError at the deadline."""
        while True:
            left = deadline - self._clock.monotonic()
            try:
                return future.result(max(0.0, min(_PATIENCE_S, left)))
            except TimeoutError:
                if left <= _PATIENCE_S:
                    raise
                self._tell_waiting(deadline, self._unanswered(doing))

    def _unanswered(self, doing: str) -> StatemgrError:
        """The error of a question without an answer, with the reason that the client has reported, if any."""
        self._serve()
        return translate(KafkaError(KafkaError._TIMED_OUT), doing, reported=self.errors)

    def _serve(self) -> None:
        """Let the client hand over what it reports."""
        self.client.poll(0)
        self._used_s = self._clock.elapsed()

    def _find_brokers(self, deadline: float) -> None:
        """Ask any broker for the others. The client sends some requests to one broker (the "controller"), and does not
        look for another one by itself if that one is gone."""
        with suppress(KafkaException):
            self.client.list_topics(timeout=max(0.1, min(ANSWER_S, deadline - self._clock.monotonic())))

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
        if waited >= _PATIENCE_S:
            self._tell_waiting(deadline, late)
        self._clock.sleep(_PAUSE_S)

    def _tell_waiting(self, deadline: float, late: StatemgrError) -> None:
        now = self._clock.monotonic()
        if now >= self._next_line:
            self._next_line = now + _LOG_S
            tell(log, Event.WAITING, "waiting for Kafka, for at most %.0f s more: %s", deadline - now, late.message)


def _still_open(where: Mapping[str, str | int], *, is_own: bool, is_others: bool) -> TransactionOpen:
    if is_own:
        return TransactionOpen(
            "an aborted transaction is still open: the next commit would also commit its records",
            hint="a broker may leave a transaction open while a partition has no leader (KAFKA-20734): find it with "
            "`kafka-transactions.sh find-hanging`, and end it with `abort`",
            **where,
        )
    whose = "another producer's transaction" if is_others else "a transaction"
    return TransactionOpen(
        f"{whose} is open there, so it is not clear whether that of an aborted commit has ended: if not, the next "
        "commit would also commit its records",
        hint="commits go on when it ends; find its producer with `kafka-transactions.sh describe-producers`, and if "
        "nobody will end it, end it with `abort`",
        **where,
    )


def _topic_of(asked: object) -> str | None:
    """The topic of a question, for errors."""
    if isinstance(asked, str):
        return asked
    found = getattr(asked, "topic", None) or getattr(asked, "name", None)
    return found if isinstance(found, str) else None
