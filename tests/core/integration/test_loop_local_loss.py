"""A consumer loop whose local files are damaged or deleted restores the task in place and counts exactly."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer

from statemgr import JobConfig, StateManager, Task
from statemgr.reader import JobReader
from tests.jobs import ALL, job_mapping
from tests.kafka_jobs import make_topic, make_topics, wait_until
from tests.servers import KafkaServer

KEYS = 400


def count(task: Task, message: Message) -> None:
    """Count messages by key, with values that fill more than one block."""
    key = message.key()
    assert isinstance(key, bytes)
    before = task.store("totals").get(key)
    number = int(before.partition(b" ")[0]) if before else 0
    task.store("totals").put(key, b"%d " % (number + 1) + os.urandom(500))


def produce(config: JobConfig, topic: str, rounds: int = 1) -> None:
    """Produce one message per key and round."""
    producer = Producer({"bootstrap.servers": config.get("kafka.bootstrap.servers")})
    for _ in range(rounds):
        for number in range(KEYS):
            producer.produce(topic, b"1", b"%04d" % number, partition=0)
    assert producer.flush(30) == 0


@contextmanager
def running(config: JobConfig, topic: str, errors: list[BaseException]) -> Iterator[None]:
    """Run a member of the job's group while the block runs."""
    consumer = config.consumer("group-" + config.job_name)
    with StateManager(config) as manager:
        loop = manager.loop(consumer, count, topics=[topic])

        def run() -> None:
            try:
                loop.run()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            loop.stop()
            thread.join(60)
    consumer.close()


def published(config: JobConfig) -> int:
    """Return the published input offset."""
    with JobReader(config) as reader:
        record = reader.records().get("Partition 0")
        return next(iter(record.current.input_offsets.values()), 0) if record else 0


def counts(config: JobConfig) -> set[int]:
    """Return the distinct counts in the published state."""
    with JobReader(config) as reader, reader.open_store("Partition 0", "totals") as store:
        found = dict(store.scan(None, None))
    assert len(found) == KEYS
    return {int(value.partition(b" ")[0]) for value in found.values()}


@pytest.fixture
def job(kafka: KafkaServer, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[JobConfig, str]:
    """Create a job with the backend that the test asks for, and its input topic."""
    factory, kind = request.param
    mapping = job_mapping(
        kafka, tmp_path, backup=(factory,), kind=kind, task__commit__ms=200, stores__totals__write__batch__size=1
    )
    config, topic = JobConfig.from_mapping(mapping), kafka.fresh_name("in")
    make_topic(config, topic)
    make_topics(config)
    return config, topic


@pytest.mark.parametrize(
    "job", [pytest.param(of, marks=() if of == ALL[2] else pytest.mark.long) for of in ALL], indirect=True
)
def test_state_dir_deleted_under_a_loop(job: tuple[JobConfig, str]) -> None:
    """FAULT 47: all local files are deleted again and again while messages arrive. The loop continues and counts every
    message exactly once."""
    config, topic = job
    errors: list[BaseException] = []
    with running(config, topic, errors):
        for turn in range(1, 5):
            produce(config, topic)
            wait_until(lambda done=turn * KEYS: bool(errors) or published(config) >= done)  # type: ignore[misc]
            shutil.rmtree(config.state_dir, ignore_errors=True)
    assert not errors
    assert counts(config) == {4}


@pytest.mark.parametrize(
    "job", [pytest.param(of, marks=() if of == ALL[1] else pytest.mark.long) for of in ALL], indirect=True
)
def test_a_rotten_file_under_a_loop(job: tuple[JobConfig, str]) -> None:
    """FAULT 44: one bit of a table file flips, but its size and time stay. The loop restores the task and continues."""
    config, topic = job
    errors: list[BaseException] = []
    produce(config, topic)
    with running(config, topic, errors):
        wait_until(lambda: bool(errors) or published(config) >= KEYS)
    tables = sorted(config.state_dir.rglob("committed/*/*.sst"), key=lambda path: path.stat().st_size)
    before, content = tables[-1].stat(), bytearray(tables[-1].read_bytes())
    content[len(content) // 2] ^= 1
    tables[-1].write_bytes(content)
    os.utime(tables[-1], ns=(before.st_atime_ns, before.st_mtime_ns))
    with running(config, topic, errors):
        produce(config, topic, 2)
        wait_until(lambda: bool(errors) or published(config) >= 3 * KEYS)
    assert not errors
    assert counts(config) == {3}
