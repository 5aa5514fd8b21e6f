"""Topics on a real broker: created with the right settings, or refused with the command that fixes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AlterConfigOpType
from confluent_kafka.admin._config import ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType

from statemgr.cli.main import cli
from statemgr.config import JobConfig
from statemgr.errors import InvalidError, TopicMisconfigured, UnavailableError
from statemgr.health.checks import Report, Status, check_brokers
from statemgr.kafka import metadata
from statemgr.kafka.admin_client import GuardedAdminClient
from statemgr.kafka.topics import TopicAdmin, changelog_topic_specs, checkpoint_topic_spec
from statemgr.local.machine import SystemClock
from tests.jobs import with_changes
from tests.kafka_jobs import client, job, make_topic, make_topics, wait_until
from tests.servers import KafkaServer


def _settings(config: JobConfig, topic: str) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = client(config)
    return {e.name: e.value for e in admin.describe_configs([resource])[resource].result(30).values()}


def test_missing_topics_are_created_as_they_must_be(kafka: KafkaServer) -> None:
    """The checkpoint topic has one compacted partition. A changelog has one per task, and its own compaction lag."""
    config = job(kafka, job__tasks=3, stores__totals__changelog__min__compaction__lag__ms=60_000)
    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    changelog = config.stores["totals"].changelog_topic
    with TopicAdmin(config, SystemClock()) as admin:
        assert [p.message for p in admin.check(specs)] == ["does not exist"] * 2
        assert not admin.exists(changelog)
        assert admin.create_missing(specs) == [config.checkpoint_topic, changelog]
        assert admin.create_missing(specs) == []
        assert admin.exists(changelog)
        assert admin.check(specs) == []
        admin.verify(specs)
    found = client(config).list_topics(timeout=60).topics
    assert [len(found[t].partitions) for t in (config.checkpoint_topic, changelog)] == [1, 3]
    assert _settings(config, config.checkpoint_topic)["cleanup.policy"] == "compact"
    settings = _settings(config, changelog)
    assert settings["cleanup.policy"] == "compact"
    assert settings["min.compaction.lag.ms"] == "60000"
    assert settings["delete.retention.ms"] == "86400000"


def test_wrong_settings_are_refused_with_the_command_that_fixes_them(kafka: KafkaServer) -> None:
    """The error names a wrong setting (fault 18), and the command in its hint makes the check pass."""
    config = job(kafka)
    topic = config.stores["totals"].changelog_topic
    make_topic(config, topic, cleanup__policy="delete", min__compaction__lag__ms="5")
    specs = changelog_topic_specs(config)
    with TopicAdmin(config, SystemClock()) as admin:
        with pytest.raises(TopicMisconfigured, match=r"cleanup\.policy is delete and must be compact") as refused:
            admin.verify(specs)
        command = refused.value.hint
        assert command is not None
        assert command.startswith(f"kafka-configs.sh --bootstrap-server {kafka.bootstrap_servers} --alter")
        assert f"--entity-name {topic} " in command
        wanted = command.rpartition("--add-config ")[2].split(",")
        assert wanted == ["cleanup.policy=compact", "min.compaction.lag.ms=14400000"]
        changes = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in (setting.split("=") for setting in wanted)
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=changes)
        other = client(config)
        other.incremental_alter_configs([resource])[resource].result(30)
        wait_until(lambda: admin.check(specs) == [])  # the broker answers before it has applied the changes


def test_a_longer_lag_than_asked_for_is_fine(kafka: KafkaServer) -> None:
    """A topic that keeps more than it must passes the check."""
    config = job(kafka)
    topic = config.stores["totals"].changelog_topic
    make_topic(config, topic, cleanup__policy="compact", min__compaction__lag__ms="99999999")
    with TopicAdmin(config, SystemClock()) as admin:
        admin.verify(changelog_topic_specs(config))


def test_a_wrong_number_of_partitions_is_refused(kafka: KafkaServer) -> None:
    """A checkpoint topic with two partitions would lose the order of records. A changelog must have one per task."""
    config = job(kafka, job__tasks=2)
    make_topic(config, config.checkpoint_topic, 2, cleanup__policy="compact")
    make_topic(
        config,
        config.stores["totals"].changelog_topic,
        3,
        cleanup__policy="compact",
        min__compaction__lag__ms="14400000",
    )
    with TopicAdmin(config, SystemClock()) as admin:
        problems = admin.check([checkpoint_topic_spec(config), *changelog_topic_specs(config)])
    assert [p.message for p in problems] == [
        "it has 2 partitions instead of 1",
        "it has 3 partitions instead of 2, one for each task",
    ]
    assert "job.tasks = 3" in problems[1].fix_command
    for tasks in (1, 5):
        other = with_changes(config, job__tasks=tasks)
        with TopicAdmin(other, SystemClock()) as admin:
            [problem] = admin.check(changelog_topic_specs(other))
        assert "one for each task" in problem.message
        assert "job.tasks = 3" in problem.fix_command, "more partitions would not spread the state that is there"
        assert "--alter" not in problem.fix_command


def test_too_few_replicas_are_refused(kafka: KafkaServer) -> None:
    """A topic with fewer replicas than the configuration asks for is a problem, with a command that fixes it."""
    config = job(kafka)
    make_topics(config)
    wanted = job(kafka, config.job_name, task__checkpoint__replication__factor=3)
    with TopicAdmin(wanted, SystemClock()) as admin:
        problems = admin.check([checkpoint_topic_spec(wanted)])
    assert [p.message for p in problems] == ["it has 1 replica instead of 3"]
    assert problems[0].fix_command.startswith("kafka-reassign-partitions.sh")


def test_one_replica_on_a_cluster_of_several_brokers_is_noted(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers' default may be one. `doctor` and `topics check` say so, and how to get more. On one broker there is
    nothing to note."""
    config = job(kafka)
    make_topics(config)
    path = tmp_path / "job.toml"
    path.write_text("".join(f'"{key}" = {json.dumps(value)}\n' for key, value in config.to_mapping().items()))
    check = ["topics", "check", "--config", str(path)]
    assert "replica" not in CliRunner().invoke(cli, check).stderr
    three = SimpleNamespace(brokers=dict.fromkeys(range(3)), topics={})
    monkeypatch.setattr(GuardedAdminClient, "list_topics", lambda *_, **__: three)
    checked = CliRunner().invoke(cli, check)
    assert checked.exit_code == 0
    assert f"note: {config.checkpoint_topic}: it has one replica, and the cluster has 3 brokers" in checked.stderr
    report = Report()
    check_brokers(report, config)
    (note,) = [one for one in report.findings if "one replica" in one.detail]
    assert note.status is Status.NOTE
    assert "then set task.checkpoint.replication.factor = 3" in (note.fix or "")
    with TopicAdmin(config, SystemClock()) as admin:  # that it has too few is a problem already
        assert admin.only_copy(replace(checkpoint_topic_spec(config), replication_factor=3)) is None


def test_what_the_broker_refuses_is_an_invalid_error(kafka: KafkaServer) -> None:
    """A topic cannot have more replicas than there are brokers. The error names the topic."""
    config = job(kafka, task__checkpoint__replication__factor=300)
    with TopicAdmin(config, SystemClock()) as admin, pytest.raises(InvalidError) as refused:
        admin.create_missing([checkpoint_topic_spec(config)])
    assert refused.value.where["topic"] == config.checkpoint_topic


def test_a_broker_that_is_not_there_is_an_unavailable_error(
    kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what the client was doing."""
    monkeypatch.setattr(metadata, "DEADLINE_S", 1.0)
    monkeypatch.setattr(metadata, "REQUEST_S", 1.0)
    config = JobConfig.from_mapping({"job.name": "nowhere", "kafka.bootstrap.servers": "127.0.0.1:1"})
    with TopicAdmin(config, SystemClock()) as admin, pytest.raises(UnavailableError, match="describing topics"):
        admin.exists("anything")
