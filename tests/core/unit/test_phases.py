"""phases: flows announce their steps to observers."""

from __future__ import annotations

import pytest

from statemgr.phases import Phase, add_observer, announce, observed, remove_observer, tasks_of


def test_observers_hear_phases_in_order() -> None:
    """An observer receives each phase with its subject, in order, until the block ends."""
    heard: list[tuple[Phase, str]] = []
    with observed(lambda phase, subject: heard.append((phase, subject))):
        announce(Phase.FLUSH, "Partition 0", "orders/1")
        announce(Phase.UPLOAD, "Partition 0/totals", "orders/1")
    announce(Phase.BEGIN, "Partition 0", "orders/1")
    assert heard == [(Phase.FLUSH, "Partition 0"), (Phase.UPLOAD, "Partition 0/totals")]


def test_what_an_observer_raises_stops_the_flow() -> None:
    """An observer's error is raised at the step itself, and the observer is still removed."""

    def fail(phase: Phase, subject: str) -> None:
        raise RuntimeError(f"{phase} {subject}")

    with pytest.raises(RuntimeError, match=r"commit\.upload x"), observed(fail):
        announce(Phase.UPLOAD, "x", "orders/1")
    announce(Phase.UPLOAD, "x", "orders/1")


def test_observer_may_remove_itself() -> None:
    """If an observer removes itself during a call, the next one still receives the phase."""
    heard: list[str] = []

    def once(phase: Phase, subject: str) -> None:
        heard.append("once")
        remove_observer(once)

    def always(phase: Phase, subject: str) -> None:
        heard.append("always")

    add_observer(once)
    add_observer(always)
    try:
        announce(Phase.FLUSH, "Partition 0", "orders/1")
        announce(Phase.FLUSH, "Partition 0", "orders/1")
    finally:
        remove_observer(always)
    assert heard == ["once", "always", "always"]


def test_phases_are_named_by_their_flow() -> None:
    """Every phase names its flow, and names are unique, because crash tests use them."""
    flows = {"restore", "commit", "publish", "clean-up", "materialize", "output", "adopt", "rescale", "copy"}
    assert {phase.value.split(".")[0] for phase in Phase} == flows
    assert len({phase.value for phase in Phase}) == len(Phase)


def test_an_observer_of_a_job_hears_of_no_other() -> None:
    """An observer of a job does not receive steps of another job or of another job ID."""
    heard: list[str] = []

    def hear(phase: Phase, subject: str) -> None:
        heard.append(subject)

    add_observer(hear, "orders/1")
    for number, job in enumerate(("orders/1", "orders/2", "clicks/1", "orders/1")):
        announce(Phase.FLUSH, f"Partition {number}", job)
    remove_observer(hear)
    announce(Phase.FLUSH, "Partition 9", "orders/1")
    assert heard == ["Partition 0", "Partition 3"]
    with pytest.raises(ValueError, match="observer"):
        remove_observer(hear)


def test_the_tasks_of_a_step() -> None:
    """A subject may be a task, a task's store, several tasks or the complete job."""
    assert tasks_of("Partition 3") == ("Partition 3",)
    assert tasks_of("Partition 3/totals") == ("Partition 3",)
    assert tasks_of("Partition 3, Partition 4") == ("Partition 3", "Partition 4")
    assert tasks_of("orders") == tasks_of("") == ()
