"""Topics that are not as the job left them: deleted, truncated, misconfigured, or written to by others."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from statemgr import JobConfig, StateManager
from statemgr.errors import (
    CorruptRecord,
    MissingState,
    PermissionNeeded,
    StatemgrError,
    TopicMisconfigured,
    UnavailableError,
)
from statemgr.model.checkpoint import ChangelogMarker
from statemgr.phases import Phase
from tests.commits import TASK, commit, current, failing, totals
from tests.jobs import DUAL, INTERVALS, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import client, committed, delete_records, make_topic, recreate, send, state_of, wait_until
from tests.servers import KafkaServer, S3Server


def job(kafka: KafkaServer, directory: Path, **more: object) -> JobConfig:
    """A dual-commit job."""
    return JobConfig.from_mapping(job_mapping(kafka, directory, **more))  # type: ignore[arg-type]


def delete_topic(config: JobConfig, topic: str) -> None:
    """Delete a topic and wait until it is gone."""
    admin = client(config)
    admin.delete_topics([topic])[topic].result(30)
    wait_until(lambda: topic not in admin.list_topics(timeout=60).topics)


def refused(config: JobConfig, error: type[StatemgrError], match: str | None = None) -> StatemgrError:
    """Check that opening the task fails with this error and a hint. Returns the error."""
    with StateManager(config) as manager, pytest.raises(error, match=match) as caught:
        manager.open_task(TASK)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("evidence", ["local", "blobs", "changelog"])
def test_a_deleted_checkpoint_topic_is_no_empty_start(kafka: KafkaServer, tmp_path: Path, evidence: str) -> None:
    """FAULT 17, A16, protocol 6, invariant 8: as long as any state remains, an empty start needs permission."""
    backup = {"local": ["kafka-changelog"], "blobs": ["blob-store"], "changelog": ["kafka-changelog"]}[evidence]
    config = job(kafka, tmp_path, backup=backup)
    commit(config, {b"a": b"1"}, 1)
    if evidence != "local":
        config = elsewhere(config, tmp_path / "other", backup)
    delete_topic(config, config.checkpoint_topic)
    error = refused(config, PermissionNeeded)
    assert "allow_empty_start=True" in str(error)
    if evidence != "changelog":
        # the topic was not even created, so a second try is refused for the same reason
        assert config.checkpoint_topic not in client(config).list_topics(timeout=60).topics
    refused(config, PermissionNeeded)
    with (
        StateManager(config) as manager,
        manager.open_task(TASK, allow_empty_start=True, overwrite_changelog=evidence != "blobs") as task,
    ):
        assert dict(task.store("totals").range()) == {}
        task.store("totals").put(b"b", b"2")
        task.commit({"orders-0": 2})
    # the permission was for one start only, and the old records on the changelog have been deleted
    assert totals(config, backup[0])[TASK] == {b"b": b"2"}
    if backup == ["kafka-changelog"]:
        assert state_of(committed(config, config.stores["totals"].changelog_topic)) == {b"b": b"2"}


@pytest.mark.parametrize("kind", INTERVALS)
@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.long)])
def test_a_lost_record_of_one_task_is_no_empty_start(
    kafka: KafkaServer, s3: S3Server, tmp_path: Path, where: str, kind: str
) -> None:
    """FAULT 50, invariant 8: after the topic was recreated and another task committed, the task's blobs show that it
    had state."""
    backend = "blob-store"
    config = job(kafka, tmp_path, backup=[backend], kind=kind, tasks=2, s3=s3 if where == "s3" else None)
    both = ("Partition 0", "Partition 1")
    for number, task in enumerate(both):
        commit(config, {b"key": task.encode()}, {f"orders-{number}": 10}, task)
    recreate(config, config.checkpoint_topic)
    first, second = (elsewhere(config, tmp_path / name, backend) for name in ("first", "second"))
    commit(first, {b"key": b"again"}, {"orders-0": 11}, both[0], allow_empty_start=True)

    with StateManager(second) as manager, pytest.raises(PermissionNeeded, match="published blob") as caught:
        manager.open_task(both[1])
    assert caught.value.where["task"] == both[1]
    with StateManager(second) as manager, pytest.raises(PermissionNeeded, match="published blob"):
        manager.acquire()
    # blobs of the other task, or of an attempt that was never published, are no evidence
    new = with_changes(second, job__name=f"{config.job_name}-new")
    with failing(Phase.SEND_CHECKPOINT), pytest.raises(UnavailableError):
        commit(new, {b"key": b"1"}, {"orders-1": 1}, both[1])
    commit(new, {b"key": b"1"}, {"orders-0": 1}, both[0])
    commit(new, {b"key": b"2"}, {"orders-1": 1}, both[1])
    assert totals(new, backend) == {both[0]: {b"key": b"1"}, both[1]: {b"key": b"2"}}
    # with the permission the task starts empty
    commit(second, {b"other": b"1"}, {"orders-1": 1}, both[1], allow_empty_start=True)
    assert totals(second, backend)[both[1]] == {b"other": b"1"}


def test_a_truncated_checkpoint_topic_is_no_empty_start(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 17: if the topic is there without its records, a start is refused on this machine and on any other."""
    for backend, evidence in (("blob-store", "published blob"), ("kafka-changelog", "records were deleted")):
        config = job(kafka, tmp_path / backend, backup=(backend,))
        commit(config, {b"a": b"1"}, 1)
        delete_records(config, config.checkpoint_topic, -1)
        refused(config, PermissionNeeded)
        refused(elsewhere(config, tmp_path / "other", backend), PermissionNeeded, evidence)


def test_wrong_topic_settings_are_refused_with_the_command(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 18, A18: a wrong cleanup.policy and a wrong number of partitions are refused, and the error names the
    command or the topic."""
    config = job(kafka, tmp_path)
    make_topic(config, config.checkpoint_topic, cleanup__policy="delete")
    error = refused(config, TopicMisconfigured, r"cleanup\.policy")
    assert "kafka-configs.sh" in str(error)
    other = job(kafka, tmp_path)
    make_topic(other, other.stores["totals"].changelog_topic, 3, cleanup__policy="compact")
    error = refused(other, TopicMisconfigured, "3 partitions")
    assert other.stores["totals"].changelog_topic in str(error)


def test_a_foreign_tail_is_left_out_and_overwritten(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 20, protocol 1, invariant 11: foreign records beyond the marker are never part of a restored state, and the
    opening undoes them on the topic."""
    config = job(kafka, tmp_path)
    topic = config.stores["totals"].changelog_topic
    model = {b"kept": b"1", b"changed": b"1", b"deleted": b"1"}
    commit(config, dict(model), 1)
    for number, factory in enumerate(DUAL):
        send(
            config,
            topic,
            [(b"new", b"foreign"), (b"changed", b"foreign"), (b"deleted", None)],
            timestamp_ms=int(time.time() * 1000),
        )
        assert state_of(committed(config, topic)) != model
        target = elsewhere(config, tmp_path / factory, factory)
        with StateManager(target) as manager, manager.open_task(TASK) as task:
            assert task.restored[0].factory == factory
            assert dict(task.store("totals").range()) == model
            assert state_of(committed(config, topic)) == model, "written back with the opening's own checkpoint"
            checkpoint = task.last_checkpoint
            assert checkpoint is not None
            assert (checkpoint.sequence, checkpoint.input_offsets) == (2 + number, {"orders-0": 1})
        assert (b"new", None) in committed(config, topic), "a key that the state lacks gets a tombstone"
        assert totals(config, "kafka-changelog")[TASK] == model


def test_an_old_foreign_tail_cannot_be_rewound(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 20, invariant 11: if compaction may have used the foreign tail, the changelog refuses and the error
    suggests the blob store."""
    config = job(kafka, tmp_path)
    commit(config, {b"a": b"1"}, 1)
    old = int((time.time() - 5 * 3600) * 1000)
    send(config, config.stores["totals"].changelog_topic, [(b"a", b"foreign")], timestamp_ms=old)
    error = refused(elsewhere(config, tmp_path / "x", "kafka-changelog"), MissingState, "rewind")
    assert "blob-store" in str(error)
    both = elsewhere(config, tmp_path / "y", ["kafka-changelog", "blob-store"])
    with StateManager(both) as manager, manager.open_task(TASK) as task:
        assert task.restored[0].factory == "blob-store"
        assert "rewind" in task.restored[0].reasons["kafka-changelog"]
        assert dict(task.store("totals").range()) == {b"a": b"1"}
    assert totals(config, "kafka-changelog")[TASK] == {b"a": b"1"}


def test_an_own_changelog_is_never_ahead_of_its_checkpoint(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 20, protocol 1: after several commits and a failed one, the changelog has no committed record beyond the
    marker."""
    config = job(kafka, tmp_path, task__commit__timeout__ms=5_000)
    topic = config.stores["totals"].changelog_topic
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        for number in range(3):
            task.store("totals").put(b"%d" % number, b"x" * 1000)
            task.commit({"orders-0": number})
        task.store("totals").put(b"uncommitted", b"1")
        task.produce("no-such-topic-" + config.job_name, b"k", b"v")
        with pytest.raises(StatemgrError):
            task.commit({"orders-0": 99})
    record = current(config)
    assert record is not None
    marker = record.current.marker("kafka-changelog", "totals")
    assert isinstance(marker, ChangelogMarker)
    reader = Consumer(
        {
            "bootstrap.servers": config.get("kafka.bootstrap.servers"),
            "group.id": "look",
            "enable.partition.eof": True,
        }
    )
    reader.assign([TopicPartition(topic, 0, marker.offset)])
    try:
        message = reader.poll(20)
        assert message is not None
        assert message.error() is not None, "a committed record beyond the marker"
    finally:
        reader.close()


def test_a_changelog_that_lost_records_is_rebuilt_from_the_other_backend(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 21: if the topic cannot serve the marker, the restore uses another backend or fails with a typed error. A
    recreated changelog is then filled again."""
    config = job(kafka, tmp_path)
    topic = config.stores["totals"].changelog_topic
    spoilers: tuple[Callable[[JobConfig, str], None], ...] = (partial(delete_records, before=1), recreate, delete_topic)
    for number, spoil in enumerate(spoilers):
        commit(
            with_changes(config, state__dir=str(tmp_path / f"m{number}")), {b"%d" % number: b"x", b"a": b"1"}, number
        )
        spoil(config, topic)
        refused(elsewhere(config, tmp_path / f"x{number}", "kafka-changelog"), MissingState)
        both = elsewhere(config, tmp_path / f"y{number}", ["kafka-changelog", "blob-store"])
        with StateManager(both) as manager, manager.open_task(TASK) as task:
            assert task.restored[0].factory == "blob-store"
            assert set(task.restored[0].reasons) == {"kafka-changelog"}
            task.commit({"orders-0": 10 + number})
        expected = {b"a": b"1", **{b"%d" % n: b"x" for n in range(number + 1)}}
        assert totals(config, "blob-store")[TASK] == expected
        if number:  # a topic with deleted records below the marker cannot be replayed until it is recreated
            assert totals(config, "kafka-changelog")[TASK] == expected


def test_a_poison_record_stops_the_start(kafka: KafkaServer, tmp_path: Path) -> None:
    """FAULT 22, A18: the error names topic, partition and offset of the poison record, and the start never uses an
    older record instead."""
    config = job(kafka, tmp_path, backup=("kafka-changelog",))
    commit(config, {b"a": b"1"}, 1)
    send(config, config.checkpoint_topic, [(b"poison", b"poison")])
    error = refused(config, CorruptRecord)
    place = {name: error.where[name] for name in ("topic", "partition", "offset")}
    # the record follows the checkpoint's record and its control record
    assert place == {"topic": config.checkpoint_topic, "partition": 0, "offset": 2}
    refused(elsewhere(config, tmp_path / "x", "kafka-changelog"), CorruptRecord)


def test_output_to_a_topic_that_does_not_exist(kafka: KafkaServer, tmp_path: Path) -> None:
    """A18: the hint says to create the topic with Kafka's tools, and not with a command that makes other topics."""
    config = job(kafka, tmp_path, kafka__producer__topic__metadata__propagation__max__ms=500)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        task.store("totals").put(b"a", b"1")
        missing = f"{config.job_name}-out"
        task.produce(missing, b"k", b"v")
        with pytest.raises(MissingState) as caught:
            task.commit({"orders-0": 1})
        assert caught.value.hint
        assert "create other topics with Kafka's tools" in caught.value.hint
