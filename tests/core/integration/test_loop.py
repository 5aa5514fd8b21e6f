"""The manager's own consumer loop and the README's example, on a real broker."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from confluent_kafka import Message, TopicPartition
from confluent_kafka.admin import AdminClient

from statemgr import JobConfig, StateManager, Task
from statemgr.errors import MissingState
from statemgr.reader import JobReader
from tests.commits import commit
from tests.docs.blocks import blocks
from tests.jobs import contents, elsewhere, job_mapping
from tests.kafka_jobs import wait_until
from tests.loop_members import count, make_topic, member, produce
from tests.servers import KafkaServer

ROOT = Path(__file__).resolve().parents[3]


class Seeing:
    """A process function that counts messages and keeps their values."""

    def __init__(self) -> None:
        self.seen: set[object] = set()

    def __call__(self, task: Task, message: Message) -> None:
        count(task, message)
        self.seen.add(message.value())


def committed_messages(config: JobConfig) -> int:
    """The number of messages that the job has committed, read without disturbing it."""
    try:
        with JobReader(config) as reader:
            return sum(sum(record.current.input_offsets.values()) for record in reader.records().values())
    except MissingState:  # the job has not made its topics yet
        return 0


def counted(config: JobConfig, partitions: int) -> int:
    """The number of messages counted in the published state of all tasks."""
    total = 0
    with StateManager(config) as manager:
        for partition in range(partitions):
            task = manager.open_task(f"Partition {partition}")
            total += sum(int(value) for _, value in task.store("totals").range())
    return total


def test_tasks_move_between_members_without_losing_or_doubling(kafka: KafkaServer, tmp_path: Path) -> None:
    """A second member joins and the first one leaves while messages arrive; every message is counted exactly once."""
    topic, group, partitions = kafka.fresh_name("in"), kafka.fresh_name("group"), 4
    make_topic(kafka, topic, partitions)
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, tasks=partitions, backup=("blob-store",), task__commit__ms=300)
    )
    first, second = Seeing(), Seeing()
    produce(kafka, topic, partitions, range(1000))
    stop_first, first_errors = member(config, group, topic, first)
    wait_until(lambda: len(first.seen) == 1000)
    other = elsewhere(config, tmp_path / "other", "blob-store")
    stop_second, second_errors = member(other, group, topic, second)
    produce(kafka, topic, partitions, range(1000, 2000))
    sent = 2000
    while not second.seen:  # the group takes a moment to give it partitions
        produce(kafka, topic, partitions, [sent])
        sent += 1
    wait_until(lambda: len(first.seen | second.seen) == sent)
    stop_first()
    produce(kafka, topic, partitions, range(sent, sent + 500))
    wait_until(lambda: len(first.seen | second.seen) == sent + 500)
    stop_second()
    assert not first_errors
    assert not second_errors
    checker = elsewhere(config, tmp_path / "check", "blob-store")
    assert counted(checker, partitions) == sent + 500


def test_input_that_is_gone_stops_the_loop(kafka: KafkaServer, tmp_path: Path) -> None:
    """If a checkpoint is before the first or after the last offset of its input, the loop stops and never jumps to
    either end."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(10))
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",)))
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for offset, why in ((3, "retention"), (99, "created again")):
        commit(config, {}, {f"{topic}-0": offset})
        if offset == 3:
            [deleted] = admin.delete_records([TopicPartition(topic, 0, 5)]).values()
            deleted.result(15)
        stop, errors = member(config, group, topic)
        wait_until(lambda errors=errors: bool(errors))
        stop()
        assert isinstance(errors[0], MissingState)
        assert f"offset {offset}, but the topic has offsets 5 to 10" in str(errors[0])
        assert why in str(errors[0].hint)


def test_an_input_topic_that_does_not_exist_is_named(kafka: KafkaServer, tmp_path: Path) -> None:
    """The error names the topic, and the hint is to create it."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=2))
    stop, errors = member(config, kafka.fresh_name("group"), "nobody-made-it")
    wait_until(lambda: bool(errors))
    stop()
    assert isinstance(errors[0], MissingState)
    assert errors[0].where["topic"] == "nobody-made-it"
    assert "create it with 2 partitions" in str(errors[0].hint)


def test_the_example_of_the_readme_runs(kafka: KafkaServer, tmp_path: Path) -> None:
    """The README's ten lines and its job.toml count all messages and stop cleanly on SIGTERM. Its lines for a user's
    own loop also work."""
    program, own_loop = blocks("README.md", "## Ten lines")
    (toml,) = blocks("README.md", "## Ten lines", "toml")
    name, topic = kafka.fresh_name("orders"), kafka.fresh_name("orders-in")
    settings = (
        toml.replace("localhost:9092", kafka.bootstrap_servers)
        .replace('name = "orders"', f'name = "{name}"')
        .replace('inputs = ["orders"]', f'inputs = ["{topic}"]')
        .replace("file:///var/lib/statemgr/blobs", (tmp_path / "blobs").as_uri())
        .replace("commit.ms = 10000", "commit.ms = 300")
    )
    (tmp_path / "job.toml").write_text(settings, encoding="utf-8")
    (tmp_path / "main.py").write_text(program.replace('consumer("orders")', f'consumer("{name}")'))
    make_topic(kafka, topic, 4)
    produce(kafka, topic, 4, range(200))
    child = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path)
    config = JobConfig.from_file(tmp_path / "job.toml", {"state.dir": str(tmp_path / "other")})
    wait_until(lambda: committed_messages(config) == 200)
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    total = sum(
        int(value)
        for partition in range(4)
        for value in contents(config, f"Partition {partition}")[0]["totals"].values()
    )
    assert total == 200
    with StateManager(config) as manager:
        exec(own_loop.replace("orders-0", f"{topic}-0"), {"manager": manager})
    stored, offsets = contents(config, "Partition 0")
    assert (stored["totals"][b"key"], offsets[f"{topic}-0"]) == (b"1", 1234)
