"""A task of a consumer group: which failed commits are repeated, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest

from statemgr.consumer.assigned_task import AssignedTask
from statemgr.errors import DiskFull, OutcomeUnknownError, StatemgrError
from statemgr.local.clock import SystemClock
from tests.blob_faults import ManualClock


class FailingTask:
    """Raises at once where a commit begins, as one does that cannot settle the last one."""

    name = "Partition 0"
    start_offsets: ClassVar[dict[str, int]] = {}

    def __init__(self, error: StatemgrError) -> None:
        self.error = error
        self.begun = 0

    def commit_async(self, input_offsets: Mapping[str, int]) -> Future[Any]:
        """Fail."""
        self.begun += 1
        raise self.error


def owned(error: StatemgrError, timeout_s: float) -> tuple[AssignedTask, FailingTask]:
    """A restored task with something to commit."""
    task = FailingTask(error)
    opening: Future[Any] = Future()
    opening.set_result(task)
    found = AssignedTask(0, opening, SystemClock(), 1.0, timeout_s)
    assert found.restored()
    found.dirty = True
    return found, task


def test_a_commit_that_cannot_begin_is_repeated() -> None:
    """FAULT 15: a broker that is away for a moment ends no loop; one that stays away does, after the time-out."""
    found, task = owned(OutcomeUnknownError("not settled"), 60.0)
    for _ in range(3):
        found.start_commit()
    assert task.begun == 3
    assert found.dirty, "what it should have carried is in the next one"
    found, task = owned(OutcomeUnknownError("not settled"), 0.0)
    with pytest.raises(OutcomeUnknownError):
        found.start_commit()


def test_failing_commits_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A commit may be due every few milliseconds; one line in ten seconds says how often it has failed."""
    found, _ = owned(OutcomeUnknownError("not settled"), 600.0)
    found.clock = clock = ManualClock()
    for _ in range(300):
        found.start_commit()
        clock.sleep(0.1)
    assert [record.retries for record in caplog.records] == [1, 100, 100]  # type: ignore[attr-defined]
    assert "Partition 0: a commit failed and is repeated (100 times since the last line): not settled" in caplog.text


def test_a_commit_that_no_repetition_helps_is_raised() -> None:
    """FAULT 24: a full disk is for a human."""
    found, _ = owned(DiskFull("full"), 60.0)
    with pytest.raises(DiskFull):
        found.start_commit()
