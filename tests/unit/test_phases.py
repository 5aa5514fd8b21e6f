"""phases: steps are announced to whoever watches."""

from __future__ import annotations

import pytest

from statemgr.phases import Phase, add_observer, announce, observed, remove_observer


def test_observers_hear_phases_in_order() -> None:
    """An observer gets each phase with its subject, in the order of the steps, until the block ends."""
    heard: list[tuple[Phase, str]] = []
    with observed(lambda phase, subject: heard.append((phase, subject))):
        announce(Phase.FLUSH, "Partition 0")
        announce(Phase.UPLOAD, "Partition 0/totals")
    announce(Phase.BEGIN)
    assert heard == [(Phase.FLUSH, "Partition 0"), (Phase.UPLOAD, "Partition 0/totals")]


def test_what_an_observer_raises_stops_the_flow() -> None:
    """An observer's error is raised at the step itself, and the observer is removed all the same."""

    def fail(phase: Phase, subject: str) -> None:
        raise RuntimeError(f"{phase} {subject}")

    with pytest.raises(RuntimeError, match=r"commit\.upload x"), observed(fail):
        announce(Phase.UPLOAD, "x")
    announce(Phase.UPLOAD, "x")


def test_observer_may_remove_itself() -> None:
    """An observer that removes itself while it is called does not make the next one miss the phase."""
    heard: list[str] = []

    def once(phase: Phase, subject: str) -> None:
        heard.append("once")
        remove_observer(once)

    def always(phase: Phase, subject: str) -> None:
        heard.append("always")

    add_observer(once)
    add_observer(always)
    try:
        announce(Phase.FLUSH)
        announce(Phase.FLUSH)
    finally:
        remove_observer(always)
    assert heard == ["once", "always", "always"]


def test_phases_are_named_by_their_flow() -> None:
    """Every phase says which flow it belongs to; names are unique (crash tests kill by them)."""
    flows = {"restore", "commit", "publish", "clean-up", "materialize", "output"}
    assert {phase.value.split(".")[0] for phase in Phase} == flows
    assert len({phase.value for phase in Phase}) == len(Phase)
