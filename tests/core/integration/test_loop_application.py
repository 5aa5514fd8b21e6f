"""Batches, serdes and timers of the consumer loop, on a real broker."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer

from statemgr import InputMessage, JobConfig, Task
from statemgr.errors import CorruptRecord, LocalStateLost
from statemgr.reader import JobReader
from tests.jobs import contents, elsewhere, job_mapping
from tests.kafka_jobs import wait_until
from tests.loop_members import Process, count, make_topic, member, produce, published
from tests.servers import KafkaServer

Start = Callable[..., tuple[Callable[[], None], list[Exception]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts members, and stops the members that a failed test leaves running."""
    stops: list[Callable[[], None]] = []

    def begin(*arguments: Any, **options: Any) -> tuple[Callable[[], None], list[Exception]]:
        stop, errors = member(*arguments, **options)
        stops.append(cache(stop))
        return stops[-1], errors

    yield begin
    for stop in stops:
        stop()


class Batches:
    """Counts messages, and checks that each batch has at most ``most`` messages of one task, in the order of each
    partition."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []
        self.seen: set[object] = set()

    def __call__(self, task: Task, messages: Sequence[Message]) -> None:
        assert 0 < len(messages) <= self.most
        ends: dict[str | None, int] = {}
        for message in messages:
            assert task.name == f"Partition {message.partition()}"
            offset = message.offset()
            assert offset is not None
            assert ends.get(message.topic(), -1) < offset
            ends[message.topic()] = offset
            count(task, message)
            self.seen.add(message.value())
        self.sizes.append(len(messages))


def counted(config: JobConfig, tasks: int) -> int:
    """The number of messages counted in the published state."""
    states = [contents(config, f"Partition {task}")[0] for task in range(tasks)]
    return sum(int(value) for state in states for value in state["totals"].values())


def test_batches_of_two_topics_move_between_members(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """A second member joins and the first one leaves while batches arrive. Each batch is bounded, of one task and in
    order, and each message counts once."""
    topics, group, partitions = [kafka.fresh_name("in"), kafka.fresh_name("in")], kafka.fresh_name("group"), 2
    for topic in topics:
        make_topic(kafka, topic, partitions)
        produce(kafka, topic, partitions, range(1000))
    mapping = job_mapping(
        kafka, tmp_path, tasks=partitions, backup=("blob-store",), task__commit__ms=300, task__batch__messages=70
    )
    config = JobConfig.from_mapping(mapping)
    first, second = Batches(70), Batches(70)
    stop_first, first_errors = start(config, group, topics, None, process_batch=first)
    wait_until(lambda: len(first.seen) == 1000 and sum(first.sizes) == 2000)
    other = elsewhere(config, tmp_path / "other", "blob-store")
    stop_second, second_errors = start(other, group, topics, None, process_batch=second)
    sent = 1000
    while not second.seen:  # the group takes a moment to give it a partition
        for topic in topics:
            produce(kafka, topic, partitions, range(sent, sent + 50))
        sent += 50
    stop_first()
    for topic in topics:
        produce(kafka, topic, partitions, range(sent, sent + 500))
    sent += 500
    wait_until(lambda: sum(published(config).values()) == 2 * sent)
    stop_second()
    assert first_errors == second_errors == []
    assert first.seen | second.seen == {b"%d" % number for number in range(sent)}
    assert max(first.sizes) > 1
    assert counted(elsewhere(config, tmp_path / "check", "blob-store"), partitions) == 2 * sent


def test_a_stop_waits_for_one_batch(kafka: KafkaServer, tmp_path: Path) -> None:
    """After a SIGTERM in the middle of a batch, the batch is finished and committed, and no other one starts."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(60))
    mapping = job_mapping(kafka, tmp_path, backup=("blob-store",), task__batch__messages=10)
    config = JobConfig.from_mapping(mapping)
    child = Process.start(config, group, topic, tmp_path / "member.log", in_batches=True, slow=0.2)
    try:
        child.wait_for(lambda lines: any(line.startswith(topic) for line in lines))
        _, error = child.terminate()
    finally:
        child.kill()
    assert error is None
    done = [line for line in child.lines() if line.startswith(topic)]
    sizes = [int(line.split()[1]) for line in child.lines() if line.startswith("batch ")]
    assert done == [f"{topic} 0 {offset}" for offset in range(len(done))]
    assert len(done) == sum(sizes) < 60
    state, offsets = contents(config)
    assert offsets == {f"{topic}-0": len(done)}
    assert sum(int(value) for value in state["totals"].values()) == len(done)


def test_a_batch_that_fails_is_not_committed(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """The error has the place of the batch, and the next start counts each message once."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(10))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__commit__ms=100))

    def fail(task: Task, messages: Sequence[Message]) -> None:
        for message in messages:
            count(task, message)
            if message.value() == b"15":
                raise ValueError("poison")

    stop, errors = start(config, group, topic, None, process_batch=fail)
    wait_until(lambda: published(config) == {f"{topic}-0": 10})
    produce(kafka, topic, 1, range(10, 20))
    wait_until(lambda: bool(errors))
    stop()
    assert isinstance(errors[0], ValueError)
    [note] = errors[0].__notes__
    assert note.startswith(f"while processing task=Partition 0, batch={topic}-0 from 1")
    assert 10 <= published(config)[f"{topic}-0"] <= 15
    stop, errors = start(config, group, topic, None, process_batch=Batches(500))
    wait_until(lambda: published(config) == {f"{topic}-0": 20})
    stop()
    assert errors == []
    assert counted(config, 1) == 20


def test_a_poison_message_stops_the_loop_until_it_is_handled(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """FAULT 22: the error has the message's place. With the documented solution, the message is written to a topic of
    its own in the transaction."""
    topic, dead, group = kafka.fresh_name("in"), kafka.fresh_name("dead"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    make_topic(kafka, dead, 1)
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for value in (json.dumps({"amount": 2}), "{not JSON", json.dumps({"amount": 3})):
        producer.produce(topic, value, "k")
    assert producer.flush(15) == 0
    config = JobConfig.from_mapping(
        job_mapping(
            kafka,
            tmp_path,
            task__commit__ms=100,
            task__input__key__serde="string",
            task__input__value__serde="json",
            stores__totals__key__serde="string",
            stores__totals__value__serde="integer",
        )
    )

    def add(task: Task, message: InputMessage[str, dict[str, int]]) -> None:
        totals, order = task.store("totals"), message.value()
        assert order is not None
        totals.put(message.key(), (totals.get(message.key()) or 0) + order["amount"])

    def careful(task: Task, message: InputMessage[str, dict[str, int]]) -> None:
        try:
            message.value()
        except CorruptRecord as error:
            task.produce(dead, message.raw.key(), message.raw.value(), headers=[("error", str(error).encode())])
        else:
            add(task, message)

    stop, errors = start(config, group, topic, add)
    wait_until(lambda: bool(errors))
    stop()
    assert isinstance(errors[0], CorruptRecord)
    assert errors[0].where == {"topic": topic, "partition": 0, "offset": 1}
    stop, errors = start(config, group, topic, careful)
    wait_until(lambda: published(config) == {f"{topic}-0": 3})
    stop()
    assert errors == []
    totals: dict[Any, Any] = dict(contents(config)[0]["totals"])
    assert totals == {"k": 5}
    [letter] = read(kafka, dead, 1)
    assert (letter.key(), letter.value()) == (b"k", b"{not JSON")
    [(name, reason)] = letter.headers() or []
    assert name == "error"
    assert b"offset=1" in bytes(reason or b"")


def read(kafka: KafkaServer, topic: str, number: int) -> list[Message]:
    """The first committed messages of a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic])
    found: list[Message] = []

    def enough() -> bool:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            found.append(message)
        return len(found) >= number

    wait_until(enough)
    consumer.close()
    return found


class Flushing:
    """Sums messages in memory; a timer writes the sum to the store if it has changed."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self.threads: set[int] = set()
        self.busy = False
        self.opened = 0

    def on_open(self, task: Task) -> None:
        self.opened += 1
        self.sums[task.name] = int(task.store("totals").get(b"sum") or 0)
        task.every(0.05, self.flush)

    def process(self, task: Task, message: Message) -> None:
        with self:
            self.sums[task.name] += 1

    def flush(self, task: Task) -> None:
        with self:
            if task.store("totals").get(b"sum") != (now := b"%d" % self.sums[task.name]):
                task.store("totals").put(b"sum", now)

    def __enter__(self) -> None:
        assert not self.busy, "never in parallel"
        self.busy = True
        self.threads.add(threading.get_ident())

    def __exit__(self, *_: Any) -> None:
        self.busy = False


def test_timers_write_to_stores_and_commits_follow(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """Timers run on the messages' thread, never in parallel with messages. They also run if no message follows, and
    again after a restart."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(500))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__commit__ms=100))

    def written() -> int:
        if not published(config):
            return 0
        with JobReader(config) as reader, reader.open_store("Partition 0", "totals") as store:
            return int(dict(store.scan(None, None)).get(b"sum", 0))

    for round_ in (1, 2):
        application = Flushing()
        stop, errors = start(config, group, topic, application.process, on_open=application.on_open)
        wait_until(lambda done=round_ * 500, errors=errors: bool(errors) or written() == done)  # type: ignore[misc]
        stop()
        assert errors == []
        assert application.opened == 1
        assert len(application.threads) == 1
        produce(kafka, topic, 1, range(500))


def test_a_failing_timer_ends_the_loop(kafka: KafkaServer, tmp_path: Path, start: Start) -> None:
    """The loop raises the timer's error with the task, and the timer's changes are not committed."""
    topic = kafka.fresh_name("in")
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))

    def fail(task: Task) -> None:
        task.store("totals").put(b"k", b"v")
        raise ValueError("a timer failed")

    def on_open(task: Task) -> None:
        task.every(0.01, fail)

    stop, errors = start(config, kafka.fresh_name("group"), topic, count, on_open=on_open)
    wait_until(lambda: bool(errors))
    stop()
    assert isinstance(errors[0], ValueError)
    assert errors[0].__notes__ == ["while processing task=Partition 0"]
    assert contents(config)[0] == {"totals": {}}


@pytest.mark.parametrize("loser", ["timer", "batch"])
def test_a_restored_task_is_announced_again(kafka: KafkaServer, tmp_path: Path, start: Start, loser: str) -> None:
    """If a timer or a batch finds the local state lost, the task is opened again with its own timer, and every message
    counts once."""
    topic = kafka.fresh_name("in")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(10))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__commit__ms=100))
    opened: list[Task] = []
    timed: list[Task] = []

    def lose(what: str) -> None:
        if what == loser and len(opened) == 1 and published(config) == {f"{topic}-0": 10}:
            raise LocalStateLost(f"told to by a {what}")

    def tick(task: Task) -> None:
        timed.append(task)
        lose("timer")

    def on_open(task: Task) -> None:
        opened.append(task)
        task.every(0.01, tick)

    def process_batch(task: Task, messages: Sequence[Message]) -> None:
        for message in messages:
            count(task, message)
        lose("batch")

    stop, errors = start(config, kafka.fresh_name("group"), topic, None, process_batch=process_batch, on_open=on_open)
    wait_until(lambda: bool(errors) or published(config) == {f"{topic}-0": 10})
    produce(kafka, topic, 1, range(10, 20))
    wait_until(lambda: bool(errors) or (published(config) == {f"{topic}-0": 20} and len(opened) == 2))
    wait_until(lambda: bool(errors) or timed[-1:] == opened[1:])
    stop()
    assert errors == []
    assert len(opened) == 2
    assert counted(config, 1) == 20
