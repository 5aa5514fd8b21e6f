"""Commits that run in parallel with the processing: what waits for them, for how long, and what the metrics report."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message

from statemgr import JobConfig, StateManager, Task
from statemgr.errors import ClosedError, RetryableError, UnavailableError
from statemgr.phases import Phase, observed
from tests.commits import TASK, current, failing, totals, write
from tests.jobs import DUAL, INTERVALS, SEGMENTS, job_mapping
from tests.kafka_jobs import wait_until
from tests.loop_members import count, make_topic, produce
from tests.servers import KafkaServer


class Gate:
    """Blocks the uploads of one task until it is opened, and records which thread took which step."""

    def __init__(self, task: str = TASK) -> None:
        self.task = task
        self.reached = threading.Event()
        self.open = threading.Event()
        self.threads: dict[Phase, set[str]] = {}

    def __call__(self, phase: Phase, subject: str) -> None:
        self.threads.setdefault(phase, set()).add(threading.current_thread().name)
        if phase is Phase.UPLOAD and subject.startswith(self.task):
            self.reached.set()
            assert self.open.wait(60)


@contextmanager
def gate(task: str = TASK) -> Iterator[Gate]:
    """A gate that is open at the end, whatever happens."""
    made = Gate(task)
    with observed(made):
        try:
            yield made
        finally:
            made.open.set()


def sample(manager: StateManager, name: str, **labels: str) -> float:
    """The value of a metric, or 0 if it has none yet."""
    value = manager.metrics.registry.get_sample_value(name, {"job": manager.config.job_name, **labels})
    return value or 0.0


def test_the_work_of_a_commit_is_on_the_threads_meant_for_it(kafka: KafkaServer, tmp_path: Path) -> None:
    """A32: a commit only flushes and makes the checkpoint directory on the caller's thread. Reads, writes and output
    continue during the rest."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    out = kafka.fresh_name("out")
    make_topic(kafka, out, 1)
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        with gate() as closed:
            future = task.commit_async({"orders-0": 1})
            assert closed.reached.wait(30)
            write(task, {b"b": b"1"})
            task.produce(out, b"k", b"v")
            assert dict(task.store("totals").range()) == {b"a": b"1", b"b": b"1"}
            assert not future.done()
            assert task.pending_commit_seconds is not None
            closed.open.set()
            assert future.result(30).input_offsets == {"orders-0": 1}
        assert task.pending_commit_seconds is None
        here = {threading.current_thread().name}
        assert closed.threads[Phase.FLUSH] == closed.threads[Phase.CHECKPOINT_DIR] == here
        for phase in (Phase.DIFF, Phase.UPLOAD, Phase.PUT_INDEX, Phase.BEGIN, Phase.ACKNOWLEDGED, Phase.CLEANED_UP):
            [name] = closed.threads[phase]
            assert name.startswith(f"statemgr-commit-{TASK}"), phase
        task.commit({"orders-0": 2})
    assert totals(config, "blob-store")[TASK] == {b"a": b"1", b"b": b"1"}


def test_an_explicit_commit_waits_and_fails_at_the_timeout(kafka: KafkaServer, tmp_path: Path) -> None:
    """A39: an explicit commit waits for the one in progress, counts as blocked after the delay, and fails at the
    timeout."""
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, task__commit__max__delay__ms=300, task__commit__timeout__ms=1500)
    )
    with StateManager(config) as manager, manager.open_task(TASK) as task:
        write(task, {b"a": b"1"})
        with gate() as closed:
            first = task.commit_async({"orders-0": 1})
            write(task, {b"b": b"1"})
            for _ in range(2):  # the second call finds that the first commit is too old already
                with pytest.raises(RetryableError, match=r"task\.commit\.timeout\.ms = 1500"):
                    task.commit({"orders-0": 2})
            assert not first.done()
            assert sample(manager, "statemgr_commits_blocked_total") == 2
            assert 0.5 < sample(manager, "statemgr_commit_blocked_seconds_total") < 10
            closed.open.set()
            assert first.result(30).input_offsets == {"orders-0": 1}
        task.commit({"orders-0": 3})
        blocked = sample(manager, "statemgr_commits_blocked_total")
        with gate() as closed:
            task.commit_async({"orders-0": 4})
            threading.Timer(0.1, closed.open.set).start()
            write(task, {b"c": b"1"})
            task.commit({"orders-0": 5})
        assert sample(manager, "statemgr_commits_blocked_total") == blocked, "it was younger than the delay"
    for factory in DUAL:
        assert totals(config, factory)[TASK] == {b"a": b"1", b"b": b"1", b"c": b"1"}


@pytest.mark.parametrize("kind", INTERVALS)
def test_metrics_of_a_commit_by_phase(kafka: KafkaServer, tmp_path: Path, kind: str) -> None:
    """B11: metrics report changes, uploaded bytes, the seconds of each phase and the size of segments, and disappear
    with the task."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), kind=kind))
    phases = ("flush", "upload", "publish", "clean-up")
    large = random.Random(0).randbytes(5000)
    with StateManager(config) as manager:
        with manager.open_task(TASK) as task:
            write(task, {b"%d" % n: b"x" * 100 for n in range(50)})
            task.commit({"orders-0": 1})
            assert sample(manager, "statemgr_commit_changes", task=TASK) == 50
            stored = sum(path.stat().st_size for path in (tmp_path / "blobs").rglob("*") if path.is_file())
            assert sample(manager, "statemgr_commit_uploaded_bytes", task=TASK) == stored
            assert all(sample(manager, "statemgr_commit_seconds", task=TASK, phase=phase) > 0 for phase in phases)
            write(task, {b"0": large})
            task.commit({"orders-0": 2})
            assert sample(manager, "statemgr_commit_changes", task=TASK) == 1
            assert sample(manager, "statemgr_commit_uploaded_bytes", task=TASK) > len(large)
            if kind == SEGMENTS:
                assert sample(manager, "statemgr_segments", task=TASK, store="totals") == 1
                grown = sample(manager, "statemgr_segments_bytes", task=TASK, store="totals")
                assert len(large) < grown < len(large) + 1000

            write(task, {b"1": large})
            with failing(Phase.UPLOAD, Phase.PUT_SEGMENTS), pytest.raises(UnavailableError):
                task.commit({"orders-0": 3})
        assert sample(manager, "statemgr_commits_total", outcome="published") == 2
        assert sample(manager, "statemgr_commits_total", outcome="failed") == 1
        names = {found.name for metric in manager.metrics.registry.collect() for found in metric.samples}
        assert not names & {"statemgr_commit_changes", "statemgr_segments", "statemgr_segments_bytes"}


def test_an_error_that_nobody_was_told_is_logged_at_the_close(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A38: no later commit can raise the error of the last commit, so the close logs it."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path))
    with StateManager(config) as manager:
        task = manager.open_task(TASK)
        write(task, {b"a": b"1"})
        with failing(Phase.UPLOAD), caplog.at_level(logging.ERROR, "statemgr"):
            task.commit_async({"orders-0": 1})
            task.close()
        assert "told to" in caplog.text
        assert TASK in caplog.text
        with pytest.raises(ClosedError):
            task.commit({"orders-0": 1})
    assert current(config) is None


def test_what_is_dropped_at_the_close_is_said(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C4: changes that no commit has published are gone after a close, and one line says how many each store
    dropped."""
    stores = ("totals", "index", "unchanged")
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, backup=("blob-store",), kind=SEGMENTS, stores=stores))
    with caplog.at_level(logging.WARNING, "statemgr"), StateManager(config) as manager:
        task = manager.open_task(TASK)
        write(task, {b"a": b"1"}, stores)
        task.commit({"orders-0": 1})
        task.close()
        assert caplog.text == "", "nothing was dropped"
        task = manager.open_task(TASK)
        write(task, {b"a": b"2", b"b": b"2"})
        task.store("totals").get_many([b"a"])
        list(task.store("totals").range())  # one half is written to the database, the other is still buffered
        write(task, {b"c": b"3", b"a": None}, ("totals", "index"))
        task.close()
        [line] = caplog.messages
        assert line.startswith(f"{TASK}: ")
        assert line.endswith("2 of index, 4 of totals")
        caplog.clear()
        with manager.open_task(TASK) as task:
            assert [dict(task.store(name).range()) for name in stores] == [{b"a": b"1"}] * 3
        assert caplog.text == ""


class Opening(StateManager):
    """Counts the tasks that it was asked to open."""

    opened = 0

    def open_task(self, *args: Any, **options: Any) -> Task:
        """Open a task, and count it."""
        self.opened += 1
        return super().open_task(*args, **options)


class Running:
    """A consumer loop in a thread, with the number of messages that it has processed from each partition."""

    def __init__(self, kafka: KafkaServer, config: JobConfig, topic: str) -> None:
        self.manager = Opening(config)
        self.processed: dict[int, int] = {}
        self.error: Exception | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": kafka.bootstrap_servers,
                "group.id": kafka.fresh_name("group"),
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "session.timeout.ms": 6000,
                "max.poll.interval.ms": 6000,
            }
        )
        self.loop = self.manager.loop(self._consumer, self._process, topics=[topic])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _process(self, task: Task, message: Message) -> None:
        count(task, message)
        partition = message.partition()
        assert partition is not None
        self.processed[partition] = self.processed.get(partition, 0) + 1

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """Stop the loop if it has not stopped by itself, and close everything."""
        self.loop.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.manager.close()
        self._consumer.close()

    def ended(self) -> bool:
        """Whether the loop has stopped."""
        return not self._thread.is_alive()

    def has_processed(self, first: int, second: int) -> bool:
        """Whether this many messages of each partition were processed. Raises the loop's error if it has one."""
        if self.error is not None:
            raise self.error
        return self.processed == {0: first, 1: second}


def loop_job(kafka: KafkaServer, directory: Path, **more: object) -> tuple[JobConfig, str]:
    """Two tasks that commit often, and their input topic."""
    topic = kafka.fresh_name("in")
    make_topic(kafka, topic, 2)
    mapping = job_mapping(kafka, directory, backup=("blob-store",), tasks=2, task__commit__ms=100)
    return JobConfig.from_mapping(mapping | more), topic


@pytest.mark.long
def test_a_commit_that_lasts_is_left_out_then_holds_its_task_back(kafka: KafkaServer, tmp_path: Path) -> None:
    """A39: the loop skips periodic commits that fall due during a commit. After the delay the task's input waits, the
    other task continues, and no rebalance follows."""
    config, topic = loop_job(kafka, tmp_path, **{"task.commit.max.delay.ms": 2500})
    with gate() as closed:
        running = Running(kafka, config, topic)
        produce(kafka, topic, 2, range(100))
        assert closed.reached.wait(60)
        produce(kafka, topic, 2, range(100, 200))
        wait_until(lambda: running.has_processed(100, 100))
        wait_until(lambda: sample(running.manager, "statemgr_commits_skipped_total") > 0)
        assert sample(running.manager, "statemgr_commits_blocked_total") == 0
        wait_until(lambda: sample(running.manager, "statemgr_commits_blocked_total") == 1)
        produce(kafka, topic, 2, range(200, 300))
        wait_until(lambda: running.has_processed(100, 150))
        time.sleep(7)  # longer than max.poll.interval.ms
        assert running.has_processed(100, 150)
        assert sample(running.manager, "statemgr_commit_blocked_seconds_total") > 5
        closed.open.set()
        wait_until(lambda: running.has_processed(150, 150))
    assert running.manager.opened == 2
    running.stop()
    assert running.error is None
    state = totals(config, "blob-store")
    assert sum(int(value) for task in state.values() for value in task.values()) == 300
    for partition in range(2):
        record = current(config, f"Partition {partition}")
        assert record is not None
        assert record.current.input_offsets == {f"{topic}-{partition}": 150}


def test_a_commit_that_never_ends_stops_the_loop(kafka: KafkaServer, tmp_path: Path) -> None:
    """A39: after task.commit.timeout.ms the loop fails and names the task."""
    config, topic = loop_job(kafka, tmp_path, **{"task.commit.max.delay.ms": 200, "task.commit.timeout.ms": 2000})
    with gate() as closed:
        running = Running(kafka, config, topic)
        produce(kafka, topic, 2, range(100))
        assert closed.reached.wait(60)
        began = time.monotonic()
        time.sleep(3.5)
        closed.open.set()  # a task can close only after its commit has ended
        wait_until(running.ended)
        assert time.monotonic() - began < 30
    running.stop()
    assert isinstance(running.error, UnavailableError)
    assert "task.commit.timeout.ms = 2000" in str(running.error)
    assert running.error.where["task"] == TASK


def test_the_last_commits_of_all_tasks_run_at_the_same_time(kafka: KafkaServer, tmp_path: Path) -> None:
    """A stop lasts as long as the slowest commit, not as long as all commits together."""
    config, topic = loop_job(kafka, tmp_path, **{"task.commit.ms": 600_000})
    together = threading.Barrier(2, timeout=30)

    def meet(phase: Phase, subject: str) -> None:
        if phase is Phase.UPLOAD:
            together.wait()

    running = Running(kafka, config, topic)
    produce(kafka, topic, 2, range(100))
    wait_until(lambda: running.has_processed(50, 50))
    with observed(meet):
        running.stop()
    assert running.error is None
    assert sum(int(value) for task in totals(config, "blob-store").values() for value in task.values()) == 100


def test_a_failed_last_commit_is_raised_by_the_loop(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A38: at a stop the loop raises the first task's error and logs the errors of the others."""
    config, topic = loop_job(kafka, tmp_path, **{"task.commit.ms": 600_000})
    running = Running(kafka, config, topic)
    produce(kafka, topic, 2, range(100))
    wait_until(lambda: running.has_processed(50, 50))
    with failing(Phase.UPLOAD), caplog.at_level(logging.ERROR, "statemgr"):
        running.stop()
    assert isinstance(running.error, UnavailableError)
    assert "Partition 0" in str(running.error)
    assert "told to, Partition 1" in caplog.text
