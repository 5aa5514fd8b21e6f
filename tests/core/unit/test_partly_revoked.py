"""A consumer loop loses source partitions of a task: one of them, for example of a deleted topic, or all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Message, TopicPartition

from statemgr import JobConfig, StateManager, Task
from statemgr.consumer import loop as consumer_loop
from statemgr.errors import MissingState
from statemgr.testing.memory_clients import MemoryGroupConsumer, served
from statemgr.testing.memory_kafka import MemoryBroker
from tests.jobs import with_changes
from tests.kafka_jobs import wait_until

PLACE = "memory:partly-revoked"
KEPT, TAKEN = TopicPartition("in", 0), TopicPartition("more", 0)


class Member(MemoryGroupConsumer):
    """A member that a test takes partitions from and gives partitions to, as brokers do."""

    steps: list[tuple[str, list[TopicPartition]]]

    def poll(self, timeout: float = -1) -> Message | None:
        if not self.steps:
            return super().poll(min(timeout, 0.01))
        kind, partitions = self.steps.pop(0)
        if kind == "assign":
            assert self._on_assign is not None
            self._on_assign(self, partitions)
            return None
        assert self._on_revoke is not None
        self._on_revoke(self, partitions)
        with self._broker.changed:
            for at in partitions:
                self._positions.pop((at.topic, at.partition), None)
        return None

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        """Add partitions."""
        with self._broker.changed:
            self._begin([TopicPartition(at.topic, at.partition, OFFSET_BEGINNING) for at in partitions])


class Running:
    """A loop on a thread of its own."""

    def __init__(self, config: JobConfig, manager: StateManager, consumer: Member) -> None:
        self.config, self.manager = config, manager
        self.seen: list[str] = []
        self.consumer = consumer
        self.condition = manager.metrics.health.condition
        self.error: BaseException | None = None

        def process(task: Task, message: Message) -> None:
            self.seen.append(f"{message.topic()} {(message.value() or b'').decode()}")
            task.store("totals").put(b"count", b"%d" % len(self.seen))

        self._loop = manager.loop(consumer, process)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self.error = error

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run until the block ends."""
        self._thread.start()
        try:
            yield
        finally:
            self._loop.stop()
            self._thread.join(60)


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    """A broker in memory with two topics, each with a message."""
    made = MemoryBroker()
    for topic in ("in", "more"):
        made.create(topic, 1)
        made.append(topic, 0, b"k", b"1")
    with served(made, PLACE):
        yield made


@pytest.fixture
def running(broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A loop that has processed the message of each topic. It waits at most a second for missing partitions."""
    monkeypatch.setattr(consumer_loop, "DEADLINE_S", 1.0)
    config = JobConfig.from_mapping(
        {
            "job.name": "j",
            "task.inputs": ["in", "more"],
            "task.commit.ms": 20,
            "task.checkpoint.replication.factor": 1,
            "stores.totals.type": "memory",
            "state.dir": str(tmp_path),
            "kafka.bootstrap.servers": PLACE,
        }
    )
    plain: Any = config.consumer("g")
    plain.__class__ = Member
    plain.steps = []
    with StateManager(config) as manager:
        made = Running(config, manager, plain)
        with made.running():
            wait_until(lambda: len(made.seen) == 2)
            yield made


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_rest_of_a_task_waits_for_the_other_partitions(
    broker: MemoryBroker, running: Running, comes_back: bool
) -> None:
    """Nothing is dropped: the task continues when it is whole again, or the loop ends with an error that names the
    deleted topic."""
    consumer = running.consumer
    consumer.in_steps = consumer.by_brokers = True
    if not comes_back:
        broker.delete("more")
    consumer.steps.append(("revoke", [TAKEN]))
    wait_until(lambda: not consumer.steps)
    broker.append("in", 0, b"k", b"2")
    if comes_back:
        consumer.steps.append(("assign", [TAKEN]))
        broker.append("more", 0, b"k", b"2")
        wait_until(lambda: len(running.seen) == 4 or running.error is not None)
        assert sorted(running.seen) == ["in 1", "in 2", "more 1", "more 2"]
    else:
        wait_until(lambda: running.error is not None)
        assert isinstance(running.error, MissingState)
        assert running.error.where["topic"] == "more"
        assert len(running.seen) == 2


@pytest.mark.parametrize("arrives", [False, True])
def test_a_part_of_a_task_fences_nobody(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arrives: bool
) -> None:
    """The partitions of a task leave this member, or arrive here, one after the other. The member that has all of them
    opens the task, and nobody fences it while it does."""
    consumer, fences, fence = running.consumer, list[object](), running.manager.fence_tasks
    consumer.in_steps = consumer.by_brokers = True

    def noted(tasks: Sequence[str], **options: Any) -> None:
        fences.append(tasks)
        fence(tasks, **options)

    monkeypatch.setattr(running.manager, "fence_tasks", noted)
    consumer.steps += [("revoke", [KEPT, TAKEN]), ("assign", [TAKEN])] if arrives else [("revoke", [TAKEN])]
    consumer.steps.append(("assign", []))  # when it is taken, the step before has ended
    wait_until(lambda: not consumer.steps)
    with StateManager(with_changes(running.config, state__dir=str(tmp_path / "other"))) as other:
        task = other.open_task("Partition 0")
        consumer.steps += [("revoke", [TAKEN if arrives else KEPT]), ("assign", [])]
        wait_until(lambda: not consumer.steps)
        task.store("totals").put(b"count", b"9")
        task.commit({"in-0": 1, "more-0": 1})
    assert fences == []
    consumer.steps += [("assign", [KEPT]), ("assign", [TAKEN])]
    wait_until(lambda: fences == [["Partition 0"]])
    assert running.error is None


def test_an_assignment_without_a_deleted_topic(broker: MemoryBroker, running: Running) -> None:
    """With the classic protocol, the error names the topic, and no assignment strategy."""
    broker.delete("more")
    running.consumer.steps += [("revoke", [KEPT, TAKEN]), ("assign", [KEPT])]
    wait_until(lambda: running.error is not None)
    assert isinstance(running.error, MissingState)
    assert running.error.where["topic"] == "more"


@pytest.mark.parametrize("in_steps", [False, True])
def test_it_is_not_ready_between_a_revocation_and_the_next_assignment(running: Running, in_steps: bool) -> None:
    """A member whose group takes everything back, and divides it again, has work that it does not do. With an
    assignment in steps it has none: nothing may follow."""
    consumer = running.consumer
    consumer.in_steps = in_steps
    wait_until(lambda: running.condition().is_ready)
    consumer.steps.append(("revoke", [KEPT, TAKEN]))
    wait_until(lambda: not running.condition().tasks)
    assert running.condition().is_ready == in_steps
    consumer.steps.append(("assign", [KEPT, TAKEN]))
    wait_until(lambda: running.condition().open == 1)
    assert running.condition().is_ready
