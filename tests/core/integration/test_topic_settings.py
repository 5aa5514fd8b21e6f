"""Settings of the job's own topics that are changed while an owner runs: it says so, goes on or stops, by what is at
stake."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.engine import coordinator
from statemgr.errors import TopicMisconfigured
from tests.commits import TASK, write
from tests.jobs import contents, elsewhere, job_mapping
from tests.kafka_jobs import alter_topic, wait_until
from tests.servers import KafkaServer

CHANGELOG = "kafka-changelog"


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """Return a job that has its state in a changelog alone, and whose owners look often."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.2)
    return JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=[CHANGELOG]))


def errors(caplog: pytest.LogCaptureFixture, topic: str, setting: str = "cleanup.policy") -> list[str]:
    """Return the errors in the log that name a topic and a setting."""
    found = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    return [message for message in found if topic in message and setting in message]


def test_a_changelog_that_may_be_cut(config: JobConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Owners say loudly and again that a changelog's records may be deleted, with the command that helps, and a metric
    says so to alerts. Commits go on: they add what the job needs."""
    caplog.set_level(logging.INFO, "statemgr")
    topic = config.stores["totals"].changelog_topic
    with StateManager(config) as manager, manager.open_task(TASK) as task:

        def problems() -> float | None:
            job = {"job": config.job_name}
            return manager.metrics.registry.get_sample_value("statemgr_topic_problems", job)

        write(task, {b"a": b"1"})
        task.commit({"orders-0": 1})
        assert problems() == 0
        alter_topic(config, topic, cleanup__policy="delete")
        wait_until(lambda: len(errors(caplog, topic)) > 1)
        assert f"--entity-name {topic} --add-config cleanup.policy=compact" in errors(caplog, topic)[0]
        assert problems() == 1
        write(task, {b"b": b"2"})
        task.commit({"orders-0": 2})
        alter_topic(config, topic, cleanup__policy="compact")
        wait_until(lambda: "are right again" in caplog.text and problems() == 0)
    assert contents(elsewhere(config, tmp_path / "elsewhere", CHANGELOG))[0]["totals"] == {b"a": b"1", b"b": b"2"}


def test_a_checkpoint_topic_that_may_lose_checkpoints(config: JobConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Commits stop while brokers may delete the only record of what is current, and go on once the setting is right."""
    topic = config.checkpoint_topic
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        task.commit({"orders-0": 1})
        alter_topic(config, topic, cleanup__policy="compact,delete")
        wait_until(lambda: bool(errors(caplog, topic)))
        write(task, {b"b": b"2"})
        with pytest.raises(TopicMisconfigured, match=r"cleanup\.policy is compact,delete") as refused:
            task.commit({"orders-0": 2})
        assert "kafka-configs.sh" in str(refused.value.hint)
        alter_topic(config, topic, cleanup__policy="compact")

        def commits() -> bool:
            try:
                return task.commit({"orders-0": 2}) is not None
            except TopicMisconfigured:
                return False

        wait_until(commits)
    assert contents(config)[0]["totals"] == {b"a": b"1", b"b": b"2"}


def test_topics_whose_leader_may_lack_records(config: JobConfig, caplog: pytest.LogCaptureFixture) -> None:
    """An unclean election takes back what was acknowledged. A start names the topic and the command, and the commits of
    an owner that runs stop while the checkpoint topic may lose its newest records."""
    setting = "unclean.leader.election.enable"
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.commit({"orders-0": 1})
        alter_topic(config, config.checkpoint_topic, **{setting: "true"})
        wait_until(lambda: bool(errors(caplog, config.checkpoint_topic, setting)))
        write(task, {b"a": b"1"})
        with pytest.raises(TopicMisconfigured, match=r"unclean\.leader\.election\.enable is true and must be false"):
            task.commit({"orders-0": 2})
    for topic in (config.checkpoint_topic, config.stores["totals"].changelog_topic):
        alter_topic(config, topic, **{setting: "true"})
        with StateManager(config) as manager, pytest.raises(TopicMisconfigured) as caught:
            manager.open_task(TASK)
        assert caught.value.where["topic"] == topic
        assert f"--add-config {setting}=false" in str(caught.value.hint)
        alter_topic(config, topic, **{setting: "false"})
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.commit({"orders-0": 2})
