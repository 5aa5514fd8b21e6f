"""A consumer loop ends within `task.shutdown.ms`, two seconds and one message of a stop request. The processes and
SIGTERM are real."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Event

import pytest
from confluent_kafka import Message, TopicPartition

from statemgr import JobConfig, StateManager, Task
from statemgr.errors import MissingState, RetryableError
from statemgr.phases import Phase, observed
from tests.commits import commit
from tests.core.integration.s3_proxy import Fault, S3Proxy
from tests.jobs import contents, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.loop_members import Process, count, make_topic, member, produce
from tests.servers import KafkaServer, S3Server

#: Seconds that a stop may take with the default of `task.shutdown.ms`, and
#: extra seconds for a busy machine, where a process starts and ends more slowly.
STOP_S = 5.0
BUSY_S = 2.0
TASK = "Partition 0"

Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start members in separate processes, and kill those that a failed test leaves behind."""
    started: list[Process] = []

    def begin(config: JobConfig, group: str, topic: str, **order: object) -> Process:
        log = tmp_path / f"member-{len(started)}.log"
        started.append(Process.start(config, group, topic, log, **order))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def test_a_stop_and_a_commit_wait_for_one_message(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """FAULT 56: with 40 messages at hand that take half a second each, commits happen on time and a stop is quick."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(40))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), task__commit__ms=1000))
    member = start(config, group, topic, slow=0.5)
    member.wait_for(lambda lines: "phase publish.acknowledged" in lines)
    assert len(member.processed()) < 10, "the first commit came after some of the messages, and not after all"
    seconds, error = member.terminate()
    assert error is None
    assert seconds < STOP_S + 0.5 + BUSY_S
    done = len(member.processed())
    assert done < 40
    state, offsets = contents(config)
    assert offsets == {f"{topic}-0": done}
    assert sum(int(value) for value in state["totals"].values()) == done


@pytest.mark.long
def test_a_slow_member_stays_in_its_group(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """FAULT 56: all messages together take twice max.poll.interval.ms. The member keeps its partition and reads no
    message twice."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(30))
    config = JobConfig.from_mapping(
        job_mapping(
            kafka,
            tmp_path,
            backup=("blob-store",),
            kafka__consumer__session__timeout__ms=6000,
            kafka__consumer__max__poll__interval__ms=6000,
        )
    )
    member = start(config, group, topic, slow=0.4)
    member.wait_for(lambda lines: sum(not line.startswith("phase") for line in lines) == 30)
    _, error = member.terminate()
    assert error is None
    assert member.processed() == [f"{topic} 0 {offset}" for offset in range(30)]
    assert member.lines().count("phase restore.plan") == 1, "the task was opened once"
    assert contents(config)[1] == {f"{topic}-0": 30}


@pytest.mark.parametrize("held", [pytest.param("/index", marks=pytest.mark.long), ".sst"])
def test_a_stop_ends_a_restore(kafka: KafkaServer, s3: S3Server, tmp_path: Path, start: Start, held: str) -> None:
    """FAULT 56: SIGTERM ends a restore that waits for the blob store."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), s3=s3))
    commit(config, {b"k%d" % number: Random(number).randbytes(1000) for number in range(500)}, {f"{topic}-0": 0})
    with S3Proxy(s3.endpoint) as proxy:
        proxy.faults.append(Fault("GET", held, times=100, wait=60))
        slow = with_changes(
            elsewhere(config, tmp_path / "other", "blob-store"), blob__store__s3__endpoint=proxy.endpoint
        )
        member = start(slow, group, topic)
        member.wait_for(lambda _: proxy.faults[0].times < 100)
        seconds, error = member.terminate()
    assert error is None
    assert seconds < STOP_S + BUSY_S
    assert len(contents(config)[0]["totals"]) == 500


def test_a_stop_ends_a_replay(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """FAULT 56: SIGTERM ends a slow replay of a changelog; the next opening restores the complete state."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("kafka-changelog",)))
    rows = {b"k%d" % number: b"1" for number in range(30_000)}
    commit(config, rows, {f"{topic}-0": 0})
    member = start(elsewhere(config, tmp_path / "other", "kafka-changelog"), group, topic, slow_replay=0.5)
    member.wait_for(lambda lines: "phase restore.replay" in lines)
    seconds, error = member.terminate()
    assert error is None
    assert seconds < STOP_S + BUSY_S
    assert "phase restore.swap" not in member.lines(), "the replay was in progress"
    assert contents(elsewhere(config, tmp_path / "other", "kafka-changelog"))[0] == {"totals": rows}


def test_a_stop_ends_a_commit(kafka: KafkaServer, s3: S3Server, tmp_path: Path, start: Start) -> None:
    """FAULT 56: SIGTERM ends a commit that waits for the blob store. The loop raises an error, and the last checkpoint
    stays valid."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), s3=s3, task__commit__ms=200))
    commit(config, {b"before": b"1"}, {f"{topic}-0": 0})
    produce(kafka, topic, 1, range(5))
    with S3Proxy(s3.endpoint) as proxy:
        proxy.faults.append(Fault("PUT", times=100, wait=60))
        slow = with_changes(config, blob__store__s3__endpoint=proxy.endpoint)
        member = start(slow, group, topic)
        member.wait_for(lambda _: any(method == "PUT" for method, _ in proxy.requests))
        seconds, error = member.terminate()
    assert isinstance(error, RetryableError)
    assert seconds < STOP_S + BUSY_S
    state, offsets = contents(config)
    assert state == {"totals": {b"before": b"1"}}
    assert offsets == {f"{topic}-0": 0}


def test_an_error_ends_a_loop_whose_commit_hangs(kafka: KafkaServer, s3: S3Server, tmp_path: Path) -> None:
    """An error of the application reaches the caller within `task.shutdown.ms`, as a stop does."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), s3=s3, task__commit__ms=200))
    produce(kafka, topic, 1, range(1))
    with S3Proxy(s3.endpoint) as proxy:
        proxy.faults.append(Fault("PUT", times=100, wait=120))

        def process(task: Task, message: Message) -> None:
            if message.offset() == 1:
                raise ValueError("the application fails")
            count(task, message)

        stop, errors = member(with_changes(config, blob__store__s3__endpoint=proxy.endpoint), group, topic, process)
        wait_until(lambda: any(method == "PUT" for method, _ in proxy.requests))
        produce(kafka, topic, 1, range(1))
        failed = time.monotonic()
        wait_until(lambda: bool(errors))
        seconds = time.monotonic() - failed
        stop()
    assert isinstance(errors[0], ValueError)
    assert seconds < 30, "of the 120 that the blob store hangs"


def test_a_stop_waits_for_a_slow_commit(kafka: KafkaServer, s3: S3Server, tmp_path: Path, start: Start) -> None:
    """FAULT 56: with a longer `task.shutdown.ms`, the last commit succeeds although each upload takes longer than a
    stop takes by default, and the process ends as soon as it has."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), s3=s3))
    commit(config, {b"before": b"1"}, {f"{topic}-0": 0})
    produce(kafka, topic, 1, range(5))
    with S3Proxy(s3.endpoint) as proxy:
        proxy.faults.append(Fault("PUT", times=100, wait=4))
        slow = with_changes(config, blob__store__s3__endpoint=proxy.endpoint, task__shutdown__ms="60 s")
        member = start(slow, group, topic)
        member.wait_for(lambda _: len(member.processed()) == 5)
        seconds, error = member.terminate()
    assert error is None
    assert 4 < seconds < 30
    assert contents(config)[1] == {f"{topic}-0": 5}


def test_a_loop_does_not_start_without_its_output(kafka: KafkaServer, tmp_path: Path) -> None:
    """J2.21: a declared output topic that does not exist is an error at the start. It names all topics that are
    missing."""
    topic, output = kafka.fresh_name("in"), kafka.fresh_name("out")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__inputs=[topic], task__outputs=[output]))
    with StateManager(config) as manager, pytest.raises(MissingState, match="the output topic does not exist") as error:
        manager.run(config.consumer(kafka.fresh_name("group")), count)
    assert error.value.where["topic"] == output
    more = with_changes(config, task__inputs=[f"{topic}-a", topic, f"{topic}-b"], task__outputs=[output, f"{output}-2"])
    with StateManager(more) as manager, pytest.raises(MissingState) as error:
        manager.run(more.consumer(kafka.fresh_name("group")), count)
    assert error.value.message == "the input topics and the output topics do not exist"
    assert error.value.where["topic"] == f"{topic}-a, {topic}-b, {output}, {output}-2"


def test_a_stop_while_an_output_topic_is_missing(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """J2.21: the work in progress is given up, and the log says how long that really took."""
    topic, output, sent = kafka.fresh_name("in"), kafka.fresh_name("out"), Event()
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(5))

    def process(task: Task, message: Message) -> None:
        task.produce(output, b"k", b"v")

    def observe(phase: Phase, subject: str) -> None:
        if phase is Phase.SEND_CHANGELOG:
            sent.set()

    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__commit__ms=100))
    caplog.set_level("INFO")
    with observed(observe):
        stop, errors = member(config, kafka.fresh_name("group"), topic, process)
        assert sent.wait(60)
        stop()
    assert errors
    [line] = [text for text in caplog.messages if "stopped" in text and "after it was asked to" in text]
    found = re.search(r"stopped ([\d.]+) s after it was asked to.*after running for (\d+) s", line)
    assert found is not None
    assert float(found[1]) < 30
    assert int(found[2]) < 300


def test_an_assignment_that_arrives_after_the_end_opens_nothing(kafka: KafkaServer, tmp_path: Path) -> None:
    """Closing a consumer delivers a pending rebalance. The loop has already ended and takes no task."""
    topic = kafka.fresh_name("in")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    consumer = config.consumer(kafka.fresh_name("group"))
    with StateManager(config) as manager:
        loop = manager.loop(consumer, count, topics=[topic])
        loop.stop()
        loop.run()
        loop._assigned(consumer, [TopicPartition(topic, 0)])
        assert consumer.assignment() == []
    consumer.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_loop_leaves_its_group_although_nobody_closes_the_consumer(
    kafka: KafkaServer, tmp_path: Path, protocol: str
) -> None:
    """The next member gets the tasks at once, and not when the session of the first one has timed out (45 s)."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(5))
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, task__inputs=[topic], kafka__consumer__group__protocol=protocol)
    )
    consumers = [config.consumer(group) for _ in range(2)]
    for consumer in consumers:
        with StateManager(config) as manager:
            loop = manager.loop(consumer, lambda task, message: None)
            thread = threading.Thread(target=loop.run)
            thread.start()
            began = time.monotonic()
            wait_until(lambda loop=loop: any(True for _ in loop._tasks), 60)
            seconds = time.monotonic() - began
            loop.stop()
            thread.join(60)
    for consumer in consumers:
        consumer.close()
    assert seconds < 20
