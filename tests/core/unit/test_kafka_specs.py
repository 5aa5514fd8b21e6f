"""How a job's topics must be set up, according to its configuration. Needs no broker."""

from __future__ import annotations

import pytest

from statemgr.config import JobConfig
from statemgr.config.contradictions import OWN_TOPIC_SETTINGS
from statemgr.errors import ConfigError
from statemgr.kafka.topics import changelog_topic_specs, checkpoint_topic_spec


def _config(**more: object) -> JobConfig:
    return JobConfig.from_mapping(
        {"job.name": "orders", "blob.store.uri": "file:///blobs"}
        | {key.replace("__", "."): value for key, value in more.items()}
    )


def test_only_stores_with_a_changelog_have_a_topic() -> None:
    """A store without a changelog backup needs no topic, unless it restores from one."""
    config = _config(
        stores__a__type="memory",
        stores__b__backup__factories=["blob-store"],
        stores__c__backup__factories=[],
        stores__d__backup__factories=["blob-store"],
        stores__d__restore__factories=["kafka-changelog", "blob-store"],
    )
    assert [spec.name for spec in changelog_topic_specs(config)] == [
        "orders-1-a-changelog",
        "orders-1-d-changelog",
    ]


def test_the_configuration_decides_partitions_replicas_and_lag() -> None:
    """A changelog has one partition per task. The checkpoint topic has one partition."""
    config = _config(
        job__tasks=5,
        task__checkpoint__replication__factor=3,
        stores__a__changelog__topic="mine",
        stores__a__changelog__min__compaction__lag__ms=7,
    )
    checkpoints, (changelog,) = checkpoint_topic_spec(config), changelog_topic_specs(config)
    assert (checkpoints.partitions, checkpoints.replication_factor) == (1, 3)
    assert checkpoints.config == {
        "cleanup.policy": "compact", "delete.retention.ms": "86400000", "max.message.bytes": "1048588",
    }  # fmt: skip
    assert (changelog.name, changelog.partitions, changelog.replication_factor) == ("mine", 5, 3)
    assert changelog.config["min.compaction.lag.ms"] == "7"


def test_new_topics_have_the_settings_of_the_configuration() -> None:
    """Besides those that statemgr chooses."""
    more = {"task.topics.min.insync.replicas": 2, "task.topics.preallocate": True}
    config = JobConfig.from_mapping({"job.name": "orders", "stores.a.type": "memory", **more})
    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    given = {"min.insync.replicas": "2", "preallocate": "true"}
    assert len(specs) == 2
    assert all(given.items() <= spec.created_with.items() for spec in specs)


@pytest.mark.parametrize("name", OWN_TOPIC_SETTINGS)
def test_a_setting_that_statemgr_chooses_is_refused(name: str) -> None:
    """The protocol depends on it."""
    with pytest.raises(ConfigError, match=f"task.topics.{name} cannot be set"):
        _config(**{f"task.topics.{name}": "1"})


def test_every_setting_that_statemgr_chooses_is_known() -> None:
    """So none is replaced silently."""
    config = _config(stores__a__type="memory")
    specs = [checkpoint_topic_spec(config), *changelog_topic_specs(config)]
    chosen = {name for spec in specs for name in (*spec.config, *spec.created_with, *spec.never)}
    assert chosen == set(OWN_TOPIC_SETTINGS)


def test_more_in_sync_replicas_than_replicas_are_refused() -> None:
    """Nothing could be written."""
    with pytest.raises(ConfigError, match="nothing could be written"):
        _config(task__checkpoint__replication__factor=1, task__topics__min__insync__replicas=2)
