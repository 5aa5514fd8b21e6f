"""Where a consumer loop begins its input, with ``task.input.start = "latest"``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, TopicPartition

from statemgr import JobConfig, JobReader, StateManager, Task
from statemgr.consumer import assigned_task
from statemgr.errors import MissingState, UnavailableError
from statemgr.kafka.transactions.publisher import publish_alone
from statemgr.local.machine import SystemClock
from statemgr.model.jobs.permissions import Permissions, Permit
from statemgr.testing.memory_clients import MemoryGroupConsumer, served
from statemgr.testing.memory_kafka import MemoryBroker
from statemgr.testing.memory_log import failure
from tests.kafka_jobs import wait_until

PLACE = "memory:input-start"


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    """A broker in memory with two topics, each with three old messages in its only partition."""
    made = MemoryBroker()
    for topic in ("in", "more"):
        made.create(topic, 1)
        for _ in range(3):
            made.append(topic, 0, b"k", b"old")
    with served(made, PLACE):
        yield made


@pytest.fixture
def config(broker: MemoryBroker, tmp_path: Path) -> JobConfig:
    """A job that begins at the end of its input."""
    return JobConfig.from_mapping(
        {
            "job.name": "j",
            "task.inputs": ["in"],
            "task.input.start": "latest",
            "task.commit.ms": 20,
            "task.checkpoint.replication.factor": 1,
            "stores.totals.type": "memory",
            "state.dir": str(tmp_path),
            "kafka.bootstrap.servers": PLACE,
        }
    )


def offsets(config: JobConfig) -> dict[str, int]:
    """The published input offsets."""
    try:
        with JobReader(config) as reader:
            return dict(reader.checkpoint("Partition 0").input_offsets)
    except MissingState:
        return {}


def run(
    config: JobConfig,
    until: Callable[[list[str]], bool],
    on_open: Callable[[Task], None] | None = None,
    **permissions: bool,
) -> list[str]:
    """Run the job until ``until`` accepts the messages that it has processed, and return them."""
    seen: list[str] = []

    def process(task: Task, message: Message) -> None:
        seen.append(f"{message.topic()} {(message.value() or b'').decode()}")
        task.store("totals").put(b"count", b"%d" % len(seen))

    with StateManager(config) as manager:
        loop = manager.loop(config.consumer("g"), process, on_open=on_open, **permissions)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            wait_until(lambda: until(seen))
        finally:
            loop.stop()
            thread.join(60)
    return seen


def test_a_new_job_begins_at_the_end(broker: MemoryBroker, config: JobConfig) -> None:
    """The first commit, which needs no message, stores the end. After that nothing is left out."""
    assert run(config, lambda seen: offsets(config) == {"in-0": 3}) == []
    broker.append("in", 0, b"k", b"new")
    assert run(config, lambda seen: len(seen) == 1) == ["in new"]


def test_a_topic_that_is_added_begins_at_its_first_offset(broker: MemoryBroker, config: JobConfig) -> None:
    """Only a task without a checkpoint begins at the end: a topic of one may also be new by a rescale or a rollback."""
    run(config, lambda seen: offsets(config) == {"in-0": 3})
    broker.append("in", 0, b"k", b"new")
    both = JobConfig.from_mapping(config.to_mapping(), {"task.inputs": ["in", "more"]})
    seen = run(both, lambda seen: len(seen) == 4)
    assert sorted(seen) == ["in new", "more old", "more old", "more old"]


def test_a_topic_that_was_created_again_begins_at_its_first_offset(broker: MemoryBroker, config: JobConfig) -> None:
    """Also if the opening commits before the loop starts."""
    run(config, lambda seen: offsets(config) == {"in-0": 3})
    broker.delete("in")
    broker.create("in", 1)
    broker.append("in", 0, b"k", b"new")
    assert run(config, lambda seen: len(seen) == 1, allow_skipped_input=True) == ["in new"]


@pytest.mark.parametrize("permission", ["allow_new_stores", "allow_empty_start"])
def test_a_new_job_with_a_permission_begins_at_the_end(config: JobConfig, permission: str) -> None:
    """The opening does not publish a checkpoint without offsets, which would lead to the first offset. The commit that
    stores the end uses up the permission, too."""
    with StateManager(config) as manager, manager.open_task("Partition 0", **{permission: True}):
        assert offsets(config) == {}
    permit = Permit("j", config.job_id, "Partition 0", "token", Permissions(**{permission: True}), 0)
    publish_alone(config, SystemClock(), "permit", config.checkpoint_topic, [(permit.key, permit.value)])
    assert run(config, lambda seen: offsets(config) == {"in-0": 3}, **{permission: True}) == []
    with JobReader(config) as reader:
        assert reader.records()
        assert reader.permits() == ()


def test_the_first_commit_follows_at_once(broker: MemoryBroker, config: JobConfig) -> None:
    """However long the time between commits is: a process that dies before it would leave out more."""
    slow = JobConfig.from_mapping(config.to_mapping(), {"task.commit.ms": 600_000})
    assert run(slow, lambda seen: offsets(config) == {"in-0": 3}) == []


def test_the_first_commit_is_repeated_at_once(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, it does not wait for the next periodic commit."""
    slow = JobConfig.from_mapping(config.to_mapping(), {"task.commit.ms": 600_000})
    begin, failed = Task.commit_async, list[int]()

    def once(self: Task, *arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(1)
            raise UnavailableError("a broker restarts")
        return begin(self, *arguments, **options)

    monkeypatch.setattr(Task, "commit_async", once)
    monkeypatch.setattr(assigned_task, "_AGAIN_S", 0.1)
    assert run(slow, lambda seen: offsets(config) == {"in-0": 3}) == []
    assert failed


def test_all_inputs_begin_at_their_end(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the client begins to fetch one of them after commits were due. A checkpoint has the offsets of both."""
    both = JobConfig.from_mapping(config.to_mapping(), {"task.inputs": ["in", "more"]})
    seek, refused = MemoryGroupConsumer.seek, list[dict[str, int]]()

    def late(self: MemoryGroupConsumer, at: TopicPartition) -> None:
        if at.topic == "more" and len(refused) < 20:
            refused.append(offsets(both))
            raise failure(KafkaError._STATE, "Erroneous state")
        seek(self, at)

    monkeypatch.setattr(MemoryGroupConsumer, "seek", late)

    def write(task: Task) -> None:
        task.store("totals").put(b"opened", b"1")

    seen = run(both, lambda seen: "old" in str(seen) or offsets(both) == {"in-0": 3, "more-0": 3}, write)
    assert seen == []
    assert refused == [{}] * 20


def test_by_default_a_job_begins_at_the_first_offset(config: JobConfig) -> None:
    """Without the key nothing is left out."""
    plain = JobConfig.from_mapping(config.to_mapping(), {"task.input.start": "earliest"})
    assert run(plain, lambda seen: len(seen) == 3) == ["in old"] * 3
