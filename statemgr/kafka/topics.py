"""Creates topics, and refuses topics whose settings would lose state.

Uses an admin client only: it reads and writes no records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin._topic import TopicDescription
from confluent_kafka.cimpl import NewTopic

from statemgr.config import JobConfig
from statemgr.config.factories import KAFKA_CHANGELOG
from statemgr.config.units import DAY_MS
from statemgr.errors import TopicMisconfigured, UnavailableError
from statemgr.kafka.clients import DEADLINE_S, REQUEST_S
from statemgr.kafka.errors import translated
from statemgr.kafka.metadata import TopicMetadata
from statemgr.logs import counted
from statemgr.ports import Clock

#: A changelog keeps its tombstones this long, so that a replay that began earlier still reads them.
DELETE_RETENTION_MS = DAY_MS
#: Kafka's default. A producer's default limit is a little lower, so its batches fit.
MAX_MESSAGE_BYTES = 1_048_588
#: A broker that was out of sync must not become the leader: it would silently take back what was acknowledged. Some
#: services do not have the setting.
_UNCLEAN = {"unclean.leader.election.enable": ("true", "false")}


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
    """One partition, compacted: it keeps the newest record of every key for ever. The broker sets the timestamps."""
    return TopicSpec(
        config.checkpoint_topic,
        1,
        config.checkpoint_replication_factor,
        {"cleanup.policy": "compact", "max.message.bytes": str(MAX_MESSAGE_BYTES)},
        at_least=("max.message.bytes",),
        created_with={"message.timestamp.type": "LogAppendTime"},
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
                except KafkaException as error:
                    if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                        raise
        self.wait_for([spec.name for spec in missing])
        return created

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
            if spec.partitions == 1:
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
                f"kafka-reassign-partitions.sh --bootstrap-server {self._servers} --execute "
                "--reassignment-json-file FILE (or lower task.checkpoint.replication.factor)",
            )
        wrong = {name: value for name, value in spec.config.items() if not _suits(spec, name, settings.get(name))}
        wrong |= {name: value for name, (bad, value) in spec.never.items() if settings.get(name) == bad}
        if wrong:
            changes = ",".join(f"{name}={value}" for name, value in wrong.items())
            yield TopicProblem(
                spec.name,
                ", ".join(f"{name} is {settings.get(name)} and must be {value}" for name, value in wrong.items()),
                f"kafka-configs.sh --bootstrap-server {self._servers} --alter --entity-type topics "
                f"--entity-name {spec.name} --add-config {changes}",
                tuple(wrong),
            )


def _suits(spec: TopicSpec, name: str, found: str | None) -> bool:
    wanted = spec.config[name]
    if found is None:
        return False
    if name in spec.at_least:
        return int(found) >= int(wanted)
    return found == wanted
