"""Checks the input topics of a job: they exist, each task has one partition of each, and their IDs have not changed.

A topic that was deleted and created again has the same name and another ID. Offsets of the old topic mean nothing in
it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from confluent_kafka import Consumer, KafkaException, TopicCollection
from confluent_kafka.admin._metadata import TopicMetadata as ListedTopic

from statemgr.config import JobConfig
from statemgr.errors import AccessDenied, ConfigError, MissingState, StatemgrError, UnavailableError
from statemgr.ids import source_topic
from statemgr.kafka.clients import DEADLINE_S, REQUEST_S
from statemgr.kafka.errors import MISSING, ClientErrors, translate
from statemgr.kafka.group_consumer import GroupConsumer
from statemgr.kafka.metadata import TopicMetadata
from statemgr.logs import counted
from statemgr.ports import Clock

log = logging.getLogger(__name__)
#: Seconds between two questions for the IDs of topics whose ID is unknown.
LOOK_EVERY_S = 30.0
_SLICE_S = 3.0
#: Seconds for which an opening may use the IDs that another opening has asked for. If a topic is created again
#: meanwhile, the first commit notices it.
_KNOWN_S = 5.0
GONE = (
    "Kafka deleted records before they were processed (retention, or DeleteRecords); to continue without them, give "
    "the one-shot permission `allow_skipped_input`"
)
RECREATED = (
    "the topic was deleted and created again, or lost records: start the job under a new job.id, or give the one-shot "
    "permission `allow_skipped_input` to read the present topic from its beginning"
)


class InputTopics:
    """Asks the brokers about input topics. Safe to use from many threads; it connects when it is first asked."""

    def __init__(self, config: JobConfig, clock: Clock) -> None:
        self._config = config
        self.clock = clock
        self._lock = threading.Lock()
        self._metadata: TopicMetadata | None = None
        #: Topic → its ID, and when it was asked for.
        self._ids: dict[str, tuple[str, float]] = {}
        #: Topics → the question for their IDs, in a block of :meth:`shared`.
        self._questions: dict[frozenset[str], Callable[[], Mapping[str, str]]] | None = None

    def check(
        self, consumer: Consumer, topics: Sequence[str], published_tasks: int | None, outputs: Sequence[str] = ()
    ) -> None:
        """Check that the consumer sees every topic, with one partition per task.

        Args:
            published_tasks: how many tasks have checkpoints; None for a new job.
            outputs: output topics, which need only exist.

        Raises: MissingState, which names all that do not exist; ConfigError, AccessDenied, UnavailableError.
        """
        counts: dict[str, int | None] = {}
        for topic in topics:
            found = self._listed(consumer, topic)
            if found.error is not None and found.error.code() not in MISSING:
                raise translate(found.error, "asking for the input topic", topic=topic)
            counts[topic] = None if found.error else len(found.partitions)
        missing = [topic for topic, count in counts.items() if count is None]
        listed = {topic: self._listed(consumer, topic) for topic in outputs}
        lost = [topic for topic, at in listed.items() if at.error is not None and at.error.code() in MISSING]
        if missing or lost:
            raise missing_topics(self._config, missing, lost, published_tasks)
        for topic, count in counts.items():
            problem = topic_problem(self._config, topic, count, published_tasks)
            if problem is not None:
                raise problem

    def _listed(self, consumer: Consumer, topic: str) -> ListedTopic:
        """A topic as the consumer sees it. Its reports by callback say whether its credentials were refused."""
        deadline = self.clock.monotonic() + DEADLINE_S
        while True:
            try:
                listed: ListedTopic = consumer.list_topics(topic, timeout=_SLICE_S).topics[topic]
                return listed
            except KafkaException as error:
                if not consumer.assignment():  # otherwise this would drop a message, and the loop polls anyway
                    consumer.poll(0)  # serves what the client reports
                reported = consumer.errors if isinstance(consumer, GroupConsumer) else ClientErrors()
                if reported.refused() is None:
                    with suppress(UnavailableError):
                        self.metadata().describe([topic])  # with the same credentials, unless the consumer has its own
                if reported.refused() is not None or self.clock.monotonic() > deadline:
                    raise translate(
                        error.args[0], "asking for the input topic", reported=reported, topic=topic
                    ) from error

    def ids(self, topics: Iterable[str], *, known_s: float = 0.0) -> Mapping[str, str]:
        """Topic → ID. Leaves out topics that do not exist here or that these credentials may not describe.

        Args:
            known_s: how many seconds old an answer may be. The answer for a topic with 1,000 partitions is large, and
                each task asks for it.

        Raises: UnavailableError.
        """
        names, now_s = sorted(set(topics)), self.clock.monotonic()
        known = {name: at[0] for name in names if (at := self._ids.get(name)) and now_s - at[1] < known_s}
        if len(known) == len(names):
            return known
        try:
            found = {name: str(topic.topic_id) for name, topic in self.metadata().describe(names).items()}
        except AccessDenied as error:
            log.debug("the IDs of the input topics are not known: %s", error)
            return {}
        self._ids.update((name, (topic_id, now_s)) for name, topic_id in found.items())
        return found

    def added(self, offsets: Mapping[str, int], topics: Iterable[str] = ()) -> list[str]:
        """Source partitions that ``topics`` and the topics of ``offsets`` have here, and ``offsets`` lacks.

        Leaves out topics that do not exist here or that these credentials may not describe. Raises: UnavailableError.
        """
        known = {topic for partition in offsets if (topic := source_topic(partition)) is not None}
        try:
            described = self.metadata().describe(sorted(known.union(topics)))
        except AccessDenied as error:
            log.debug("the partitions of the input topics are not known: %s", error)
            return []
        here = [f"{topic}-{part.id}" for topic, found in described.items() for part in found.partitions]
        return [partition for partition in here if partition not in offsets]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """A block in which no message is received. One question is then enough for the commits of all tasks."""
        self._questions = {}
        try:
            yield
        finally:
            self._questions = None

    def asked(self, topics: Collection[str]) -> Callable[[], Mapping[str, str]]:
        """Ask for the IDs of topics now. Calling the result waits for the answer; see :meth:`ids`."""
        if not topics:
            return dict
        client = self.metadata()
        with self._lock:
            questions, key = self._questions, frozenset(topics)
            if questions is not None and key in questions:
                return questions[key]
            futures = client.client.describe_topics(TopicCollection(sorted(topics)), request_timeout=REQUEST_S)

            def answer() -> Mapping[str, str]:
                try:
                    return {topic: str(future.result(REQUEST_S).topic_id) for topic, future in futures.items()}
                except (KafkaException, TimeoutError):
                    return self.ids(topics)  # it distinguishes a missing topic from a slow answer

            if questions is not None:
                questions[key] = answer
            return answer

    def spans(
        self, places: Iterable[tuple[str, int]]
    ) -> tuple[Mapping[tuple[str, int], tuple[int, int]], StatemgrError | None]:
        """First offset and last stable offset of source partitions: see :meth:`TopicMetadata.spans`."""
        return self.metadata().spans(places)

    def close(self) -> None:
        with self._lock:
            if self._metadata is not None:
                self._metadata.close()
            self._metadata = None

    def metadata(self) -> TopicMetadata:
        """What asks the brokers. It is closed with this object."""
        with self._lock:
            self._metadata = self._metadata or TopicMetadata(self._config, self.clock)
            return self._metadata


class TaskInputs:
    """The IDs of one task's input topics. Refuses a commit whose offsets belong to another topic.

    Args:
        known: topic → ID, from the checkpoint that the task continues.
        skip: accept topics that were deleted and created again; ``recreated`` names them.
    """

    def __init__(self, topics: InputTopics, task: str, known: Mapping[str, str], *, skip: bool = False) -> None:
        self._topics = topics
        self._task = task
        self._known = dict(known)
        self._looked = float("-inf")
        self.recreated: frozenset[str] = frozenset()
        if skip:
            found = topics.ids(known) if known else {}
            self.recreated = frozenset(topic for topic, old in known.items() if found.get(topic, old) != old)
            self._known.update(found)

    def expect(self, topics: Iterable[str] = ()) -> None:
        """Check, before input is read, that the topics are those of the checkpoint. ``topics`` will be read in any
        case.

        Raises: MissingState, UnavailableError.
        """
        wanted = {*topics, *self._known}
        if wanted:
            self._take(self._topics.ids(wanted, known_s=_KNOWN_S))

    def added(self, offsets: Mapping[str, int]) -> list[str]:
        """As :meth:`InputTopics.added`, also of the topics in ``recreated``."""
        return self._topics.added(offsets, self.recreated)

    def gone(self, offsets: Mapping[str, int]) -> Mapping[str, int]:
        """Source partition → its first offset, of those that begin after ``offsets`` now. Topics whose IDs are unknown
        are left out: these brokers may not have them. Raises: UnavailableError, AccessDenied.
        """
        topics = {name: topic for name, at in offsets.items() if at >= 0 and (topic := source_topic(name)) is not None}
        places = {(topic, int(name.rpartition("-")[2])): name for name, topic in topics.items() if topic in self._known}
        starts = self._topics.metadata().starts(places)
        return {places[at]: start for at, start in starts.items() if start > offsets[places[at]]}

    def expect_from(self, offsets: Mapping[str, int]) -> None:
        """Check that the topics still have their records from these offsets on.

        Raises: MissingState; as :meth:`gone`.
        """
        for name, start in self.gone(offsets).items():
            raise MissingState(
                f"the next records of the input are gone: offset {offsets[name]} is next, and the first one is {start}",
                hint=f"{GONE} (on Spark, at a new checkpoint location if you keep one; at that one, with "
                "failOnDataLoss=false, if another source needs it)",
                partition=name,
                task=self._task,
            )

    def asked(self, sources: Iterable[str]) -> Callable[[], Mapping[str, str]]:
        """For a commit: ask now, after the last message was received, for the IDs of the topics of ``sources``.

        Calling the result waits for the answer: topic → ID. Topics without a known ID (the offsets may not be Kafka's)
        are asked for once in :data:`LOOK_EVERY_S` seconds. The result raises: MissingState, UnavailableError.
        """
        topics = {topic for topic in map(source_topic, sources) if topic}
        wanted = topics
        now_s = self._topics.clock.monotonic()
        if now_s - self._looked < LOOK_EVERY_S:
            wanted = topics & self._known.keys()
        else:
            self._looked = now_s
        answer = self._topics.asked(wanted)

        def checked() -> Mapping[str, str]:
            self._take(answer())
            return {topic: self._known[topic] for topic in sorted(topics & self._known.keys())}

        return checked

    def _take(self, found: Mapping[str, str]) -> None:
        """Raises: MissingState if the ID of a topic is not the one of the checkpoint."""
        for topic, topic_id in self._known.items():
            if found.get(topic, topic_id) != topic_id:
                raise MissingState(
                    "the input topic was deleted and created again: the input offsets belong to the topic with ID "
                    f"{topic_id}, but the present topic has the ID {found[topic]}",
                    hint=RECREATED,
                    topic=topic,
                    task=self._task,
                )
        self._known.update(found)


def topic_problem(
    config: JobConfig, topic: str, partitions: int | None, published_tasks: int | None
) -> StatemgrError | None:
    """The error for an input topic that does not exist, or whose number of partitions is not ``job.tasks``.

    Args:
        partitions: how many the topic has; None: it does not exist.
        published_tasks: how many tasks have checkpoints; None: none yet.
    """
    if partitions is None:
        return missing_topics(config, [topic], [], published_tasks)
    if partitions == config.tasks and published_tasks in (None, config.tasks):
        return None
    if published_tasks is None:
        hint = f"set job.tasks = {partitions}; all input topics must have the same number of partitions"
    elif published_tasks == partitions:
        hint = f"set job.tasks back to {partitions}"
    else:
        hint = (
            f"use `statemgr rescale --tasks {partitions}`, which refuses rows that were written for {published_tasks} "
            f"partitions and are not processed yet; or write new input to a topic with {published_tasks} partitions, "
            "and set task.inputs to it"
        )
    state = "no state yet" if published_tasks is None else f"state of {counted(published_tasks, 'task')}"
    return ConfigError(
        f"the input topic has {counted(partitions, 'partition')} and needs as many tasks, but the job has {state}, "
        f"and job.tasks is {config.tasks}",
        hint=hint,
        topic=topic,
        key="job.tasks",
    )


def missing_topics(
    config: JobConfig, inputs: Sequence[str], outputs: Sequence[str], published_tasks: int | None = None
) -> MissingState:
    """The error for all input topics and output topics that do not exist. An output topic may have any number of
    partitions; the hint names that of the tasks."""
    kinds = [(kind, len(topics)) for kind, topics in (("input", inputs), ("output", outputs)) if topics]
    names = " and the ".join(f"{kind} {'topic' if count == 1 else 'topics'}" for kind, count in kinds)
    alone = len(inputs) + len(outputs) == 1
    wanted = (published_tasks if inputs else None) or config.tasks
    hint = f"create {'it' if alone else 'each'} with {counted(wanted, 'partition')}"
    if wanted == config.tasks:
        hint += ", as `statemgr topics create --all` does"
    return MissingState(
        f"the {names} {'does' if alone else 'do'} not exist",
        hint=f"{hint}; or correct {' and '.join(f'task.{kind}s' for kind, _ in kinds)}",
        topic=", ".join([*inputs, *outputs]),
    )
