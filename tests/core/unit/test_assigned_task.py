"""A task of a consumer group: which failed commits it repeats, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from statemgr.consumer.assigned_task import AssignedTask
from statemgr.errors import DiskFull, OutcomeUnknownError, StatemgrError, UnavailableError
from statemgr.local.machine import SystemClock
from statemgr.ports import TransactionOpen
from tests.blob_faults import ManualClock


class FailingTask:
    """A task whose commits fail at once, as they do when the outcome of the last commit is unknown."""

    name = "Partition 0"
    start_offsets: ClassVar[dict[str, int]] = {}
    metrics = SimpleNamespace(begins_commit=nullcontext)
    has_much_output = False
    repairs = False

    def __init__(self, error: StatemgrError) -> None:
        self.error = error
        self.begun = 0

    def may_commit(self) -> bool:
        """Return whether no repair is in progress."""
        return not self.repairs

    def commit_async(self, input_offsets: Mapping[str, int]) -> Future[Any]:
        """Raise the error."""
        self.begun += 1
        raise self.error


class SlowTask(FailingTask):
    """A task with a commit in progress."""

    metrics = SimpleNamespace(
        begins_commit=nullcontext, hold=lambda held: None, log=SimpleNamespace(waits=lambda age: None)
    )
    pending_commit_seconds = 400.0

    def __init__(self, error: StatemgrError) -> None:
        super().__init__(error)
        self.commit: Future[Any] = Future()

    def commit_async(self, input_offsets: Mapping[str, int]) -> Future[Any]:
        """Return the commit."""
        return self.commit

    def forgive(self) -> None:
        """Forget the error of the commit."""


def owned(error: StatemgrError, timeout_s: float) -> tuple[AssignedTask, FailingTask]:
    """Return a restored task with something to commit."""
    task = FailingTask(error)
    opening: Future[Any] = Future()
    opening.set_result(task)
    found = AssignedTask(0, frozenset({"orders-0"}), 2, opening, SystemClock(), 1.0, timeout_s)
    assert found.restored()
    found.dirty = True
    return found, task


def test_a_commit_that_cannot_begin_is_repeated() -> None:
    """FAULT 15: a short broker outage does not end the loop; an outage longer than the time-out does."""
    found, task = owned(OutcomeUnknownError("not settled"), 60.0)
    for _ in range(3):
        found.start_commit()
    assert task.begun == 3
    assert found.dirty, "what it should have carried is in the next one"
    found, task = owned(OutcomeUnknownError("not settled"), 0.0)
    with pytest.raises(OutcomeUnknownError):
        found.start_commit()


def test_a_failed_commit_does_not_wait_for_the_next_periodic_one() -> None:
    """``task.commit.ms`` may be longer than the time for which a commit is repeated."""
    found, _ = owned(UnavailableError("a broker restarts"), 60.0)
    found.clock = clock = ManualClock()
    for _ in range(12):
        found.start_commit()
        assert not found.commits_early
        clock.sleep(5.0)
        assert found.commits_early
    clock.sleep(0.1)
    with pytest.raises(UnavailableError):
        found.start_commit()


def test_a_commit_does_not_wait_for_a_repair() -> None:
    """The loop asks again in each turn, and processes the messages of other tasks meanwhile."""
    found, task = owned(OutcomeUnknownError("not settled"), 60.0)
    task.repairs = True
    for _ in range(3):
        found.start_commit()
        assert found.commits_early
    assert task.begun == 0
    task.repairs = False
    found.start_commit()
    assert task.begun == 1


def test_a_task_is_held_back_while_a_repair_takes_long() -> None:
    """Otherwise it would collect changes and output without a limit. The repair does not end the loop."""
    found, _ = owned(UnavailableError("not begun"), 60.0)
    task = SlowTask(UnavailableError("not begun"))
    task.pending_commit_seconds, task.repairs = 0.0, True
    found.task, found.clock = task, clock = task, ManualClock()  # type: ignore[assignment]
    for second in range(120):
        found.start_commit()
        assert found.hold_back() == (second > 1)
        clock.sleep(1.0)
    task.repairs = False
    found.start_commit()
    assert found.committing
    assert not found.hold_back()


def test_the_age_of_a_commit_is_its_own() -> None:
    """Neither a clock that leaps when a stop gives up, nor a commit that the application began, ends the loop."""
    found, _ = owned(UnavailableError("slow"), 60.0)
    task = SlowTask(UnavailableError("slow"))
    task.pending_commit_seconds = 0.5
    found.task, found.clock = task, clock = task, ManualClock()  # type: ignore[assignment]
    clock.sleep(1000)
    assert not found.hold_back()
    found.start_commit()
    clock.sleep(1000)
    assert not found.hold_back()


@pytest.mark.parametrize("suspended_s", [0, 395])
def test_a_suspended_process_goes_on(suspended_s: float) -> None:
    """J2.8: it was suspended with a commit in progress, for longer than commits may take. The commit fails by itself,
    and is repeated. A commit that takes as long ends the loop."""
    found, _ = owned(UnavailableError("the transaction was open for 400 s"), 60.0)
    task = SlowTask(UnavailableError("the transaction was open for 400 s"))
    found.task, found.clock = task, clock = task, ManualClock()  # type: ignore[assignment]
    found.start_commit()
    clock.sleep(400)
    if not suspended_s:
        with pytest.raises(UnavailableError, match="did not end within"):
            found.hold_back()
        return
    found.suspended(suspended_s)
    assert found.hold_back()
    task.commit.set_exception(task.error)
    assert found.ended_commit() is None
    assert found.dirty


def test_a_transaction_of_other_software_ends_no_loop() -> None:
    """It may be open for longer than commits are repeated. What fails after it has all of the time."""
    found, task = owned(UnavailableError("a broker restarts"), 60.0)
    found.clock = clock = ManualClock()
    for error in (task.error, TransactionOpen("still open"), UnavailableError("a broker restarts")):
        task.error = error
        for _ in range(4 if isinstance(error, TransactionOpen) else 1):
            found.start_commit()
            clock.sleep(50.0)
    found.start_commit()
    clock.sleep(50.0)
    with pytest.raises(UnavailableError):
        found.start_commit()


def test_a_commit_that_is_repeated_is_proved_again() -> None:
    """INVARIANT 17: the first proof that no input was skipped got no answer, so nothing is known of the input."""
    found, task = owned(OutcomeUnknownError("not settled"), 60.0)

    def prove() -> None:
        raise UnavailableError("no answer")

    found.inputs.append(SimpleNamespace(source="orders-0", next=500, prove=prove))  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="no answer"):
        found.commit_and_wait(lambda: True)
    assert task.begun == 0


def test_failing_commits_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Commits may be due every few milliseconds. One log line every ten seconds counts the failures."""
    found, _ = owned(OutcomeUnknownError("not settled"), 600.0)
    found.clock = clock = ManualClock()
    for _ in range(300):
        found.start_commit()
        clock.sleep(0.1)
    assert [record.retries for record in caplog.records] == [1, 100, 100]  # type: ignore[attr-defined]
    assert "Partition 0: a commit failed and is repeated (100 times since the last line): not settled" in caplog.text


def test_a_commit_that_no_repetition_helps_is_raised() -> None:
    """FAULT 24: repeating the commit does not free a full disk, so the task raises the error."""
    found, _ = owned(DiskFull("full"), 60.0)
    with pytest.raises(DiskFull):
        found.start_commit()
