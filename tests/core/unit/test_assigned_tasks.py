"""A member's task that waits for its blob store: each try fences older owners, and none fences a newer one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from statemgr import StateManager
from statemgr.consumer import assigned_tasks
from statemgr.consumer.assigned_task import AssignedTask
from statemgr.consumer.assigned_tasks import AssignedTasks
from statemgr.engine import opening
from statemgr.errors import UnavailableError
from statemgr.kafka.transactions.publisher import TransactionalPublisher
from statemgr.model.jobs.permissions import NO_PERMISSIONS, Permissions
from statemgr.services import Services
from statemgr.testing.memory_servers import MemoryServers
from tests.kafka_jobs import wait_until

Member = tuple[StateManager, AssignedTasks, AssignedTask]


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Iterator[Member]:
    """A member with one of two tasks, which is open and has committed. It opens one task at a time."""
    monkeypatch.setattr(assigned_tasks, "_REACH_S", 0.02)
    monkeypatch.setattr(assigned_tasks, "_OPENERS", 1)
    config = {
        "job.name": "orders", "job.tasks": 2, "task.inputs": ["orders"], "task.backup.factories": ["blob-store"],
        "stores.totals.value.serde": "bytes",
    }  # fmt: skip
    servers = MemoryServers(config)
    servers.open()
    servers.broker.create("orders", 2)
    on_disk = servers.on_disk(servers.config, "member")
    with servers.manager(on_disk, "kafka-partition") as manager:
        tasks = manager.loop(on_disk.consumer("group"), lambda task, message: None)._tasks
        tasks.add([TopicPartition("orders", 0)])
        (owned,) = tasks
        wait_until(owned.restored)
        assert owned.task is not None
        owned.task.store("totals").put(b"key", b"1")
        owned.task.commit({"orders-0": 0})
        yield manager, tasks, owned
        tasks.shut_down(lambda: False)
    servers.close()


def test_a_permission_is_for_the_first_checkpoint(member: Member) -> None:
    """It is given again to a task that has left without one, and not after a commit."""
    _, tasks, owned = member
    tasks.add([TopicPartition("orders", 1)])
    (other,) = (one for one in tasks if one is not owned)
    wait_until(other.restored)
    tasks._permissions = given = Permissions(allow_empty_start=True)
    assert [tasks._permissions_of(0), tasks._permissions_of(1)] == [NO_PERMISSIONS, given]
    assert other.task is not None
    other.task.commit({"orders-1": 0})
    assert tasks._permissions_of(1) == NO_PERMISSIONS


def trying(tasks: AssignedTasks, condition: Callable[[], bool]) -> Callable[[], bool]:
    """The condition, looked at in turns of a loop."""

    def turn() -> bool:
        tasks.try_again()
        return condition()

    return turn


def _unreachable(*_: object, **__: object) -> None:
    raise UnavailableError("the blob store does not answer")


def test_a_task_that_was_given_back_fences_nobody(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence of one of the tries is in progress when the partition is revoked: the member keeps it until that ends."""
    fence, fences, go = TransactionalPublisher.fence, list[TransactionalPublisher](), threading.Event()

    def slow(self: TransactionalPublisher) -> None:
        fences.append(self)
        if len(fences) > 4:
            go.wait(30)
        fence(self)

    _, tasks, owned = member
    monkeypatch.setattr(opening, "restore_task", _unreachable)
    monkeypatch.setattr(TransactionalPublisher, "fence", slow)
    tasks.open_again(owned, waits=True)
    wait_until(trying(tasks, lambda: len(fences) > 4))
    closing = threading.Thread(target=tasks.close, args=([0],))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    go.set()
    closing.join(30)
    assert not closing.is_alive()
    ended = len(fences)
    tasks.try_again()
    assert len(fences) == ended


def test_others_open_while_a_task_waits(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose blob store cannot be reached holds no thread between two tries."""
    real, tries = opening.restore_task, list[str]()

    def first_is_unreachable(services: Services, task: str, *given: Any, **more: Any) -> Any:
        tries.append(task)
        if task == "Partition 0":
            _unreachable()
        return real(services, task, *given, **more)

    _, tasks, owned = member
    monkeypatch.setattr(opening, "restore_task", first_is_unreachable)
    tasks.open_again(owned, waits=True)
    wait_until(trying(tasks, lambda: len(tries) > 1))
    tasks.add([TopicPartition("orders", 1)])
    *_, other = tasks
    wait_until(trying(tasks, other.restored))
    assert not owned.restored()


def test_a_fence_that_failed_is_tried_again(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers cannot be reached either, and answer before the blob store does."""
    manager, tasks, owned = member
    fence, tries = manager.fence_tasks, list[int]()

    def fails(*given: object, **more: object) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise UnavailableError("no broker answers")
        fence(*given, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as cut:
        cut.setattr(opening, "restore_task", _unreachable)
        cut.setattr(manager, "fence_tasks", fails)
        tasks.open_again(owned, waits=True)
        wait_until(trying(tasks, lambda: len(tries) > 3))
    wait_until(trying(tasks, owned.restored))
    assert owned.task is not None
    assert owned.task.store("totals").get(b"key") == b"1"
