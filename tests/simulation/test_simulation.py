"""Histories that a seed decides (:mod:`tests.simulation`)."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import live_all, lived
from tests.simulation.hunt import PAGE, rows
from tests.simulation.known_faults import FOUND_BY, KNOWN, NOT_FOUND

#: Its processes are for one worker.
pytestmark = pytest.mark.xdist_group("simulation")
#: Seeds in which each known fault must show.
_SEEDS = 2000


def test_histories() -> None:
    """Owners die, sleep too long and lose answers. Whoever opens a task finds the state of the newest checkpoint, and
    at peace every backend restores it. These are the first five hundred histories, or as many as a minute allows."""
    assert live_all(range(500), 2, within_s=60) == 0


def test_a_seed_is_a_history() -> None:
    """The same seed gives the same history, turn by turn and byte by byte."""
    one, other = (
        {result["seed"]: result["fingerprint"] for result in lived([(seed, None) for seed in range(6)], jobs)}
        for jobs in (1, 2)
    )
    assert one == other


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    """Known fault → the error that shows it: in its own history, or, because every change of the code moves histories a
    little, in one of the first ones."""
    own = lived([(FOUND_BY[fault], fault) for fault in sorted(FOUND_BY)], 2)
    errors = {str(result["fault"]): result["error"] for result in own}
    for fault in [fault for fault, error in errors.items() if error is None]:
        histories = lived([(seed, fault) for seed in range(150)], 2)
        errors[fault] = next((result["error"] for result in histories if result["error"] is not None), None)
    return errors


@pytest.mark.parametrize("fault", sorted(FOUND_BY))
def test_a_known_fault_shows(fault: str, found: dict[str, object]) -> None:
    """A history fails when the fault is put back. Without it, the first ones go well (above)."""
    assert found[fault] is not None


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", sorted(FOUND_BY))
def test_a_known_fault_is_found(fault: str) -> None:
    """One of the first seeds finds a fault that is put back."""
    assert any(result["error"] is not None for result in lived([(seed, fault) for seed in range(_SEEDS)], 2))


def test_every_known_fault_is_in_the_docs() -> None:
    """The page about the simulation names each known fault, with the seed that finds it or as one that none finds."""
    assert FOUND_BY.keys() ^ NOT_FOUND == KNOWN.keys()
    assert [row for row in rows(FOUND_BY) if row not in PAGE.read_text()] == []
