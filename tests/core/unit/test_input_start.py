"""Where a consumer loop begins an input topic that is new to a task, with ``task.input.start = "latest"``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Message

from statemgr import JobConfig, JobReader, StateManager, Task
from statemgr.errors import MissingState
from statemgr.testing.memory_clients import served
from statemgr.testing.memory_kafka import MemoryBroker
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
    """A job that begins new topics at their end."""
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


def run(config: JobConfig, until: Callable[[list[str]], bool]) -> list[str]:
    """Run the job until ``until`` accepts the messages that it has processed, and return them."""
    seen: list[str] = []

    def process(task: Task, message: Message) -> None:
        seen.append(f"{message.topic()} {(message.value() or b'').decode()}")
        task.store("totals").put(b"count", b"%d" % len(seen))

    with StateManager(config) as manager:
        loop = manager.loop(config.consumer("g"), process)
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


def test_a_topic_that_is_added_begins_at_its_end(broker: MemoryBroker, config: JobConfig) -> None:
    """The topics that the task has read before continue."""
    run(config, lambda seen: offsets(config) == {"in-0": 3})
    broker.append("in", 0, b"k", b"new")
    both = JobConfig.from_mapping(config.to_mapping(), {"task.inputs": ["in", "more"]})
    assert run(both, lambda seen: offsets(both) == {"in-0": 4, "more-0": 3}) == ["in new"]


def test_a_partition_of_a_known_topic_begins_at_its_first_offset(broker: MemoryBroker, config: JobConfig) -> None:
    """A rescale gives a task a partition without an offset. What was written to it before must not be left out."""
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        task.commit({"in-1": 0})
    assert run(config, lambda seen: len(seen) == 3) == ["in old"] * 3


def test_by_default_a_job_begins_at_the_first_offset(config: JobConfig) -> None:
    """Without the key nothing is left out."""
    plain = JobConfig.from_mapping(config.to_mapping(), {"task.input.start": "earliest"})
    assert run(plain, lambda seen: len(seen) == 3) == ["in old"] * 3
