"""Timers of a task: regular times on a clock that the test moves."""

from __future__ import annotations

import pytest

from statemgr.engine.timers import Timers
from statemgr.errors import InvalidError
from tests.blob_faults import ManualClock


def test_times_do_not_drift_and_missed_ones_are_one_call() -> None:
    """A late call does not delay the next one, and after a long pause there is only one call."""
    clock, called = ManualClock(), []
    timers, began = Timers(clock, "Partition 0"), clock.now
    timers.add(10, lambda: called.append(clock.now - began))
    for at in (9.9, 10.0, 13.0, 19.9, 24.0, 29.0, 30.0, 71.0, 79.0, 80.0):
        clock.now = began + at
        timers.run()
    assert called == [10.0, 24.0, 30.0, 71.0, 80.0]


def test_the_earliest_is_called_first_and_a_callback_may_cancel_another() -> None:
    """Callbacks that are due together run in the order of their times."""
    clock, called = ManualClock(), []
    timers = Timers(clock, "Partition 0")
    late = timers.add(3, lambda: called.append("late"))
    timers.add(1, lambda: called.append("first"))
    timers.add(2, late.cancel)
    assert not timers.run()
    clock.now += 5
    assert timers.run()
    assert called == ["first"]
    clock.now += 5
    timers.run()
    assert called == ["first", "first"]


def test_a_callback_may_add_a_timer() -> None:
    """The new timer first runs a full interval later."""
    clock, called = ManualClock(), []
    timers = Timers(clock, "Partition 0")
    first = timers.add(1, lambda: (first.cancel(), timers.add(1, lambda: called.append("second"))))
    clock.now += 1
    timers.run()
    assert called == []
    clock.now += 1
    timers.run()
    assert called == ["second"]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "10", True])
def test_only_a_positive_number_of_seconds(seconds: float) -> None:
    """Anything else raises an InvalidError that names the task."""
    with pytest.raises(InvalidError, match="positive number of seconds") as caught:
        Timers(ManualClock(), "Partition 3").add(seconds, lambda: None)
    assert caught.value.where == {"task": "Partition 3"}
