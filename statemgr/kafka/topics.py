"""Creates topics, refuses topics whose settings would lose state, and watches the checkpoint topic: that it was deleted
and created again under a running job, or has lost its newest records.

The topic's ID shows that it was created again. A publish asks for the ID while it sends its records, at most every few
seconds. In between it asks only if its records get an offset that is not higher than all earlier ones, as happens in a
new topic. In the old topic, this shows that records were lost: a broker that did not have them has become the leader
(an unclean election).

Uses an admin client only: it reads and writes no records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.admin._topic import TopicDescription
from confluent_kafka.cimpl import NewTopic

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.config.units import DAY_MS
from statemgr.errors import MissingState, TopicMisconfigured, UnavailableError
from statemgr.kafka.clients import ANSWER_S, DEADLINE_S, REQUEST_S
from statemgr.kafka.errors import MISSING, translated
from statemgr.kafka.metadata import TopicMetadata
from statemgr.logs import counted
from statemgr.ports import Clock

#: A topic keeps its tombstones this long, so that a read that began earlier still sees them.
DELETE_RETENTION_MS = DAY_MS
#: Kafka's default. A producer's default limit is a little lower, so its batches fit.
MAX_MESSAGE_BYTES = 1_048_588
#: A broker that was out of sync must not become the leader: it would silently take back what was acknowledged. Some
#: services do not have the setting.
_UNCLEAN = {"unclean.leader.election.enable": ("true", "false")}
#: The broker's clock says when a checkpoint was published, for :mod:`statemgr.backends.changelog` to know what
#: compaction may have removed since.
BROKER_TIMES = {"message.timestamp.type": "LogAppendTime"}
#: Seconds between two questions of a watch for the topic's ID.
_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic must have: exactly these partitions, at least these replicas (-1: any), and settings.

    ``config``: the settings that it must have. ``at_least``: names of those settings that may also be higher.
    ``created_with``: further settings of a new topic, which an existing one need not have. ``never``: values that it
    must not have, each with the value to set instead; the setting need not exist.
    """

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    at_least: Collection[str] = field(default=())
    created_with: Mapping[str, str] = field(default_factory=dict)
    never: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TopicProblem:
    """What is wrong with a topic, and the command that fixes it.

    ``settings``: the names of the wrong settings. ``missing``: whether there is no such topic.
    """

    topic: str
    message: str
    fix_command: str
    settings: tuple[str, ...] = ()
    missing: bool = False

    def error(self) -> TopicMisconfigured:
        """The problem as an error."""
        return TopicMisconfigured(f"topic {self.topic}: {self.message}", hint=self.fix_command, topic=self.topic)


def checkpoint_topic_spec(config: JobConfig) -> TopicSpec:
    """One partition, compacted: it keeps the newest record of every key for ever. The broker sets the timestamps.

    A process that has read the topic remembers it for hours, and reads what is new: the deletes must still be there.
    """
    return TopicSpec(
        config.checkpoint_topic,
        1,
        config.checkpoint_replication_factor,
        {
            "cleanup.policy": "compact",
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
            "delete.retention.ms": str(DELETE_RETENTION_MS),
        },
        at_least=("max.message.bytes", "delete.retention.ms"),
        created_with={**config.topic_settings, **BROKER_TIMES},
        never=_UNCLEAN,
    )


def changelog_topic_specs(config: JobConfig) -> list[TopicSpec]:
    """One partition per task, compacted. It keeps recent records and tombstones that a running replay still needs."""
    return [
        TopicSpec(
            store.changelog_topic,
            config.tasks,
            config.checkpoint_replication_factor,
            {
                "cleanup.policy": "compact",
                "min.compaction.lag.ms": str(store.min_compaction_lag_ms),
                "delete.retention.ms": str(DELETE_RETENTION_MS),
            },
            at_least=("min.compaction.lag.ms", "delete.retention.ms"),
            created_with=config.topic_settings,
            never=_UNCLEAN,
        )
        for store in config.stores.values()
        if KAFKA_CHANGELOG in (*store.backup_factories, *store.restore_factories)
    ]


class TopicAdmin(TopicMetadata):
    """Creates, checks and deletes topics."""

    def __init__(self, config: JobConfig, clock: Clock) -> None:
        super().__init__(config, clock)
        self._servers = str(config.kafka_client("admin")["bootstrap.servers"])
        self._checkpoint_topic = config.checkpoint_topic
        self._reassigning = (
            f"kafka-reassign-partitions.sh --bootstrap-server {self._servers} --execute --reassignment-json-file FILE "
            "(docs/operations.md has an example)"
        )

    def exists(self, topic: str) -> bool:
        """Raises: UnavailableError, AccessDenied."""
        return topic in self.describe([topic])

    def create_missing(self, specs: Sequence[TopicSpec]) -> list[str]:
        """Create the topics that do not exist, and return their names. It is no error if another process creates one
        first.

        Raises: UnavailableError, AccessDenied, InvalidError (the brokers refuse the settings).
        """
        found = self.describe([spec.name for spec in specs])
        missing = [spec for spec in specs if spec.name not in found]
        if not missing:
            return []
        requested = [
            NewTopic(s.name, s.partitions, s.replication_factor, config={**s.config, **s.created_with}) for s in missing
        ]
        futures = self.client.create_topics(requested, operation_timeout=DEADLINE_S, request_timeout=DEADLINE_S)
        created = []
        for name, future in futures.items():
            with translated("creating a topic", self.errors, topic=name):
                try:
                    future.result(2 * DEADLINE_S)
                    created.append(name)
                except TimeoutError as error:
                    raise self._unanswered("creating a topic").with_where(topic=name) from error
                except KafkaException as error:
                    if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                        raise
        self.wait_for([spec.name for spec in missing])
        return created

    def set(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change settings of a topic; the others stay. Raises: UnavailableError, AccessDenied, InvalidError."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        self.ask(
            "changing a topic's settings",
            lambda: self.client.incremental_alter_configs([resource], request_timeout=REQUEST_S),
            topic=topic,
        )

    def delete(self, topic: str) -> None:
        """Delete a topic; a missing one is no error. Raises: UnavailableError, AccessDenied."""
        self.ask(
            "deleting a topic",
            lambda: self.client.delete_topics([topic], request_timeout=REQUEST_S),
            missing_is_none=True,
            topic=topic,
        )

    def delete_unused(self, specs: Sequence[TopicSpec]) -> None:
        """Delete the topics that have another number of partitions, but the right settings, and to which nothing was
        ever written. Raises: UnavailableError, AccessDenied.
        """
        found = self.describe([spec.name for spec in specs])
        settings = self.settings(list(found))
        for spec in specs:
            topic = found.get(spec.name)
            if topic is None or len(topic.partitions) == spec.partitions:
                continue
            if self._is_unused(spec, topic, settings[spec.name]):
                self.delete(spec.name)
                self.wait_until_gone(spec.name)

    def _is_unused(self, spec: TopicSpec, found: TopicDescription, settings: Mapping[str, str]) -> bool:
        """Whether a topic has the settings that we give it, and nothing was ever written to it."""
        return all(_suits(spec, name, settings.get(name)) for name in spec.config) and not any(
            self.bounds(spec.name, one.id)[1] for one in found.partitions
        )

    def wait_until_gone(self, topic: str) -> None:
        """Wait until the broker that answers has forgotten a deleted topic. Raises: UnavailableError."""
        late = UnavailableError("the brokers did not delete a topic in time", topic=topic)
        deadline = self._deadline()
        while self.exists(topic):
            self._pause(deadline, late)

    def check(self, specs: Sequence[TopicSpec]) -> list[TopicProblem]:
        """Everything that is wrong with these topics; empty if nothing is.

        Raises: UnavailableError, AccessDenied.
        """
        found = self.describe([spec.name for spec in specs])
        settings = self.settings(list(found))
        problems: list[TopicProblem] = []
        for spec in specs:
            if spec.name in found:
                problems += self._problems(spec, found[spec.name], settings[spec.name])
            else:
                problems.append(TopicProblem(spec.name, "does not exist", "`statemgr topics create`", missing=True))
        return problems

    def only_copy(self, spec: TopicSpec) -> TopicProblem | None:
        """What to say about the checkpoint topic if it has one replica and the cluster several brokers; otherwise None,
        also if :meth:`check` already names too few replicas.

        Raises: UnavailableError, AccessDenied.
        """
        found = self.describe([spec.name]).get(spec.name)
        if found is None or spec.replication_factor > 1 or any(len(one.replicas) > 1 for one in found.partitions):
            return None
        with translated("listing the brokers", self.errors, topic=spec.name):
            brokers = len(self.client.list_topics(spec.name, timeout=REQUEST_S).brokers)
        if brokers < 2:
            return None
        return TopicProblem(
            spec.name,
            f"it has one replica, and the cluster has {brokers} brokers: if the replica's disk is lost, so is the job",
            f"{self._reassigning}, then set task.checkpoint.replication.factor = {min(brokers, 3)}",
        )

    def verify(self, specs: Sequence[TopicSpec]) -> None:
        """Raises: TopicMisconfigured with the first problem and the command that fixes it."""
        for problem in self.check(specs):
            raise problem.error()

    def _problems(
        self, spec: TopicSpec, found: TopicDescription, settings: Mapping[str, str]
    ) -> Iterator[TopicProblem]:
        partitions = len(found.partitions)
        if partitions != spec.partitions:
            message = f"it has {counted(partitions, 'partition')} instead of {spec.partitions}"
            if spec.name == self._checkpoint_topic:
                command = "set task.checkpoint.topic to a new topic, or delete this one if nothing else uses it"
            else:
                message += ", one for each task"
                command = (
                    "nothing was ever written to it: for a new job, `statemgr topics create --recreate-empty` makes it "
                    f"again; if the job has state elsewhere, set job.tasks = {partitions}"
                    if self._is_unused(spec, found, settings)
                    else f"if the job has state on the topic, set job.tasks = {partitions} (more partitions would not "
                    "spread it; `statemgr rescale --tasks` does); for a new job, set stores.<name>.changelog.topic to "
                    "a new topic"
                )
            yield TopicProblem(spec.name, message, command)
        replicas = min((len(p.replicas) for p in found.partitions), default=0)
        if replicas < spec.replication_factor:
            yield TopicProblem(
                spec.name,
                f"it has {counted(replicas, 'replica')} instead of {spec.replication_factor}",
                f"{self._reassigning}, or lower task.checkpoint.replication.factor",
            )
        wrong = {name: value for name, value in spec.config.items() if not _suits(spec, name, settings.get(name))}
        wrong |= {name: value for name, (bad, value) in spec.never.items() if settings.get(name) == bad}
        if wrong:
            yield TopicProblem(
                spec.name,
                ", ".join(f"{name} is {settings.get(name)} and must be {value}" for name, value in wrong.items()),
                f"kafka-configs.sh {self.altering(spec.name, wrong)}",
                tuple(wrong),
            )

    def altering(self, topic: str, settings: Mapping[str, str]) -> str:
        """What to give to ``kafka-configs.sh`` to change settings of a topic."""
        changes = ",".join(f"{name}={value}" for name, value in settings.items())
        return (
            f"--bootstrap-server {self._servers} --alter --entity-type topics --entity-name {topic} "
            f"--add-config {changes}"
        )


def _suits(spec: TopicSpec, name: str, found: str | None) -> bool:
    wanted = spec.config[name]
    if found is None:
        return False
    if name in spec.at_least:
        return int(found) >= int(wanted)
    return found == wanted


# --- watching ----------------------------------------------------------------------------------------------------


def newest_lost(topic: str, what: str) -> MissingState:
    """The error of an owner that finds less on the topic than it has seen there."""
    return MissingState(
        f"the checkpoint topic has lost its newest records while this owner was running: {what}. A broker without "
        "these records has become the leader",
        hint="bring a broker back that has the records. If none has them, start the job again: it continues from an "
        "older checkpoint, and sends output again that it has sent since. On Spark, first run `statemgr topics repair "
        "--write --allow-older-checkpoints` and set task.checkpoint.topic: otherwise the new output has sequence "
        "numbers that sinks skip",
        topic=topic,
    )


class TopicWatch:
    """Remembers the topic's ID at the first read. Safe to use from many threads."""

    def __init__(self, topic: str, metadata: TopicMetadata, clock: Clock) -> None:
        self._topic = topic
        self._metadata = metadata
        self._clock = clock
        self._lock = threading.Lock()
        self._known: str | None = None
        self._seen_at = 0.0
        self._end = 0

    def compare(self, topic_id: str) -> None:
        """Compare the ID that the topic has now. Raises: MissingState if it had another ID before."""
        with self._lock:
            if self._known is None:
                self._known = topic_id
            if self._known == topic_id:
                self._seen_at = self._clock.monotonic()
                return
        raise MissingState(
            "the checkpoint topic was deleted and created again while this owner was running, without its checkpoints: "
            f"its ID was {self._known} and is now {topic_id}",
            hint="stop the job and restore the records of the topic; to start empty instead, open the job once "
            "with allow_empty_start=True",
            topic=self._topic,
        )

    def reached(self, end: int) -> None:
        """Note that the topic was read or written up to this offset."""
        with self._lock:
            self._end = max(self._end, end)

    def begin_check(self) -> Callable[[int], None]:
        """Ask for the topic's ID without waiting, if it is time to.

        Call this before records are written, and the result after that, with the offset after them, and before they
        are committed. It raises: MissingState if this is not the topic that was read, if it has lost records, or if
        there is no topic.
        """
        is_due = self._clock.monotonic() - self._seen_at >= _EVERY_S
        return partial(self._check, self._metadata.describe_later(self._topic) if is_due else None, self._end)

    def _check(self, asked: Future[TopicDescription] | None, known: int, end: int) -> None:
        if asked is not None or end <= self._end:
            asked = asked or self._metadata.describe_later(self._topic)
            try:
                self.compare(str(asked.result(ANSWER_S).topic_id))
            except TimeoutError:
                return  # the commit itself shows whether the brokers can be reached
            except KafkaException as error:
                if error.args[0].code() not in MISSING:
                    return
                raise MissingState(
                    "the checkpoint topic was deleted while this owner was running",
                    hint="stop the job and restore the records of the topic",
                    topic=self._topic,
                ) from error
        if end <= known:  # other tasks may have written since, but nobody takes offsets back
            raise newest_lost(self._topic, f"it had {known} offsets, and the newest one is now {end - 1}")
        self.reached(end)
