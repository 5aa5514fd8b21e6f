"""Input that other software writes in transactions: the ends are no messages, and an open one holds up the rest."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer, TopicPartition

from statemgr import JobConfig, StateManager, Task
from statemgr.consumer import loop, loop_log
from statemgr.engine import input_lag
from statemgr.engine.input_lag import InputLag, Reached
from statemgr.errors import MissingState
from statemgr.health import diagnosis
from statemgr.health.checks import Report, check_job
from statemgr.health.overview import JobMonitor, JobOverview
from statemgr.health.problems import Fault, Problem
from statemgr.kafka.transactions import held_up
from tests.jobs import job_mapping, with_changes
from tests.kafka_jobs import plain_producer, wait_until
from tests.loop_members import count, make_topic, member
from tests.servers import KafkaServer


@pytest.fixture
def topic(kafka: KafkaServer) -> str:
    """Create an input topic with one partition."""
    name = kafka.fresh_name("in")
    make_topic(kafka, name, 1)
    return name


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path) -> JobConfig:
    """Return a job of one task."""
    return JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=1, task__commit__ms=200))


@pytest.fixture
def writer(config: JobConfig, topic: str) -> Producer:
    """Return a producer of transactions."""
    return plain_producer(config, f"{topic}-writer")


def write(writer: Producer, topic: str, messages: int, end: str = "commit") -> None:
    """Write messages in one transaction, and commit it, abort it, or leave it open."""
    writer.begin_transaction()
    for _ in range(messages):
        writer.produce(topic, b"x", key=b"k", partition=0)
    assert writer.flush(30) == 0
    if end == "commit":
        writer.commit_transaction(30)
    elif end == "abort":
        writer.abort_transaction(30)


def overview(config: JobConfig) -> JobOverview | None:
    """Return what `top` shows; None before the first checkpoint."""
    try:
        with JobMonitor(config) as monitor:
            found = monitor.overview()
            return found if found.tasks else None
    except MissingState:
        return None


def group_lag(config: JobConfig, group: str, topic: str) -> int:
    """Return the lag that lag tools and autoscalers compute: the end of the log without the group's offset."""
    consumer = config.consumer(group)
    try:
        [committed] = consumer.committed([TopicPartition(topic, 0)], timeout=30)
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1]) - committed.offset
    finally:
        consumer.close()


@pytest.mark.parametrize("batches", [False, True], ids=["messages", "batches"])
def test_the_end_of_a_transaction_is_no_lag(
    config: JobConfig, writer: Producer, kafka: KafkaServer, topic: str, batches: bool
) -> None:
    """A consumer has received everything: the lag is 0 in `top`, in the metrics' positions and in the group, after
    messages, and after an aborted transaction of which it receives nothing."""
    write(writer, topic, 3)
    group = kafka.fresh_name("group")
    seen: list[Message] = []

    def process(task: Task, message: Message) -> None:
        count(task, message)
        seen.append(message)

    def process_batch(task: Task, messages: Sequence[Message]) -> None:
        for message in messages:
            process(task, message)

    given = (None, {"process_batch": process_batch}) if batches else (process, {})
    stop, errors = member(config, group, topic, given[0], **given[1])
    wait_until(lambda: len(seen) == 3)
    wait_until(lambda: (found := overview(config)) is not None and found.lag == 0)
    wait_until(lambda: group_lag(config, group, topic) == 0)
    write(writer, topic, 2, "abort")
    wait_until(lambda: (found := overview(config)) is not None and found.lag == 0)
    wait_until(lambda: group_lag(config, group, topic) == 0)
    write(writer, topic, 1)
    wait_until(lambda: len(seen) == 4)
    stop()
    assert not errors
    found = overview(config)
    assert found is not None
    assert found.lag == 0
    assert found.tasks[0].lag == 0


def test_an_open_transaction_is_named(
    config: JobConfig,
    writer: Producer,
    kafka: KafkaServer,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is delivered, and nothing lags. `top`, `doctor` and the log say what holds the input up, since when, and
    who has opened the transaction. When it has ended, the list is empty again."""
    config = with_changes(config, task__inputs=[topic])
    for module in (input_lag, loop):
        monkeypatch.setattr(module, "ASK_EVERY_S", 0.1)
    for module, name, value in ((held_up, "LONG_MS", 500), (diagnosis, "LONG_MS", 500), (loop_log, "LONG_S", 0.5)):
        monkeypatch.setattr(module, name, value)
    write(writer, topic, 1)
    with JobMonitor(config) as monitor, closing(diagnosis.Diagnosis(monitor)) as looking:
        stop, errors = member(config, kafka.fresh_name("group"), topic)
        wait_until(lambda: overview(config) is not None)
        with caplog.at_level(logging.WARNING):
            write(writer, topic, 2, "open")
            plain = plain_producer(config)
            plain.produce(topic, b"y", key=b"k", partition=0)
            assert plain.flush(30) == 0

            def problems() -> list[Problem]:
                return [one for one in looking.tasks(monitor.overview()) if one.fault is Fault.INPUT_HELD_UP]

            wait_until(lambda: bool(problems()))
            [problem] = problems()
            assert problem.part == f"{topic}-0"
            assert "open at offset 2" in problem.detail
            assert "3 offsets" in problem.detail
            assert f"transactional ID {topic}-writer" in problem.detail
            found = monitor.overview()
            assert (found.lag, found.open) == (0, {f"{topic}-0": (2, 5)})
            assert [one.fault for one in looking.tasks(found)] == [Fault.INPUT_HELD_UP], "and nobody is stuck"
            wait_until(lambda: "receives nothing of" in caplog.text)
        report = Report()
        check_job(report, config, ())
        assert [(one.check, f"{topic}-writer" in one.detail) for one in report.findings if one.fix] == [("input", True)]
        writer.abort_transaction(30)
        wait_until(lambda: problems() == [])
        wait_until(lambda: monitor.overview().lag == 0)
        stop()
        assert not errors


@pytest.mark.long
def test_the_metrics_count_what_can_be_received(
    config: JobConfig, writer: Producer, kafka: KafkaServer, topic: str
) -> None:
    """The lag ends where an open transaction begins, and another metric says how long it has been open."""
    write(writer, topic, 3)
    write(writer, topic, 2, "open")
    with StateManager(config) as manager:
        lag = InputLag(manager._services, lambda: [Reached("Partition 0", topic, 0, 1)])
        labels = ("Partition 0", topic, "0")
        wait_until(lambda: lag.series() == [(labels, 3.0)])
        wait_until(lambda: lag.held_up()[0][1] > 0)
        assert lag.blocked() == [], "there is something to receive before it"
        lag.close()
    writer.abort_transaction(30)


def test_input_that_keeps_arriving_is_not_held_up(
    config: JobConfig, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives between two questions is no open transaction: a broker that then hangs would be called so for as
    long as it hangs."""
    monkeypatch.setattr(input_lag, "ASK_EVERY_S", 0.0)
    over, made = threading.Event(), plain_producer(config)

    def write_on() -> None:
        while not over.is_set():
            made.produce(topic, b"y", key=b"k", partition=0)
            made.flush(30)

    writing = threading.Thread(target=write_on)
    writing.start()
    try:
        with StateManager(config) as manager:
            lag = InputLag(manager._services, lambda: [Reached("Partition 0", topic, 0, 1 << 40)])
            wait_until(lambda: bool(lag.series()) and lag._ends != {}, 30)
            seen = [dict(lag._held) for _ in range(100) if lag.held_up()]
            lag.close()
    finally:
        over.set()
        writing.join()
    assert [one for one in seen if one] == []
