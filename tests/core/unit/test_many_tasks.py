"""Many tasks in one process: what is asked for once for all of them, and what does not wait for the one before."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Message

from statemgr import JobConfig, StateManager, Task
from statemgr.consumer import assigned_tasks
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.consumer.assigned_tasks import AssignedTasks
from statemgr.consumer.loop import ConsumerLoop
from statemgr.engine.coordinator import UpkeepThread
from statemgr.errors import MissingState, UnavailableError
from statemgr.flows.worker import Worker
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.kafka.checkpoint_assembly import Assembly, Track
from statemgr.kafka.output_topics import OutputTopics
from statemgr.kafka.transactions.publisher import job_transactional_id
from statemgr.local.directories import StoreDirectories
from statemgr.local.machine import Threads
from statemgr.model import codecs
from statemgr.model.checkpoint import CheckpointKey
from statemgr.model.jobs.permissions import NO_PERMISSIONS
from statemgr.ports import TopicInfo
from statemgr.testing.memory_admin import MemoryAdmin
from statemgr.testing.memory_clients import MemoryConsumer, served
from statemgr.testing.memory_kafka import MemoryBroker
from tests.blob_faults import ManualClock
from tests.kafka_jobs import wait_until

TASKS = 40
NAMES = [f"Partition {index}" for index in range(5)]


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    """A broker in memory with the input of a job, one message in each partition."""
    made = MemoryBroker()
    made.create("in", TASKS)
    for partition in range(TASKS):
        made.append("in", partition, b"k", b"v")
    with served(made, "memory:many"):
        yield made


@pytest.fixture
def config(broker: MemoryBroker, tmp_path: Path) -> JobConfig:
    """A job with many tasks."""
    return JobConfig.from_mapping(
        {
            "job.name": "many",
            "job.tasks": TASKS,
            "kafka.bootstrap.servers": "memory:many",
            "state.dir": str(tmp_path),
            "task.backup.factories": ["kafka-changelog"],
            "task.restore.factories": ["kafka-changelog"],
            "task.commit.ms": 600_000,
            "stores.totals.value.serde": "bytes",
        }
    )


def test_the_polling_thread_asks_for_no_partition_alone(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: after the restores, a few requests on another thread ask where all partitions begin and end. The commits of
    all tasks share one question for the topic's ID."""
    asked: list[tuple[str, int]] = []
    offsets, describe = MemoryAdmin.list_offsets, MemoryAdmin.describe_topics

    def list_offsets(self: MemoryAdmin, places: Mapping[Any, Any], *args: Any, **options: Any) -> Any:
        if any(place.topic == "in" for place in places):
            asked.append((threading.current_thread().name, len(places)))
            wait_until(lambda: manager._tasks.condition().open == TASKS)  # the next question is for all others
        return offsets(self, places, *args, **options)

    def describe_topics(self: MemoryAdmin, topics: Any, **options: Any) -> Any:
        described.append(list(topics.topic_names))
        return describe(self, topics, **options)

    described: list[list[str]] = []
    monkeypatch.setattr(MemoryAdmin, "list_offsets", list_offsets)
    monkeypatch.setattr(MemoryAdmin, "describe_topics", describe_topics)
    monkeypatch.setattr(MemoryConsumer, "get_watermark_offsets", None)
    seen: set[str] = set()
    with StateManager(config) as manager:

        def process(task: Task, message: Message) -> None:
            task.store("totals").put(b"k", b"v")
            seen.add(task.name)

        consumer = config.consumer("group")
        loop = manager.loop(consumer, process, topics=["in"])
        thread = threading.Thread(target=loop.run)
        thread.start()
        wait_until(lambda: len(seen) == TASKS or not thread.is_alive())
        loop.stop()
        thread.join(60)
    assert all(name.startswith("statemgr-input-offsets") for name, _ in asked)
    assert sum(count for _, count in asked) == 2 * TASKS, "each partition is asked for its begin and its end once"
    assert len(asked) <= 4
    assert described.count(["in"]) < TASKS / 2


def test_owners_of_the_whole_job_are_fenced_once(broker: MemoryBroker, config: JobConfig) -> None:
    """J1.5: a fence of many tasks takes the ID of the whole job over once, and their openings do not repeat it."""
    with StateManager(config) as manager:
        manager.fence_tasks(NAMES)
        for name in NAMES:
            manager.open_task(name).close()
        assert broker.fence(job_transactional_id(config)).epoch == 1
        manager.open_task(NAMES[0]).close()
        assert broker.fence(job_transactional_id(config)).epoch == 3, "an opening without a fence fences by itself"


class Waiting:
    """A task whose close waits until another one closes, too."""

    def __init__(self, both: threading.Barrier) -> None:
        self.close = lambda leave_copies: both.wait(30)


def test_tasks_close_together(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: a stop does not close one task after the other."""
    monkeypatch.setattr(Task, "close", lambda task, leave_copies: task.close(leave_copies))
    both = threading.Barrier(2)
    with StateManager(config) as manager:
        consumer = config.consumer("group")
        outputs = OutputTopics(config, manager._inputs)
        tasks = AssignedTasks(manager._services, manager, manager._inputs, outputs, consumer, ["in"], NO_PERMISSIONS)
        for index in range(2):
            opening: Future[Any] = Future()
            opening.set_result(Waiting(both))
            tasks._owned[index] = owned = AssignedTask(index, frozenset(), 1, opening, manager.clock, 1.0, 1.0)
            assert owned.restored()
        tasks.shut_down(lambda: False)
    assert not both.broken


def test_a_task_that_fails_to_close_leaves_none_open(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebalance closes all tasks that leave, also after an error."""
    closed: list[Any] = []

    def close(task: Any, leave_copies: bool) -> None:
        closed.append(task)
        if len(closed) == 1:
            raise UnavailableError("told to")

    monkeypatch.setattr(assigned_tasks, "_CLOSED_TOGETHER", 1)
    with StateManager(config) as manager:
        consumer = config.consumer("group")
        outputs = OutputTopics(config, manager._inputs)
        tasks = AssignedTasks(manager._services, manager, manager._inputs, outputs, consumer, ["in"], NO_PERMISSIONS)
        for index in range(20):
            opening: Future[Any] = Future()
            opening.set_result(SimpleNamespace(close=partial(close, index)))
            tasks._owned[index] = owned = AssignedTask(index, frozenset(), 1, opening, manager.clock, 1.0, 1.0)
            assert owned.restored()
        with pytest.raises(UnavailableError, match="told to"):
            tasks.close()
        tasks.shut_down(lambda: False)
    assert closed == list(range(20))


def test_commits_of_many_tasks_begin_in_several_turns(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: between them the loop polls, so that it notices a stop and a rebalance."""
    begun: list[int] = []
    clock = ManualClock()
    with StateManager(config) as manager:
        loop: ConsumerLoop = manager.loop(config.consumer("group"), lambda *_: None, topics=["in"])
        monkeypatch.setattr(loop, "_clock", clock)
        for index in range(3):
            loop._tasks._owned[index] = SimpleNamespace(  # type: ignore[assignment]
                lost=threading.Event(),
                inputs=[],
                committing=False,
                commits_early=False,
                ended_commit=lambda: None,
                start_commit=lambda index=index: (begun.append(index), clock.sleep(1.0)),
            )
        loop.commit_soon()
        for turn in (1, 2, 3):
            loop._commit(clock.monotonic())
            assert len(begun) == turn
        loop._commit(clock.monotonic())
        assert sorted(begun) == [0, 1, 2], "each task once"
        loop.commit_soon()
        loop.stop()
        loop._commit(clock.monotonic())
        assert len(begun) == 3, "after a stop, the last commits follow"
        loop._tasks._owned.clear()


def test_commits_in_progress_are_bounded(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: a stop waits for the commits in progress, so the others begin when one of these has ended."""
    monkeypatch.setattr("statemgr.consumer.loop._COMMITS_AT_ONCE", 2)
    running: list[SimpleNamespace] = []
    with StateManager(config) as manager:
        loop: ConsumerLoop = manager.loop(config.consumer("group"), lambda *_: None, topics=["in"])

        def end(task: SimpleNamespace) -> None:
            task.committing = task in running

        def start(task: SimpleNamespace) -> None:
            running.append(task)
            task.committing = True

        for index in range(5):
            task = SimpleNamespace(lost=threading.Event(), inputs=[], committing=False, commits_early=False)
            task.ended_commit, task.start_commit = partial(end, task), partial(start, task)
            loop._tasks._owned[index] = task  # type: ignore[assignment]
        loop.commit_soon()
        for _ in range(2):
            loop._commit(loop._clock.monotonic())
            assert len(running) == 2
        ended = running.pop()
        loop._commit(loop._clock.monotonic())
        assert len(running) == 2
        assert ended not in running
        loop._tasks._owned.clear()


def test_a_stop_without_time_begins_no_other_commit(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: tasks whose last commit has no time left close at once, without a local copy. An error counts them, and the
    next owner processes their input again."""
    copies: list[str] = []
    leave_copies = Task._leave_copies
    monkeypatch.setattr(Task, "_leave_copies", lambda task: (copies.append(task.name), leave_copies(task)))
    with monkeypatch.context() as hurry:
        hurry.setattr(ConsumerLoop, "_hurried", lambda loop: True)
        with pytest.raises(UnavailableError, match=f"of {TASKS} of {TASKS} tasks"):
            process_all(config)
    assert not copies
    # a busy machine may need longer for all commits and copies than a stop takes
    monkeypatch.setattr(ConsumerLoop, "_hurried", lambda loop: False)
    monkeypatch.setattr(ConsumerLoop, "_give_up_late", lambda loop: None)
    process_all(config)
    assert len(copies) == TASKS
    with StateManager(config) as manager, manager.open_task("Partition 0") as task:
        assert task.start_offsets == {"in-0": 1}


def process_all(config: JobConfig) -> None:
    """Run a loop until each task, which has no checkpoint, has processed a message, then stop it."""
    seen: set[str] = set()

    def process(task: Task, message: Message) -> None:
        assert task.last_checkpoint is None
        task.store("totals").put(b"k", b"v")
        seen.add(task.name)
        if len(seen) == TASKS:
            loop.stop()

    with StateManager(config) as manager:
        loop = manager.loop(config.consumer("group"), process, topics=["in"])
        loop.run()


def test_openings_assemble_each_checkpoint_once(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: every opening looks at all tasks, but the work for a thousand tasks is not a million."""
    with StateManager(config) as manager:
        for name in NAMES:
            with manager.open_task(name) as task:
                task.commit({f"in-{name.split()[1]}": 1})
    calls: list[str] = []
    current = Assembly.current

    def counted(self: Assembly, track: Track, *args: Any) -> Any:
        calls.append(track.id.task)
        return current(self, track, *args)

    monkeypatch.setattr(Assembly, "current", counted)
    with StateManager(config) as manager:
        manager.fence_tasks(NAMES)
        opened = [manager.open_task(name) for name in NAMES]
        assert sorted(calls) == NAMES
        opened[0].commit({"in-0": 1})
        opened[1].close()
        task = manager.open_task(NAMES[1])
        assert len(calls) == 2 * len(NAMES), "after a commit, they are looked at again"
        assert task.start_offsets == {"in-1": 1}


def test_an_opening_decodes_only_what_it_needs(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: of its own task all retained checkpoints, of the others the current one: a job may have thousands."""
    with StateManager(config) as manager:
        for name in NAMES:
            with manager.open_task(name) as task:
                for number in range(2):
                    task.commit({f"in-{name.split()[1]}": number})
    decoded = Counter[str]()
    decode = codecs.decode_task

    def counted(key: bytes, at: CheckpointKey, *args: Any) -> Any:
        decoded[at.task] += 1
        return decode(key, at, *args)

    monkeypatch.setattr(codecs, "decode_task", counted)
    with StateManager(config) as manager, manager.open_task(NAMES[0]):
        assert decoded == {name: 2 if name == NAMES[0] else 1 for name in NAMES}


def test_commits_without_a_directory_tidy_nothing(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: most commits of a task whose changes are in a changelog make no local directory, so they look for none."""
    tidied: list[Any] = []
    keep_only = StoreDirectories.keep_only
    monkeypatch.setattr(
        StoreDirectories, "keep_only", lambda self, ids: (tidied.append(list(ids)), keep_only(self, ids))
    )
    with StateManager(config) as manager, manager.open_task(NAMES[0]) as task:
        for number in range(4):
            task.store("totals").put(b"k", b"%d" % number)
            task.commit({"in-0": number})
            if number == 0:
                first = len(tidied)
        assert len(tidied) == first == 1
        task.store("totals").put(b"k", b"v")
        task.commit({"in-0": 5}, materialize=True)
        assert len(tidied) == 2
        assert len(tidied[-1]) == 1


def test_descriptions_of_a_changelog_are_shared(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: the description of a topic grows with the tasks, and each task asks for it. Tasks share an answer
    whose question was sent after they had begun to ask, and never an older one."""
    gate, asked = threading.Event(), threading.Semaphore(0)
    questions: list[int] = []
    described = ChangelogTopics._described

    def slow(self: ChangelogTopics, topic: str) -> TopicInfo:
        questions.append(1)
        asked.release()
        assert gate.wait(30)
        return described(self, topic)

    with StateManager(config) as manager, ThreadPoolExecutor(20) as pool:
        manager.open_task(NAMES[0]).close()
        monkeypatch.setattr(ChangelogTopics, "_described", slow)
        changelog, topic = manager._services.changelog(), config.stores["totals"].changelog_topic
        first = pool.submit(changelog.describe, topic)
        assert asked.acquire(timeout=30)
        later = [pool.submit(changelog.describe, topic) for _ in range(16)]
        wait_until(lambda: topic in changelog._next)  # type: ignore[attr-defined]
        assert not any(one.done() for one in [first, *later])
        gate.set()
        assert {one.result(30).topic_id for one in [first, *later]} == {first.result().topic_id}
    assert 2 <= len(questions) <= 8
    assert all(one.result() is not first.result() for one in later)


def test_tasks_share_no_error(config: JobConfig) -> None:
    """Each task adds its own name to the error that its question has had."""
    with StateManager(config) as manager, ThreadPoolExecutor(5) as pool:
        changelog = manager._services.changelog()
        held = changelog._asking.setdefault("none", threading.Lock())  # type: ignore[attr-defined]
        with held:
            asking = [pool.submit(changelog.describe, "none") for _ in NAMES]
            wait_until(lambda: all(one.running() for one in asking))
        errors = [one.exception(30) for one in asking]
    for name, error in zip(NAMES, errors, strict=True):
        assert isinstance(error, MissingState)
        error.with_where(task=name)
    assert [error.where["task"] for error in errors if isinstance(error, MissingState)] == NAMES


def test_upkeep_rests_after_a_stop_has_given_up(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """J1.5: pauses are short then, and looks at all tasks would take the time that the closes need."""
    looks: list[int] = []
    pauses: list[float] = []
    pause = Worker.pause
    monkeypatch.setattr(UpkeepThread, "look", lambda upkeep: looks.append(1))
    monkeypatch.setattr(Worker, "pause", lambda worker, s: (pauses.append(s), pause(worker, s))[1])
    with StateManager(config) as manager:
        manager._services.give_up()
        manager._upkeep.start()
        wait_until(lambda: len(pauses) > 3)
    assert not looks


def test_workers_share_threads() -> None:
    """J1.5: a worker that has nothing to do has no thread."""
    threads = Threads()
    workers = [threads.worker(f"w{number}", background=False) for number in range(50)]
    before = threading.active_count()
    for worker in workers:
        name = worker.submit(lambda: threading.current_thread().name).result(30)
        assert name.startswith("statemgr-w")
    assert threading.active_count() - before < len(workers) / 2
    gate = threading.Event()
    both = [worker.submit(gate.wait, 30) for worker in workers[:2]]
    gate.set()
    assert [one.result(30) for one in both] == [True, True], "one does not wait for the other"
    threads.close()
