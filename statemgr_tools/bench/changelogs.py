"""Changelog topics that a run fills once, and the jobs that have their state."""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from statemgr.config import JobConfig
from statemgr.ids import CheckpointId
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import ChangelogMarker, Checkpoint
from statemgr.wiring import open_services
from statemgr_tools.bench import records
from statemgr_tools.bench.jobs import publish
from statemgr_tools.bench.kafka_operations import fill
from statemgr_tools.bench.seed import STORE
from statemgr_tools.bench.session import Session

_FACTORY = "kafka-changelog"
_TIMEOUT_S = 30
_RECORDS = 5_000_000


@dataclass(frozen=True, kw_only=True)
class FilledChangelog:
    """A changelog of ``count`` different keys, and the job that has its state.

    ``app`` and ``source`` are Kafka Streams' names: its changelog is ``<app>-st-changelog``.
    """

    config: JobConfig
    topic: str
    count: int
    app: str
    source: str

    @property
    def broker(self) -> str:
        return str(self.config.get("kafka.bootstrap.servers"))


def filled_changelog(session: Session) -> FilledChangelog:
    """Return a changelog with 5 million records of 16 + 100 bytes, made once per run."""
    return session.shared("changelog", lambda: _fill(session, session.count(_RECORDS, least=20_000)))


def _fill(session: Session, count: int) -> FilledChangelog:
    session.report(f"filling a changelog with {count:,} records")
    app = f"bench-{session.directory.name}"
    topic, source = f"{app}-st-changelog", f"{app}-source"
    config = session.job("changelog", task__backup__factories=_FACTORY, stores__s__changelog__topic=topic)
    make_topic(config, source)
    with TopicAdmin(config, SystemClock()) as admin:
        admin.create_missing(changelog_topic_specs(config))
    fill(config, topic, records.batches(count))
    services = open_services(config)
    try:
        topic_id = services.changelog().describe(topic).topic_id
        _, end = services.changelog().bounds(topic, 0)
    finally:
        services.close()
    publish(config, _checkpoint(ChangelogMarker(topic, topic_id, 0, end)))
    return FilledChangelog(config=config, topic=topic, count=count, app=app, source=source)


def make_topic(config: JobConfig, topic: str) -> None:
    """Create a topic with one partition and the broker's settings."""
    admin = AdminClient(config.kafka_client("admin"))
    admin.create_topics([NewTopic(topic, 1)])[topic].result(_TIMEOUT_S)


def _checkpoint(marker: ChangelogMarker) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=CheckpointId(1_700_000_000_000, 1),
        sequence=1,
        epoch=1,
        input_offsets={},
        stores={STORE: "filled"},
        state_checkpoint_markers={_FACTORY: {STORE: marker}},
        backup_factories={STORE: (_FACTORY,)},
        restore_factories={STORE: (_FACTORY,)},
    )
