"""The output of a consumer loop on a real broker: its timestamps, and records that its topics do not take."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message

from statemgr import JobConfig, Task
from statemgr.errors import InvalidError, StatemgrError
from statemgr.kafka import output_topics
from statemgr.model.record_size import size_of_batch
from statemgr.phases import Phase
from tests.jobs import job_mapping, with_changes
from tests.kafka_jobs import alter_topic, committed, make_topic, messages, send, wait_until
from tests.loop_members import Process, member, published
from tests.servers import KafkaServer

HOUR_MS = 3_600_000
COUNT = 20


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _job(kafka: KafkaServer, directory: Path, **more: object) -> tuple[JobConfig, str, str]:
    """Return a job with an input topic and an output topic, and the names of both."""
    topic, output = kafka.fresh_name("in"), kafka.fresh_name("out")
    mapping = job_mapping(kafka, directory, backup=["kafka-changelog"], task__commit__ms=100, **more)  # type: ignore[arg-type]
    config = JobConfig.from_mapping(mapping | {"task.inputs": [topic], "task.outputs": [output]})
    make_topic(config, topic)
    return config, topic, output


def _times(config: JobConfig, topic: str) -> list[tuple[bytes | None, int]]:
    return [(found.key(), found.timestamp()[1]) for found in messages(config, topic)]


@pytest.mark.parametrize("in_batches", [False, True])
def test_output_has_the_timestamp_of_its_input(kafka: KafkaServer, tmp_path: Path, in_batches: bool) -> None:
    """A consumer of the output sees the timestamp of the input, also one that the broker gave, or another that
    `produce` was given. Output of a timer has the time of its commit. A topic with LogAppendTime has the broker's."""
    config, topic, output = _job(kafka, tmp_path)
    stamped, appended = kafka.fresh_name("stamped"), kafka.fresh_name("appended")
    make_topic(config, output)
    make_topic(config, stamped, message__timestamp__type="LogAppendTime")
    make_topic(config, appended, message__timestamp__type="LogAppendTime")
    began = _now_ms()
    old = began - 5 * HOUR_MS
    for number in range(COUNT):
        send(config, topic, [(b"%d" % number, b"")], old + number)
    send(config, stamped, [(b"by the broker", b"")], old)
    ((_, by_broker),) = _times(config, stamped)
    assert by_broker >= began

    def one(task: Task, message: Message) -> None:
        task.produce(output, message.key(), None, partition=0)
        task.produce(output, b"given", None, timestamp_ms=old - HOUR_MS)
        task.produce(appended, message.key(), None)

    def batch(task: Task, batch: list[Message]) -> None:
        for found in batch:
            task.produce(output, found.key(), None, timestamp_ms=found.timestamp()[1])
        task.produce(output, b"newest", b"%d" % max(found.timestamp()[1] for found in batch))

    def opened(task: Task) -> None:
        task.every(0.2, lambda task: task.produce(output, b"timer", None))

    functions: dict[str, Any] = {"process": None, "process_batch": batch} if in_batches else {"process": one}
    stop, errors = member(config, kafka.fresh_name("group"), [topic, stamped], on_open=opened, **functions)
    wait_until(lambda: published(config) == {f"{topic}-0": COUNT, f"{stamped}-0": 1})
    wait_until(lambda: b"timer" in dict(committed(config, output)))
    stop()
    assert errors == []
    found = _times(config, output)
    of_inputs = {key: at for key, at in found if key not in (b"given", b"newest", b"timer")}
    assert of_inputs == {b"by the broker": by_broker} | {b"%d" % number: old + number for number in range(COUNT)}
    assert all(began <= at <= _now_ms() for key, at in found if key == b"timer")
    if in_batches:
        newest = [record for record in messages(config, output) if record.key() == b"newest"]
        assert newest
        assert [record.timestamp()[1] for record in newest] == [int(record.value() or b"") for record in newest]
    else:
        assert {at for key, at in found if key == b"given"} == {old - HOUR_MS}
        assert all(began <= at <= _now_ms() for _, at in _times(config, appended))


@pytest.mark.parametrize(
    "phase",
    [
        Phase.PREPARED,
        Phase.SEND_CHECKPOINT,
        Phase.ACKNOWLEDGED,
        pytest.param(Phase.COMMIT_TRANSACTION, marks=pytest.mark.long),
    ],
)
def test_a_killed_process_changes_no_timestamp(kafka: KafkaServer, tmp_path: Path, phase: Phase) -> None:
    """A process is killed between the preparation of a commit and its end. The next owner settles it, and a consumer
    sees the output of each message once, with the timestamp of the message."""
    config, topic, output = _job(kafka, tmp_path)
    config = with_changes(config, kafka__consumer__session__timeout__ms=6000)
    make_topic(config, output)
    old = _now_ms() - 5 * HOUR_MS
    for number in range(COUNT):
        send(config, topic, [(b"k", b"%d" % number)], old + number)
    group = kafka.fresh_name("group")
    first = Process.start(config, group, topic, tmp_path / "first.log", output=output, dies_at=phase.value)
    wait_until(lambda: first.child.poll() is not None)
    first.child.communicate()
    assert f"phase {phase.value}" in first.lines()
    second = Process.start(config, group, topic, tmp_path / "second.log", output=output)
    try:
        second.wait_for(lambda lines: f"phase {Phase.OPEN.value}" in lines)
        wait_until(lambda: published(config) == {f"{topic}-0": COUNT})
        assert second.terminate()[1] is None
    finally:
        second.kill()
    assert _times(config, output) == [(b"%d" % number, old + number) for number in range(COUNT)]


#: A record that its topic refuses → the settings of the topic, and arguments of ``produce``.
REFUSED: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
    "an unknown partition": ({}, {"partition": 1}),
    "without a key": ({"cleanup.policy": "compact"}, {"key": None}),
    "too large": ({"max.message.bytes": "20000"}, {"value": bytes(20_000)}),
    "too old": ({"message.timestamp.before.max.ms": str(HOUR_MS)}, {}),
    "too new": ({}, {"timestamp_ms": 2 * HOUR_MS}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_output_that_its_topic_refuses_fails_in_process(kafka: KafkaServer, tmp_path: Path, why: str) -> None:
    """J1.9: `produce` raises what the commit would raise, so the code can put such a record elsewhere, and the loop
    goes on."""
    settings, given = REFUSED[why]
    config, topic, output = _job(kafka, tmp_path)
    rejected, refused = kafka.fresh_name("rejected"), list[InvalidError]()
    make_topic(config, output, **{name.replace(".", "__"): value for name, value in settings.items()})
    make_topic(config, rejected)
    now = _now_ms()
    at_ms = now + given["timestamp_ms"] if "timestamp_ms" in given else None
    arguments = {"key": b"k", "value": b"v"} | given | ({} if at_ms is None else {"timestamp_ms": at_ms})
    send(config, topic, [(b"bad", b"")], now - 2 * HOUR_MS)
    send(config, topic, [(b"good", b"")])

    def process(task: Task, message: Message) -> None:
        if message.key() == b"good":
            task.produce(output, b"k", b"good")
            return
        try:
            task.produce(output, **arguments)
        except InvalidError as error:
            refused.append(error)
            task.produce(rejected, message.key(), None)

    stop, errors = member(config, kafka.fresh_name("group"), topic, process)
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 2})
    stop()
    assert errors == []
    assert [error.where["topic"] for error in refused] == [output]
    assert refused[0].hint
    assert committed(config, output) == [(b"k", b"good")]
    assert committed(config, rejected) == [(b"bad", None)]


def test_the_largest_record_that_a_topic_takes(kafka: KafkaServer, tmp_path: Path) -> None:
    """J1.9: `produce` takes exactly what the broker takes, headers included."""
    config, topic, output = _job(kafka, tmp_path)
    limit, headers, sizes = 20_000, [("name", b"value"), ("none", None)], list[int]()
    make_topic(config, output, max__message__bytes=str(limit))
    send(config, topic, [(b"k", b"")])

    def process(task: Task, message: Message) -> None:
        for size in range(limit - 200, limit):
            sizes.append(size)
            try:
                task.produce(output, b"key", bytes(size), headers=headers)
            except InvalidError:
                task.owner.output.drop()
                task.produce(output, b"key", bytes(size - 1), headers=headers)
                return

    stop, errors = member(config, kafka.fresh_name("group"), topic, process)
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 1})
    stop()
    assert errors == []
    ((_, value),) = committed(config, output)
    assert len(value or b"") == sizes[-1] - 1
    assert size_of_batch(b"key", value, headers) == limit


def test_a_topic_that_changes_while_the_loop_runs(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J1.9: the topic takes less than at the start: a commit fails, and after a restart `produce` refuses the record.
    It takes more again: `produce` asks before it refuses."""
    config, topic, output = _job(kafka, tmp_path)
    make_topic(config, output, max__message__bytes="40000")
    refused = list[InvalidError]()

    def process(task: Task, message: Message) -> None:
        try:
            task.produce(output, message.key(), bytes(30_000))
        except InvalidError as error:
            refused.append(error)

    group = kafka.fresh_name("group")
    stop, errors = member(config, group, topic, process)
    send(config, topic, [(b"1", b"")])
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 1})
    alter_topic(config, output, max__message__bytes="20000")
    send(config, topic, [(b"2", b"")])
    wait_until(lambda: bool(errors))
    stop()
    (error,) = errors
    assert isinstance(error, StatemgrError)
    assert error.where["topic"] == output
    assert refused == []

    stop, errors = member(config, group, topic, process)
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 2})
    assert len(refused) == 1
    alter_topic(config, output, max__message__bytes="40000")
    monkeypatch.setattr(output_topics, "LOOK_EVERY_S", 0.0)
    send(config, topic, [(b"3", b"")])
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 3})
    stop()
    assert errors == []
    assert len(refused) == 1
    assert [key for key, _ in committed(config, output)] == [b"1", b"3"]
