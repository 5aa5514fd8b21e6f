"""`statemgr top` and its read model next to a running job, on a real broker."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from statemgr import JobConfig, StateManager, Task, __version__
from statemgr.cli.main import cli
from statemgr.health import overview
from statemgr.health.diagnosis import Diagnosis
from statemgr.health.overview import JobMonitor
from statemgr.health.problems import Fault
from statemgr.kafka.clients import DEADLINE_S
from statemgr.kafka.transactions.publisher import task_transactional_id
from statemgr.local.machine import this_process
from statemgr.model import codecs
from statemgr.model.checkpoint import Layout
from statemgr.model.checkpoint_records import JobCheckpoint, publish_of, task_part
from tests.cli.test_running_job import write_toml
from tests.jobs import job_mapping, with_changes
from tests.kafka_jobs import a_record, job, make_topic, make_topics, plain_producer, recreate, send, wait_until
from tests.loop_members import delete_topic
from tests.servers import KafkaServer

# one worker, because each would set up the job that the tests of this module share
pytestmark = pytest.mark.xdist_group("top")
SECRET = "hunter2-do-not-show"
Run = Callable[..., Result]


@pytest.fixture
def topic(kafka: KafkaServer) -> str:
    """Return the name of an input topic that no other test uses."""
    return kafka.fresh_name("orders")


def new_job(kafka: KafkaServer, directory: Path, topic: str) -> JobConfig:
    """Create a job of three tasks whose input has two partitions."""
    config = JobConfig.from_mapping(job_mapping(kafka, directory, tasks=3, kafka__ssl__key__password=SECRET))
    make_topic(config, topic, 2)
    produce(config, topic, (7, 3))
    return config


@contextmanager
def started(config: JobConfig, topic: str) -> Iterator[list[Task]]:
    """Run two tasks that have committed: `Partition 0` is 5 messages behind, `Partition 1` is 1 behind."""
    with StateManager(config) as manager:
        tasks = [manager.open_task(f"Partition {number}") for number in range(2)]
        for number, task in enumerate(tasks):
            task.store("totals").put(b"a", b"1")
            task.commit({f"{topic}-{number}": 2})
        yield tasks


@pytest.fixture
def config(kafka: KafkaServer, tmp_path: Path, topic: str) -> JobConfig:
    """Create a job that has not run yet, in `job.toml`."""
    config = new_job(kafka, tmp_path, topic)
    write_toml(config, tmp_path / "job.toml")
    return config


@pytest.fixture
def running(config: JobConfig, topic: str) -> Iterator[list[Task]]:
    """Run the job, for a test that changes it."""
    with started(config, topic) as tasks:
        yield tasks


@pytest.fixture(scope="module")
def shared(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[JobConfig, list[Task]]]:
    """Run the job of all tests that only read."""
    topic = kafka.fresh_name("orders")
    config = new_job(kafka, tmp_path_factory.mktemp("shared"), topic)
    with started(config, topic) as tasks:
        yield config, tasks


@pytest.fixture
def unchanged(shared: tuple[JobConfig, list[Task]], tmp_path: Path) -> list[Task]:
    """Return the tasks of the job of all tests that only read, which is in `job.toml`."""
    config, tasks = shared
    write_toml(config, tmp_path / "job.toml")
    return tasks


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line with the job in `job.toml`."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def produce(config: JobConfig, topic: str, counts: tuple[int, ...]) -> None:
    """Write this many messages to each partition."""
    producer = plain_producer(config)
    for partition, count in enumerate(counts):
        for _ in range(count):
            producer.produce(topic, b"x", partition=partition)
    assert producer.flush(30) == 0


def test_tasks_by_lag_with_owner_and_stage(run: Run, unchanged: list[Task]) -> None:
    """The lag of a task is what its input has after its checkpoint. The task with the highest lag is first."""
    last = unchanged[0].last_checkpoint
    assert last is not None
    topic = next(iter(last.input_offsets)).removesuffix("-0")
    found = json.loads(run("top", "--json").stdout)
    first, second = found["tasks"]
    assert [(task["task"], task["lag"]) for task in (first, second)] == [("Partition 0", 5), ("Partition 1", 1)]
    assert (found["lag"], found["expected"], found["together"]) == (6, 3, False)
    assert found["lags"] == {f"{topic}-0": 5, f"{topic}-1": 1}
    assert first["owner"] == f"{this_process()} (v{__version__})"
    assert first["checkpoint_id"] == str(last.checkpoint_id)
    assert first["stages"] == {"totals": "2"}
    assert first["problems"] == []
    assert found["notes"] == ["1 of 3 tasks have no checkpoint yet"]
    assert 0 <= first["age_s"] <= found["oldest_s"]
    by_task = json.loads(run("top", "--json", "--sort", "task", "--task", "1").stdout)
    assert [task["task"] for task in by_task["tasks"]] == ["Partition 1"]


def test_an_owner_that_is_withheld_is_known_by_its_transactional_id(kafka: KafkaServer, tmp_path: Path) -> None:
    """With `job.owner.published = false` no record names the machine or the process."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, tasks=1, job__owner__published=False))
    with StateManager(config) as manager:
        manager.open_task("Partition 0").commit({"orders-0": 1})
    with JobMonitor(config) as monitor:
        (task,) = monitor.overview().tasks
    assert task.owner == task_transactional_id(config, "Partition 0")


def test_the_job_is_not_disturbed(run: Run, running: list[Task], topic: str) -> None:
    """The owners commit as before, the epoch stays, and the next reading has the new checkpoints."""
    before = json.loads(run("top", "--json").stdout)["tasks"]
    for number, task in enumerate(running):
        task.store("totals").put(b"a", b"2")
        task.commit({f"{topic}-{number}": 3})
    after = json.loads(run("top", "--json").stdout)["tasks"]
    assert [task["lag"] for task in after] == [4, 0]
    assert [task["epoch"] for task in after] == [task["epoch"] for task in before]
    assert after[0]["sequence"] == before[0]["sequence"] + 1


def test_a_process_that_does_not_answer_is_a_problem(run: Run, unchanged: list[Task]) -> None:
    """An address of --metrics at which nothing listens is in the list of faults."""
    found = json.loads(run("top", "--json", "--metrics", "http://127.0.0.1:1/metrics").stdout)
    assert [(one["fault"], one["part"]) for one in found["problems"]] == [
        ("member-stuck", "the process at http://127.0.0.1:1/metrics")
    ]


def test_a_table_for_people_and_no_secret(run: Run, unchanged: list[Task]) -> None:
    """If the output is not a terminal, the command prints all tasks once, and no secret."""
    found = run("top")
    assert found.exit_code == 0
    assert "lag 6" in found.stdout
    assert "Partition 0" in found.stdout
    assert "Partition 1" in found.stdout
    assert SECRET not in found.output


def test_input_that_was_created_again_is_a_problem(
    run: Run, running: list[Task], config: JobConfig, kafka: KafkaServer, topic: str
) -> None:
    """The lag of such a task is unknown, and the task lists the problem."""
    delete_topic(kafka, topic)
    make_topic(config, topic, 2)
    found = json.loads(run("top", "--json").stdout)
    assert found["lag"] is None
    assert [task["lag"] for task in found["tasks"]] == [None, None]
    assert f"{topic} was deleted and created again" in found["tasks"][0]["problems"]


def test_without_a_checkpoint_the_lag_is_unknown(run: Run, config: JobConfig) -> None:
    """Nobody knows where such a job will start to read, so the lag is unknown, not 0."""
    with StateManager(config) as manager:
        manager.open_task("Partition 0")
    found = json.loads(run("top", "--json").stdout)
    assert (found["lag"], found["tasks"]) == (None, [])
    assert "lag ?" in run("top", "--once").stdout


def test_a_thousand_tasks_take_a_few_requests(kafka: KafkaServer, topic: str) -> None:
    """A reading of a thousand tasks costs three requests."""
    config = job(kafka, job__tasks=1000, stores__totals__backup__factories=[])
    make_topics(config)
    make_topic(config, topic, 8)
    records = [a_record(config, n + 1, f"Partition {n}", input_offsets={f"{topic}-{n % 8}": 0}) for n in range(1000)]
    send(config, config.checkpoint_topic, [pair for record in records for pair in codecs.encode_record(record)])
    produce(config, topic, (0, 0, 0, 4))
    with JobMonitor(config) as monitor:
        asked: list[str] = []
        ask = monitor.metadata.ask

        def counting(doing: str, *args: Any, **kwargs: Any) -> Any:
            asked.append(doing)
            return ask(doing, *args, **kwargs)

        monitor.metadata.ask = counting  # type: ignore[method-assign]
        found = monitor.overview()
    assert (len(found.tasks), found.lag) == (1000, 4)
    assert found.ordered("lag")[0].task == "Partition 3"
    assert found.ordered("task")[10].task == "Partition 10"
    assert len(asked) == 3


def test_a_thousand_tasks_that_are_published_together(kafka: KafkaServer, topic: str) -> None:
    """The checkpoint of each task names all thousand partitions. They are compared once."""
    config = job(kafka, job__tasks=1000, stores__totals__backup__factories=[])
    make_topics(config)
    make_topic(config, topic, 1)
    produce(config, topic, (4,))
    sources = {f"{topic}-{n}": 0 for n in range(1000)}
    layout = Layout(0, 1000, "spark-hash(string)")
    records = [
        replace(a_record(config, 1, f"Partition {n}", input_offsets=sources), layout=layout) for n in range(1000)
    ]
    publish, key = publish_of(records[0].current), records[0].key(records[0].current)
    sent = [codecs.encode_job(replace(key, task=""), JobCheckpoint(records[0].layout, publish))]
    sent += [codecs.encode_task(one.key(one.current), task_part(one.current, publish)) for one in records]
    send(config, config.checkpoint_topic, sent)
    compared = 0
    compare = overview._Inputs.compare

    def counting(*arguments: Any) -> Any:
        nonlocal compared
        compared += 1
        return compare(*arguments)

    with JobMonitor(config) as monitor, pytest.MonkeyPatch.context() as patched:
        patched.setattr(overview._Inputs, "compare", counting)
        found = monitor.overview()
    assert compared == 1
    assert found.together
    assert (found.lags[f"{topic}-0"], found.lags[f"{topic}-999"], found.lag) == (4, None, None)
    assert len(json.dumps(asdict(found))) < 1_000_000


def test_a_checkpoint_topic_that_was_created_again(kafka: KafkaServer) -> None:
    """A long-lived monitor reads the new topic, and shows nothing of the old one."""
    config = job(kafka)
    make_topics(config)
    send(config, config.checkpoint_topic, codecs.encode_record(a_record(config, 1)))
    with JobMonitor(config) as monitor:
        assert len(monitor.overview().tasks) == 1
        recreate(config, config.checkpoint_topic)
        found = monitor.overview()
    assert found.tasks == ()
    assert found.oldest_s is None


class Terminal:
    """`statemgr top` in a terminal."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._screen = bytearray()
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "statemgr", "top", *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "24"}
        self.child = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=environment, start_new_session=True
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)

    def shows(self, text: str) -> bool:
        """Whether the text has been on the screen."""
        assert self.child.poll() is None, self._screen.decode()
        with suppress(BlockingIOError):
            while data := os.read(self._ours, 65_536):
                self._screen.extend(data)
        return text.encode() in self._screen

    def close(self) -> None:
        """End the process, even after a failure."""
        self.child.kill()
        self.child.wait()
        os.close(self._ours)


def test_it_refreshes_in_a_terminal_until_ctrl_c(run: Run, running: list[Task], tmp_path: Path, topic: str) -> None:
    """A new commit appears without a new call, and Ctrl-C ends the command with status 0."""
    with closing(Terminal(tmp_path, "--interval", "0.5")) as terminal:
        wait_until(lambda: terminal.shows("Partition 1"))
        running[1].store("totals").put(b"b", b"1")
        checkpoint = running[1].commit({f"{topic}-1": 3})
        wait_until(lambda: terminal.shows(str(checkpoint.checkpoint_id)))
        terminal.child.send_signal(signal.SIGINT)
        assert terminal.child.wait(60) == 0


def test_ctrl_c_does_not_wait_for_a_broker(unchanged: list[Task], tmp_path: Path) -> None:
    """A broker takes connections and never answers. Ctrl-C does not wait until the reading gives up."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"kafka.bootstrap.servers=127.0.0.1:{silent.getsockname()[1]}"
        with closing(Terminal(tmp_path, "--set", address)) as terminal:
            wait_until(lambda: terminal.shows("reading the checkpoint topic"))
            assert silent.accept()
            terminal.child.send_signal(signal.SIGINT)
            assert terminal.child.wait(DEADLINE_S) == 0


def test_a_broker_that_is_gone_is_exit_status_3(
    run: Run, unchanged: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script can see the failure, and nothing is shown as if it were current."""
    monkeypatch.setattr("statemgr.kafka.metadata.DEADLINE_S", 2.0)
    monkeypatch.setattr("statemgr.kafka.metadata.REQUEST_S", 2.0)
    found = run("top", "--once", "--set", "kafka.bootstrap.servers=localhost:1")
    assert found.exit_code == 3
    assert found.stdout == ""


def test_stages_that_the_configuration_asks_for(shared: tuple[JobConfig, list[Task]]) -> None:
    """If the configuration is ahead of the checkpoints, its stage is shown next to theirs."""
    blobs = {"task__backup__factories": ["blob-store"], "task__restore__factories": ["blob-store"]}
    with JobMonitor(with_changes(shared[0], **blobs)) as monitor:
        assert dict(monitor.overview().tasks[0].stages) == {"totals": "2, configured 4"}


def test_the_end_of_a_transaction_in_the_input_is_no_message_that_waits(
    running: list[Task], config: JobConfig, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a transaction counts as lag forever. Only a message for consumers makes a late task stuck."""
    monkeypatch.setattr("statemgr.health.diagnosis.late_ms", lambda *_: -60_000)
    producer = plain_producer(config, f"{topic}-writer")
    producer.begin_transaction()
    producer.produce(topic, b"x", partition=0)
    producer.commit_transaction(30)
    for number, offset in enumerate((8, 3)):  # all messages of both partitions
        running[number].store("totals").put(b"a", b"2")
        running[number].commit({f"{topic}-{number}": offset})
    with JobMonitor(config) as monitor, closing(Diagnosis(monitor)) as diagnosis:
        found = monitor.overview()
        assert found.lag == 1
        assert diagnosis.tasks(found) == []
        assert diagnosis.tasks(found) == [], "it remembers that there is none"
        producer.begin_transaction()
        producer.produce(topic, b"y", partition=0)
        producer.commit_transaction(30)
        wait_until(lambda: [one.fault for one in diagnosis.tasks(monitor.overview())] == [Fault.MEMBER_STUCK])
