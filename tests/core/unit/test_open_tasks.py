"""Which tasks a process has open."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from statemgr.engine.opening import Assignment, OpenTasks
from statemgr.errors import InvalidError, OpeningCancelled
from statemgr.local.machine import SystemClock
from tests.commits import TASK


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
