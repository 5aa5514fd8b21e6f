"""Which tasks a process has open, and that none stays open after an error. Needs no broker."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import pytest

from statemgr.engine.opening import Assignment, OpenTasks
from statemgr.errors import InvalidError, OpeningCancelled, RetryableError, UnavailableError
from statemgr.flows.opening import open_job, restore
from statemgr.ids import task_name
from statemgr.kafka.changelog_topic import ChangelogTopics
from statemgr.local.machine import SystemClock
from statemgr.model.checkpoint import CheckpointRecord
from statemgr.ports import CheckpointLog
from statemgr.stores.open_store import OpenStore
from statemgr.testing.memory_servers import MemoryServers
from statemgr.transfer.transfer import Transfer
from tests.commits import TASK

CONFIG: dict[str, object] = {
    "job.name": "orders",
    "job.tasks": 3,
    "task.backup.factories": ["blob-store"],
    **{f"stores.{name}.value.serde": "bytes" for name in ("a", "b", "c")},
}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Task and store of each store that is closed. The close of store b of task 0 raises an error after that."""
    seen: list[tuple[str, str]] = []
    close = OpenStore.close

    def failing(self: OpenStore) -> None:
        close(self)
        seen.append((self.identity.task, self.identity.store))
        if seen[-1] == (TASK, "b"):
            raise RetryableError("cannot remove a local directory")

    monkeypatch.setattr(OpenStore, "close", failing)
    return seen


def test_first_publishes_of_another_process_are_no_lost_checkpoints(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes after a read of the topic and before the look at what this machine knows. Found by a simulation."""
    real, config = open_job._read, servers.on_disk(servers.config, "disk")
    with servers.manager(config, "kafka-partition") as owner, ExitStack() as ends:
        tasks = [ends.enter_context(owner.open_task(task_name(number))) for number in range(3)]

        def read(log: CheckpointLog, names: Collection[str], only_settled: bool) -> Mapping[str, CheckpointRecord]:
            found = real(log, names, only_settled)
            if tasks:
                tasks.pop().commit({})
            return found

        monkeypatch.setattr(open_job, "_read", read)
        with servers.manager(config, "kafka-partition") as other:
            assert other.look().keys() == {task_name(number) for number in range(3)}


def test_what_gives_way_is_waited_for_until_it_has() -> None:
    """FAULT 40: a process may be suspended, so the opening of a lost partition may take any time. The next opening
    waits for it and ends early only if its own partition is lost too."""
    tasks, lost = OpenTasks(SystemClock()), threading.Event()
    first, third = Assignment(TASK, still_owned=lambda: False), Assignment(TASK)
    tasks.claim(first)
    with ThreadPoolExecutor(2) as pool:
        cancelled = pool.submit(tasks.claim, Assignment(TASK, still_owned=lambda: not lost.is_set()))
        second = pool.submit(tasks.claim, third)
        lost.set()
        with pytest.raises(OpeningCancelled):
            cancelled.result(30)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        tasks.forget(first)
        second.result(30)
    tasks.forget(first)  # as an opening does that has failed, after its task was closed
    with pytest.raises(InvalidError, match="already open in this process"):
        tasks.claim(Assignment(TASK))


def test_a_close_that_fails_leaves_nothing_open(servers: MemoryServers, closed: list[tuple[str, str]]) -> None:
    """An error in the close of one task is raised when all others are closed."""
    manager = servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition")
    tasks = [manager.open_task(f"Partition {index}") for index in range(3)]
    with pytest.raises(RetryableError, match="cannot remove"):
        manager.close()
    assert all(task.closed for task in tasks)
    assert sorted(closed) == [(f"Partition {index}", name) for index in range(3) for name in "abc"]


def test_the_first_of_several_errors_is_raised(
    servers: MemoryServers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the application, or else of the first close that fails. The errors of later closes may come from it,
    and are in the log."""
    close, number = OpenStore.close, count()

    def fail(self: OpenStore) -> None:
        close(self)
        raise RetryableError(f"close {next(number)}")

    monkeypatch.setattr(OpenStore, "close", fail)
    config = servers.on_disk(servers.config, "one")
    with pytest.raises(RetryableError, match="close 0"), servers.manager(config, "kafka-partition") as manager:
        manager.open_task("Partition 0")
    with (
        pytest.raises(KeyError, match="mine"),
        servers.manager(config, "kafka-partition") as manager,
        manager.open_task("Partition 1"),
    ):
        raise KeyError("mine")
    failed = [line.rpartition(" ")[2] for line in caplog.messages if "closing failed after another error" in line]
    assert failed == ["1", "2", "4", "5", "3"]


def test_a_restore_that_fails_closes_the_other_stores(
    servers: MemoryServers, closed: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the restore is raised, and not that of a close after it."""
    restore_and_open = restore._Restore.restore_and_open

    def fail(self: restore._Restore) -> object:
        if self.plan.store == "a":
            raise UnavailableError("the blob store does not answer")
        return restore_and_open(self)

    monkeypatch.setattr(restore._Restore, "restore_and_open", fail)
    with (
        servers.manager(servers.on_disk(servers.config, "one"), "kafka-partition") as manager,
        pytest.raises(UnavailableError, match="does not answer"),
    ):
        manager.open_task(TASK)
    assert sorted(closed) == [(TASK, "b"), (TASK, "c")]


def test_an_adapter_that_fails_to_close_leaves_none_open(
    servers: MemoryServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the close of one adapter is raised when all others are closed."""
    closed = []

    def fail(self: Transfer) -> None:
        raise RetryableError("told to")

    monkeypatch.setattr(Transfer, "close", fail)
    monkeypatch.setattr(ChangelogTopics, "close", lambda self: closed.append(self))
    services = servers.services(servers.on_disk(servers.config, "one"))
    changelog = services.changelog()
    services.transfer()  # closed first
    with pytest.raises(RetryableError, match="told to"):
        services.close()
    assert closed == [changelog]
