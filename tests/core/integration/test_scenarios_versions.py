"""Versions of checkpoint records: which are written and read, and older software that runs in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statemgr import JobConfig, StateManager
from statemgr.errors import ConfigError, MissingState
from statemgr.ids import CheckpointId
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.model.codecs import decode_key
from tests.commits import TASK, commit, current, publish_by_hand, published, totals
from tests.jobs import DUAL, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import committed, send
from tests.servers import KafkaServer


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """Create a job that writes both versions."""
    settings = {"task__checkpoint__write__versions": [1, 2], **more}
    return JobConfig.from_mapping(job_mapping(kafka, directory, **settings))  # type: ignore[arg-type]


def older_software(config: JobConfig, key: bytes, value: bytes, offset: int) -> None:
    """Act as software that knows only version 1: append to the changelog, then write a checkpoint."""
    record = current(config)
    assert record is not None
    store = config.stores["totals"]
    send(config, store.changelog_topic, [(key, value)])
    marker = record.current.marker("kafka-changelog", "totals")
    assert isinstance(marker, ChangelogMarker)
    beyond = marker.offset + 2  # a control record lies between
    ours = replace(
        record.current,
        checkpoint_id=CheckpointId(record.current.checkpoint_id.millis + 1, 0),
        input_offsets={"orders-0": offset},
        state_checkpoint_markers={
            "kafka-changelog": {"totals": replace(marker, topic_id=None, offset=beyond)},
        },
    )
    publish_by_hand(config, replace(record, checkpoints=(ours,)), version=1)


def test_both_versions_are_in_one_transaction_with_one_id(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 4, A42: a job that writes versions 1 and 2 writes both at once. One that reads only 2 continues."""
    config = job(kafka, tmp_path, backup=("kafka-changelog",))
    checkpoint = commit(config, {b"a": b"1"}, 1)
    keys = [decode_key(key) for key, _ in committed(config, config.checkpoint_topic) if key is not None]
    assert sorted(key.record_version for key in keys) == [1, 2]
    newer = with_changes(config, task__checkpoint__write__versions=[2], task__checkpoint__read__versions=[2])
    with StateManager(newer) as manager, manager.open_task(TASK) as task:
        assert task.last_checkpoint == checkpoint
        assert dict(task.store("totals").range()) == {b"a": b"1"}


def test_a_newer_version_one_record_wins(kafka: KafkaServer, tmp_path: Path) -> None:
    """Protocol 4, A1, A15, A42: older software ran in between. The job restores from the changelog, and then uploads
    the complete state."""
    config = job(kafka, tmp_path)
    commit(config, {b"a": b"1", b"large": b"x" * 100_000}, 1)
    older_software(config, b"a", b"older", 7)
    with (
        StateManager(elsewhere(config, tmp_path / "x", "blob-store")) as manager,
        pytest.raises(MissingState, match="marker"),
    ):
        manager.open_task(TASK)
    expected = {b"a": b"older", b"large": b"x" * 100_000}
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        assert task.restored[0].factory == "kafka-changelog", "the local directory is of an older state"
        assert task.last_checkpoint is not None
        assert task.last_checkpoint.input_offsets == {"orders-0": 7}
        assert dict(task.store("totals").range()) == expected
        checkpoint = task.commit({"orders-0": 8})
        assert set(checkpoint.state_checkpoint_markers) == set(DUAL), "the blob store was filled anew"
    for factory in DUAL:
        assert totals(config, factory)[TASK] == expected
    # once more: now the version 2 record is the newer one
    with StateManager(elsewhere(config, tmp_path / "y", "blob-store")) as manager, manager.open_task(TASK) as task:
        assert task.last_checkpoint == checkpoint


def test_a_job_that_only_older_software_has_run(kafka: KafkaServer, tmp_path: Path) -> None:
    """A1, A15: the last checkpoint has version 1. Its changelog has the state, and the first commit fills the blobs."""
    first = job(kafka, tmp_path, backup=("kafka-changelog",))
    commit(first, {b"a": b"1"}, 1)
    record = current(first)
    assert record is not None
    # the same job with another checkpoint topic, which has only a version 1 record
    config = with_changes(
        first,
        task__checkpoint__topic=first.job_name + "-older",
        task__backup__factories=list(DUAL),
        task__restore__factories=list(DUAL),
    )
    from tests.kafka_jobs import make_topics

    make_topics(config)
    publish_by_hand(config, record, version=1)
    with (
        StateManager(elsewhere(config, tmp_path / "x", "blob-store")) as manager,
        pytest.raises(MissingState) as caught,
    ):
        manager.open_task(TASK)
    assert "kafka-changelog" in str(caught.value)
    checkpoint = commit(elsewhere(config, tmp_path / "y", list(DUAL)), {b"b": b"2"}, 2)
    assert set(checkpoint.state_checkpoint_markers) == set(DUAL)
    assert published(config, "blob-store") == {TASK: {"totals": {b"a": b"1", b"b": b"2"}}}


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"task.checkpoint.write.versions": [1]}, "task.checkpoint.write.versions"),
        ({"task.checkpoint.write.versions": [1, 2], "task.checkpoint.read.versions": [2]}, "read.versions"),
        ({"task.checkpoint.write.versions": [3]}, "task.checkpoint.write.versions"),
        ({"task.checkpoint.write.versions": [1, 2], "task.backup.factories": ["blob-store"]}, "write.versions"),
    ],
)
def test_version_settings_are_checked_before_the_job_starts(
    kafka: KafkaServer, tmp_path: Path, settings: dict[str, object], key: str
) -> None:
    """A42: versions that could not be read back, or could not name the state, fail at load. The error names the key."""
    mapping = job_mapping(kafka, tmp_path) | settings
    if "task.backup.factories" in settings:
        mapping["task.restore.factories"] = settings["task.backup.factories"]
    with pytest.raises(ConfigError, match=key):
        JobConfig.from_mapping(mapping)
