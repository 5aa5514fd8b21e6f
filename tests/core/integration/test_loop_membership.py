"""Members of a consumer group come, are killed and suspended, and are turned away for good.

One of them assigns the partitions (the ``classic`` protocol), or the brokers do (``consumer``, KIP-848).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from statemgr import JobConfig, StateManager
from statemgr.errors import ConfigError, FencedError, RetryableError
from statemgr.kafka.group_consumer import GroupConsumer
from tests.jobs import contents, elsewhere, job_mapping, with_changes
from tests.kafka_jobs import wait_until
from tests.loop_members import QUICK_GROUP, Process, count, make_topic, member, produce, published
from tests.servers import KafkaServer

BY_BROKERS = {"kafka__consumer__group__protocol": "consumer"}


def test_a_member_that_another_process_replaces_ends(kafka: KafkaServer, tmp_path: Path) -> None:
    """J1.1: two processes have the same group.instance.id. The first one ends with an error that names it, and is
    neither alive nor ready; the second one goes on."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(10))
    name = {"kafka__consumer__group__instance__id": "machine-1"}
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, task__commit__ms=200, **name, **QUICK_GROUP))
    consumer, raised = config.consumer(group), list[Exception]()
    with StateManager(config) as manager:
        health = manager.metrics.health
        loop = manager.loop(consumer, count, topics=[topic])

        def run() -> None:
            try:
                loop.run()
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            # nothing is left to commit, which would find out first that the other process has taken the task over
            wait_until(lambda: published(config) == {f"{topic}-0": 10})
            assert health.condition().is_ready
            other = JobConfig.from_mapping({**config.to_mapping(), "state.dir": str(tmp_path / "other")})
            stop, errors = member(other, group, topic)
            thread.join(60)
            (error,) = raised
            assert type(error) is FencedError
            assert error.where == {"group_instance_id": "machine-1"}
            assert "group.instance.id" in error.message
            assert any("FencedError" in why for why in health.condition().dead)
        finally:
            loop.stop()
            thread.join(60)
            consumer.close()
    produce(kafka, topic, 1, range(10))
    wait_until(lambda: published(other) == {f"{topic}-0": 20})
    stop()
    assert errors == []
    assert sum(int(value) for value in contents(other)[0]["totals"].values()) == 20


def test_a_second_process_with_the_same_name_is_refused_by_the_brokers(kafka: KafkaServer, tmp_path: Path) -> None:
    """J2.8: where the brokers assign partitions, the second of two processes with the same group.instance.id ends, and
    may try again later. The first one goes on."""
    topic, group = kafka.fresh_name("in"), kafka.fresh_name("group")
    make_topic(kafka, topic, 1)
    produce(kafka, topic, 1, range(10))
    mapping = job_mapping(kafka, tmp_path, task__commit__ms=200, **BY_BROKERS)
    config = with_changes(JobConfig.from_mapping(mapping), kafka__consumer__group__instance__id="machine-1")
    stop, errors = member(config, group, topic, consumer=config.consumer(group))
    wait_until(lambda: published(config) == {f"{topic}-0": 10})
    other = with_changes(config, state__dir=str(tmp_path / "other"))
    stop_other, refused = member(other, group, topic, consumer=other.consumer(group))
    wait_until(lambda: bool(refused))
    stop_other()
    (error,) = refused
    assert type(error) is RetryableError
    assert error.where == {"group_instance_id": "machine-1"}
    produce(kafka, topic, 1, range(10))
    wait_until(lambda: published(config) == {f"{topic}-0": 20})
    stop()
    assert errors == []


@pytest.mark.parametrize("first", ["consumer", pytest.param("classic", marks=pytest.mark.long)])
def test_tasks_of_two_topics_move_where_the_brokers_assign_them(kafka: KafkaServer, tmp_path: Path, first: str) -> None:
    """J2.8: a member joins and leaves a group of KIP-848, and each message counts once. What a member keeps is not
    opened again. The first member may still have the older protocol."""
    topics, group, tasks = [kafka.fresh_name("in"), kafka.fresh_name("in")], kafka.fresh_name("group"), 4
    for topic in topics:
        make_topic(kafka, topic, tasks)
        produce(kafka, topic, tasks, range(100))
    config = JobConfig.from_mapping(
        job_mapping(kafka, tmp_path, tasks=tasks, task__commit__ms=200, kafka__consumer__group__protocol=first)
    )
    other = with_changes(config, state__dir=str(tmp_path / "other"), **BY_BROKERS)
    opened: list[str] = []
    stop, errors = member(
        config, group, topics, consumer=config.consumer(group), on_open=lambda task: opened.append(task.name)
    )
    wait_until(lambda: sum(published(config).values()) == 200)
    moved: list[str] = []
    stop_other, other_errors = member(
        other, group, topics, consumer=other.consumer(group), on_open=lambda task: moved.append(task.name)
    )
    wait_until(lambda: len(moved) == tasks / 2)
    for topic in topics:
        produce(kafka, topic, tasks, range(100))
    wait_until(lambda: sum(published(config).values()) == 400)
    stop_other()
    wait_until(lambda: len(opened) >= tasks + len(moved))
    stop()
    assert errors == other_errors == []
    if first == "consumer":
        assert sorted(opened) == sorted([f"Partition {index}" for index in range(tasks)] + moved)
    states = [contents(config, f"Partition {index}")[0] for index in range(tasks)]
    assert sum(int(value) for state in states for value in state["totals"].values()) == 400


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Kill the members that a failed test leaves behind."""
    started: list[Process] = []
    yield started
    for process in started:
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_that_are_killed_and_suspended(
    kafka: KafkaServer, tmp_path: Path, processes: list[Process], protocol: str
) -> None:
    """J2.8: another member takes the tasks over when the group has given a member up. A suspended one that wakes up
    joins again, and each message counts once."""
    topic, group, tasks = kafka.fresh_name("in"), kafka.fresh_name("group"), 4
    make_topic(kafka, topic, tasks)
    settings = QUICK_GROUP if protocol == "classic" else BY_BROKERS
    mapping = job_mapping(kafka, tmp_path, tasks=tasks, backup=("blob-store",), task__commit__ms=200, **settings)
    config, sent = JobConfig.from_mapping(mapping), 0

    def start() -> Process:
        number = len(processes)
        own = elsewhere(config, tmp_path / f"machine-{number}", "blob-store")
        processes.append(Process.start(own, group, topic, tmp_path / f"{number}.log"))
        return processes[-1]

    def processed() -> None:
        nonlocal sent
        produce(kafka, topic, tasks, range(sent, sent + 100))
        sent += 100
        wait_until(lambda: sum(published(config).values()) == sent)

    first, second = start(), start()
    for process in (first, second):
        process.wait_for(lambda lines: "phase restore.swap" in lines or "phase restore.open" in lines)
    processed()
    second.kill()
    processed()
    third = start()
    third.wait_for(lambda lines: "phase restore.open" in lines)
    third.child.send_signal(signal.SIGSTOP)
    processed()
    third.child.send_signal(signal.SIGCONT)
    processed()
    for process in (first, third):
        assert process.terminate()[1] is None
    states = [contents(config, f"Partition {index}")[0] for index in range(tasks)]
    assert sum(int(value) for state in states for value in state["totals"].values()) == sent


@pytest.mark.parametrize("settings", [{}, BY_BROKERS], ids=["classic", "consumer"])
def test_a_member_without_tasks_is_ready(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """More processes than tasks: a rolling update waits until the one that gets none is ready, too."""
    monkeypatch.setattr("statemgr.consumer.loop_health._NONE_S", 1.0)
    topic, group, made = kafka.fresh_name("in"), kafka.fresh_name("group"), list[StateManager]()
    make_topic(kafka, topic, 1)
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, **settings))
    with ExitStack() as stack:
        for number in range(2):
            there = with_changes(config, state__dir=str(tmp_path / str(number)))
            consumer = there.consumer(group)
            stack.callback(consumer.close)
            made.append(stack.enter_context(StateManager(there)))
            loop = made[-1].loop(consumer, count, topics=[topic])
            thread = threading.Thread(target=loop.run)
            thread.start()
            stack.callback(thread.join, 60)
            stack.callback(loop.stop)
            wait_until(lambda: made[-1].metrics.health.condition().is_ready)
        # the brokers may move the task to the second member
        wait_until(lambda: sorted(one.metrics.health.condition().open for one in made) == [0, 1])
        wait_until(lambda: all(one.metrics.health.condition().is_ready for one in made))


def test_settings_of_the_other_protocol_are_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    """J2.8: the brokers decide about the session and the strategy, so a setting of the client would have no effect."""
    config = JobConfig.from_mapping(job_mapping(kafka, tmp_path, **BY_BROKERS))
    consumer = config.consumer("group")
    assert isinstance(consumer, GroupConsumer)
    assert consumer.by_brokers
    consumer.close()
    with pytest.raises(ConfigError, match=r"session\.timeout\.ms"):
        with_changes(config, kafka__consumer__session__timeout__ms=6000).consumer("group")
